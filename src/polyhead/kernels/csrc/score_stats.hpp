// Statistics of the attention weights of a block of scores, in one pass while the block is in the cache.
//
// The block comes from a matrix product; nothing else here is of size queries x keys.
#pragma once

#include "simd/math.hpp"
#include "kernel_arguments.hpp"

namespace polyhead {
namespace {

constexpr int LANES = NATIVE<float>;
using Lanes = Vec<float, LANES>;
using LaneIndices = Vec<int32_t, LANES>;
// Rows processed together: column data is read, and column sums are written, once for all of them.
constexpr int ROWS = LANES == 16 ? 4 : 2;
// Used for -inf, because 0 · -inf is NaN.
constexpr float FAR = -1000.0f;

inline float sum_of_lanes(Lanes x) {
    float sum = 0;
    for (int lane = 0; lane < LANES; ++lane) sum += x[lane];
    return sum;
}

inline float largest_lane(Lanes x) {
    float found = x[0];
    for (int lane = 1; lane < LANES; ++lane) found = x[lane] > found ? x[lane] : found;
    return found;
}

// EDGE: vectors at the edge of a block, or of the interval of a row, are read lane by lane.
template <bool EDGE>
POLYHEAD_INLINE Lanes load_lanes(const float *from, int64_t left) {
    if (!EDGE || left >= LANES) return load<Lanes>(from);
    Lanes x{};
    for (int lane = 0; lane < left; ++lane) x[lane] = from[lane];
    return x;
}

template <bool EDGE>
POLYHEAD_INLINE void add_lanes(float *to, int64_t left, Lanes x) {
    if (!EDGE || left >= LANES) return store(to, load<Lanes>(to) + x);
    for (int lane = 0; lane < left; ++lane) to[lane] += x[lane];
}

// Consecutive rows of one head.
struct ScoreRows {
    const ScoreStats &in;
    int64_t head, row;

    const float *scores(int r) const { return in.scores + (head * in.rows + row + r) * in.columns; }
    int64_t number(int r) const { return head * in.queries + row + r; }
    // the interval of the block's columns that a row may attend to
    int32_t first(int r) const { return in.first ? clamp_to_block(in.first[row + r]) : 0; }
    int32_t stop(int r) const { return in.stop ? clamp_to_block(in.stop[row + r]) : int32_t(in.columns); }
    int32_t clamp_to_block(int64_t key) const {
        key -= in.column;
        return int32_t(key < 0 ? 0 : key > in.columns ? in.columns : key);
    }
    const float *bias() const { return in.key_bias ? in.key_bias + head * in.keys : nullptr; }

    // a vector of scores, -inf where the row may not attend
    template <bool EDGE>
    POLYHEAD_INLINE Lanes load_scores(int r, int64_t column, LaneIndices lane_indices, int32_t first, int32_t stop,
                                      const float *bias) const {
        Lanes x = load_lanes<EDGE>(scores(r) + column, in.columns - column);
        if (bias) x += load_lanes<EDGE>(bias + column, in.columns - column);
        if (!EDGE) return x;
        LaneIndices columns = lane_indices + int32_t(column);
        return ((columns >= first) & (columns < stop)) ? x : splat<Lanes>(NEGATIVE_INFINITY<float>);
    }
};

// Calls `edge(column)` for the vectors at the ends of [begin, end) and `inner(column)` for those of [inner_begin, inner_end).
template <class Edge, class Inner>
POLYHEAD_INLINE void for_each_vector(int64_t begin, int64_t inner_begin, int64_t inner_end, int64_t end, Edge edge, Inner inner) {
    int64_t c = begin / LANES * LANES;
    for (; c < inner_begin && c < end; c += LANES) edge(c);
    for (; c + LANES <= inner_end; c += LANES) inner(c);
    for (; c < end; c += LANES) edge(c);
}

// The running maximum of a row, and the sum of e^(score - maximum).
inline void update_max_and_sum(const ScoreRows &rows) {
    const ScoreStats &in = rows.in;
    const LaneIndices lane_indices = iota<int32_t, LANES>();
    const float *bias = rows.bias();
    const int32_t first = rows.first(0), stop = rows.stop(0);
    float &row_max = in.row_max[rows.number(0)], &row_sum = in.row_sum[rows.number(0)];
    Lanes high = splat<Lanes>(NEGATIVE_INFINITY<float>);
    for_each_vector(first, first, stop, stop,
                 [&](int64_t c) { high = larger(high, rows.load_scores<true>(0, c, lane_indices, first, stop, bias)); },
                 [&](int64_t c) { high = larger(high, rows.load_scores<false>(0, c, lane_indices, first, stop, bias)); });
    const float before = row_max, now = largest_lane(high) > before ? largest_lane(high) : before;
    if (now == NEGATIVE_INFINITY<float>) return;
    Lanes added{};
    auto add = [&](Lanes x) { added += exponential<float, LANES>(larger(x - now, splat<Lanes>(FAR))); };
    for_each_vector(first, first, stop, stop,
                    [&](int64_t c) { add(rows.load_scores<true>(0, c, lane_indices, first, stop, bias)); },
                 [&](int64_t c) { add(rows.load_scores<false>(0, c, lane_indices, first, stop, bias)); });
    row_sum = row_sum * exponential<float, LANES>(larger(splat<Lanes>(before - now), splat<Lanes>(FAR)))[0] + sum_of_lanes(added);
    row_max = now;
}

// Insert into the `top` largest scores of a row, in descending order; among equal scores the first key wins.
inline void insert_into_top(const ScoreStats &in, int64_t number, float x, int64_t key) {
    float *score = in.top_score + number * in.top;
    int64_t *keys = in.top_key + number * in.top;
    int64_t at = in.top - 1;
    for (; at > 0 && score[at - 1] < x; --at) score[at] = score[at - 1], keys[at] = keys[at - 1];
    score[at] = x, keys[at] = key;
}

POLYHEAD_INLINE void insert_lanes_into_top(const ScoreStats &in, int64_t number, Lanes x, int64_t column) {
    const float *last = in.top_score + number * in.top + in.top - 1;
    for (int lane = 0; lane < LANES; ++lane)
        if (x[lane] > *last) insert_into_top(in, number, x[lane], in.column + column + lane);
}

// R rows at once, with SUMS weighted sums over keys, and the largest scores if TOP.
template <int R, int SUMS, bool TOP>
struct RowStats {
    ScoreRows rows;
    const ScoreStats &in;
    const LaneIndices lane_indices = iota<int32_t, LANES>();
    const float *bias, *weights;
    float *column_sums;
    int32_t first[R], stop[R];
    float high[R], low[R], position[R], weight[R], last[R];
    Lanes entropy[R] = {}, distance[R] = {}, sums[R][SUMS + 1] = {};

    RowStats(const ScoreRows &own, float *to) : rows(own), in(own.in), column_sums(to) {
        bias = rows.bias(), weights = in.key_weights + rows.head * SUMS * in.keys;
        for (int r = 0; r < R; ++r) {
            const int64_t number = rows.number(r);
            first[r] = rows.first(r), stop[r] = rows.stop(r), high[r] = in.high[number], low[r] = in.low[number];
            position[r] = in.position[rows.row + r], weight[r] = in.row_weights ? in.row_weights[number] : 1.0f;
            last[r] = TOP ? in.top_score[number * in.top + in.top - 1] : 0;
            // a row without keys has no weights
            if (high[r] == NEGATIVE_INFINITY<float>) first[r] = stop[r] = 0;
        }
    }

    template <bool EDGE>
    POLYHEAD_INLINE void add_vector(int64_t c) {
        const int64_t left = in.columns - c;
        const Lanes column = __builtin_convertvector(lane_indices, Lanes) + float(in.column + c);
        Lanes column_sum{}, key[SUMS + 1];
        for (int s = 0; s < SUMS; ++s) key[s] = load_lanes<EDGE>(weights + s * in.keys + c, left);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            Lanes x = rows.load_scores<EDGE>(r, c, lane_indices, first[r], stop[r], bias) - high[r] - low[r];
            x = larger(x, splat<Lanes>(FAR));
            if (TOP && __builtin_expect(positive_lane_bits(x - last[r]), 0)) {
                insert_lanes_into_top(in, rows.number(r), x, c);
                last[r] = in.top_score[rows.number(r) * in.top + in.top - 1];
            }
            Lanes p = exponential<float, LANES>(x), away = column - position[r];
            entropy[r] += p * x;
            distance[r] += p * larger(away, -away);
            column_sum += p * weight[r];
            for (int s = 0; s < SUMS; ++s) sums[r][s] += p * key[s];
        }
        add_lanes<EDGE>(column_sums + c, left, column_sum);
    }

    void process_rows() {
        int64_t begin = in.columns, end = 0, inner_begin = 0, inner_end = in.columns;
        for (int r = 0; r < R; ++r) {
            inner_begin = first[r] > inner_begin ? first[r] : inner_begin;
            inner_end = stop[r] < inner_end ? stop[r] : inner_end;
            if (first[r] >= stop[r]) continue;
            begin = first[r] < begin ? first[r] : begin;
            end = stop[r] > end ? stop[r] : end;
        }
        for_each_vector(begin, inner_begin, inner_end, end, [&](int64_t c) { add_vector<true>(c); },
                        [&](int64_t c) { add_vector<false>(c); });
        for (int r = 0; r < R; ++r) {
            float *out = in.row_sums + rows.number(r) * (2 + SUMS);
            out[0] -= sum_of_lanes(entropy[r]), out[1] += sum_of_lanes(distance[r]);
            for (int s = 0; s < SUMS; ++s) out[2 + s] += sum_of_lanes(sums[r][s]);
        }
    }
};

template <int SUMS, bool TOP>
void compute_chunk_stats(const ScoreStats &in, int64_t head, int64_t chunk) {
    float *column_sums = in.column_sums + (head * in.chunks + chunk) * in.columns;
    int64_t row = in.chunk_first[chunk], end = in.chunk_first[chunk + 1];
    for (; row + ROWS <= end; row += ROWS) RowStats<ROWS, SUMS, TOP>({in, head, row}, column_sums).process_rows();
    for (; row < end; ++row) RowStats<1, SUMS, TOP>({in, head, row}, column_sums).process_rows();
}

inline void update_max_and_sum_of_chunk(const ScoreStats &in, int64_t head, int64_t chunk) {
    for (int64_t row = in.chunk_first[chunk]; row < in.chunk_first[chunk + 1]; ++row) update_max_and_sum({in, head, row});
}

using ChunkFunction = void (*)(const ScoreStats &, int64_t, int64_t);

template <bool TOP>
ChunkFunction select_chunk_stats(int sums) {
    static constexpr ChunkFunction chunks[] = {compute_chunk_stats<0, TOP>, compute_chunk_stats<1, TOP>, compute_chunk_stats<2,
                                               TOP>,
                                       compute_chunk_stats<3, TOP>, compute_chunk_stats<4, TOP>};
    return chunks[sums];
}

inline void score_stats(const ScoreStats &in) {
    const ChunkFunction work = in.row_max ? update_max_and_sum_of_chunk
                               : in.top ? select_chunk_stats<true>(in.sums)
                                        : select_chunk_stats<false>(in.sums);
#pragma omp parallel for collapse(2) num_threads(in.threads) schedule(static)
    for (int64_t head = 0; head < in.heads; ++head)
        for (int64_t chunk = 0; chunk < in.chunks; ++chunk) work(in, head, chunk);
}

}  // namespace
}  // namespace polyhead

// What a block of scores tells of its weights, read once while it is in the cache.
//
// The block comes from a matrix product; nothing here is of size queries x keys but the block itself.
#pragma once

#include "simd/math.hpp"
#include "problem.hpp"

namespace polyhead {
namespace {

constexpr int LANES = NATIVE<float>;
using Lanes = Vec<float, LANES>;
using Places = Vec<int32_t, LANES>;
// Rows that share a pass: what belongs to a column is read, and its sum written, once for all of them.
constexpr int ROWS = LANES == 16 ? 4 : 2;
// Stands for -inf, of which 0 times is not a number.
constexpr float FAR = -1000.0f;

inline Places counting() {
    Places places;
    for (int lane = 0; lane < LANES; ++lane) places[lane] = lane;
    return places;
}

inline float total(Lanes x) {
    float sum = 0;
    for (int lane = 0; lane < LANES; ++lane) sum += x[lane];
    return sum;
}

inline float largest(Lanes x) {
    float most = x[0];
    for (int lane = 1; lane < LANES; ++lane) most = x[lane] > most ? x[lane] : most;
    return most;
}

// Vectors at the edge of a block, or of what a row may attend to, are read lane by lane: EDGE.
template <bool EDGE>
POLYHEAD_INLINE Lanes take_lanes(const float *from, int64_t left) {
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

// Some rows of one head, side by side.
struct Rows {
    const Observation &in;
    int64_t head, row;

    const float *scores(int r) const { return in.scores + (head * in.rows + row + r) * in.columns; }
    int64_t number(int r) const { return head * in.queries + row + r; }
    // the columns of the block that a row may attend to
    int32_t first(int r) const { return in.first ? clamped(in.first[row + r]) : 0; }
    int32_t stop(int r) const { return in.stop ? clamped(in.stop[row + r]) : int32_t(in.columns); }
    int32_t clamped(int64_t key) const {
        key -= in.column;
        return int32_t(key < 0 ? 0 : key > in.columns ? in.columns : key);
    }
    const float *bias() const { return in.key_bias ? in.key_bias + head * in.keys : nullptr; }

    // a vector of scores, -inf where the row may not attend
    template <bool EDGE>
    POLYHEAD_INLINE Lanes at(int r, int64_t column, Places places, int32_t first, int32_t stop, const float *bias) const {
        Lanes x = take_lanes<EDGE>(scores(r) + column, in.columns - column);
        if (bias) x += take_lanes<EDGE>(bias + column, in.columns - column);
        if (!EDGE) return x;
        Places here = places + int32_t(column);
        return ((here >= first) & (here < stop)) ? x : splat<Lanes>(NEGATIVE_INFINITY<float>);
    }
};

// Calls `edge(column)` for the vectors at the ends of [begin, end) and `inner(column)` for those of [inner_begin, inner_end).
template <class Edge, class Inner>
POLYHEAD_INLINE void over_vectors(int64_t begin, int64_t inner_begin, int64_t inner_end, int64_t end, Edge edge, Inner inner) {
    int64_t c = begin / LANES * LANES;
    for (; c < inner_begin && c < end; c += LANES) edge(c);
    for (; c + LANES <= inner_end; c += LANES) inner(c);
    for (; c < end; c += LANES) edge(c);
}

// The running maximum of a row, and the sum of e^(score - maximum).
inline void scan_row(const Rows &rows) {
    const Observation &in = rows.in;
    const Places places = counting();
    const float *bias = rows.bias();
    const int32_t first = rows.first(0), stop = rows.stop(0);
    float &most = in.most[rows.number(0)], &sum = in.sum[rows.number(0)];
    Lanes high = splat<Lanes>(NEGATIVE_INFINITY<float>);
    over_vectors(first, first, stop, stop,
                 [&](int64_t c) { high = larger(high, rows.at<true>(0, c, places, first, stop, bias)); },
                 [&](int64_t c) { high = larger(high, rows.at<false>(0, c, places, first, stop, bias)); });
    const float before = most, now = largest(high) > before ? largest(high) : before;
    if (now == NEGATIVE_INFINITY<float>) return;
    Lanes added{};
    auto add = [&](Lanes x) { added += exponential<float, LANES>(larger(x - now, splat<Lanes>(FAR))); };
    over_vectors(first, first, stop, stop, [&](int64_t c) { add(rows.at<true>(0, c, places, first, stop, bias)); },
                 [&](int64_t c) { add(rows.at<false>(0, c, places, first, stop, bias)); });
    sum = sum * exponential<float, LANES>(larger(splat<Lanes>(before - now), splat<Lanes>(FAR)))[0] + total(added);
    most = now;
}

// The `top` largest of a row so far, the largest first; of equals the first key.
inline void insert(const Observation &in, int64_t number, float x, int64_t key) {
    float *score = in.top_score + number * in.top;
    int64_t *keys = in.top_key + number * in.top;
    int64_t at = in.top - 1;
    for (; at > 0 && score[at - 1] < x; --at) score[at] = score[at - 1], keys[at] = keys[at - 1];
    score[at] = x, keys[at] = key;
}

POLYHEAD_INLINE void insert_all(const Observation &in, int64_t number, Lanes x, int64_t column) {
    const float *last = in.top_score + number * in.top + in.top - 1;
    for (int lane = 0; lane < LANES; ++lane)
        if (x[lane] > *last) insert(in, number, x[lane], in.column + column + lane);
}

// R rows at once, with SUMS sums over weighted keys, and the largest where TOP.
template <int R, int SUMS, bool TOP>
struct Observer {
    Rows rows;
    const Observation &in;
    const Places places = counting();
    const float *bias, *weights;
    float *column_sums;
    int32_t first[R], stop[R];
    float high[R], low[R], position[R], weight[R], last[R];
    Lanes entropy[R] = {}, distance[R] = {}, sums[R][SUMS + 1] = {};

    Observer(const Rows &own, float *to) : rows(own), in(own.in), column_sums(to) {
        bias = rows.bias(), weights = in.key_weights + rows.head * SUMS * in.keys;
        for (int r = 0; r < R; ++r) {
            const int64_t number = rows.number(r);
            first[r] = rows.first(r), stop[r] = rows.stop(r), high[r] = in.high[number], low[r] = in.low[number];
            position[r] = in.position[rows.row + r], weight[r] = in.row_weights ? in.row_weights[number] : 1.0f;
            last[r] = TOP ? in.top_score[number * in.top + in.top - 1] : 0;
            // no key at all: no weight
            if (high[r] == NEGATIVE_INFINITY<float>) first[r] = stop[r] = 0;
        }
    }

    template <bool EDGE>
    POLYHEAD_INLINE void look(int64_t c) {
        const int64_t left = in.columns - c;
        const Lanes column = __builtin_convertvector(places, Lanes) + float(in.column + c);
        Lanes of_column{}, key[SUMS + 1];
        for (int s = 0; s < SUMS; ++s) key[s] = take_lanes<EDGE>(weights + s * in.keys + c, left);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            Lanes x = rows.at<EDGE>(r, c, places, first[r], stop[r], bias) - high[r] - low[r];
            x = larger(x, splat<Lanes>(FAR));
            if (TOP && __builtin_expect(positive(x - last[r]), 0)) {
                insert_all(in, rows.number(r), x, c);
                last[r] = in.top_score[rows.number(r) * in.top + in.top - 1];
            }
            Lanes p = exponential<float, LANES>(x), away = column - position[r];
            entropy[r] += p * x;
            distance[r] += p * larger(away, -away);
            of_column += p * weight[r];
            for (int s = 0; s < SUMS; ++s) sums[r][s] += p * key[s];
        }
        add_lanes<EDGE>(column_sums + c, left, of_column);
    }

    void run() {
        int64_t begin = in.columns, end = 0, inner_begin = 0, inner_end = in.columns;
        for (int r = 0; r < R; ++r) {
            inner_begin = first[r] > inner_begin ? first[r] : inner_begin;
            inner_end = stop[r] < inner_end ? stop[r] : inner_end;
            if (first[r] >= stop[r]) continue;
            begin = first[r] < begin ? first[r] : begin;
            end = stop[r] > end ? stop[r] : end;
        }
        over_vectors(begin, inner_begin, inner_end, end, [&](int64_t c) { look<true>(c); }, [&](int64_t c) { look<false>(c); });
        for (int r = 0; r < R; ++r) {
            float *out = in.row_sums + rows.number(r) * (2 + SUMS);
            out[0] -= total(entropy[r]), out[1] += total(distance[r]);
            for (int s = 0; s < SUMS; ++s) out[2 + s] += total(sums[r][s]);
        }
    }
};

template <int SUMS, bool TOP>
void observe_chunk(const Observation &in, int64_t head, int64_t chunk) {
    float *column_sums = in.column_sums + (head * in.chunks + chunk) * in.columns;
    int64_t row = in.chunk_first[chunk], end = in.chunk_first[chunk + 1];
    for (; row + ROWS <= end; row += ROWS) Observer<ROWS, SUMS, TOP>({in, head, row}, column_sums).run();
    for (; row < end; ++row) Observer<1, SUMS, TOP>({in, head, row}, column_sums).run();
}

inline void scan_chunk(const Observation &in, int64_t head, int64_t chunk) {
    for (int64_t row = in.chunk_first[chunk]; row < in.chunk_first[chunk + 1]; ++row) scan_row({in, head, row});
}

using Chunk = void (*)(const Observation &, int64_t, int64_t);

template <bool TOP>
Chunk by_sums(int sums) {
    static constexpr Chunk chunks[] = {observe_chunk<0, TOP>, observe_chunk<1, TOP>, observe_chunk<2, TOP>,
                                       observe_chunk<3, TOP>, observe_chunk<4, TOP>};
    return chunks[sums];
}

inline void observe(const Observation &in) {
    const Chunk work = in.most ? scan_chunk : in.top ? by_sums<true>(in.sums) : by_sums<false>(in.sums);
#pragma omp parallel for collapse(2) num_threads(in.threads) schedule(static)
    for (int64_t head = 0; head < in.heads; ++head)
        for (int64_t chunk = 0; chunk < in.chunks; ++chunk) work(in, head, chunk);
}

}  // namespace
}  // namespace polyhead

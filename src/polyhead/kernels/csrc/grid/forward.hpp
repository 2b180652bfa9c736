// Attention over the windows of a grid: only pairs inside a window are computed, a vector of queries at a time.
#pragma once

#include "grid/partition.hpp"
#include "simd/hash.hpp"
#include "simd/math.hpp"
#include "simd/scratch.hpp"

// for lambdas that are called from several loops
#define POLYHEAD_ALWAYS_INLINE __attribute__((always_inline))

namespace polyhead {
namespace {

template <class T>
struct GridForward : GridRows<T> {
    using Base = GridRows<T>;
    using Base::L, Base::ROWS, Base::in, Base::cut, Base::part, Base::runs, Base::num_runs;
    using typename Base::V;
    using Rows = typename Base::Rows;
    // neighbours processed at once: their scores fit into the nearest cache
    static constexpr int64_t FORWARD = 160;
    static_assert(FORWARD >= GridPartition::MAX_RUN, "a run is not divided");

    // rows of points: those in the ring, and those of a block
    T *around_k, *around_v, *own_q;
    // 0 inside the grid and -inf outside; scores; sums of features, and the same point by point
    T *outside, *scores, *sum_v, *rows_out;
    Dropout dropout;
    uint32_t head = 0;
    const T *table = nullptr;

    GridForward(const Grid &problem, const GridPartition &sizes, KeyRun *run_memory)
        : Base(problem, sizes, run_memory), dropout(dropout_of(in.dropout, in.threshold)) {}

    template <class Take>
    void allocate(Take take) {
        around_k = take(cut.ring * in.dim * cut.pitch), around_v = take(cut.ring * in.width * cut.pitch);
        own_q = take(ROWS * in.dim * cut.pitch), outside = take(cut.pitch), scores = take(FORWARD * ROWS * L);
        sum_v = take(ROWS * in.width * L), rows_out = take(L * max_of(in.dim, in.width));
    }

    // the dropout factors of L pairs, given the first query and the first key
    POLYHEAD_INLINE V dropout_at(int64_t query, int64_t key) const {
        return dropout_factor<T, L>(dropout, hash_query(head, iota<uint32_t, L>() + uint32_t(query)),
                                    iota<uint32_t, L>() + uint32_t(key), T(1 / (1 - in.dropout)));
    }

    // the index of the point in column `left + x` of a row
    int64_t point_index(int64_t row, int64_t x) const { return row * cut.width + part.x + x; }

    // calls work(run, row, place, offset, shift) for each score
    template <class Each>
    POLYHEAD_INLINE void for_each_score(int64_t first, int64_t last, Each work) const {
        for (int64_t n = first; n < last; ++n) {
            const KeyRun &s = runs[n];
            if (s.to - s.from == ROWS)
                for_each_score_of_run<0, 2>(s, work);
            else if (s.from == 0)
                for_each_score_of_run<0, 1>(s, work);
            else
                for_each_score_of_run<1, 2>(s, work);
        }
    }

    template <int FROM, int TO, class Each>
    POLYHEAD_INLINE void for_each_score_of_run(const KeyRun &s, Each work) const {
        for (int64_t c = 0; c < s.count; ++c)
#pragma GCC unroll 2
            for (int r = FROM; r < TO; ++r)
                work(s, r, ((s.score_slot + c) * ROWS + r) * L, s.number + c - r * cut.across, s.shift + c * cut.step_x);
    }

    void begin_part(const GridPart &next, int64_t query_head) {
        part = next;
        head = dropout.on ? hash_head(in.seed, in.numbering.number(part.b, in.heads, query_head)) : 0;
        table = in.table ? static_cast<const T *>(in.table) + query_head * cut.offsets : nullptr;
    }

    void compute_dots(int64_t first, int64_t last, const T *const *own, int64_t features, int64_t x, const T *around,
                      const T *start,
              T *into) const {
        const int64_t from = cut.left + x;
        const T *a[ROWS];
        for (int r = 0; r < ROWS; ++r) a[r] = own[r] + from;
        Base::compute_dots(runs + first, last - first, a, {around + from, features * cut.pitch}, start + from, cut.pitch,
                           cut.step_x,
                   features, into);
    }

    void compute_sums(int64_t first, int64_t last, const T *weights, int64_t features, int64_t x, const T *around, T *into) const {
        Base::compute_sums(runs + first, last - first, weights, {around + cut.left + x, features * cut.pitch}, cut.pitch,
                           cut.step_x,
                   features, into, features * L, first == 0);
    }

    static void fill_with_zeros(T *numbers, int64_t count) {
        for (int64_t n = 0; n < count; ++n) numbers[n] = 0;
    }

    // Writes sums (features, L) of a vector of points to a tensor.
    void store_sums(const T *sum, int64_t features, const Strided &x, int64_t h, int64_t row, int64_t from, T factor, bool add) {
        const int64_t lanes = min_of(L, part.points - from);
        T *into = this->mutable_item_address(x, part.b, h, point_index(row, from));
        if (lanes == L && !add) return transpose<L>(sum, L, into, x.item, features, L, factor);
        transpose<L>(sum, L, rows_out, features, features, L, factor);
        for (int64_t i = 0; i < lanes; ++i)
            for (int64_t d = 0; d < features; ++d)
                into[i * x.item + d] = rows_out[i * features + d] + (add ? into[i * x.item + d] : T(0));
    }

    // -inf outside the grid
    void mark_outside() {
        const auto s = this->span(cut.pad);
        for (int64_t c = s.begin; c < s.end; ++c) outside[c] = NEGATIVE_INFINITY<T>;
        for (int64_t x = s.first; x < s.stop; ++x) outside[this->column(x)] = 0;
    }

    // loads a row of the keys and values of a query head into the ring
    void load_keys(int64_t row, int64_t query_head) {
        const int64_t h = query_head / (in.heads / in.key_heads), size = row % cut.ring * cut.pitch;
        this->load_row(in.k, h, row, in.dim, cut.pad, around_k + size * in.dim);
        this->load_row(in.v, h, row, in.width, cut.pad, around_v + size * in.width);
    }

    void forward(const GridPart &next) {
        begin_part(next, next.h);
        mark_outside();
        auto fetch = [&](int64_t row) { load_keys(row, part.h); };
        this->sweep_rows(fetch, [&](int64_t row, int64_t rows) {
            for (int64_t r = 0; r < rows; ++r)
                this->load_row(in.q, part.h, row + r * cut.step_y, in.dim, 0, own_q + r * in.dim * cut.pitch, T(in.scale));
            for (int64_t x = 0; x < part.points; x += L) forward_vector(row, rows, x);
        });
    }

    void forward_vector(int64_t row, int64_t rows, int64_t x) {
        V high[ROWS], total[ROWS] = {};
        const T *own[ROWS];
        for (int r = 0; r < ROWS; ++r) own[r] = own_q + r * in.dim * cut.pitch;
        for (V &x : high) x = splat<V>(NEGATIVE_INFINITY<T>);
        for (int64_t first = 0, last; first < num_runs; first = last) {
            last = this->assign_score_slots(first, FORWARD);
            compute_dots(first, last, own, in.dim, x, around_k, outside, scores);
            scores_to_weights(first, last, row, x, high, total);
            compute_sums(first, last, scores, in.width, x, around_v, sum_v);
        }
        T *lse = static_cast<T *>(in.lse) + (part.b * in.heads + part.h) * cut.rows * cut.width;
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t query_row = row + r * cut.step_y, lanes = min_of(L, part.points - x);
            scale_sums(int(r), T(1) / total[r]);
            store_sums(sum_v + r * in.width * L, in.width, in.out, part.h, query_row, x, 1, false);
            const V found = high[r] + logarithm<T, L>(total[r]);
            for (int64_t lane = 0; lane < lanes; ++lane) lse[point_index(query_row, x) + lane] = found[lane];
        }
    }

    POLYHEAD_INLINE void scale_sums(int r, V factor) {
        T *sum = sum_v + r * in.width * L;
        for (int64_t d = 0; d < in.width; ++d) store(sum + d * L, load<V>(sum + d * L) * factor);
    }

    // Turns scores into weights relative to the largest so far, and rescales the earlier sums.
    void scores_to_weights(int64_t first, int64_t last, int64_t row, int64_t x, V (&high)[ROWS], V (&total)[ROWS]) {
        V before[ROWS], sum[ROWS], shift_by[ROWS];
        for (int r = 0; r < ROWS; ++r) before[r] = shift_by[r] = high[r];
        for_each_score(first, last, [&](const KeyRun &, int r, int64_t at, int64_t number, int64_t) POLYHEAD_ALWAYS_INLINE {
            V s = load<V>(scores + at);
            if (table) store(scores + at, s = s + table[number]);
            shift_by[r] = larger(shift_by[r], s);
        });
        for (int r = 0; r < ROWS; ++r) {
            high[r] = shift_by[r];
            shift_by[r] = shift_by[r] == NEGATIVE_INFINITY<T> ? V{} : shift_by[r];
            const V rescale = exponential<T, L>(before[r] - shift_by[r]);
            sum[r] = total[r] * rescale;
            if (first > 0) scale_sums(r, rescale);
        }
        for_each_score(first, last, [&](const KeyRun &s, int r, int64_t at, int64_t, int64_t shift) POLYHEAD_ALWAYS_INLINE {
            const V weight = exponential<T, L>(load<V>(scores + at) - shift_by[r]);
            sum[r] += weight;
            const V keep = dropout.on ? dropout_at(point_index(row + r * cut.step_y, x),
                                                   point_index(s.row, x + shift)) : splat<V>(T(1));
            store(scores + at, dropout.on ? weight * keep : weight);
        });
        for (int r = 0; r < ROWS; ++r) total[r] = sum[r];
    }
};

// Computes the parts from `first` to `stop`, counted through the batch, for each head; idle threads take the next one. False if
// allocation fails.
template <class T, class Worker, class Work>
bool for_each_part(const Grid &in, const GridPartition &cut, int64_t heads, int64_t first, int64_t stop, Work work) {
    int64_t arrays = 0;
    Worker(in, cut, nullptr).allocate([&](int64_t count) {
        arrays += whole_lines(count * int64_t(sizeof(T)));
        return static_cast<T *>(nullptr);
    });
    const int64_t bytes = arrays + whole_lines(cut.max_runs(Worker::ROWS) * int64_t(sizeof(KeyRun)));
    const int64_t end = stop * heads;
    const int threads = int(min_of(in.threads, end - first * heads));
    Scratch scratch;
    if (!scratch.reserve_zeros(size_t(bytes * threads))) return false;
    int64_t next = first * heads;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int thread = 0; thread < threads; ++thread) {
        char *memory = scratch.as<char>() + thread * bytes;
        Worker own(in, cut, reinterpret_cast<KeyRun *>(memory + arrays));
        own.allocate([&](int64_t count) { return take<T>(memory, count); });
        for (;;) {
            int64_t number;
#pragma omp atomic capture
            number = next++;
            if (number >= end) break;
            work(own, find_part(cut, heads, number), number);
        }
    }
    return true;
}

template <class T>
bool grid_forward(const Grid &in) {
    using Worker = GridForward<T>;
    const GridPartition cut(in, NATIVE<T>, Worker::ROWS);
    return for_each_part<T, Worker>(in, cut, in.heads, 0, in.batch * cut.parts(),
                                 [](Worker &own, const GridPart &part, int64_t) { own.forward(part); });
}

}  // namespace
}  // namespace polyhead

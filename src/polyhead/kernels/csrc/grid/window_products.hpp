// Attention over windows for vectors of adjacent grid points: its three inner loops.
//
// A row of points is stored feature by feature, (features, pitch), with padding on both sides, so the keys at one offset from L
// adjacent queries are one contiguous vector load, without horizontal reductions.
#pragma once

#include "kernel_arguments.hpp"
#include "simd/transpose.hpp"

namespace polyhead {
namespace {

// for loops that need all registers: inlined, they would share them with their callers
#define POLYHEAD_NOINLINE __attribute__((noinline))

// Keeps x in a register: compilers would load it again for each product.
#if defined(__AVX512F__)
#define POLYHEAD_KEEP_IN_REGISTER(x) asm("" : "+v"(x))
#elif defined(__SSE2__)
#define POLYHEAD_KEEP_IN_REGISTER(x) asm("" : "+x"(x))
#else
#define POLYHEAD_KEEP_IN_REGISTER(x) (void)(x)
#endif

// A part of a window: adjacent neighbours in one row of keys.
struct KeyRun {
    int64_t row, ring_slot;  // in the grid, and in the ring of loaded rows
    int from, to;            // the rows of queries that see it
    // index, in the window's offset table, of the run's first key relative to query row 0; subtract the window's width (`across`)
    // per further query row
    int64_t number;
    int64_t shift;           // offset of its first key from the query, in points
    int64_t count;
    int64_t score_slot;      // where its scores begin
};

template <class T>
struct WindowProducts {
    static constexpr int L = NATIVE<T>;
    using V = Vec<T, L>;
    // rows of queries, neighbours and features processed at once: as many as the registers hold
    static constexpr int ROWS = 2, ACROSS = VECTOR_BYTES == 64 ? 8 : 5, DEEP = VECTOR_BYTES == 64 ? 8 : 4;
    static_assert(ROWS == 2, "ROWS must be 2: sums_tile handles runs that are visible to query row 0, row 1 or both");

    // Rows of points, `size` numbers per row.
    struct Rows {
        const T *data;
        int64_t size;
    };

    // into[c][r] = first[c] + Σ_d a[r][d] b[d][c], for neighbours c at a distance of `apart` points
    template <int R, int X, int STEP>
    static POLYHEAD_NOINLINE void dots_tile(const T *const *a, const T *b, const T *first, int64_t pitch, int64_t apart,
                                         int64_t features, T *into) {
        const int64_t step = STEP ? STEP : apart;
        V sum[R][X];
#pragma GCC unroll 8
        for (int c = 0; c < X; ++c)
#pragma GCC unroll 2
            for (int r = 0; r < R; ++r) sum[r][c] = load<V>(first + c * step);
        for (int64_t d = 0; d < features; ++d) {
            V x[R];
#pragma GCC unroll 2
            for (int r = 0; r < R; ++r) x[r] = load<V>(a[r] + d * pitch);
#pragma GCC unroll 8
            for (int c = 0; c < X; ++c) {
                V y = load<V>(b + d * pitch + c * step);
                if (R > 1) POLYHEAD_KEEP_IN_REGISTER(y);
#pragma GCC unroll 2
                for (int r = 0; r < R; ++r) sum[r][c] += x[r] * y;
            }
        }
#pragma GCC unroll 8
        for (int c = 0; c < X; ++c)
            for (int r = 0; r < R; ++r) store(into + (c * ROWS + r) * L, sum[r][c]);
    }

    template <int R, int STEP, int X = ACROSS, class... Rest>
    static POLYHEAD_INLINE void dots_across(int64_t count, Rest... rest) {
        if constexpr (X > 1)
            if (count < X) return dots_across<R, STEP, X - 1>(count, rest...);
        dots_tile<R, X, STEP>(rest...);
    }

    template <int R>
    static void dots_rows(const T *const *a, const T *b, const T *first, int64_t pitch, int64_t step, int64_t features,
                          int64_t count, T *into) {
        // tiles of nearly equal size
        for (int64_t tiles = (count + ACROSS - 1) / ACROSS; tiles > 0; --tiles) {
            const int64_t now = (count + tiles - 1) / tiles;
            if (step == 1)
                dots_across<R, 1>(now, a, b, first, pitch, step, features, into);
            else
                dots_across<R, 0>(now, a, b, first, pitch, step, features, into);
            count -= now, b += now * step, first += now * step, into += now * ROWS * L;
        }
    }

    // The products of rows `a` with all neighbours in some runs.
    static void compute_dots(const KeyRun *runs, int64_t num_runs, const T *const *a, Rows b, const T *first, int64_t pitch,
                     int64_t step, int64_t features, T *into) {
        for (int64_t n = 0; n < num_runs; ++n) {
            const KeyRun &s = runs[n];
            const T *from = b.data + s.ring_slot * b.size + s.shift;
            T *to = into + s.score_slot * ROWS * L + s.from * L;
            if (s.to - s.from == ROWS)
                dots_rows<ROWS>(a, from, first + s.shift, pitch, step, features, s.count, to);
            else
                dots_rows<1>(a + s.from, from, first + s.shift, pitch, step, features, s.count, to);
        }
    }

    template <int FROM, int TO, int F>
    static POLYHEAD_INLINE void add_weighted_keys(V (&sum)[ROWS][F], const T *weights, const T *b, int64_t pitch, int64_t step,
                                                  int64_t count) {
        for (; count > 0; --count, weights += ROWS * L, b += step) {
            V w[ROWS];
            for (int r = FROM; r < TO; ++r) w[r] = load<V>(weights + r * L);
#pragma GCC unroll 8
            for (int f = 0; f < F; ++f) {
                V y = load<V>(b + f * pitch);
                if (TO - FROM > 1) POLYHEAD_KEEP_IN_REGISTER(y);
#pragma GCC unroll 2
                for (int r = FROM; r < TO; ++r) sum[r][f] += w[r] * y;
            }
        }
    }

    // one block of F features of compute_sums
    template <int F>
    static POLYHEAD_NOINLINE void sums_tile(const KeyRun *runs, int64_t num_runs, const T *weights, Rows b, int64_t pitch,
                                         int64_t step, T *into, int64_t next_row, bool fresh) {
        V sum[ROWS][F];
        for (int r = 0; r < ROWS; ++r)
            for (int f = 0; f < F; ++f) sum[r][f] = fresh ? V{} : load<V>(into + r * next_row + f * L);
        for (int64_t n = 0; n < num_runs; ++n) {
            const KeyRun &s = runs[n];
            const T *from = b.data + s.ring_slot * b.size + s.shift, *w = weights + s.score_slot * ROWS * L;
            if (s.to - s.from == ROWS)
                add_weighted_keys<0, 2, F>(sum, w, from, pitch, step, s.count);
            else if (s.from == 0)
                add_weighted_keys<0, 1, F>(sum, w, from, pitch, step, s.count);
            else
                add_weighted_keys<1, 2, F>(sum, w, from, pitch, step, s.count);
        }
        for (int r = 0; r < ROWS; ++r)
            for (int f = 0; f < F; ++f) store(into + r * next_row + f * L, sum[r][f]);
    }

    // into[r][d] += Σ weights[c][r] b[d][c] over all neighbours c in some runs; `fresh`: = instead of +=
    template <int F = DEEP>
    static void compute_sums(const KeyRun *runs, int64_t num_runs, const T *weights, Rows b, int64_t pitch, int64_t step,
                     int64_t features, T *into, int64_t next_row, bool fresh) {
        int64_t d = 0;
        for (; d + F <= features; d += F)
            sums_tile<F>(runs, num_runs, weights, {b.data + d * pitch, b.size}, pitch, step, into + d * L, next_row, fresh);
        if constexpr (F > 1)
            if (d < features)
                compute_sums<F / 2>(runs, num_runs, weights, {b.data + d * pitch, b.size}, pitch, step, features - d, into + d * L,
                            next_row, fresh);
    }
};

}  // namespace
}  // namespace polyhead

// Attention over windows for vectors of adjacent grid points: its three inner loops.
//
// A row of points is stored feature by feature, (features, pitch), with padding on both sides. The keys at one offset from a
// vector of queries are then one load, and no sum goes over lanes.
#pragma once

#include "kernel_arguments.hpp"
#include "simd/transpose.hpp"

namespace polyhead {
namespace {

// a loop that needs all registers
#define POLYHEAD_ALONE __attribute__((noinline))

// Keeps x in a register: compilers would load it again for each product.
#if defined(__AVX512F__)
#define POLYHEAD_HOLD(x) asm("" : "+v"(x))
#elif defined(__SSE2__)
#define POLYHEAD_HOLD(x) asm("" : "+x"(x))
#else
#define POLYHEAD_HOLD(x) (void)(x)
#endif

// A part of a window: adjacent neighbours in one row of keys.
struct KeyRun {
    int64_t row, place;  // in the grid, and in the ring of loaded rows
    int from, to;        // the rows of queries that see it
    int64_t number;      // index of its first offset as seen by the first row of queries; `across` less per row further down
    int64_t shift;       // offset of its first key from the query, in points
    int64_t count;
    int64_t slot;        // where its scores begin
};

template <class T>
struct GridLanes {
    static constexpr int L = NATIVE<T>;
    using V = Vec<T, L>;
    // rows of queries, neighbours and features processed at once: as many as the registers hold
    static constexpr int ROWS = 2, ACROSS = VECTOR_BYTES == 64 ? 8 : 5, DEEP = VECTOR_BYTES == 64 ? 8 : 4;
    static_assert(ROWS == 2, "a run is seen by both rows, by the first or by the second; there is no loop for a third");

    // Rows of points, `size` numbers per row.
    struct Rows {
        const T *data;
        int64_t size;
    };

    // into[c][r] = first[c] + Σ_d a[r][d] b[d][c], for neighbours c at a distance of `apart` points
    template <int R, int X, int STEP>
    static POLYHEAD_ALONE void dots_tile(const T *const *a, const T *b, const T *first, int64_t pitch, int64_t apart,
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
                if (R > 1) POLYHEAD_HOLD(y);
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
    static void dots(const KeyRun *runs, int64_t num_runs, const T *const *a, Rows b, const T *first, int64_t pitch,
                     int64_t step, int64_t features, T *into) {
        for (int64_t n = 0; n < num_runs; ++n) {
            const KeyRun &s = runs[n];
            const T *from = b.data + s.place * b.size + s.shift;
            T *to = into + s.slot * ROWS * L + s.from * L;
            if (s.to - s.from == ROWS)
                dots_rows<ROWS>(a, from, first + s.shift, pitch, step, features, s.count, to);
            else
                dots_rows<1>(a + s.from, from, first + s.shift, pitch, step, features, s.count, to);
        }
    }

    template <int FROM, int TO, int F>
    static POLYHEAD_INLINE void add(V (&sum)[ROWS][F], const T *weights, const T *b, int64_t pitch, int64_t step, int64_t count) {
        for (; count > 0; --count, weights += ROWS * L, b += step) {
            V w[ROWS];
            for (int r = FROM; r < TO; ++r) w[r] = load<V>(weights + r * L);
#pragma GCC unroll 8
            for (int f = 0; f < F; ++f) {
                V y = load<V>(b + f * pitch);
                if (TO - FROM > 1) POLYHEAD_HOLD(y);
#pragma GCC unroll 2
                for (int r = FROM; r < TO; ++r) sum[r][f] += w[r] * y;
            }
        }
    }

    // F features of the sums below
    template <int F>
    static POLYHEAD_ALONE void sums_tile(const KeyRun *runs, int64_t num_runs, const T *weights, Rows b, int64_t pitch,
                                         int64_t step, T *into, int64_t next_row, bool fresh) {
        V sum[ROWS][F];
        for (int r = 0; r < ROWS; ++r)
            for (int f = 0; f < F; ++f) sum[r][f] = fresh ? V{} : load<V>(into + r * next_row + f * L);
        for (int64_t n = 0; n < num_runs; ++n) {
            const KeyRun &s = runs[n];
            const T *from = b.data + s.place * b.size + s.shift, *w = weights + s.slot * ROWS * L;
            if (s.to - s.from == ROWS)
                add<0, 2, F>(sum, w, from, pitch, step, s.count);
            else if (s.from == 0)
                add<0, 1, F>(sum, w, from, pitch, step, s.count);
            else
                add<1, 2, F>(sum, w, from, pitch, step, s.count);
        }
        for (int r = 0; r < ROWS; ++r)
            for (int f = 0; f < F; ++f) store(into + r * next_row + f * L, sum[r][f]);
    }

    // into[r][d] += Σ weights[c][r] b[d][c] over all neighbours c in some runs; `fresh`: = instead of +=
    template <int F = DEEP>
    static void sums(const KeyRun *runs, int64_t num_runs, const T *weights, Rows b, int64_t pitch, int64_t step,
                     int64_t features, T *into, int64_t next_row, bool fresh) {
        int64_t d = 0;
        for (; d + F <= features; d += F)
            sums_tile<F>(runs, num_runs, weights, {b.data + d * pitch, b.size}, pitch, step, into + d * L, next_row, fresh);
        if constexpr (F > 1)
            if (d < features)
                sums<F / 2>(runs, num_runs, weights, {b.data + d * pitch, b.size}, pitch, step, features - d, into + d * L,
                            next_row, fresh);
    }
};

}  // namespace
}  // namespace polyhead

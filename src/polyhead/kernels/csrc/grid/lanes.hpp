// Points of a grid side by side in a vector: the three loops that attention over a window is made of.
//
// A row of points lies feature by feature, (features, pitch), with room on both sides. The keys at one distance from a vector
// of queries are then one load, and no sum goes over lanes.
#pragma once

#include <utility>

#include "problem.hpp"
#include "simd/vector.hpp"

namespace polyhead {
namespace {

// a loop that needs all registers for itself
#define POLYHEAD_ALONE __attribute__((noinline))

// Compilers read a number from memory again for each product that it is in, where the core could do something else.
#if defined(__AVX512F__)
#define POLYHEAD_HOLD(x) asm("" : "+v"(x))
#elif defined(__SSE2__)
#define POLYHEAD_HOLD(x) asm("" : "+x"(x))
#else
#define POLYHEAD_HOLD(x) (void)(x)
#endif

template <int HALF, int B, class V, int... I>
POLYHEAD_INLINE void swap_lanes(V (&rows)[B], std::integer_sequence<int, I...> lanes) {
    for (int r = 0; r < B; ++r) {
        if (r & HALF) continue;
        const V a = rows[r], b = rows[r + HALF];
        rows[r] = SHUFFLE(a, b, (I & HALF ? B + I - HALF : I)...);
        rows[r + HALF] = SHUFFLE(a, b, (I & HALF ? B + I : I + HALF)...);
    }
    if constexpr (2 * HALF < B) swap_lanes<2 * HALF>(rows, lanes);
}

// into[c][r] = factor · from[r][c], in blocks of B x B; where they do not fit, the last overlaps the one before.
template <int B, class T>
void turned(const T *from, int64_t step, T *into, int64_t stride, int64_t rows, int64_t columns, T factor) {
    using V = Vec<T, B>;
    if (rows < B || columns < B) {
        if constexpr (B > 4) return turned<B / 2>(from, step, into, stride, rows, columns, factor);
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t c = 0; c < columns; ++c) into[c * stride + r] = from[r * step + c] * factor;
        return;
    }
    auto next = [](int64_t at, int64_t last) { return at < last && at + B > last ? last : at + B; };
    for (int64_t r = 0; r <= rows - B; r = next(r, rows - B))
        for (int64_t c = 0; c <= columns - B; c = next(c, columns - B)) {
            V block[B];
            for (int i = 0; i < B; ++i) block[i] = load<V>(from + (r + i) * step + c) * factor;
            swap_lanes<1>(block, std::make_integer_sequence<int, B>{});
            for (int i = 0; i < B; ++i) store(into + (c + i) * stride + r, block[i]);
        }
}

// A part of a window: one row of keys, and some neighbours in it.
struct Stretch {
    int64_t row, place;  // of the grid, and of those that are at hand
    int from, to;        // which rows of queries see it
    int64_t number;      // of its first offset as the first row of queries sees it; a row further down, `across` less
    int64_t shift;       // how many points its first key is from the query
    int64_t count;
    int64_t slot;        // where its scores begin
};

template <class T>
struct GridLanes {
    static constexpr int L = NATIVE<T>;
    using V = Vec<T, L>;
    // rows of queries, neighbours and features that are under way at once: what the registers hold
    static constexpr int ROWS = 2, ACROSS = VECTOR_BYTES == 64 ? 8 : 5, DEEP = VECTOR_BYTES == 64 ? 8 : 4;
    static_assert(ROWS == 2, "loops take a stretch as seen by both rows, by the first or by the second: a third has no loop");

    // Rows of points, `size` numbers each.
    struct Rows {
        const T *data;
        int64_t size;
    };

    // into[c][r] = first[c] + Σ_d a[r][d] b[d][c], for the neighbours c, `apart` points from each other
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
        // tiles of nearly one size
        for (int64_t tiles = (count + ACROSS - 1) / ACROSS; tiles > 0; --tiles) {
            const int64_t now = (count + tiles - 1) / tiles;
            if (step == 1)
                dots_across<R, 1>(now, a, b, first, pitch, step, features, into);
            else
                dots_across<R, 0>(now, a, b, first, pitch, step, features, into);
            count -= now, b += now * step, first += now * step, into += now * ROWS * L;
        }
    }

    // The products of rows `a` with all neighbours in some stretches.
    static void dots(const Stretch *stretches, int64_t many, const T *const *a, Rows b, const T *first, int64_t pitch,
                     int64_t step, int64_t features, T *into) {
        for (int64_t n = 0; n < many; ++n) {
            const Stretch &s = stretches[n];
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
    static POLYHEAD_ALONE void sums_tile(const Stretch *stretches, int64_t many, const T *weights, Rows b, int64_t pitch,
                                         int64_t step, T *into, int64_t next_row, bool fresh) {
        V sum[ROWS][F];
        for (int r = 0; r < ROWS; ++r)
            for (int f = 0; f < F; ++f) sum[r][f] = fresh ? V{} : load<V>(into + r * next_row + f * L);
        for (int64_t n = 0; n < many; ++n) {
            const Stretch &s = stretches[n];
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

    // into[r][d] += Σ weights[c][r] b[d][c], over all neighbours c in some stretches; the first to be summed are fresh
    template <int F = DEEP>
    static void sums(const Stretch *stretches, int64_t many, const T *weights, Rows b, int64_t pitch, int64_t step,
                     int64_t features, T *into, int64_t next_row, bool fresh) {
        int64_t d = 0;
        for (; d + F <= features; d += F)
            sums_tile<F>(stretches, many, weights, {b.data + d * pitch, b.size}, pitch, step, into + d * L, next_row, fresh);
        if constexpr (F > 1)
            if (d < features)
                sums<F / 2>(stretches, many, weights, {b.data + d * pitch, b.size}, pitch, step, features - d, into + d * L,
                            next_row, fresh);
    }
};

}  // namespace
}  // namespace polyhead

// Products of a few rows with a matrix, for vectors of columns, and what prepares them: copies, transposes, sums over lanes.
#pragma once

#include <type_traits>
#include <utility>

#include "simd/vector.hpp"

namespace polyhead {
namespace {

template <class V, class Combine, int... I>
POLYHEAD_INLINE auto combine_halves(V x, Combine combine, std::integer_sequence<int, I...>) {
    return combine(SHUFFLE(x, x, I...), SHUFFLE(x, x, int(I + sizeof...(I))...));
}

// Reduce all lanes to one number.
template <class T, int W, class Combine>
POLYHEAD_INLINE T reduce(Vec<T, W> x, Combine combine) {
    if constexpr (W > 4) return reduce<T, W / 2>(combine_halves(x, combine, std::make_integer_sequence<int, W / 2>{}), combine);
    if constexpr (W == 4) return combine(combine(x[0], x[2]), combine(x[1], x[3]));
    if constexpr (W == 2) return combine(x[0], x[1]);
}

// Copy `rows` rows of `count` numbers, times `factor`. If `count` is not a multiple of W, the last vector of a row overlaps the one before.
template <int W, class T>
POLYHEAD_INLINE void copy_rows(const T *from, int64_t step, T *into, int64_t stride, int64_t rows, int64_t count, T factor = 1) {
    using V = Vec<T, W>;
    if constexpr (W > 2)
        if (count < W) return copy_rows<W / 2>(from, step, into, stride, rows, count, factor);
    for (; rows > 0; --rows, from += step, into += stride) {
        if (W == 2 && count < 2) {
            if (count) *into = *from * factor;
            continue;
        }
        for (int64_t i = 0; i + W <= count; i += W) store(into + i, load<V>(from + i) * factor);
        store(into + count - W, load<V>(from + count - W) * factor);
    }
}

template <class V>
POLYHEAD_INLINE auto sum_lanes(V x) {
    return reduce<typename std::decay<decltype(x[0])>::type, sizeof(V) / sizeof(x[0])>(x, [](auto a, auto b) { return a + b; });
}
template <class V>
POLYHEAD_INLINE auto max_lane(V x) {
    return reduce<typename std::decay<decltype(x[0])>::type, sizeof(V) / sizeof(x[0])>(x, [](auto a, auto b) { return a > b ? a : b; });
}

template <class T>
struct RowProducts {
    static constexpr int L = NATIVE<T>;
    // columns are a multiple of half a vector, since many heads are narrow, and at least of a quad
    static constexpr int HALF = L > 8 ? L / 2 : 4;

    // into (columns, rows) = the transpose of (rows, columns), both multiples of 4
    static void transpose(const T *from, int64_t rows, int64_t columns, T *into) {
        using Q = Quad<T>;
        for (int64_t r = 0; r < rows; r += 4)
            for (int64_t c = 0; c < columns; c += 4) {
                const T *x = from + r * columns + c;
                const Q row0 = load<Q>(x), row1 = load<Q>(x + columns), row2 = load<Q>(x + 2 * columns),
                        row3 = load<Q>(x + 3 * columns);
                const Q low01 = SHUFFLE(row0, row1, 0, 4, 1, 5), low23 = SHUFFLE(row2, row3, 0, 4, 1, 5);
                const Q high01 = SHUFFLE(row0, row1, 2, 6, 3, 7), high23 = SHUFFLE(row2, row3, 2, 6, 3, 7);
                T *to = into + c * rows + r;
                store(to, SHUFFLE(low01, low23, 0, 1, 4, 5)), store(to + rows, SHUFFLE(low01, low23, 2, 3, 6, 7));
                store(to + 2 * rows, SHUFFLE(high01, high23, 0, 1, 4, 5));
                store(to + 3 * rows, SHUFFLE(high01, high23, 2, 3, 6, 7));
            }
    }

    // result[r][c] = Σ_i from[r][i] matrix[i][c] for R rows and N·W columns from c on
    template <int R, int N, int W>
    static POLYHEAD_INLINE void product_at(const T *from, int64_t step, const T *matrix, int64_t begin, int64_t end, int64_t columns,
                                    T *result, int64_t c) {
        using X = Vec<T, W>;
        X sum[R][N] = {};
        for (int64_t i = begin; i < end; ++i) {
            X x[N];
            for (int n = 0; n < N; ++n) x[n] = load<X>(matrix + i * columns + c + n * W);
            for (int r = 0; r < R; ++r)
                for (int n = 0; n < N; ++n) sum[r][n] += from[r * step + i] * x[n];
        }
        for (int r = 0; r < R; ++r)
            for (int n = 0; n < N; ++n) store(result + r * columns + c + n * W, sum[r][n]);
    }

    // the same for the columns from c to `last`, with i from `begin` to `end`
    template <int R>
    static POLYHEAD_INLINE void product(const T *from, int64_t step, const T *matrix, int64_t begin, int64_t end, int64_t columns,
                                 T *result, int64_t c, int64_t last) {
        constexpr int N = R == 1 ? 4 : 2;
        for (; c + N * L <= last; c += N * L) product_at<R, N, L>(from, step, matrix, begin, end, columns, result, c);
        for (; c + L <= last; c += L) product_at<R, 1, L>(from, step, matrix, begin, end, columns, result, c);
        if (c < last) product_at<R, 1, HALF>(from, step, matrix, begin, end, columns, result, c);
    }

    // result[i][c] += Σ_r from[r][i] rows[r][c], for i from `begin` to `end` and W columns from c on
    template <int R, int W>
    static POLYHEAD_INLINE void add_outer_at(const T *from, int64_t step, const T *rows, int64_t columns, int64_t begin, int64_t end,
                                      T *result, int64_t c) {
        using X = Vec<T, W>;
        X x[R];
        for (int r = 0; r < R; ++r) x[r] = load<X>(rows + r * columns + c);
        for (int64_t i = begin; i < end; ++i) {
            X sum = load<X>(result + i * columns + c);
            for (int r = 0; r < R; ++r) sum += from[r * step + i] * x[r];
            store(result + i * columns + c, sum);
        }
    }

    template <int R>
    static POLYHEAD_INLINE void add_outer(const T *from, int64_t step, const T *rows, int64_t columns, int64_t begin, int64_t end,
                                   T *result) {
        int64_t c = 0;
        for (; c + L <= columns; c += L) add_outer_at<R, L>(from, step, rows, columns, begin, end, result, c);
        if (c < columns) add_outer_at<R, HALF>(from, step, rows, columns, begin, end, result, c);
    }
};

}  // namespace
}  // namespace polyhead

// Products of narrow matrices with contiguous rows of whole vectors, and copies from and to other layouts.
//
// A row has `wide` numbers, k padded with zeros to a multiple of UNIT. The number of rows is padded to a multiple of UNIT too, so
// that no loop has a remainder.
#pragma once

#include "simd/transpose.hpp"

namespace polyhead {
namespace {

template <class T>
struct Dense {
    static constexpr int L = NATIVE<T>, UNIT = L > 8 ? L : 8;
    // sums computed at once, rows by vectors: half of the registers
    static constexpr int ROWS = VECTOR_BYTES == 64 ? 8 : 4, VECTORS = 2;
    using V = Vec<T, L>;

    static int64_t whole(int64_t n) { return (n + UNIT - 1) / UNIT * UNIT; }

    // out (rows, k) = a (rows, k) · b (k, k), or from − a · b [− c · d], where `from` may be `out`
    static void times(const T *a, const T *b, T *out, int64_t rows, int64_t k, const T *from = nullptr, const T *c = nullptr,
                      const T *d = nullptr) {
        const int64_t wide = whole(k);
        int64_t at = 0;
        for (; at + VECTORS * L <= wide; at += VECTORS * L)
            for (int64_t row = 0; row < rows; row += ROWS)
                times_tile<VECTORS>(a, b, out, row * wide, at, k, wide, from, c, d);
        for (; at < wide; at += L)
            for (int64_t row = 0; row < rows; row += ROWS) times_tile<1>(a, b, out, row * wide, at, k, wide, from, c, d);
    }

    // out (k, k) += aᵀ (k, rows) · b (rows, k); of a symmetric result only the upper triangle, and some of the lower one.
    static void inside(const T *a, const T *b, T *out, int64_t rows, int64_t k, bool symmetric = false) {
        const int64_t wide = whole(k);
        int64_t at = 0;
        for (; at + VECTORS * L <= wide; at += VECTORS * L)
            for (int64_t i = 0; i < (symmetric && at + VECTORS * L < k ? at + VECTORS * L : k); i += ROWS)
                inside_tile<VECTORS>(a + i, b + at, out + i * wide + at, rows, wide);
        for (; at < wide; at += L)
            for (int64_t i = 0; i < (symmetric && at + L < k ? at + L : k); i += ROWS)
                inside_tile<1>(a + i, b + at, out + i * wide + at, rows, wide);
    }

    // out = factor · (a + aᵀ)
    static void symmetric(const T *a, T *out, int64_t k, T factor) {
        transpose_square(a, out, k);
        const int64_t wide = whole(k);
        for (int64_t i = 0; i < k * wide; i += L) store(out + i, (load<V>(a + i) + load<V>(out + i)) * factor);
    }

    // out (k, k) = aᵀ
    static void transpose_square(const T *a, T *out, int64_t k) {
        const int64_t wide = whole(k);
        for (int64_t i = 0; i < wide; i += L)
            for (int64_t j = 0; j < wide; j += L) transpose_block(a + i * wide + j, wide, out + j * wide + i, wide);
    }

    // Copies the upper triangle to the lower one.
    static void mirror(T *a, int64_t k) {
        const int64_t wide = whole(k);
        for (int64_t i = 0; i < k; ++i)
            for (int64_t j = 0; j < i; ++j) a[i * wide + j] = a[j * wide + i];
    }

    // Copies `rows` rows of a matrix with any strides, times `factor`.
    static void gather(const T *from, int64_t row, int64_t column, T *into, int64_t rows, int64_t k, T factor = 1) {
        const int64_t wide = whole(k), whole_k = k / L * L;
        if (column == 1) {
            for (int64_t r = 0; r < rows; ++r) {
                const T *x = from + r * row;
                T *y = into + r * wide;
                for (int64_t c = 0; c < whole_k; c += L) store(y + c, load<V>(x + c) * factor);
                for (int64_t c = whole_k; c < k; ++c) y[c] = x[c] * factor;
            }
            return;
        }
        const int64_t whole_rows = row == 1 ? rows / L * L : 0;
        for (int64_t r = 0; r < whole_rows; r += L) {
            for (int64_t c = 0; c < whole_k; c += L) transpose_block(from + c * column + r, column, into + r * wide + c, wide, factor);
            for (int64_t c = whole_k; c < k; ++c)
                for (int lane = 0; lane < L; ++lane) into[(r + lane) * wide + c] = from[c * column + r + lane] * factor;
        }
        for (int64_t r = whole_rows; r < rows; ++r)
            for (int64_t c = 0; c < k; ++c) into[r * wide + c] = from[r * row + c * column] * factor;
    }

    // The inverse of gather.
    static void scatter(const T *from, T *into, int64_t row, int64_t column, int64_t rows, int64_t k) {
        const int64_t wide = whole(k), whole_k = k / L * L;
        if (column == 1) {
            for (int64_t r = 0; r < rows; ++r) {
                const T *x = from + r * wide;
                T *y = into + r * row;
                for (int64_t c = 0; c < whole_k; c += L) store(y + c, load<V>(x + c));
                for (int64_t c = whole_k; c < k; ++c) y[c] = x[c];
            }
            return;
        }
        const int64_t whole_rows = row == 1 ? rows / L * L : 0;
        for (int64_t r = 0; r < whole_rows; r += L) {
            for (int64_t c = 0; c < whole_k; c += L) transpose_block(from + r * wide + c, wide, into + c * column + r, column);
            for (int64_t c = whole_k; c < k; ++c)
                for (int lane = 0; lane < L; ++lane) into[c * column + r + lane] = from[(r + lane) * wide + c];
        }
        for (int64_t r = whole_rows; r < rows; ++r)
            for (int64_t c = 0; c < k; ++c) into[r * row + c * column] = from[r * wide + c];
    }

   private:
    template <int N>
    static POLYHEAD_INLINE void times_tile(const T *a, const T *b, T *out, int64_t row, int64_t at, int64_t k, int64_t wide,
                                           const T *from, const T *c, const T *d) {
        V sum[ROWS][N] = {};
        add_times<N>(sum, a + row, b + at, k, wide);
        if (c) add_times<N>(sum, c + row, d + at, k, wide);
        for (int r = 0; r < ROWS; ++r)
            for (int v = 0; v < N; ++v) {
                const int64_t place = row + r * wide + at + v * L;
                store(out + place, from ? load<V>(from + place) - sum[r][v] : sum[r][v]);
            }
    }

    template <int N>
    static POLYHEAD_INLINE void add_times(V (&sum)[ROWS][N], const T *a, const T *b, int64_t k, int64_t wide) {
        for (int64_t i = 0; i < k; ++i) {
            V right[N];
            for (int v = 0; v < N; ++v) right[v] = load<V>(b + i * wide + v * L);
            for (int r = 0; r < ROWS; ++r)
                for (int v = 0; v < N; ++v) sum[r][v] += a[r * wide + i] * right[v];
        }
    }

    template <int N>
    static POLYHEAD_INLINE void inside_tile(const T *a, const T *b, T *out, int64_t rows, int64_t wide) {
        V sum[ROWS][N] = {};
        for (int64_t row = 0; row < rows; ++row) {
            V right[N];
            for (int v = 0; v < N; ++v) right[v] = load<V>(b + row * wide + v * L);
            for (int r = 0; r < ROWS; ++r)
                for (int v = 0; v < N; ++v) sum[r][v] += a[row * wide + r] * right[v];
        }
        for (int r = 0; r < ROWS; ++r)
            for (int v = 0; v < N; ++v) {
                T *to = out + r * wide + v * L;
                store(to, load<V>(to) + sum[r][v]);
            }
    }

        static POLYHEAD_INLINE void transpose_block(const T *from, int64_t step, T *into, int64_t into_step, T factor = 1) {
        V rows[L];
        for (int r = 0; r < L; ++r) rows[r] = load<V>(from + r * step) * factor;
        swap_lanes<1>(rows, std::make_integer_sequence<int, L>{});
        for (int r = 0; r < L; ++r) store(into + r * into_step, rows[r]);
    }
};

}  // namespace
}  // namespace polyhead

// Products of narrow matrices with contiguous rows of whole vectors, and copies from and to other layouts.
//
// A row has `padded_k` numbers, k padded with zeros to a multiple of UNIT. The number of rows is padded to a multiple of UNIT
// too, so that no loop has a remainder.
#pragma once

#include "simd/transpose.hpp"

namespace polyhead {
namespace {

template <class T>
struct NarrowMatrices {
    static constexpr int L = NATIVE<T>, UNIT = L > 8 ? L : 8;
    // sums computed at once, rows by vectors: half of the registers
    static constexpr int ROWS = VECTOR_BYTES == 64 ? 8 : 4, VECTORS = 2;
    using V = Vec<T, L>;

    static int64_t round_up(int64_t n) { return (n + UNIT - 1) / UNIT * UNIT; }

    // out (rows, k) = a (rows, k) · b (k, k), or from − a · b [− c · d], where `from` may be `out`
    static void multiply(const T *a, const T *b, T *out, int64_t rows, int64_t k, const T *from = nullptr, const T *c = nullptr,
                      const T *d = nullptr) {
        const int64_t padded_k = round_up(k);
        int64_t at = 0;
        for (; at + VECTORS * L <= padded_k; at += VECTORS * L)
            for (int64_t row = 0; row < rows; row += ROWS)
                multiply_tile<VECTORS>(a, b, out, row * padded_k, at, k, padded_k, from, c, d);
        for (; at < padded_k; at += L)
            for (int64_t row = 0; row < rows; row += ROWS) multiply_tile<1>(a, b, out, row * padded_k, at, k, padded_k, from, c, d);
    }

    // out (k, k) += aᵀ (k, rows) · b (rows, k); of a symmetric result only the upper triangle, and some of the lower one.
    static void add_transposed_product(const T *a, const T *b, T *out, int64_t rows, int64_t k, bool symmetric = false) {
        const int64_t padded_k = round_up(k);
        int64_t at = 0;
        for (; at + VECTORS * L <= padded_k; at += VECTORS * L)
            for (int64_t i = 0; i < (symmetric && at + VECTORS * L < k ? at + VECTORS * L : k); i += ROWS)
                add_transposed_product_tile<VECTORS>(a + i, b + at, out + i * padded_k + at, rows, padded_k);
        for (; at < padded_k; at += L)
            for (int64_t i = 0; i < (symmetric && at + L < k ? at + L : k); i += ROWS)
                add_transposed_product_tile<1>(a + i, b + at, out + i * padded_k + at, rows, padded_k);
    }

    // out = factor · (a + aᵀ)
    static void symmetrise(const T *a, T *out, int64_t k, T factor) {
        transpose_square(a, out, k);
        const int64_t padded_k = round_up(k);
        for (int64_t i = 0; i < k * padded_k; i += L) store(out + i, (load<V>(a + i) + load<V>(out + i)) * factor);
    }

    // out (k, k) = aᵀ
    static void transpose_square(const T *a, T *out, int64_t k) {
        const int64_t padded_k = round_up(k);
        for (int64_t i = 0; i < padded_k; i += L)
            for (int64_t j = 0; j < padded_k; j += L) transpose_block(a + i * padded_k + j, padded_k, out + j * padded_k + i,
                                                                      padded_k);
    }

    // Copies the upper triangle to the lower one.
    static void copy_upper_to_lower(T *a, int64_t k) {
        const int64_t padded_k = round_up(k);
        for (int64_t i = 0; i < k; ++i)
            for (int64_t j = 0; j < i; ++j) a[i * padded_k + j] = a[j * padded_k + i];
    }

    // Copies `rows` rows of a matrix with any strides, times `factor`.
    static void load_strided(const T *from, int64_t row, int64_t column, T *into, int64_t rows, int64_t k, T factor = 1) {
        const int64_t padded_k = round_up(k), whole_k = k / L * L;
        if (column == 1) {
            for (int64_t r = 0; r < rows; ++r) {
                const T *x = from + r * row;
                T *y = into + r * padded_k;
                for (int64_t c = 0; c < whole_k; c += L) store(y + c, load<V>(x + c) * factor);
                for (int64_t c = whole_k; c < k; ++c) y[c] = x[c] * factor;
            }
            return;
        }
        const int64_t whole_rows = row == 1 ? rows / L * L : 0;
        for (int64_t r = 0; r < whole_rows; r += L) {
            for (int64_t c = 0; c < whole_k; c += L) transpose_block(from + c * column + r, column, into + r * padded_k + c,
                                                                     padded_k, factor);
            for (int64_t c = whole_k; c < k; ++c)
                for (int lane = 0; lane < L; ++lane) into[(r + lane) * padded_k + c] = from[c * column + r + lane] * factor;
        }
        for (int64_t r = whole_rows; r < rows; ++r)
            for (int64_t c = 0; c < k; ++c) into[r * padded_k + c] = from[r * row + c * column] * factor;
    }

    // The inverse of load_strided.
    static void store_strided(const T *from, T *into, int64_t row, int64_t column, int64_t rows, int64_t k) {
        const int64_t padded_k = round_up(k), whole_k = k / L * L;
        if (column == 1) {
            for (int64_t r = 0; r < rows; ++r) {
                const T *x = from + r * padded_k;
                T *y = into + r * row;
                for (int64_t c = 0; c < whole_k; c += L) store(y + c, load<V>(x + c));
                for (int64_t c = whole_k; c < k; ++c) y[c] = x[c];
            }
            return;
        }
        const int64_t whole_rows = row == 1 ? rows / L * L : 0;
        for (int64_t r = 0; r < whole_rows; r += L) {
            for (int64_t c = 0; c < whole_k; c += L) transpose_block(from + r * padded_k + c, padded_k, into + c * column + r,
                                                                     column);
            for (int64_t c = whole_k; c < k; ++c)
                for (int lane = 0; lane < L; ++lane) into[c * column + r + lane] = from[(r + lane) * padded_k + c];
        }
        for (int64_t r = whole_rows; r < rows; ++r)
            for (int64_t c = 0; c < k; ++c) into[r * row + c * column] = from[r * padded_k + c];
    }

   private:
    template <int N>
    static POLYHEAD_INLINE void multiply_tile(const T *a, const T *b, T *out, int64_t row, int64_t at, int64_t k, int64_t padded_k,
                                           const T *from, const T *c, const T *d) {
        V sum[ROWS][N] = {};
        add_product<N>(sum, a + row, b + at, k, padded_k);
        if (c) add_product<N>(sum, c + row, d + at, k, padded_k);
        for (int r = 0; r < ROWS; ++r)
            for (int v = 0; v < N; ++v) {
                const int64_t place = row + r * padded_k + at + v * L;
                store(out + place, from ? load<V>(from + place) - sum[r][v] : sum[r][v]);
            }
    }

    template <int N>
    static POLYHEAD_INLINE void add_product(V (&sum)[ROWS][N], const T *a, const T *b, int64_t k, int64_t padded_k) {
        for (int64_t i = 0; i < k; ++i) {
            V right[N];
            for (int v = 0; v < N; ++v) right[v] = load<V>(b + i * padded_k + v * L);
            for (int r = 0; r < ROWS; ++r)
                for (int v = 0; v < N; ++v) sum[r][v] += a[r * padded_k + i] * right[v];
        }
    }

    template <int N>
    static POLYHEAD_INLINE void add_transposed_product_tile(const T *a, const T *b, T *out, int64_t rows, int64_t padded_k) {
        V sum[ROWS][N] = {};
        for (int64_t row = 0; row < rows; ++row) {
            V right[N];
            for (int v = 0; v < N; ++v) right[v] = load<V>(b + row * padded_k + v * L);
            for (int r = 0; r < ROWS; ++r)
                for (int v = 0; v < N; ++v) sum[r][v] += a[row * padded_k + r] * right[v];
        }
        for (int r = 0; r < ROWS; ++r)
            for (int v = 0; v < N; ++v) {
                T *to = out + r * padded_k + v * L;
                store(to, load<V>(to) + sum[r][v]);
            }
    }

        static POLYHEAD_INLINE void transpose_block(const T *from, int64_t step, T *into, int64_t into_step, T factor = 1) {
        V rows[L];
        for (int r = 0; r < L; ++r) rows[r] = load<V>(from + r * step) * factor;
        transpose_in_registers<1>(rows, std::make_integer_sequence<int, L>{});
        for (int r = 0; r < L; ++r) store(into + r * into_step, rows[r]);
    }
};

}  // namespace
}  // namespace polyhead

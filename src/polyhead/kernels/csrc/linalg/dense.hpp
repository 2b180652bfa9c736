// Products of narrow matrices whose rows lie one after the other, in whole vectors; and matrices from anywhere put so.
//
// A row has `wide` numbers, a multiple of UNIT, of which the first k count and the others are zero. Matrices have a multiple of
// UNIT rows, of which the last are zero too: no loop has a rest.
#pragma once

#include <utility>

#include "simd/vector.hpp"

namespace polyhead {
namespace {

template <class T>
struct Dense {
    static constexpr int L = NATIVE<T>, UNIT = L > 8 ? L : 8;
    // sums that are under way at once: rows by vectors, in half of the registers
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

    // out (k, k) += aᵀ (k, rows) · b (rows, k); of a symmetric one only what lies above the diagonal, and some below.
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

    // out = into · (a + aᵀ)
    static void symmetric(const T *a, T *out, int64_t k, T into) {
        turned(a, out, k);
        const int64_t wide = whole(k);
        for (int64_t i = 0; i < k * wide; i += L) store(out + i, (load<V>(a + i) + load<V>(out + i)) * into);
    }

    // out (k, k) = aᵀ
    static void turned(const T *a, T *out, int64_t k) {
        const int64_t wide = whole(k);
        for (int64_t i = 0; i < wide; i += L)
            for (int64_t j = 0; j < wide; j += L) turn(a + i * wide + j, wide, out + j * wide + i, wide);
    }

    // What lies below the diagonal, from above it.
    static void mirror(T *a, int64_t k) {
        const int64_t wide = whole(k);
        for (int64_t i = 0; i < k; ++i)
            for (int64_t j = 0; j < i; ++j) a[i * wide + j] = a[j * wide + i];
    }

    // A matrix with any strides: `rows` of them, into rows of whole vectors; times `factor`.
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
            for (int64_t c = 0; c < whole_k; c += L) turn(from + c * column + r, column, into + r * wide + c, wide, factor);
            for (int64_t c = whole_k; c < k; ++c)
                for (int lane = 0; lane < L; ++lane) into[(r + lane) * wide + c] = from[c * column + r + lane] * factor;
        }
        for (int64_t r = whole_rows; r < rows; ++r)
            for (int64_t c = 0; c < k; ++c) into[r * wide + c] = from[r * row + c * column] * factor;
    }

    // The other way round.
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
            for (int64_t c = 0; c < whole_k; c += L) turn(from + r * wide + c, wide, into + c * column + r, column);
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
                const int64_t here = row + r * wide + at + v * L;
                store(out + here, from ? load<V>(from + here) - sum[r][v] : sum[r][v]);
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

    // L rows of L numbers as columns: blocks of 1, 2, 4, … lanes change places.
    static POLYHEAD_INLINE void turn(const T *from, int64_t step, T *into, int64_t into_step, T factor = 1) {
        V rows[L];
        for (int r = 0; r < L; ++r) rows[r] = load<V>(from + r * step) * factor;
        swap_blocks<1>(rows, std::make_integer_sequence<int, L>{});
        for (int r = 0; r < L; ++r) store(into + r * into_step, rows[r]);
    }

    template <int HALF, int... I>
    static POLYHEAD_INLINE void swap_blocks(V (&rows)[L], std::integer_sequence<int, I...> lanes) {
        for (int r = 0; r < L; ++r) {
            if (r & HALF) continue;
            const V a = rows[r], b = rows[r + HALF];
            rows[r] = SHUFFLE(a, b, (I & HALF ? L + I - HALF : I)...);
            rows[r + HALF] = SHUFFLE(a, b, (I & HALF ? L + I : I + HALF)...);
        }
        if constexpr (2 * HALF < L) swap_blocks<2 * HALF>(rows, lanes);
    }
};

}  // namespace
}  // namespace polyhead

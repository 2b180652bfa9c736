// A matrix times few vectors, at the speed of reading the matrix.
#pragma once

#include "simd/math.hpp"
#include "kernel_arguments.hpp"

namespace polyhead {
namespace {

// Four rows of the matrix, one after the other: memory is read as one stream, and their sums end in one quad.
template <int M>
POLYHEAD_INLINE void gemm_rows(const SkinnyGemm &in, int64_t row, int count, int64_t first) {
    constexpr int L = NATIVE<float>;
    using V = Vec<float, L>;
    const int64_t whole = in.columns / L * L;
    V sum[4][M] = {};
    float rest[4][M] = {};
    for (int r = 0; r < count; ++r) {
        const float *w = in.matrix + (row + r) * in.columns;
        V other[M] = {};
        int64_t c = 0;
        for (; c + 2 * L <= whole; c += 2 * L) {
            const V a = load<V>(w + c), b = load<V>(w + c + L);
            for (int m = 0; m < M; ++m) {
                const float *x = in.x + (first + m) * in.columns + c;
                sum[r][m] += a * load<V>(x);
                other[m] += b * load<V>(x + L);
            }
        }
        for (; c < whole; c += L)
            for (int m = 0; m < M; ++m) sum[r][m] += load<V>(w + c) * load<V>(in.x + (first + m) * in.columns + c);
        for (int m = 0; m < M; ++m) {
            sum[r][m] += other[m];
            for (int64_t i = whole; i < in.columns; ++i) rest[r][m] += w[i] * in.x[(first + m) * in.columns + i];
        }
    }
    for (int m = 0; m < M; ++m) {
        const Quad<float> all = sum_each_of_four(sum[0][m], sum[1][m], sum[2][m], sum[3][m]);
        for (int r = 0; r < count; ++r)
            in.out[(first + m) * in.rows + row + r] = all[r] + rest[r][m] + (in.bias ? in.bias[row + r] : 0);
    }
}

template <int M>
void gemm_row_block(const SkinnyGemm &in, int64_t begin, int64_t end, int64_t first) {
    int64_t row = begin;
    for (; row + 4 <= end; row += 4) gemm_rows<M>(in, row, 4, first);
    if (row < end) gemm_rows<M>(in, row, int(end - row), first);
}

// Vectors in fours, then one by one: the matrix is read from memory once, and again from the cache.
inline void skinny_gemm(const SkinnyGemm &in) {
    // each thread has its own rows, and a block of them stays in its cache for all vectors
    const int64_t block = 64, blocks = (in.rows + block - 1) / block;
#pragma omp parallel for num_threads(in.threads) schedule(static)
    for (int64_t b = 0; b < blocks; ++b) {
        const int64_t begin = b * block, end = begin + block < in.rows ? begin + block : in.rows;
        int64_t first = 0;
        for (; first + 4 <= in.vectors; first += 4) gemm_row_block<4>(in, begin, end, first);
        for (; first < in.vectors; ++first) gemm_row_block<1>(in, begin, end, first);
    }
}

}  // namespace
}  // namespace polyhead

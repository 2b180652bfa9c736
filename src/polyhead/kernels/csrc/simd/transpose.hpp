// Transposes of blocks of whole vectors.
#pragma once

#include <utility>

#include "simd/vector.hpp"

namespace polyhead {
namespace {

// Transpose a block of B vectors with B lanes: blocks of 1, 2, 4, … lanes change places.
template <int HALF, int B, class V, int... I>
POLYHEAD_INLINE void transpose_in_registers(V (&rows)[B], std::integer_sequence<int, I...> lanes) {
    for (int r = 0; r < B; ++r) {
        if (r & HALF) continue;
        const V a = rows[r], b = rows[r + HALF];
        rows[r] = SHUFFLE(a, b, (I & HALF ? B + I - HALF : I)...);
        rows[r + HALF] = SHUFFLE(a, b, (I & HALF ? B + I : I + HALF)...);
    }
    if constexpr (2 * HALF < B) transpose_in_registers<2 * HALF>(rows, lanes);
}

// into[c][r] = factor · from[r][c], in blocks of B x B; if they do not fit evenly, the last block overlaps the one before.
template <int B, class T>
void transpose(const T *from, int64_t step, T *into, int64_t stride, int64_t rows, int64_t columns, T factor) {
    using V = Vec<T, B>;
    if (rows < B || columns < B) {
        if constexpr (B > 4) return transpose<B / 2>(from, step, into, stride, rows, columns, factor);
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t c = 0; c < columns; ++c) into[c * stride + r] = from[r * step + c] * factor;
        return;
    }
    auto next = [](int64_t at, int64_t last) { return at < last && at + B > last ? last : at + B; };
    for (int64_t r = 0; r <= rows - B; r = next(r, rows - B))
        for (int64_t c = 0; c <= columns - B; c = next(c, columns - B)) {
            V block[B];
            for (int i = 0; i < B; ++i) block[i] = load<V>(from + (r + i) * step + c) * factor;
            transpose_in_registers<1>(block, std::make_integer_sequence<int, B>{});
            for (int i = 0; i < B; ++i) store(into + (c + i) * stride + r, block[i]);
        }
}

}  // namespace
}  // namespace polyhead

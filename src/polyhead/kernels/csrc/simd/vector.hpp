// Short vectors in GCC's and clang's notation, and the few operations that it lacks.
//
// Everything here and in the files that include it is compiled once per instruction set. All of it has internal
// linkage, so that the linker cannot use an AVX-512 body for a function of the baseline.
#pragma once

#include <cstdint>
#include <type_traits>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define POLYHEAD_INLINE inline __attribute__((always_inline))

namespace polyhead {
namespace {

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64;
#elif defined(__AVX2__)
constexpr int VECTOR_BYTES = 32;
#else
constexpr int VECTOR_BYTES = 16;
#endif

template <class T, int W>
struct VecOf {
    typedef T type __attribute__((vector_size(W * sizeof(T))));
};
template <class T, int W>
using Vec = typename VecOf<T, W>::type;
template <class T>
using Quad = Vec<T, 4>;

// The lanes of a native vector.
template <class T>
constexpr int NATIVE = VECTOR_BYTES / int(sizeof(T));

template <class T>
struct BitsOf;
template <>
struct BitsOf<float> {
    using type = int32_t;
};
template <>
struct BitsOf<double> {
    using type = int64_t;
};
template <class T>
using Int = typename BitsOf<T>::type;

template <class V, class T>
POLYHEAD_INLINE V load(const T *from) {
    V x;
    __builtin_memcpy(&x, from, sizeof x);
    return x;
}

template <class V, class T>
POLYHEAD_INLINE void store(T *to, V x) {
    __builtin_memcpy(to, &x, sizeof x);
}

template <class V, class T>
POLYHEAD_INLINE V splat(T x) {
    return x - V{};
}

// 0, 1, 2, …
template <class I, int W>
POLYHEAD_INLINE Vec<I, W> iota() {
    Vec<I, W> lanes;
    for (int lane = 0; lane < W; ++lane) lanes[lane] = I(lane);
    return lanes;
}

// The first `count` lanes, less than all; zeros elsewhere. Reads nothing beyond them.
template <class T>
POLYHEAD_INLINE Vec<T, NATIVE<T>> load_first(const T *from, int count) {
#if defined(__AVX512F__)
    const unsigned mask = (1u << count) - 1;
    if constexpr (sizeof(T) == 4)
        return _mm512_maskz_loadu_ps(__mmask16(mask), from);
    else
        return _mm512_maskz_loadu_pd(__mmask8(mask), from);
#elif defined(__AVX2__)
    const auto mask = iota<Int<T>, NATIVE<T>>() < Int<T>(count);
    if constexpr (sizeof(T) == 4)
        return _mm256_maskload_ps(from, (__m256i)mask);
    else
        return _mm256_maskload_pd(from, (__m256i)mask);
#else
    Vec<T, NATIVE<T>> x{};
    for (int lane = 0; lane < count; ++lane) x[lane] = from[lane];
    return x;
#endif
}

template <class V>
POLYHEAD_INLINE V larger(V x, V y) {
    return x > y ? x : y;
}

template <class V>
POLYHEAD_INLINE V smaller(V x, V y) {
    return x < y ? x : y;
}

#define SHUFFLE __builtin_shufflevector

// Four sums of W lanes each, as one quad: interleave and add until every 128 bits hold (a, b, c, d), then fold.
POLYHEAD_INLINE Quad<float> sum_each_of_four(Vec<float, 4> a, Vec<float, 4> b, Vec<float, 4> c, Vec<float, 4> d) {
    auto ab = SHUFFLE(a, b, 0, 4, 1, 5) + SHUFFLE(a, b, 2, 6, 3, 7);
    auto cd = SHUFFLE(c, d, 0, 4, 1, 5) + SHUFFLE(c, d, 2, 6, 3, 7);
    return SHUFFLE(ab, cd, 0, 1, 4, 5) + SHUFFLE(ab, cd, 2, 3, 6, 7);
}

#if defined(__AVX2__)
POLYHEAD_INLINE Quad<float> sum_each_of_four(Vec<float, 8> a, Vec<float, 8> b, Vec<float, 8> c, Vec<float, 8> d) {
    auto ab = SHUFFLE(a, b, 0, 8, 1, 9, 4, 12, 5, 13) + SHUFFLE(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
    auto cd = SHUFFLE(c, d, 0, 8, 1, 9, 4, 12, 5, 13) + SHUFFLE(c, d, 2, 10, 3, 11, 6, 14, 7, 15);
    auto x = SHUFFLE(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
    return SHUFFLE(x, x, 0, 1, 2, 3) + SHUFFLE(x, x, 4, 5, 6, 7);
}
#endif

#if defined(__AVX512F__)
POLYHEAD_INLINE Quad<float> sum_each_of_four(Vec<float, 16> a, Vec<float, 16> b, Vec<float, 16> c, Vec<float, 16> d) {
#define LOW 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29
#define HIGH 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31
    auto ab = SHUFFLE(a, b, LOW) + SHUFFLE(a, b, HIGH), cd = SHUFFLE(c, d, LOW) + SHUFFLE(c, d, HIGH);
#undef LOW
#undef HIGH
    auto x = SHUFFLE(ab, cd, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
             SHUFFLE(ab, cd, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    auto y = SHUFFLE(x, x, 0, 1, 2, 3, 4, 5, 6, 7) + SHUFFLE(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
    return SHUFFLE(y, y, 0, 1, 2, 3) + SHUFFLE(y, y, 4, 5, 6, 7);
}
#endif

POLYHEAD_INLINE Quad<double> sum_each_of_four(Vec<double, 2> a, Vec<double, 2> b, Vec<double, 2> c, Vec<double, 2> d) {
    auto ab = SHUFFLE(a, b, 0, 2) + SHUFFLE(a, b, 1, 3);
    auto cd = SHUFFLE(c, d, 0, 2) + SHUFFLE(c, d, 1, 3);
    return SHUFFLE(ab, cd, 0, 1, 2, 3);
}

#if defined(__AVX2__)
POLYHEAD_INLINE Quad<double> sum_each_of_four(Vec<double, 4> a, Vec<double, 4> b, Vec<double, 4> c, Vec<double, 4> d) {
    auto ab = SHUFFLE(a, b, 0, 4, 2, 6) + SHUFFLE(a, b, 1, 5, 3, 7);
    auto cd = SHUFFLE(c, d, 0, 4, 2, 6) + SHUFFLE(c, d, 1, 5, 3, 7);
    return SHUFFLE(ab, cd, 0, 1, 4, 5) + SHUFFLE(ab, cd, 2, 3, 6, 7);
}
#endif

#if defined(__AVX512F__)
POLYHEAD_INLINE Vec<double, 4> add_halves(Vec<double, 8> x) {
    return SHUFFLE(x, x, 0, 1, 2, 3) + SHUFFLE(x, x, 4, 5, 6, 7);
}
POLYHEAD_INLINE Quad<double> sum_each_of_four(Vec<double, 8> a, Vec<double, 8> b, Vec<double, 8> c, Vec<double, 8> d) {
    return sum_each_of_four(add_halves(a), add_halves(b), add_halves(c), add_halves(d));
}
#endif

// Which lanes are positive, as bits: what the backward pass saves of LeakyReLU.
template <class V>
POLYHEAD_INLINE unsigned positive_lane_bits(V x) {
    auto mask = x > 0;
    unsigned bits = 0;
    for (unsigned lane = 0; lane < sizeof(V) / sizeof(x[0]); ++lane) bits |= unsigned(mask[lane] & 1) << lane;
    return bits;
}

// x where the bit is set, y elsewhere. The general form tests x again, which is cheaper than expanding the bits to lanes.
template <class V>
POLYHEAD_INLINE V select_lanes(unsigned, V x, V y) {
    return x > 0 ? x : y;
}

// total + value in the lanes whose bit is set.
template <class V>
POLYHEAD_INLINE V add_where(V total, unsigned bits, V value) {
    using I = Int<typename std::remove_reference<decltype(V{}[0])>::type>;
    constexpr int lanes = sizeof(V) / sizeof(I);
    Vec<I, lanes> powers;
    for (int lane = 0; lane < lanes; ++lane) powers[lane] = I(1) << lane;
    return total + ((I(bits) & powers) != 0 ? value : V{});
}

#if defined(__SSE2__)
POLYHEAD_INLINE unsigned positive_lane_bits(Vec<float, 4> x) {
    return unsigned(_mm_movemask_ps(_mm_cmpgt_ps(x, _mm_setzero_ps())));
}
POLYHEAD_INLINE unsigned positive_lane_bits(Vec<double, 2> x) {
    return unsigned(_mm_movemask_pd(_mm_cmpgt_pd(x, _mm_setzero_pd())));
}
#endif
#if defined(__AVX2__)
POLYHEAD_INLINE unsigned positive_lane_bits(Vec<float, 8> x) {
    return unsigned(_mm256_movemask_ps(_mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_GT_OQ)));
}
POLYHEAD_INLINE unsigned positive_lane_bits(Vec<double, 4> x) {
    return unsigned(_mm256_movemask_pd(_mm256_cmp_pd(x, _mm256_setzero_pd(), _CMP_GT_OQ)));
}
#endif
#if defined(__AVX512F__)
POLYHEAD_INLINE unsigned positive_lane_bits(Vec<float, 16> x) {
    return _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GT_OQ);
}
POLYHEAD_INLINE unsigned positive_lane_bits(Vec<double, 8> x) {
    return _mm512_cmp_pd_mask(x, _mm512_setzero_pd(), _CMP_GT_OQ);
}
POLYHEAD_INLINE Vec<float, 16> select_lanes(unsigned bits, Vec<float, 16> x, Vec<float, 16> y) {
    return _mm512_mask_mov_ps(y, __mmask16(bits), x);
}
POLYHEAD_INLINE Vec<double, 8> select_lanes(unsigned bits, Vec<double, 8> x, Vec<double, 8> y) {
    return _mm512_mask_mov_pd(y, __mmask8(bits), x);
}
POLYHEAD_INLINE Vec<float, 16> add_where(Vec<float, 16> total, unsigned bits, Vec<float, 16> value) {
    return _mm512_mask_add_ps(total, __mmask16(bits), total, value);
}
POLYHEAD_INLINE Vec<float, 8> add_where(Vec<float, 8> total, unsigned bits, Vec<float, 8> value) {
    return _mm256_mask_add_ps(total, __mmask8(bits), total, value);
}
POLYHEAD_INLINE Vec<double, 8> add_where(Vec<double, 8> total, unsigned bits, Vec<double, 8> value) {
    return _mm512_mask_add_pd(total, __mmask8(bits), total, value);
}
#endif

}  // namespace
}  // namespace polyhead

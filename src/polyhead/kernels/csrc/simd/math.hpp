// exp and log of whole vectors.
#pragma once

#include "simd/vector.hpp"

namespace polyhead {
namespace {

template <class T>
constexpr T NEGATIVE_INFINITY = -__builtin_inff();

template <class T>
struct ExpConstants;

template <>
struct ExpConstants<float> {
    static constexpr float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    static constexpr float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
    static constexpr float lowest = -87.3f;  // 2^n is a normal number down to here
    static constexpr int mantissa = 23, bias = 127;
    // e^r = 1 + r + r^2 P(r) on |r| <= ln(2) / 2
    static constexpr float p[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                                  4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
};

template <>
struct ExpConstants<double> {
    static constexpr double magic = 6755399441055744.0;  // 1.5 * 2^52
    static constexpr double ln2_high = 6.93145751953125e-1, ln2_low = 1.42860682030941723212e-6;
    static constexpr double lowest = -708.3;
    static constexpr int mantissa = 52, bias = 1023;
    // Taylor: the first term left out is 4e-18
    static constexpr double p[] = {1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800,
                                   1.0 / 362880,     1.0 / 40320,     1.0 / 5040,     1.0 / 720,
                                   1.0 / 120,        1.0 / 24,        1.0 / 6,        0.5};
};

// e^x for x up to about 80: exactly 0 far below zero, NaN for NaN.
template <class T, int W>
POLYHEAD_INLINE Vec<T, W> exponential(Vec<T, W> x) {
    using K = ExpConstants<T>;
    using V = Vec<T, W>;
    using I = Vec<Int<T>, W>;
    V shifted = x * T(1.44269504088896340736) + K::magic;
    V n = shifted - K::magic;
    V r = x - n * K::ln2_high;
    r = r - n * K::ln2_low;
    V p = splat<V>(K::p[0]);
    for (unsigned term = 1; term < sizeof(K::p) / sizeof(T); ++term) p = p * r + K::p[term];
    V y = (p * r) * r + r + T(1);
    // the low bits of `shifted` are the integer: multiply, because an integer addition would turn NaN into a number
    I scale = ((I)shifted + Int<T>(K::bias)) << K::mantissa;
    y = y * (V)scale;
    return x < K::lowest ? V{} : y;
}

// log(x) for finite x > 0, to an absolute error near the unit of rounding: two steps of Halley's method on e^y = x.
template <class T, int W>
POLYHEAD_INLINE Vec<T, W> logarithm(Vec<T, W> x) {
    using K = ExpConstants<T>;
    using V = Vec<T, W>;
    using I = Vec<Int<T>, W>;
    // the bits of x, read as an integer, approximate log2(x) linearly, with an error of at most 0.04
    I bits = (I)x - (Int<T>(K::bias) << K::mantissa);
    V y = __builtin_convertvector(bits, V) * (T(0.69314718055994530942) / T(Int<T>(1) << K::mantissa)) + T(0.03);
    for (int step = 0; step < 2; ++step) {
        V z = x * exponential<T, W>(-y);
        y = y + T(2) * (z - T(1)) / (z + T(1));
    }
    return y;
}

}  // namespace
}  // namespace polyhead

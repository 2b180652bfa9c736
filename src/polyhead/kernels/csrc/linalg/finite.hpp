// Whether all numbers are finite, at the speed of reading them.
#pragma once

#include <algorithm>

#include "kernel_arguments.hpp"
#include "simd/vector.hpp"

namespace polyhead {
namespace {

template <class T>
bool all_finite(const T *x, int64_t count) {
    constexpr int L = NATIVE<T>;
    using V = Vec<T, L>;
    // zero times a finite number is zero; times inf or NaN it is NaN, and the sum stays NaN
    V a = {}, b = {};
    T rest = 0;
    int64_t i = 0;
    for (; i + 2 * L <= count; i += 2 * L) a += load<V>(x + i) * T(0), b += load<V>(x + i + L) * T(0);
    for (; i < count; ++i) rest += x[i] * T(0);
    a += b;
    for (int lane = 0; lane < L; ++lane) rest += a[lane];
    return rest == 0;
}

template <class T>
bool all_arrays_finite(const Arrays &in) {
    // a long array is shared by all threads
    constexpr int64_t PART = 1 << 15;
    if (in.arrays == 1 && in.counts[0] <= PART) return all_finite(reinterpret_cast<const T *>(in.data[0]), in.counts[0]);
    int64_t nonfinite = 0;
#pragma omp parallel num_threads(in.threads) reduction(+ : nonfinite)
    for (int64_t array = 0; array < in.arrays; ++array) {
        const T *x = reinterpret_cast<const T *>(in.data[array]);
        const int64_t count = in.counts[array], parts = (count + PART - 1) / PART;
#pragma omp for schedule(dynamic) nowait
        for (int64_t part = 0; part < parts; ++part)
            nonfinite += !all_finite(x + part * PART, std::min(PART, count - part * PART));
    }
    return nonfinite == 0;
}

}  // namespace
}  // namespace polyhead

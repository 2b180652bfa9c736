// Whether all numbers are finite: as fast as they can be read.
#pragma once

#include <algorithm>

#include "problem.hpp"
#include "simd/vector.hpp"

namespace polyhead {
namespace {

template <class T>
bool all_finite(const T *x, int64_t count) {
    constexpr int L = NATIVE<T>;
    using V = Vec<T, L>;
    // zero times a number is zero; times what is not finite it is no number, and sums stay so
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
bool finite_numbers(const Pieces &in) {
    // pieces are of any length: each is shared by all threads when it is long
    constexpr int64_t PART = 1 << 15;
    if (in.pieces == 1 && in.counts[0] <= PART) return all_finite(reinterpret_cast<const T *>(in.data[0]), in.counts[0]);
    int64_t wrong = 0;
#pragma omp parallel num_threads(in.threads) reduction(+ : wrong)
    for (int64_t piece = 0; piece < in.pieces; ++piece) {
        const T *x = reinterpret_cast<const T *>(in.data[piece]);
        const int64_t count = in.counts[piece], parts = (count + PART - 1) / PART;
#pragma omp for schedule(dynamic) nowait
        for (int64_t part = 0; part < parts; ++part)
            wrong += !all_finite(x + part * PART, std::min(PART, count - part * PART));
    }
    return wrong == 0;
}

}  // namespace
}  // namespace polyhead

// Steps on the Stiefel manifold, and the check for finite numbers, against plain loops in double precision.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "instruction_sets.hpp"

namespace stiefel_test {

using polyhead::Kernels;
using polyhead::StiefelStep;
using Dense = std::vector<double>;

// aᵀ b of (rows, p) and (rows, q)
inline Dense inside(const Dense &a, const Dense &b, int64_t rows, int64_t p, int64_t q) {
    Dense c(p * q, 0);
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < p; ++i)
            for (int64_t j = 0; j < q; ++j) c[i * q + j] += a[r * p + i] * b[r * q + j];
    return c;
}

// a (rows, k) · b (k, k)
inline Dense times(const Dense &a, const Dense &b, int64_t rows, int64_t k) {
    Dense c(rows * k, 0);
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < k; ++i)
            for (int64_t j = 0; j < k; ++j) c[r * k + j] += a[r * k + i] * b[i * k + j];
    return c;
}

inline Dense symmetric(const Dense &a, int64_t k) {
    Dense s(a);
    for (int64_t i = 0; i < k; ++i)
        for (int64_t j = 0; j < k; ++j) s[i * k + j] = 0.5 * (a[i * k + j] + a[j * k + i]);
    return s;
}

// The nearest matrix with orthonormal columns.
inline Dense nearest(Dense y, int64_t n, int64_t k) {
    for (int step = 0; step < 60; ++step) {
        Dense gram = inside(y, y, n, k, k);
        double largest = 0;
        for (int64_t i = 0; i < k; ++i) {
            double sum = 0;
            for (int64_t j = 0; j < k; ++j) sum += std::abs(gram[i * k + j]);
            largest = std::max(largest, sum);
        }
        // scaled to a norm of at most 1 until it is near
        const double scale = step < 40 ? 1 / std::sqrt(largest) : 1;
        for (double &value : gram) value *= -0.5 * scale * scale;
        for (int64_t i = 0; i < k; ++i) gram[i * k + i] += 1.5;
        y = times(y, gram, n, k);
        for (double &value : y) value *= scale;
    }
    return y;
}

struct Options {
    bool canonical = false, moments = true, scalar = false, transport = false, transposed = false;
    double scale = -0.01;
};

// Empty, or the name of the first wrong result. Tensors of two matrices each; the last gradient is inf, so that the kernel skips it.
template <class T, class Generator>
std::string difference(const Kernels &kernels, int64_t n, int64_t k, const Options &o, int threads, Generator &generator) {
    std::normal_distribution<double> normal;
    const int64_t tensors = 2, each = 2, size = n * k;
    const double keep = 0.9, add = 0.1, keep_second = 0.9, root = 1.3, eps = 1e-3;
    auto drawn = [&] {
        std::vector<T> x(each * size);
        for (T &value : x) value = T(normal(generator));
        return x;
    };
    // the index in a tensor of element i of a matrix, row by row
    auto place = [&](int64_t matrix, int64_t i) { return matrix * size + (o.transposed ? i % k * n + i / k : i); };
    auto taken = [&](const std::vector<T> &x, int64_t matrix) {
        Dense y(size);
        for (int64_t i = 0; i < size; ++i) y[i] = double(x[place(matrix, i)]);
        return y;
    };
    std::vector<std::vector<T>> x, g, first, second;
    for (int64_t t = 0; t < tensors; ++t) {
        x.push_back(drawn()), g.push_back(drawn()), first.push_back(drawn());
        second.push_back(o.scalar ? std::vector<T>(each, T(0.7)) : drawn());
        for (T &value : second.back()) value = std::abs(value);
        for (int64_t m = 0; m < each; ++m) {
            const Dense point = nearest(taken(x[t], m), n, k);
            for (int64_t i = 0; i < size; ++i) x[t][place(m, i)] = T(point[i]);
            if (!o.transport) continue;
            // A transported moment is tangent, and the kernel relies on it: (x + Δ)ᵀ(x + Δ) is then I + ΔᵀΔ, with eigenvalues of at least
            // 1. For another moment the inverse root would have only 9 correct digits.
            const Dense any = taken(first[t], m), at = taken(x[t], m);
            const Dense out = times(at, symmetric(inside(at, any, n, k, k), k), n, k);
            for (int64_t i = 0; i < size; ++i) first[t][place(m, i)] = T(any[i] - out[i]);
        }
    }
    g[1][place(1, size - 1)] = std::numeric_limits<T>::infinity();
    const auto x0 = x, first0 = first, second0 = second;
    auto places = [](std::vector<std::vector<T>> &all) {
        std::vector<int64_t> data;
        for (auto &one : all) data.push_back(int64_t(reinterpret_cast<uintptr_t>(one.data())));
        return data;
    };
    const auto px = places(x), pg = places(g), pf = places(first), ps = places(second);
    const int64_t row = o.transposed ? 1 : k, column = o.transposed ? n : 1;
    auto matrices = [&](const std::vector<int64_t> &data, bool there) {
        return polyhead::Matrices{there ? data.data() : nullptr, size, row, column};
    };
    std::vector<uint8_t> skipped(tensors * each, 7);
    StiefelStep step{sizeof(T) == 8, tensors, each, n, k, matrices(px, true), matrices(pg, true), matrices(pf, o.moments),
                     matrices(ps, o.moments && !o.transport), o.canonical, o.scalar ? 1 : 0, !o.transport, o.transport, -1,
                     keep, add, 0.3, 1, keep_second, root, eps, o.scale, skipped.data(), threads};
    if (o.scalar) step.second = {ps.data(), 1, 1, 0};
    if (!kernels.stiefel_step(step)) return "no memory";

    auto differs = [&](double found, double expected) {
        return !(std::abs(found - expected) <= (sizeof(T) == 4 ? 2e-5 : 1e-11) * (1 + std::abs(expected)));
    };
    for (int64_t t = 0; t < tensors; ++t)
        for (int64_t m = 0; m < each; ++m) {
            const bool far = t == 1 && m == 1;
            if (skipped[t * each + m] != far) return "which matrices were skipped";
            if (far) {
                for (int64_t i = 0; i < size; ++i)
                    if (x[t][place(m, i)] != x0[t][place(m, i)] || first[t][place(m, i)] != first0[t][place(m, i)])
                        return "something was written";
                continue;
            }
            const Dense at = taken(x0[t], m), gradient = taken(g[t], m);
            Dense p = inside(at, gradient, n, k, k), s = symmetric(p, k);
            if (o.canonical)
                for (int64_t i = 0; i < k; ++i)
                    for (int64_t j = 0; j < k; ++j) s[i * k + j] = p[j * k + i];
            const Dense normal_part = times(at, s, n, k);
            Dense r(size), d(size), moment(size);
            double squares = 0;
            for (int64_t i = 0; i < size; ++i) {
                r[i] = normal_part[i] - gradient[i];
                squares += r[i] * r[i];
                moment[i] = keep * first0[t][place(m, i)] + add * r[i];
                d[i] = o.moments ? 0.3 * r[i] + moment[i] : r[i];
            }
            double scale = o.scale;
            if (step.second.data && o.scalar) {
                if (o.canonical)
                    for (int64_t i = 0; i < k * k; ++i) squares -= 0.5 * (p[i] - s[i]) * (p[i] - s[i]);
                const double mean = keep_second * double(T(0.7)) + (1 - keep_second) * squares / double(size);
                if (differs(second[t][m], mean)) return "a mean square";
                scale /= std::sqrt(mean) * root + eps;
            } else if (step.second.data) {
                for (int64_t i = 0; i < size; ++i) {
                    const double square = keep_second * second0[t][place(m, i)] + (1 - keep_second) * r[i] * r[i];
                    if (differs(second[t][place(m, i)], square)) return "a second moment";
                    d[i] /= std::sqrt(square) * root + eps;
                }
            }
            const Dense normal_step = step.tangent ? times(at, symmetric(inside(at, d, n, k, k), k), n, k) : Dense(size, 0);
            Dense y(size);
            for (int64_t i = 0; i < size; ++i) y[i] = at[i] + scale * (d[i] - normal_step[i]);
            y = nearest(y, n, k);
            if (o.transport && o.moments) {
                const Dense out = times(y, symmetric(inside(y, moment, n, k, k), k), n, k);
                for (int64_t i = 0; i < size; ++i) moment[i] -= out[i];
            }
            for (int64_t i = 0; i < size; ++i) {
                if (differs(x[t][place(m, i)], y[i])) return "a point";
                if (o.moments && differs(first[t][place(m, i)], moment[i])) return "a first moment";
            }
        }
    return "";
}

template <class T, class Generator>
std::string test(const Kernels &kernels, Generator &generator) {
    std::vector<Options> all(6);
    all[1].canonical = all[1].transposed = true;
    all[2].scalar = all[2].canonical = true;
    all[3].scalar = all[3].transposed = true, all[3].scale = -0.3;
    all[4].transport = all[4].transposed = true, all[4].canonical = true;
    all[5].moments = false, all[5].transport = true;
    for (auto [n, k] : {std::pair<int64_t, int64_t>{1, 1}, {5, 5}, {7, 3}, {33, 16}, {70, 17}, {131, 35}})
        for (const Options &o : all) {
            // a 1 x 1 point has no tangent direction, so that only rounding errors would be compared
            if (n == 1 && (o.transport || !o.moments)) continue;
            const std::string wrong = difference<T>(kernels, n, k, o, n % 2 ? 1 : 3, generator);
            if (!wrong.empty())
                return wrong + ", " + std::to_string(n) + " x " + std::to_string(k) + ", case " + std::to_string(&o - all.data());
        }
    for (int64_t count : {1, 7, 16, 33, 40000}) {
        std::vector<T> x(count, T(3)), y(5, std::numeric_limits<T>::max());
        const int64_t data[] = {int64_t(reinterpret_cast<uintptr_t>(x.data())), int64_t(reinterpret_cast<uintptr_t>(y.data()))};
        const int64_t counts[] = {count, 5};
        if (!kernels.all_finite({sizeof(T) == 8, 2, data, counts, 2})) return "finite numbers";
        x.back() = std::numeric_limits<T>::quiet_NaN();
        if (kernels.all_finite({sizeof(T) == 8, 2, data, counts, 2})) return "NaN";
    }
    return "";
}

}  // namespace stiefel_test

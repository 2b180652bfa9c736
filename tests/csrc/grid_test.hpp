// Attention over the windows of a grid against plain loops over all pairs, in double precision.
#pragma once

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "instruction_sets.hpp"
#include "naive.hpp"

namespace grid_test {

using polyhead::Grid;
using polyhead::GridGradients;
using polyhead::Kernels;
using polyhead::Strided;
using Numbers = std::vector<double>;

struct Window {
    std::vector<int64_t> sizes, reach, steps;

    int64_t points() const {
        int64_t all = 1;
        for (int64_t n : sizes) all *= n;
        return all;
    }
    int64_t offsets() const {
        int64_t all = 1;
        for (int64_t n : reach) all *= 2 * n + 1;
        return all;
    }
    // the index of the offset from query to key; -1 outside the window
    int64_t offset(int64_t query, int64_t key) const {
        int64_t number = 0, size = 1;
        for (size_t axis = sizes.size(); axis-- > 0; query /= sizes[axis], key /= sizes[axis]) {
            const int64_t apart = key % sizes[axis] - query % sizes[axis], far = apart / steps[axis];
            if (apart % steps[axis] || far < -reach[axis] || far > reach[axis]) return -1;
            number += (far + reach[axis]) * size, size *= 2 * reach[axis] + 1;
        }
        return number;
    }
};

template <class T>
struct Problem {
    Window window;
    int64_t batch, heads, key_heads, dim, width, points;
    double dropout;
    bool with_table;
    std::vector<T> q, k, v, d_out, d_lse, table;

    template <class Generator>
    Problem(Window w, int64_t d, int64_t e, double drop, bool tables, Generator &generator)
        : window(w), batch(2), heads(4), key_heads(2), dim(d), width(e), points(w.points()), dropout(drop),
          with_table(tables) {
        std::normal_distribution<float> normal;
        for (auto [x, count] : {std::pair{&q, heads * dim}, {&k, key_heads * dim}, {&v, key_heads * width}, {&d_out, heads * width},
                                {&d_lse, heads}})
            for (int64_t i = 0; i < batch * points * count; ++i) x->push_back(T(normal(generator)));
        for (int64_t i = 0; i < heads * window.offsets(); ++i) table.push_back(T(normal(generator)));
    }

    // heads inside items, as projections leave them
    static Strided by_item(const std::vector<T> &x, int64_t points, int64_t heads, int64_t features) {
        return {x.data(), points * heads * features, features, heads * features};
    }
    double dropout_factor(int64_t b, int64_t h, int64_t i, int64_t j) const {
        naive::Case c{};
        c.dropout = dropout, c.seed = 7;
        return naive::dropout_factor(c, b * heads + h, i, j);
    }
};

struct Answer {
    Numbers out, lse, dq, dk, dv, d_table;
};

constexpr double SCALE = 0.3;

// Adds the terms of one query of one head.
template <class T>
void add_query(const Problem<T> &p, int64_t b, int64_t h, int64_t i, Answer &a) {
    const int64_t kh = h / (p.heads / p.key_heads), row = (b * p.points + i) * p.heads + h;
    const int64_t number = (b * p.heads + h) * p.points + i;
    auto key = [&](int64_t j) { return (b * p.points + j) * p.key_heads + kh; };
    Numbers weight(p.points, 0), grad(p.points, 0);
    double total = 0, delta = 0;
    for (int64_t j = 0; j < p.points; ++j) {
        const int64_t offset = p.window.offset(i, j);
        if (offset < 0) continue;
        double score = p.with_table ? p.table[h * p.window.offsets() + offset] : 0;
        for (int64_t d = 0; d < p.dim; ++d) score += SCALE * p.q[row * p.dim + d] * p.k[key(j) * p.dim + d];
        total += weight[j] = std::exp(score);
    }
    a.lse[number] = std::log(total);
    for (int64_t j = 0; j < p.points; ++j) {
        weight[j] /= total;
        const double keep = p.dropout_factor(b, h, i, j);
        for (int64_t w = 0; w < p.width; ++w) {
            a.out[row * p.width + w] += weight[j] * keep * p.v[key(j) * p.width + w];
            a.dv[key(j) * p.width + w] += weight[j] * keep * p.d_out[row * p.width + w];
            grad[j] += keep * p.d_out[row * p.width + w] * p.v[key(j) * p.width + w];
        }
        delta += weight[j] * grad[j];
    }
    for (int64_t j = 0; j < p.points; ++j) {
        const int64_t offset = p.window.offset(i, j);
        if (offset < 0) continue;
        const double ds = weight[j] * (grad[j] - delta + p.d_lse[number]);
        a.d_table[h * p.window.offsets() + offset] += ds;
        for (int64_t d = 0; d < p.dim; ++d) {
            a.dq[row * p.dim + d] += ds * SCALE * p.k[key(j) * p.dim + d];
            a.dk[key(j) * p.dim + d] += ds * SCALE * p.q[row * p.dim + d];
        }
    }
}

template <class T>
Answer answer(const Problem<T> &p) {
    auto zeros = [](size_t count) { return Numbers(count, 0); };
    Answer a{zeros(p.d_out.size()), zeros(p.d_lse.size()), zeros(p.q.size()),
             zeros(p.k.size()),     zeros(p.v.size()),     zeros(p.table.size())};
    for (int64_t b = 0; b < p.batch; ++b)
        for (int64_t h = 0; h < p.heads; ++h)
            for (int64_t i = 0; i < p.points; ++i) add_query(p, b, h, i, a);
    return a;
}

// Empty, or the name of the first wrong result.
template <class T>
std::string difference(const Problem<T> &p, const Answer &a, const Kernels &kernels, int threads) {
    const T nan = std::numeric_limits<T>::quiet_NaN();
    std::vector<T> out(p.d_out.size(), nan), lse(p.d_lse.size(), nan), dq(p.q.size(), nan), dk(p.k.size(), nan),
        dv(p.v.size(), nan), d_table(p.table.size(), nan);
    auto of_queries = [&](const std::vector<T> &x, int64_t n) { return p.by_item(x, p.points, p.heads, n); };
    auto of_keys = [&](const std::vector<T> &x, int64_t n) { return p.by_item(x, p.points, p.key_heads, n); };
    naive::Case c{};
    c.dropout = p.dropout;
    Grid in{sizeof(T) == 8, p.batch, p.heads, p.key_heads, p.dim, p.width, int64_t(p.window.sizes.size()), p.window.sizes.data(),
            p.window.reach.data(), p.window.steps.data(), of_queries(p.q, p.dim), of_keys(p.k, p.dim), of_keys(p.v, p.width),
            of_queries(out, p.width), lse.data(), p.with_table ? p.table.data() : nullptr, SCALE, p.dropout, c.threshold(), 7,
            threads};
    if (!kernels.grid_forward(in)) return "no memory";
    GridGradients g{of_queries(p.d_out, p.width), p.d_lse.data(), of_queries(dq, p.dim), of_keys(dk, p.dim), of_keys(dv, p.width),
                    d_table.data()};
    if (!kernels.grid_backward(in, g)) return "no memory";
    auto differs = [](const std::vector<T> &x, const Numbers &y) {
        for (size_t i = 0; i < x.size(); ++i)
            if (!(std::abs(x[i] - y[i]) <= (sizeof(T) == 4 ? 2e-4 : 1e-11) * (1 + std::abs(y[i])))) return true;
        return false;
    };
    if (p.with_table && differs(d_table, a.d_table)) return "d_table";
    return differs(out, a.out) ? "out" : differs(lse, a.lse) ? "lse" : differs(dq, a.dq) ? "dq" : differs(dk, a.dk) ? "dk"
           : differs(dv, a.dv) ? "dv" : "";
}

template <class T, class Generator>
std::string test(const std::vector<const Kernels *> &sets, Generator &generator) {
    const std::vector<Window> all = {
        {{1, 1}, {0, 0}, {1, 1}},      {{1, 37}, {0, 3}, {1, 2}},           {{5, 7}, {1, 2}, {1, 1}},
        {{11, 19}, {2, 1}, {3, 2}},    {{7, 33}, {6, 32}, {1, 1}},          {{3, 4, 5}, {1, 1, 2}, {1, 2, 1}},
        {{39, 9}, {1, 1}, {1, 1}},     {{1, 300}, {0, 40}, {1, 1}},         {{2, 3, 2, 9}, {1, 1, 0, 2}, {1, 1, 1, 1}},
    };
    bool odd = false;
    for (const Window &window : all)
        for (auto [dim, width] : {std::pair<int64_t, int64_t>{1, 3}, {16, 16}, {9, 20}}) {
            odd = !odd;
            const Problem<T> p(window, dim, width, odd ? 0.3 : 0.0, !odd || dim == 9, generator);
            const Answer expected = answer(p);
            for (const Kernels *kernels : sets)
                for (int threads : {1, 3}) {
                    const std::string wrong = difference(p, expected, *kernels, threads);
                    if (!wrong.empty())
                        return std::string(kernels->name) + ", " + wrong + ", " + std::to_string(p.points) + " points, " +
                               std::to_string(dim) + " features";
                }
        }
    return "";
}

}  // namespace grid_test

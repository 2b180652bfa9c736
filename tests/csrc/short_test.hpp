// Attention over few keys against plain loops in double precision.
#pragma once

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "instruction_sets.hpp"
#include "naive.hpp"

namespace short_test {

using polyhead::Kernels;
using polyhead::Short;
using polyhead::ShortBias;
using polyhead::ShortGradients;
using polyhead::Strided;

template <class T>
struct Problem {
    int64_t batch, heads, key_heads, queries, keys, dim, width, rows;
    double dropout;
    std::vector<T> q, k, v, d_out, d_lse;
    std::vector<int32_t> first, stop;
    // contiguous, of these sizes along batch, heads, queries and keys; the sizes are zero if it is absent
    std::vector<T> bias, table;
    int64_t bias_sizes[4] = {};

    template <class Generator>
    Problem(int64_t b, int64_t h, int64_t kh, int64_t n, int64_t m, int64_t d, int64_t w, int64_t r, double drop, Generator &generator)
        : batch(b), heads(h), key_heads(kh), queries(n), keys(m), dim(d), width(w), rows(r), dropout(drop) {
        std::normal_distribution<float> normal;
        for (auto [x, count] : {std::pair{&q, b * n * h * d}, {&k, b * m * kh * d}, {&v, b * m * kh * w}, {&d_out, b * n * h * w},
                                {&d_lse, b * h * n}})
            for (int64_t i = 0; i < count; ++i) x->push_back(T(normal(generator)));
        for (int64_t i = 0; i < r * n; ++i) {
            // some begin before the first key, some end after the last, some are empty
            first.push_back(int32_t(generator() % (m + 2)) - 1);
            stop.push_back(i % 5 == 4 ? first.back() : int32_t(generator() % (m + 3)));
        }
    }

    // A bias of the sizes whose bit is set, 1 along the other axes, with some entries of -inf; and a table over key - query.
    template <class Generator>
    void add_bias(unsigned axes, bool with_table, Generator &generator) {
        std::normal_distribution<float> normal;
        const int64_t whole[] = {batch, heads, queries, keys};
        int64_t count = 1;
        for (int axis = 0; axis < 4; ++axis) count *= bias_sizes[axis] = axes >> axis & 1 ? whole[axis] : 1;
        for (int64_t i = 0; i < count; ++i) bias.push_back(i % 7 == 6 ? -std::numeric_limits<T>::infinity() : T(normal(generator)));
        for (int64_t i = 0; with_table && i < heads * (queries + keys - 1); ++i) table.push_back(T(normal(generator)));
    }
    int64_t bias_at(int64_t b, int64_t h, int64_t i, int64_t j) const {
        const int64_t place[] = {b, h, i, j};
        int64_t at = 0;
        for (int axis = 0; axis < 4; ++axis) at = at * bias_sizes[axis] + (bias_sizes[axis] > 1 ? place[axis] : 0);
        return at;
    }
    int64_t table_at(int64_t h, int64_t i, int64_t j) const { return h * (queries + keys - 1) + j - i + queries - 1; }
    double added(int64_t b, int64_t h, int64_t i, int64_t j) const {
        return (bias.empty() ? 0 : double(bias[bias_at(b, h, i, j)])) + (table.empty() ? 0 : double(table[table_at(h, i, j)]));
    }
    ShortBias bias_term(const std::vector<T> &x) const {
        if (x.empty()) return {};
        ShortBias term{x.data(), 0, 0, 0, 0};
        int64_t step = 1, *strides[] = {&term.batch, &term.head, &term.query, &term.key};
        for (int axis = 3; axis >= 0; step *= bias_sizes[axis--])
            if (bias_sizes[axis] > 1) *strides[axis] = step;
        return term;
    }
    ShortBias table_term(const std::vector<T> &x) const {
        if (x.empty()) return {};
        return {x.data() + queries - 1, 0, heads > 1 ? queries + keys - 1 : 0, -1, 1};
    }

    // NaN in a query, a key, a value and a gradient of the last head
    void add_nan() {
        const T nan = std::numeric_limits<T>::quiet_NaN();
        q[((queries / 2) * heads + heads - 1) * dim] = d_out[((queries / 3) * heads + heads - 1) * width] = nan;
        k[((keys / 2) * key_heads + key_heads - 1) * dim] = v[((keys / 3) * key_heads + key_heads - 1) * width] = nan;
    }

    // heads inside items, as projections leave them
    static Strided by_item(const std::vector<T> &x, int64_t items, int64_t heads, int64_t features) {
        return {x.data(), items * heads * features, features, heads * features};
    }
    bool allowed(int64_t b, int64_t i, int64_t j) const {
        const int64_t at = (rows > 1 ? b * queries : 0) + i;
        return first[at] <= j && j < stop[at];
    }
    double dropout_factor(int64_t b, int64_t h, int64_t i, int64_t j) const {
        naive::Case c{};
        c.dropout = dropout, c.seed = 7;
        return naive::dropout_factor(c, b * heads + h, i, j);
    }
};

// Empty, or the name of the first wrong result.
template <class T>
std::string difference(const Problem<T> &p, const Kernels &kernels, int threads) {
    const double scale = 0.3, nan = std::numeric_limits<double>::quiet_NaN();
    std::vector<T> out(p.d_out.size(), T(nan)), lse(p.batch * p.heads * p.queries, T(nan));
    std::vector<T> dq(p.q.size(), T(nan)), dk(p.k.size(), T(nan)), dv(p.v.size(), T(nan));
    std::vector<T> d_bias(p.bias.size(), T(nan)), d_table(p.table.size(), T(nan));
    auto of_queries = [&](const std::vector<T> &x, int64_t n) { return p.by_item(x, p.queries, p.heads, n); };
    auto of_keys = [&](const std::vector<T> &x, int64_t n) { return p.by_item(x, p.keys, p.key_heads, n); };
    naive::Case c{};
    c.dropout = p.dropout;
    Short in{sizeof(T) == 8, p.batch, p.heads, p.key_heads, p.queries, p.keys, p.dim, p.width, of_queries(p.q, p.dim),
             of_keys(p.k, p.dim), of_keys(p.v, p.width), of_queries(out, p.width), lse.data(), p.first.data(), p.stop.data(),
             p.rows, scale, p.dropout, c.threshold(), 7, threads, {p.table_term(p.table), p.bias_term(p.bias)}};
    if (!kernels.short_forward(in)) return "no memory";
    ShortGradients g{of_queries(p.d_out, p.width), p.d_lse.data(), of_queries(dq, p.dim), of_keys(dk, p.dim), of_keys(dv, p.width),
                     {p.table_term(d_table), p.bias_term(d_bias)}};
    if (!kernels.short_backward(in, g)) return "no memory";

    std::vector<double> wq(dq.size(), 0), wk(dk.size(), 0), wv(dv.size(), 0), wo(out.size(), 0);
    std::vector<double> wb(d_bias.size(), 0), wt(d_table.size(), 0);
    for (int64_t b = 0; b < p.batch; ++b)
        for (int64_t h = 0; h < p.heads; ++h)
            for (int64_t i = 0; i < p.queries; ++i) {
                const int64_t kh = h / (p.heads / p.key_heads), row = (b * p.queries + i) * p.heads + h;
                auto key = [&](int64_t j) { return (b * p.keys + j) * p.key_heads + kh; };
                std::vector<double> weight(p.keys, 0), grad(p.keys, 0);
                double total = 0, delta = 0;
                for (int64_t j = 0; j < p.keys; ++j) {
                    if (!p.allowed(b, i, j)) continue;
                    double score = p.added(b, h, i, j);
                    for (int64_t d = 0; d < p.dim; ++d) score += scale * p.q[row * p.dim + d] * p.k[key(j) * p.dim + d];
                    total += weight[j] = std::exp(score);
                }
                const double expected = std::log(total), found = lse[(b * p.heads + h) * p.queries + i];
                if (std::isnan(total) ? !std::isnan(found) : total == 0 ? !std::isinf(found) : !(std::abs(found - expected) < 1e-4))
                    return "lse";
                for (int64_t j = 0; j < p.keys; ++j) {
                    if (!p.allowed(b, i, j)) continue;
                    // no key has a weight if every score is -inf
                    weight[j] = total == 0 ? 0 : weight[j] / total;
                    for (int64_t w = 0; w < p.width; ++w) {
                        const double used = weight[j] * p.dropout_factor(b, h, i, j);
                        wo[row * p.width + w] += used * p.v[key(j) * p.width + w];
                        wv[key(j) * p.width + w] += used * p.d_out[row * p.width + w];
                        grad[j] += p.dropout_factor(b, h, i, j) * p.d_out[row * p.width + w] * p.v[key(j) * p.width + w];
                    }
                    delta += weight[j] * grad[j];
                }
                for (int64_t j = 0; j < p.keys; ++j) {
                    if (!p.allowed(b, i, j)) continue;
                    const double d_score = weight[j] * (grad[j] - delta + p.d_lse[(b * p.heads + h) * p.queries + i]);
                    const double ds = d_score * scale;
                    if (!p.bias.empty()) wb[p.bias_at(b, h, i, j)] += d_score;
                    if (!p.table.empty()) wt[p.table_at(h, i, j)] += d_score;
                    for (int64_t d = 0; d < p.dim; ++d) {
                        wq[row * p.dim + d] += ds * p.k[key(j) * p.dim + d];
                        wk[key(j) * p.dim + d] += ds * p.q[row * p.dim + d];
                    }
                }
            }
    auto differs = [](const std::vector<T> &x, const std::vector<double> &y) {
        for (size_t i = 0; i < x.size(); ++i) {
            if (std::isnan(x[i]) && std::isnan(y[i])) continue;
            if (!(std::abs(x[i] - y[i]) <= (sizeof(T) == 4 ? 1e-4 : 1e-11) * (1 + std::abs(y[i])))) return true;
        }
        return false;
    };
    if (differs(d_bias, wb) || differs(d_table, wt)) return "the gradient of the bias";
    return differs(out, wo) ? "out" : differs(dq, wq) ? "dq" : differs(dk, wk) ? "dk" : differs(dv, wv) ? "dv" : "";
}

template <class T, class Generator>
std::string test(const Kernels &kernels, Generator &generator) {
    for (int64_t queries : {1, 7, 8, 19})
        for (int64_t keys : {1, 16, 17, 35})
            for (auto [dim, width] : {std::pair<int64_t, int64_t>{1, 3}, {7, 9}, {16, 16}, {33, 20}})
                for (double dropout : {0.0, 0.3}) {
                    const int64_t rows = keys % 2 ? 3 : 1;
                    Problem<T> p(3, 6, 2, queries, keys, dim, width, rows, dropout, generator);
                    for (int threads : {1, 4, 2}) {
                        if (threads == 2) p.add_nan();
                        const std::string wrong = difference(p, kernels, threads);
                        if (!wrong.empty())
                            return wrong + ", " + std::to_string(queries) + " queries, " + std::to_string(keys) + " keys";
                    }
                }
    return "";
}

// Biases that broadcast along any of the axes, with and without a table.
template <class T, class Generator>
std::string test_bias(const Kernels &kernels, Generator &generator) {
    for (unsigned axes = 0; axes < 16; ++axes)
        for (auto [queries, keys] : {std::pair<int64_t, int64_t>{1, 1}, {9, 17}, {7, 35}})
            for (int64_t heads : {2, 6})
                for (int64_t batch : {1, 5}) {
                    Problem<T> p(batch, heads, 2, queries, keys, 5, 9, keys % 2 ? batch : 1, batch % 2 ? 0.3 : 0.0, generator);
                    p.add_bias(axes, (axes + heads) % 3 != 0, generator);
                    for (int threads : {1, 4, 2}) {
                        if (threads == 2) p.add_nan();
                        const std::string wrong = difference(p, kernels, threads);
                        if (!wrong.empty()) return wrong + ", a bias along axes " + std::to_string(axes) + ", " + std::to_string(keys) + " keys";
                    }
                }
    return "";
}

// A matrix times few vectors: rows and columns that do not fill a SIMD vector, and more vectors than are processed at once.
template <class Generator>
std::string test_skinny_gemm(const Kernels &kernels, Generator &generator) {
    std::normal_distribution<float> normal;
    for (int64_t vectors : {1, 4, 6})
        for (int64_t rows : {1, 5, 67, 130})
            for (int64_t columns : {1, 16, 37, 96}) {
                auto drawn = [&](int64_t count) {
                    std::vector<float> x(count);
                    for (float &value : x) value = normal(generator);
                    return x;
                };
                auto x = drawn(vectors * columns), matrix = drawn(rows * columns), bias = drawn(rows);
                std::vector<float> out(vectors * rows, std::numeric_limits<float>::quiet_NaN());
                kernels.skinny_gemm({vectors, rows, columns, x.data(), matrix.data(), rows % 2 ? bias.data() : nullptr, out.data(), 2});
                for (int64_t m = 0; m < vectors; ++m)
                    for (int64_t r = 0; r < rows; ++r) {
                        double expected = rows % 2 ? bias[r] : 0;
                        for (int64_t c = 0; c < columns; ++c) expected += double(x[m * columns + c]) * matrix[r * columns + c];
                        if (!(std::abs(out[m * rows + r] - expected) < 1e-4 * (1 + std::abs(expected)))) return "a product";
                    }
            }
    return "";
}

}  // namespace short_test

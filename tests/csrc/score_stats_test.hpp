// Statistics of blocks of scores against plain loops.
#pragma once

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "instruction_sets.hpp"

namespace score_stats_test {

using polyhead::Kernels;
using polyhead::ScoreStats;
using Floats = std::vector<float>;

// Scores of `heads` x `queries` x `keys` in blocks of `rows` x `columns`; rows attend to [first, stop).
struct Problem {
    int64_t heads, queries, keys, rows, columns;
    int sums;
    int64_t top;
    bool bias, weighted;
    Floats scores, key_bias, key_weights, row_weights, position;
    std::vector<int32_t> first, stop;

    template <class Generator>
    Problem(int64_t h, int64_t q, int64_t k, int64_t r, int64_t c, int s, int64_t t, bool b, bool w, Generator &generator)
        : heads(h), queries(q), keys(k), rows(r), columns(c), sums(s), top(t), bias(b), weighted(w) {
        std::normal_distribution<float> normal;
        auto drawn = [&](int64_t count) {
            Floats x(count);
            for (float &value : x) value = normal(generator);
            return x;
        };
        scores = drawn(h * q * k), key_bias = drawn(h * k), key_weights = drawn(h * s * k), row_weights = drawn(h * q);
        for (int64_t i = 0; i < q; ++i) {
            position.push_back(float(i + k - q));
            first.push_back(int32_t(generator() % (k + 1)));
            stop.push_back(first.back() + int32_t(generator() % (k + 1 - first.back())));
            if (i % 3 == 0) first.back() = 0, stop.back() = int32_t(k);
        }
        if (k) scores[0] = -std::numeric_limits<float>::infinity();
    }

    float score(int64_t h, int64_t i, int64_t j) const {
        return scores[(h * queries + i) * keys + j] + (bias ? key_bias[h * keys + j] : 0);
    }
    bool allowed(int64_t i, int64_t j) const { return first[i] <= j && j < stop[i]; }
};

struct Found {
    Floats row_max, row_sum, low, row_sums, received, top_score;
    std::vector<int64_t> top_key;
};

inline Found by_blocks(const Problem &p, const Kernels &kernels, int threads) {
    const int64_t number = p.heads * p.queries;
    Found f{Floats(number, -std::numeric_limits<float>::infinity()), Floats(number, 0), Floats(number, 0),
            Floats(number * (2 + p.sums), 0), Floats(p.heads * p.keys, 0), Floats(number * p.top, -1000.0f),
            std::vector<int64_t>(number * p.top, -1)};
    for (bool scanning : {true, false}) {
        for (int64_t r = 0; r < p.queries; r += p.rows)
            for (int64_t c = 0; c < p.keys; c += p.columns) {
                const int64_t rows = std::min(p.rows, p.queries - r), columns = std::min(p.columns, p.keys - c);
                // exactly as large as needed, so that a sanitizer detects reads beyond it
                Floats block(p.heads * rows * columns);
                for (int64_t h = 0; h < p.heads; ++h)
                    for (int64_t i = 0; i < rows; ++i)
                        for (int64_t j = 0; j < columns; ++j)
                            block[(h * rows + i) * columns + j] = p.scores[(h * p.queries + r + i) * p.keys + c + j];
                std::vector<int32_t> chunks;
                for (int64_t i = 0; i < rows; i += 5) chunks.push_back(int32_t(i));
                chunks.push_back(int32_t(rows));
                const int64_t count = int64_t(chunks.size()) - 1;
                Floats columns_of(p.heads * count * columns, 0);
                ScoreStats s{p.heads, rows, columns, p.queries, p.keys, block.data(), c, p.first.data() + r,
                              p.stop.data() + r, p.bias ? p.key_bias.data() + c : nullptr,
                              scanning ? f.row_max.data() + r : nullptr, scanning ? f.row_sum.data() + r : nullptr,
                              f.row_max.data() + r, f.low.data() + r, p.position.data() + r,
                              p.weighted ? p.row_weights.data() + r : nullptr, p.key_weights.data() + c, p.sums,
                              f.row_sums.data() + r * (2 + p.sums), chunks.data(), count, columns_of.data(),
                              f.top_score.data() + r * p.top, f.top_key.data() + r * p.top, p.top, threads};
                kernels.score_stats(s);
                if (scanning) continue;
                for (int64_t h = 0; h < p.heads; ++h)
                    for (int64_t chunk = 0; chunk < count; ++chunk)
                        for (int64_t j = 0; j < columns; ++j)
                            f.received[h * p.keys + c + j] += columns_of[(h * count + chunk) * columns + j];
            }
        if (scanning)
            for (int64_t n = 0; n < number; ++n) f.low[n] = f.row_sum[n] > 0 ? std::log(f.row_sum[n]) : 0;
    }
    return f;
}

// Empty, or the name of the first wrong result.
inline std::string difference(const Problem &p, const Found &f) {
    auto differs = [](double a, double b) { return !(std::abs(a - b) <= 1e-4 * (1 + std::abs(b))); };
    std::vector<double> received(p.heads * p.keys, 0);
    for (int64_t h = 0; h < p.heads; ++h)
        for (int64_t i = 0; i < p.queries; ++i) {
            const int64_t n = h * p.queries + i;
            double total = 0, entropy = 0, distance = 0;
            for (int64_t j = 0; j < p.keys; ++j) total += p.allowed(i, j) ? std::exp(double(p.score(h, i, j))) : 0;
            std::vector<double> sums(p.sums, 0), weights;
            for (int64_t j = 0; j < p.keys; ++j) {
                const double w = p.allowed(i, j) && total > 0 ? std::exp(double(p.score(h, i, j))) / total : 0;
                weights.push_back(w);
                if (w > 0) entropy -= w * std::log(w);
                distance += w * std::abs(double(j) - p.position[i]);
                for (int s = 0; s < p.sums; ++s) sums[s] += w * p.key_weights[(h * p.sums + s) * p.keys + j];
                received[h * p.keys + j] += w * (p.weighted ? p.row_weights[n] : 1);
            }
            const float *row = f.row_sums.data() + n * (2 + p.sums);
            if (differs(row[0], entropy)) return "entropy";
            if (differs(row[1], distance)) return "distance";
            for (int s = 0; s < p.sums; ++s)
                if (differs(row[2 + s], sums[s])) return "a weighted sum";
            std::sort(weights.begin(), weights.end(), std::greater<double>());
            for (int64_t t = 0; t < p.top; ++t) {
                const int64_t key = f.top_key[n * p.top + t];
                const double expected = t < p.keys ? weights[t] : 0;
                if (key < 0 ? expected > 0 : !p.allowed(i, key)) return "the keys of the largest";
                if (key >= 0 && differs(std::exp(double(f.top_score[n * p.top + t])), expected)) return "the largest";
            }
        }
    for (size_t j = 0; j < received.size(); ++j)
        if (differs(f.received[j], received[j])) return "received";
    return "";
}

}  // namespace score_stats_test

// Attention along edges as plain loops in double precision: the definition that the kernels are tested against.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace naive {

using Numbers = std::vector<double>;

struct Case {
    int kind;
    int64_t batch, sources, destinations, heads, dim, edge_features;
    std::vector<int32_t> source, destination;
    Numbers q, k, v, a, inside, features, map, weights;  // empty if absent
    double factor, dropout;
    int32_t seed;
    bool tied;
    Numbers d_out, d_lse;

    int64_t edges() const { return int64_t(source.size()); }
    int64_t threshold() const { return int64_t(std::nearbyint(dropout * 4294967296.0)) - 2147483648LL; }
    const Numbers &values() const { return tied ? k : v; }
};

struct Answer {
    Numbers out, lse, dq, dk, dv, da, d_inside, d_weights, d_features, d_map;
};

inline uint32_t mix(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

inline double dropout_factor(const Case &c, int64_t head, int64_t query, int64_t key) {
    if (c.dropout == 0) return 1;
    uint32_t row = mix(mix(mix(uint32_t(c.seed)) + uint32_t(head)) + uint32_t(query));
    uint32_t word = mix(row ^ (uint32_t(key) * 0x9E3779B1u));
    return int64_t(int32_t(word)) >= c.threshold() ? 1 / (1 - c.dropout) : 0;
}

// Indices of rows of (batch, node, head).
struct At {
    const Case &c;
    int64_t to(int64_t b, int64_t e, int64_t h) const { return (b * c.destinations + c.destination[e]) * c.heads + h; }
    int64_t from(int64_t b, int64_t e, int64_t h) const { return (b * c.sources + c.source[e]) * c.heads + h; }
};

// The argument of leaky in lane d (GAT has one lane).
inline double inner(const Case &c, int64_t b, int64_t e, int64_t h, int64_t d) {
    At at{c};
    if (c.kind == 0)
        return c.q[at.to(b, e, h)] + c.k[at.from(b, e, h)] + (c.inside.empty() ? 0 : c.inside[e * c.heads + h]);
    double x = c.q[at.to(b, e, h) * c.dim + d] + c.k[at.from(b, e, h) * c.dim + d];
    for (int64_t f = 0; f < c.edge_features; ++f)
        x += c.map[(h * c.edge_features + f) * c.dim + d] * c.features[e * c.edge_features + f];
    return x;
}

inline double leaky(const Case &c, double x) { return x > 0 ? x : c.factor * x; }

inline double score(const Case &c, int64_t b, int64_t e, int64_t h) {
    At at{c};
    if (c.kind == 0) return leaky(c, inner(c, b, e, h, 0));
    double sum = 0;
    for (int64_t d = 0; d < c.dim; ++d)
        sum += c.kind == 1 ? c.a[h * c.dim + d] * leaky(c, inner(c, b, e, h, d))
                           : c.factor * c.q[at.to(b, e, h) * c.dim + d] * c.k[at.from(b, e, h) * c.dim + d];
    return sum;
}

inline void forward(const Case &c, Answer &r) {
    At at{c};
    const int64_t rows = c.batch * c.destinations * c.heads;
    Numbers row_max(rows, -std::numeric_limits<double>::infinity()), row_sum(rows, 0);
    r.out.assign(rows * c.dim, 0);
    r.lse.assign(rows, 0);
    for (int64_t b = 0; b < c.batch; ++b)
        for (int64_t e = 0; e < c.edges(); ++e)
            for (int64_t h = 0; h < c.heads; ++h) {
                double &m = row_max[at.to(b, e, h)];
                m = std::max(m, score(c, b, e, h));
            }
    for (int64_t b = 0; b < c.batch; ++b)
        for (int64_t e = 0; e < c.edges(); ++e)
            for (int64_t h = 0; h < c.heads; ++h)
                row_sum[at.to(b, e, h)] += std::exp(score(c, b, e, h) - row_max[at.to(b, e, h)]);
    for (int64_t x = 0; x < rows; ++x) r.lse[x] = row_max[x] + std::log(row_sum[x]);
    for (int64_t b = 0; b < c.batch; ++b)
        for (int64_t e = 0; e < c.edges(); ++e)
            for (int64_t h = 0; h < c.heads; ++h) {
                const int64_t to = at.to(b, e, h), from = at.from(b, e, h);
                double weight = std::exp(score(c, b, e, h) - r.lse[to]) * (c.weights.empty() ? 1 : c.weights[e]);
                weight *= dropout_factor(c, b * c.heads + h, c.destination[e], c.source[e]);
                for (int64_t d = 0; d < c.dim; ++d) r.out[to * c.dim + d] += weight * c.values()[from * c.dim + d];
            }
}

// propagates ds to the inputs of the score
inline void backward_score(const Case &c, Answer &r, int64_t b, int64_t e, int64_t h, double ds) {
    At at{c};
    const int64_t to = at.to(b, e, h), from = at.from(b, e, h), features = c.edge_features;
    if (c.kind == 0) {
        ds *= inner(c, b, e, h, 0) > 0 ? 1 : c.factor;
        r.dq[to] += ds;
        r.dk[from] += ds;
        if (!c.inside.empty()) r.d_inside[e * c.heads + h] += ds;
        return;
    }
    for (int64_t d = 0; d < c.dim; ++d) {
        const int64_t i = to * c.dim + d, j = from * c.dim + d, lane = h * c.dim + d;
        if (c.kind == 2) {
            r.dq[i] += ds * c.factor * c.k[j];
            r.dk[j] += ds * c.factor * c.q[i];
            continue;
        }
        const double x = inner(c, b, e, h, d), dx = ds * c.a[lane] * (x > 0 ? 1 : c.factor);
        r.dq[i] += dx;
        r.dk[j] += dx;
        r.da[lane] += ds * leaky(c, x);
        for (int64_t f = 0; f < features; ++f) {
            r.d_features[e * features + f] += dx * c.map[(h * features + f) * c.dim + d];
            r.d_map[(h * features + f) * c.dim + d] += dx * c.features[e * features + f];
        }
    }
}

inline void backward(const Case &c, Answer &r) {
    At at{c};
    r.dq.assign(c.q.size(), 0);
    r.dk.assign(c.k.size(), 0);
    r.dv.assign(c.values().size(), 0);
    r.da.assign(c.a.size(), 0);
    r.d_inside.assign(c.inside.size(), 0);
    r.d_weights.assign(c.weights.size(), 0);
    r.d_features.assign(c.features.size(), 0);
    r.d_map.assign(c.map.size(), 0);
    for (int64_t b = 0; b < c.batch; ++b)
        for (int64_t e = 0; e < c.edges(); ++e)
            for (int64_t h = 0; h < c.heads; ++h) {
                const int64_t to = at.to(b, e, h), from = at.from(b, e, h);
                const double alpha = std::exp(score(c, b, e, h) - r.lse[to]);
                const double keep = dropout_factor(c, b * c.heads + h, c.destination[e], c.source[e]);
                const double weight = c.weights.empty() ? 1 : c.weights[e];
                double delta = 0, dp = 0;
                for (int64_t d = 0; d < c.dim; ++d) {
                    delta += c.d_out[to * c.dim + d] * r.out[to * c.dim + d];
                    dp += c.d_out[to * c.dim + d] * c.values()[from * c.dim + d];
                    r.dv[from * c.dim + d] += alpha * weight * keep * c.d_out[to * c.dim + d];
                }
                if (!c.weights.empty()) r.d_weights[e] += alpha * keep * dp;
                backward_score(c, r, b, e, h,
                               alpha * (weight * keep * dp - delta + (c.d_lse.empty() ? 0 : c.d_lse[to])));
            }
    if (!c.tied) return;
    for (size_t x = 0; x < r.dk.size(); ++x) r.dk[x] += r.dv[x];
    r.dv.clear();
}

}  // namespace naive

// The backward pass, by source first: this order reads the rows of q and d_out, computes dk and dv, and saves per edge
// only ds and, for GATv2, the signs of its sums. Then by destination: dq from these, gathering rows again only for Dot.
//
// GATv2 in both orders: leaky' = slope + (1 - slope) [x > 0], so the sums run over the positive lanes only, and a,
// constant in the sum, multiplies the row of the node once. leaky(x) = leaky'(x) x gives da from the sums of the nodes,
// without a term per edge.
#pragma once

#include "edges/batch_entry.hpp"

namespace polyhead {
namespace {

// What the first half saves for the second, and the gradients that both add to, for one batch entry.
template <class T>
struct BackwardState {
    const EdgeGradients &to;
    const T *out, *lse, *d_out, *d_lse;
    T *dq, *dk, *dv, *da, *d_inside, *d_weights, *d_features;
    T *stats;         // (destinations, 2, heads): lse, and delta - d_lse
    T *ds;            // (edges, heads), by destination
    Signs<T> *signs;  // (edges, heads, vectors of a head), by destination
    T *da_parts;      // (parts, heads, dim)
    T *map_parts;     // (parts, heads, features, dim)
    T *a_map;         // (heads, features, dim): a times map
    int64_t signs_row;
};

// An output without a batch axis is set by the first entry; the others add to it.
template <class T>
POLYHEAD_INLINE void set_or_add(T *to, T value, int64_t entry) {
    *to = entry ? *to + value : value;
}

template <class T>
void compute_lse_and_delta(const BatchEntry<T> &in, const BackwardState<T> &state) {
    const int64_t heads = in.shape.heads, dim = in.shape.dim;
#pragma omp parallel for num_threads(in.problem.threads) schedule(static)
    for (int64_t node = 0; node < in.problem.destinations; ++node) {
        for (int64_t h = 0; h < heads; ++h) {
            const int64_t at = node * heads + h;
            Vec<T, 8> sum{};
            for (int64_t x = at * dim; x < (at + 1) * dim; x += 8)
                sum += load<Vec<T, 8>>(state.d_out + x) * load<Vec<T, 8>>(state.out + x);
            T delta = ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7]));
            state.stats[2 * node * heads + h] = state.lse[at];
            state.stats[(2 * node + 1) * heads + h] = delta - (state.d_lse ? state.d_lse[at] : T(0));
        }
    }
}

// raw = slope * S + (1 - slope) * P; d = a * raw (+ add); da += x * raw
template <class T>
void write_gatv2_gradients(const BatchEntry<T> &in, const T *x, const T *total, const T *positive_sums, T *d, T *da, const T *add) {
    using V = Vec<T, 8>;
    for (int64_t h = 0; h < in.shape.heads; ++h) {
        const V all = splat<V>(in.factor * total[h]);
        for (int64_t at = h * in.shape.dim; at < (h + 1) * in.shape.dim; at += 8) {
            V raw = all + (1 - in.factor) * load<V>(positive_sums + at);
            if (da) store(da + at, load<V>(da + at) + load<V>(x + at) * raw);
            V result = load<V>(in.a + at) * raw;
            store(d + at, add ? result + load<V>(add + at) : result);
        }
    }
}

}  // namespace
}  // namespace polyhead

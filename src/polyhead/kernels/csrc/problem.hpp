// What one call is about: plain data, shared by the bindings, the tests and every instruction set.
#pragma once

#include <cstdint>

namespace polyhead {

enum Kind { GAT = 0, GATV2 = 1, DOT = 2 };

// Node-major tensors (batch, nodes, heads, dim); GAT's q and k are (batch, nodes, heads). A null pointer is "none".
struct Problem {
    int kind;
    bool wide;  // double, else float
    int64_t batch, sources, destinations, heads, dim, edge_features;
    const void *q, *k, *v, *a, *inside, *features, *map, *weights;  // v null: the same tensor as k
    const int32_t *first, *source, *edge;                           // the edges, by destination
    double factor;                                                  // Dot: of the scores; else: LeakyReLU's slope
    double dropout;
    int64_t threshold;
    int32_t seed;
    int threads;
};

struct Result {
    void *out, *lse;
};

struct Gradients {
    const int32_t *out_first, *out_place, *out_destination;  // the edges, by source
    const void *out, *lse, *d_out, *d_lse;
    void *dq, *dk, *dv, *da, *d_inside, *d_weights, *d_features, *d_map;
};

struct GatherSum {
    bool wide;
    int64_t destinations, width;
    const void *v;
    const int32_t *first, *source;
    void *out;
    int threads;
};

// Every entry returns false when there is no memory for its scratch.
struct Kernels {
    const char *name;
    bool (*forward)(const Problem &, const Result &);
    bool (*backward)(const Problem &, const Gradients &);
    bool (*gather_sum)(const GatherSum &);
};

}  // namespace polyhead

// What one call is about: plain data, shared by the bindings, the tests and every instruction set.
#pragma once

#include <cstdint>

namespace polyhead {

enum Kind { GAT = 0, GATV2 = 1, DOT = 2 };

// Node-major tensors (batch, nodes, heads, dim); GAT's q and k are (batch, nodes, heads). A null pointer is "none".
struct Problem {
    int kind;
    bool wide;  // double, else float
    int64_t batch, sources, destinations, edges, heads, dim, edge_features;
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
    int64_t sources, destinations, edges, width;
    const void *v;
    const int32_t *first, *source;
    void *out;
    int threads;
};

// A block of scores (heads, rows, columns) of `queries` x `keys`. What belongs to queries is (heads, queries, …), to keys
// (heads, …, keys), and is given from the block's first row, or column, on.
struct Observation {
    int64_t heads, rows, columns, queries, keys;
    const float *scores;
    int64_t column;                // the number of the first key
    const int32_t *first, *stop;   // (rows): the keys of each row, by number
    const float *key_bias;         // added to the scores
    float *most, *sum;             // of each query; where they are wanted, nothing else is found out
    const float *high, *low;       // the log-sum-exp of each query, in two parts: their sum
    const float *position;         // (rows)
    const float *row_weights;      // what a row counts in the sums of columns
    const float *key_weights;      // (heads, sums, keys)
    int sums;                      // at most 4
    float *row_sums;               // (heads, queries, 2 + sums): entropy, distance, weighted sums
    const int32_t *chunk_first;    // (chunks + 1): rows whose columns are summed together
    int64_t chunks;
    float *column_sums;            // (heads, chunks, columns)
    float *top_score;              // (heads, queries, top), and the keys
    int64_t *top_key;
    int64_t top;
    int threads;
};

// (batch, heads, items, features), of which features lie side by side; strides are in numbers.
struct Strided {
    const void *data;
    int64_t batch, head, item;
};

// Attention along keys, so few that they and their gradients fit into a core's caches.
struct Short {
    bool wide;
    int64_t batch, heads, key_heads, queries, keys, dim, width;
    Strided q, k, v, out;
    void *lse;                    // (batch, heads, queries)
    const int32_t *first, *stop;  // (interval_rows, queries): the keys of each query
    int64_t interval_rows;        // the batch's, or 1 for all
    double scale, dropout;
    int64_t threshold;
    int32_t seed;
    int threads;
};

struct ShortGradients {
    Strided d_out;
    const void *d_lse;  // as lse, or null
    Strided dq, dk, dv;
};

// Attention over the windows of a grid of points, of which the keys and the queries are all.
struct Grid {
    bool wide;
    int64_t batch, heads, key_heads, dim, width;
    int64_t axes;                            // two or more
    const int64_t *sizes, *reach, *steps;    // of each axis: points, neighbours to each side, and how far these are apart
    Strided q, k, v, out;
    void *lse;                               // (batch, heads, points)
    const void *table;                       // (heads, offsets of a window): added to the scores; or null
    double scale, dropout;
    int64_t threshold;
    int32_t seed;
    int threads;
};

struct GridGradients {
    Strided d_out;
    const void *d_lse;  // as lse, or null
    Strided dq, dk, dv;
    void *d_table;      // where there is a table
};

// out (vectors, rows) = x (vectors, columns) · matrixᵀ (rows, columns) + bias (rows)
struct Thin {
    int64_t vectors, rows, columns;
    const float *x, *matrix, *bias;
    float *out;
    int threads;
};

// Some tensors of alike matrices; strides are in numbers.
struct Matrices {
    const int64_t *data;  // where each tensor is
    int64_t matrix, row, column;
};

// A step of gradient descent on the Stiefel manifold: matrices x (n, k) with orthonormal columns move along a direction
//     r = gradient of the manifold's metric from `sign` · g,   first = keep · first + add · r,
//     d = now · r + ahead · first,   where there is a second moment d / (√second · root + eps),
// by scale · d, to the nearest matrix with orthonormal columns.
struct StiefelStep {
    bool wide;
    int64_t tensors, matrices, n, k;  // matrices: of each tensor
    Matrices x, g, first, second;     // without data: there is none
    bool canonical;                   // the metric: else Euclidean
    int64_t copies;                   // 0: each number has a second moment; else each matrix, written so often along its rows
    bool tangent;                     // what is normal to the manifold is taken out of d, which has to be tangent otherwise
    bool transport;                   // and out of `first`, where the matrix has arrived
    double sign, keep, add, now, ahead, keep_second, root, eps, scale;
    uint8_t *left;                    // (tensors, matrices): those that are too far for this kernel, and were not touched
    int threads;
};

// Numbers that lie one after the other, in several pieces.
struct Pieces {
    bool wide;
    int64_t pieces;
    const int64_t *data, *counts;
    int threads;
};

// OUT_OF_RANGE: an id names no node or edge, and was not followed; what was written means nothing.
enum Status { DONE, NO_MEMORY, OUT_OF_RANGE };

// Entries that follow ids return a status; others that can fail return false when there is no memory for their scratch.
struct Kernels {
    const char *name;
    Status (*forward)(const Problem &, const Result &);
    Status (*backward)(const Problem &, const Gradients &);
    Status (*gather_sum)(const GatherSum &);
    void (*observe)(const Observation &);
    bool (*short_forward)(const Short &);
    bool (*short_backward)(const Short &, const ShortGradients &);
    bool (*grid_forward)(const Grid &);
    bool (*grid_backward)(const Grid &, const GridGradients &);
    void (*thin)(const Thin &);
    bool (*stiefel_step)(const StiefelStep &);
    bool (*finite)(const Pieces &);
};

}  // namespace polyhead

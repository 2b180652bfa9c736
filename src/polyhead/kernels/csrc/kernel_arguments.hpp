// The arguments of each kernel as plain data, shared by the bindings, the tests and every instruction set.
#pragma once

#include <cstdint>

namespace polyhead {

// Which heads of the whole attention these are: dropout counts heads through the whole batch. All of them if `total` is 0.
struct DropoutHeads {
    int64_t first, total;
    int64_t number(int64_t entry, int64_t heads, int64_t head) const { return entry * (total ? total : heads) + first + head; }
};

enum ScoreKind { GAT = 0, GATV2 = 1, DOT = 2 };

// Node-major tensors (batch, nodes, heads, dim); GAT's q and k are (batch, nodes, heads). Null pointers mean absent tensors.
struct EdgeProblem {
    int kind;
    bool is_double;  // else float
    int64_t batch, sources, destinations, edges, heads, dim, edge_features;
    const void *q, *k, *v, *a, *inside, *features, *map, *weights;  // v null: v is k
    const int32_t *indptr, *indices, *edge_id;                     // the edges, by destination
    double factor;                                                  // Dot: the scale; else the slope of LeakyReLU
    double dropout;
    int64_t threshold;
    int32_t seed;
    int threads;
    DropoutHeads numbering;
    const int32_t *query_index, *key_index;  // of nodes in the whole graph, for dropout; null if they count from 0
};

struct EdgeResult {
    void *out, *lse;
};

struct EdgeGradients {
    const int32_t *out_indptr, *out_slot, *out_indices;  // the edges, by source
    const void *out, *lse, *d_out, *d_lse;
    void *dq, *dk, *dv, *da, *d_inside, *d_weights, *d_features, *d_map;
};

struct GatherSum {
    bool is_double;
    int64_t sources, destinations, edges, width;
    const void *v;
    const int32_t *indptr, *indices;
    void *out;
    int threads;
};

// A block of scores (heads, rows, columns) of `queries` x `keys`. Arrays per query are (heads, queries, …), arrays per key
// (heads, …, keys); their pointers are at the first row, or column, of the block.
struct ScoreStats {
    int64_t heads, rows, columns, queries, keys;
    const float *scores;
    int64_t column;                // the index of the first key
    const int32_t *first, *stop;   // (rows): the interval of keys of each row
    const float *key_bias;         // added to the scores
    float *row_max, *row_sum;      // of each query; if given, nothing else is computed
    const float *high, *low;       // the log-sum-exp of each query is high + low
    const float *position;         // (rows)
    const float *row_weights;      // the weight of each row in the column sums
    const float *key_weights;      // (heads, sums, keys)
    int sums;                      // at most 4
    float *row_sums;               // (heads, queries, 2 + sums): entropy, distance, weighted sums
    const int32_t *chunk_first;    // (chunks + 1): the first rows of chunks with column sums of their own
    int64_t chunks;
    float *column_sums;            // (heads, chunks, columns)
    float *top_score;              // (heads, queries, top), and the keys
    int64_t *top_key;
    int64_t top;
    int threads;
};

// (batch, heads, items, features) with contiguous features; strides in elements.
struct Strided {
    const void *data;
    int64_t batch, head, item;
};

// A term added to the scores, or its gradient, (batch, heads, queries, keys) with strides in elements: 0 where it broadcasts, and 1
// along other keys. A table over key - query has the stride -1 along queries. The pointer is at query 0 and key 0; null if absent.
struct ShortBias {
    const void *data;
    int64_t batch, head, query, key;
};

// Attention along few keys: they and their gradients fit into the caches of a core.
struct Short {
    bool is_double;
    int64_t batch, heads, key_heads, queries, keys, dim, width;
    Strided q, k, v, out;
    void *lse;                    // (batch, heads, queries)
    const int32_t *first, *stop;  // (interval_rows, queries): the interval of keys of each query
    int64_t interval_rows;        // the batch size, or 1 for all
    double scale, dropout;
    int64_t threshold;
    int32_t seed;
    int threads;
    ShortBias bias[2];
    DropoutHeads numbering;
};

struct ShortGradients {
    Strided d_out;
    const void *d_lse;  // as lse, or null
    Strided dq, dk, dv;
    ShortBias d_bias[2];  // absent where no gradient is needed
};

// Attention over the windows of a grid; queries and keys are all of its points.
struct Grid {
    bool is_double;
    int64_t batch, heads, key_heads, dim, width;
    int64_t axes;                            // two or more
    const int64_t *sizes, *reach, *steps;    // per axis: points, neighbours to each side, dilation
    Strided q, k, v, out;
    void *lse;                               // (batch, heads, points)
    const void *table;                       // (heads, offsets of a window): added to the scores; or null
    double scale, dropout;
    int64_t threshold;
    int32_t seed;
    int threads;
    DropoutHeads numbering;
};

struct GridGradients {
    Strided d_out;
    const void *d_lse;  // as lse, or null
    Strided dq, dk, dv;
    void *d_table;      // if there is a table
};

// out (vectors, rows) = x (vectors, columns) · matrixᵀ (rows, columns) + bias (rows)
struct SkinnyGemm {
    int64_t vectors, rows, columns;
    const float *x, *matrix, *bias;
    float *out;
    int threads;
};

// Tensors of matrices with one shape and layout; strides in elements.
struct Matrices {
    const int64_t *data;  // the address of each tensor
    int64_t matrix, row, column;
};

// A step of gradient descent on the Stiefel manifold: matrices x (n, k) with orthonormal columns move along a direction
//     r = gradient of the manifold's metric from `sign` · g,   first = momentum · first + gradient_factor · r,
//     d = direct_factor · r + momentum_factor · first,   with a second moment d / (√second · root_factor + eps),
// by scale · d, to the nearest matrix with orthonormal columns.
struct StiefelStep {
    bool is_double;
    int64_t tensors, matrices, n, k;  // matrices: per tensor
    Matrices x, g, first, second;     // data is null if absent
    bool canonical;                   // the metric; else Euclidean
    int64_t copies;                   // 0: a second moment per element; else per matrix, with this many copies along its rows
    bool tangent;                     // project d onto the tangent space; without it d must be tangent
    bool transport;                   // project `first` onto the tangent space at the new point
    double sign, momentum, gradient_factor, direct_factor, momentum_factor, beta2, root_factor, eps, scale;
    uint8_t *skipped;                 // (tensors, matrices): 1 if the step is too long for this kernel; nothing is written then
    int threads;
};

// Several contiguous arrays.
struct Arrays {
    bool is_double;
    int64_t arrays;
    const int64_t *data, *counts;
    int threads;
};

// OUT_OF_RANGE: an id was out of range and was not used; the outputs are unspecified.
enum Status { DONE, NO_MEMORY, OUT_OF_RANGE };

// Kernels that read ids return a status; others that can fail return false if the allocation of scratch memory fails.
struct Kernels {
    const char *name;
    Status (*edges_forward)(const EdgeProblem &, const EdgeResult &);
    Status (*edges_backward)(const EdgeProblem &, const EdgeGradients &);
    Status (*gather_sum)(const GatherSum &);
    void (*score_stats)(const ScoreStats &);
    bool (*short_forward)(const Short &);
    bool (*short_backward)(const Short &, const ShortGradients &);
    bool (*grid_forward)(const Grid &);
    bool (*grid_backward)(const Grid &, const GridGradients &);
    void (*skinny_gemm)(const SkinnyGemm &);
    bool (*stiefel_step)(const StiefelStep &);
    bool (*all_finite)(const Arrays &);
};

}  // namespace polyhead

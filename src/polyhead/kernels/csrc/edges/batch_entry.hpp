// The typed arguments of one batch entry, shared by both directions.
#pragma once

#include "edges/id_checks.hpp"
#include "edges/score_and_sum_loops.hpp"
#include "edges/edge_partition.hpp"
#include "edges/quads.hpp"
#include "kernel_arguments.hpp"
#include "simd/hash.hpp"
#include "simd/threads.hpp"

namespace polyhead {
namespace {

constexpr int64_t MAX_BLOCK_EDGES = 32, BLOCK_BYTES = 32768;

// Edges processed together: their rows roughly fill the L1 cache.
inline int64_t edges_per_block(int64_t bytes) {
    int64_t edges = BLOCK_BYTES / (bytes + 1) / 4 * 4;
    return edges < 4 ? 4 : edges > MAX_BLOCK_EDGES ? MAX_BLOCK_EDGES : edges;
}

template <class T>
const T *pointer_at(const void *base, int64_t elements) {
    return base ? static_cast<const T *>(base) + elements : nullptr;
}

template <class T>
T *pointer_at(void *base, int64_t elements) {
    return base ? static_cast<T *>(base) + elements : nullptr;
}

template <class T>
struct BatchEntry {
    const EdgeProblem &problem;
    HeadShape shape;
    int64_t number, row, width, q_row, k_row, block;  // width: of a quad; q_row, k_row: elements per node
    const T *q, *k, *v, *a, *inside, *features, *map, *weights;
    bool tied;
    T factor, keep;  // keep: 1 / (1 - dropout)
    Dropout dropout;

    BatchEntry(const EdgeProblem &p, int64_t entry, int gathered)
        : problem(p), shape{p.heads, p.dim}, number(entry), row(p.heads * p.dim), width(4 * p.heads) {
        q_row = k_row = p.kind == GAT ? p.heads : row;
        block = edges_per_block(gathered * row * int64_t(sizeof(T)));
        q = pointer_at<T>(p.q, entry * p.destinations * q_row);
        k = pointer_at<T>(p.k, entry * p.sources * k_row);
        tied = !p.v;
        v = tied ? k : pointer_at<T>(p.v, entry * p.sources * row);
        a = pointer_at<T>(p.a, 0);
        inside = pointer_at<T>(p.inside, 0);
        features = pointer_at<T>(p.features, 0);
        map = pointer_at<T>(p.map, 0);
        weights = pointer_at<T>(p.weights, 0);
        factor = T(p.factor);
        keep = T(1 / (1 - p.dropout));
        dropout = dropout_of(p.dropout, p.threshold);
    }

    uint32_t head_hash(int64_t h) const { return hash_head(problem.seed, problem.numbering.number(number, shape.heads, h)); }

    // the number of a node in the whole graph
    POLYHEAD_INLINE uint32_t query_number(int64_t node) const { return uint32_t(problem.query_index ? problem.query_index[node] : node); }
    POLYHEAD_INLINE uint32_t key_number(int64_t node) const { return uint32_t(problem.key_index ? problem.key_index[node] : node); }

    // whether edge ids are used
    bool uses_edge_ids() const { return inside || features || weights; }
};

// The edges to prefetch while a block is processed: those of the next block that were not prefetched yet.
struct PrefetchRange {
    int64_t at, count;
};

POLYHEAD_INLINE PrefetchRange next_edges_to_prefetch(int64_t *prefetched, int64_t end, int64_t block, int64_t edges) {
    int64_t to = end + block < edges ? end + block : edges;
    // a thread that starts another part has prefetched nothing there
    int64_t from = *prefetched > end && *prefetched <= to ? *prefetched : end;
    *prefetched = to;
    return {from, to - from};
}

template <class T>
POLYHEAD_INLINE void leaky_relu_in_place(T *x, int64_t count, T slope) {
    using V = Vec<T, 4>;
    for (int64_t at = 0; at < count; at += 4) {
        V y = load<V>(x + at);
        store(x + at, y > T(0) ? y : slope * y);
    }
}

}  // namespace
}  // namespace polyhead

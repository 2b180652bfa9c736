// The arguments of one batch entry, with their type, and what both directions ask of them.
#pragma once

#include "simd/hash.hpp"
#include "edges/ids.hpp"
#include "edges/parts.hpp"
#include "problem.hpp"
#include "edges/quads.hpp"
#include "edges/loops.hpp"

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace polyhead {
namespace {

inline int thread_number() {
#if defined(_OPENMP)
    return omp_get_thread_num();
#else
    return 0;
#endif
}

constexpr int64_t MOST_EDGES = 32, BLOCK_BYTES = 32768;

// Edges worked on together: their rows about fill the first cache.
inline int64_t block_edges(int64_t bytes) {
    int64_t edges = BLOCK_BYTES / (bytes + 1) / 4 * 4;
    return edges < 4 ? 4 : edges > MOST_EDGES ? MOST_EDGES : edges;
}

template <class T>
const T *offset(const void *base, int64_t elements) {
    return base ? static_cast<const T *>(base) + elements : nullptr;
}

template <class T>
T *offset(void *base, int64_t elements) {
    return base ? static_cast<T *>(base) + elements : nullptr;
}

template <class T>
struct Entry {
    const Problem &problem;
    Shape shape;
    int64_t number, row, width, q_row, k_row, block;  // width: of a quad; q_row, k_row: elements of a node
    const T *q, *k, *v, *a, *inside, *features, *map, *weights;
    bool tied;
    T factor, kept;
    Dropout dropout;

    Entry(const Problem &p, int64_t entry, int gathered)
        : problem(p), shape{p.heads, p.dim}, number(entry), row(p.heads * p.dim), width(4 * p.heads) {
        q_row = k_row = p.kind == GAT ? p.heads : row;
        block = block_edges(gathered * row * int64_t(sizeof(T)));
        q = offset<T>(p.q, entry * p.destinations * q_row);
        k = offset<T>(p.k, entry * p.sources * k_row);
        tied = !p.v;
        v = tied ? k : offset<T>(p.v, entry * p.sources * row);
        a = offset<T>(p.a, 0);
        inside = offset<T>(p.inside, 0);
        features = offset<T>(p.features, 0);
        map = offset<T>(p.map, 0);
        weights = offset<T>(p.weights, 0);
        factor = T(p.factor);
        kept = T(1 / (1 - p.dropout));
        dropout = dropout_of(p.dropout, p.threshold);
    }

    uint32_t head_hash(int64_t h) const { return hash_head(problem.seed, number * shape.heads + h); }

    // whether edges are looked up by their numbers
    bool numbered() const { return inside || features || weights; }
};

// The edges to ask memory for while [at, at + count) are worked on: those up to a block further on that were not asked
// for yet.
struct Next {
    int64_t at, count;
};

POLYHEAD_INLINE Next next_edges(int64_t *asked, int64_t end, int64_t block, int64_t edges) {
    int64_t to = end + block < edges ? end + block : edges;
    // a thread that begins another part has asked for nothing there
    int64_t from = *asked > end && *asked <= to ? *asked : end;
    *asked = to;
    return {from, to - from};
}

template <class T>
POLYHEAD_INLINE void leaky_all(T *x, int64_t count, T slope) {
    using V = Vec<T, 4>;
    for (int64_t at = 0; at < count; at += 4) {
        V y = load<V>(x + at);
        store(x + at, y > T(0) ? y : slope * y);
    }
}

}  // namespace
}  // namespace polyhead

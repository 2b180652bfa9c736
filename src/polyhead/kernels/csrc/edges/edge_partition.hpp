// Parts with equal numbers of edges, whatever the degrees: a node cut by a boundary is summed in pieces, which are merged
// afterwards.
#pragma once

#include "simd/scratch.hpp"

namespace polyhead {
namespace {

constexpr int64_t EDGES_PER_PART = 2048, MAX_PARTS = 256;

struct Part {
    int64_t begin, end;       // edges
    int64_t node, node_end;   // the nodes whose first edge lies in it
};

// The parts depend only on the graph: results do not depend on the number of threads.
inline int64_t count_parts(int64_t edges) {
    int64_t parts = edges / EDGES_PER_PART;
    return parts < 1 ? 1 : parts > MAX_PARTS ? MAX_PARTS : parts;
}

inline int64_t first_node_at_or_after(const int32_t *indptr, int64_t nodes, int64_t edge) {
    int64_t low = 0, high = nodes;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (indptr[middle] < edge)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

inline Part find_part(const int32_t *indptr, int64_t nodes, int64_t index, int64_t parts) {
    int64_t edges = indptr[nodes];
    Part part;
    part.begin = edges * index / parts;
    part.end = edges * (index + 1) / parts;
    part.node = first_node_at_or_after(indptr, nodes, part.begin);
    part.node_end = index + 1 == parts ? nodes : first_node_at_or_after(indptr, nodes, part.end);
    return part;
}

// Processes all nodes: `work.process_node` for a node within a part, `process_piece` for a piece of a node that a boundary cuts,
// then `merge_pieces` and `finish_cut_node`. Skips parts without `ids_in_range`, and returns false if there are any.
template <class Work>
bool for_each_part(Work &work, const int32_t *indptr, int64_t nodes, int threads, int (*thread_number)()) {
    const int64_t parts = count_parts(indptr[nodes]);
    int outside = 0;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) reduction(| : outside)
    for (int64_t index = 0; index < parts; ++index) {
        Part part = find_part(indptr, nodes, index, parts);
        int thread = thread_number();
        if (!work.ids_in_range(part.begin, part.end)) {
            outside = 1;
            continue;
        }
        if (indptr[part.node] > part.begin) {
            int64_t end = indptr[part.node] < part.end ? indptr[part.node] : part.end;
            work.process_piece(index, thread, part.node - 1, part.begin, end, 2 * index);
        }
        for (int64_t node = part.node; node < part.node_end; ++node) {
            if (indptr[node + 1] <= part.end)
                work.process_node(index, thread, node, indptr[node], indptr[node + 1]);
            else
                work.process_piece(index, thread, node, indptr[node], part.end, 2 * index + 1);
        }
    }
    if (outside) return false;
    for (int64_t index = 0; index + 1 < parts; ++index) {
        Part part = find_part(indptr, nodes, index, parts);
        int64_t node = part.node_end - 1;
        if (part.node_end == part.node || indptr[node + 1] <= part.end) continue;
        for (int64_t other = index + 1; other < parts && indptr[nodes] * other / parts < indptr[node + 1]; ++other)
            work.merge_pieces(node, 2 * index + 1, 2 * other);
        work.finish_cut_node(index, node, 2 * index + 1);
    }
    return true;
}

}  // namespace
}  // namespace polyhead

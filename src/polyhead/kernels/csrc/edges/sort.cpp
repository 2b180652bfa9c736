#include "edges/sort.hpp"

namespace polyhead {
namespace {

// Counts the edges of each node, one place to the right, so that the prefix sum can be done in place. Each id is read once
// (hence volatile) and copied into the arrays of the second order: the ids that are sorted are those that were checked, even if
// another thread writes to the input.
template <class I>
int64_t count_edges_per_node(const Edges &edges, const CSR &csr) {
    const volatile I *source = static_cast<const I *>(edges.sources), *destination = static_cast<const I *>(edges.destinations);
    for (int64_t e = 0; e < edges.count; ++e) {
        I s = source[e * edges.source_stride], d = destination[e * edges.destination_stride];
        if (s < 0 || s >= edges.num_sources || d < 0 || d >= edges.num_destinations) return e;
        ++csr.out_indptr[s + 1];
        ++csr.indptr[d + 1];
        csr.out_slot[e] = int32_t(s);
        csr.out_indices[e] = int32_t(d);
    }
    return -1;
}

void prefix_sum(int32_t *indptr, int64_t nodes) {
    for (int64_t n = 0; n < nodes; ++n) indptr[n + 1] += indptr[n];
}

// Placing the edges has advanced every start to the end of its node; this moves them back.
void move_starts_back(int32_t *indptr, int64_t nodes) {
    for (int64_t n = nodes; n > 0; --n) indptr[n] = indptr[n - 1];
    indptr[0] = 0;
}

void place_edges(const Edges &edges, const CSR &csr) {
    for (int64_t e = 0; e < edges.count; ++e) {
        int32_t at = csr.indptr[csr.out_indices[e]]++;
        csr.indices[at] = csr.out_slot[e];
        csr.edge_id[at] = int32_t(e);
    }
    move_starts_back(csr.indptr, edges.num_destinations);
    for (int64_t d = 0; d < edges.num_destinations; ++d)
        for (int32_t at = csr.indptr[d]; at < csr.indptr[d + 1]; ++at) {
            int32_t out = csr.out_indptr[csr.indices[at]]++;
            csr.out_slot[out] = at;
            csr.out_indices[out] = int32_t(d);
        }
    move_starts_back(csr.out_indptr, edges.num_sources);
}

template <class I>
int64_t sort_ids(const Edges &edges, const CSR &csr) {
    for (int64_t n = 0; n <= edges.num_destinations; ++n) csr.indptr[n] = 0;
    for (int64_t n = 0; n <= edges.num_sources; ++n) csr.out_indptr[n] = 0;
    int64_t invalid = count_edges_per_node<I>(edges, csr);
    if (invalid >= 0) return invalid;
    prefix_sum(csr.indptr, edges.num_destinations);
    prefix_sum(csr.out_indptr, edges.num_sources);
    place_edges(edges, csr);
    return -1;
}

}  // namespace

int64_t sort_edges(const Edges &edges, const CSR &csr) {
    return edges.is_int64 ? sort_ids<int64_t>(edges, csr) : sort_ids<int32_t>(edges, csr);
}

}  // namespace polyhead

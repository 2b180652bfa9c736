// Builds CSR (by destination) and CSC (by source) from COO edges, by two counting sorts.
#pragma once

#include <cstdint>

namespace polyhead {

struct Edges {
    const void *sources, *destinations;
    int64_t source_stride, destination_stride;
    bool is_int64;  // else int32
    int64_t count, num_sources, num_destinations;
};

// Both orders. out_slot: the position of an edge in the order by destination.
struct CSR {
    int32_t *indptr, *indices, *edge_id;           // by destination
    int32_t *out_indptr, *out_slot, *out_indices;  // by source
};

// Returns -1, or the index of the first edge with an id out of range; the arrays are then unspecified.
int64_t sort_edges(const Edges &edges, const CSR &csr);

}  // namespace polyhead

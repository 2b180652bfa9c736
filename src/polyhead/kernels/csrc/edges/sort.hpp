// The edges by destination and by source: two counting sorts.
#pragma once

#include <cstdint>

namespace polyhead {

struct Edges {
    const void *sources, *destinations;
    int64_t source_stride, destination_stride;
    bool wide;  // int64, else int32
    int64_t count, num_sources, num_destinations;
};

struct Order {
    int32_t *first, *source, *edge;                    // by destination
    int32_t *out_first, *out_place, *out_destination;  // by source
};

// -1, or the number of the first edge that has an id out of range: the arrays are then unspecified.
int64_t sort_edges(const Edges &edges, const Order &order);

}  // namespace polyhead

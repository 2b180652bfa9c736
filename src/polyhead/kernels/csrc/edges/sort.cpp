#include "edges/sort.hpp"

namespace polyhead {
namespace {

// Counts, at one place further on: the sum over what stands before is then made where they stand. Each id is read once (so
// says volatile) and copied to where the second order will be: what is checked is what is sorted, whatever others write there.
template <class I>
int64_t count(const Edges &edges, const Order &order) {
    const volatile I *source = static_cast<const I *>(edges.sources), *destination = static_cast<const I *>(edges.destinations);
    for (int64_t e = 0; e < edges.count; ++e) {
        I s = source[e * edges.source_stride], d = destination[e * edges.destination_stride];
        if (s < 0 || s >= edges.num_sources || d < 0 || d >= edges.num_destinations) return e;
        ++order.out_first[s + 1];
        ++order.first[d + 1];
        order.out_place[e] = int32_t(s);
        order.out_destination[e] = int32_t(d);
    }
    return -1;
}

void sum(int32_t *first, int64_t nodes) {
    for (int64_t n = 0; n < nodes; ++n) first[n + 1] += first[n];
}

// Placing moves every start to its node's end: one step back puts it right.
void restore(int32_t *first, int64_t nodes) {
    for (int64_t n = nodes; n > 0; --n) first[n] = first[n - 1];
    first[0] = 0;
}

void place(const Edges &edges, const Order &order) {
    for (int64_t e = 0; e < edges.count; ++e) {
        int32_t at = order.first[order.out_destination[e]]++;
        order.source[at] = order.out_place[e];
        order.edge[at] = int32_t(e);
    }
    restore(order.first, edges.num_destinations);
    for (int64_t d = 0; d < edges.num_destinations; ++d)
        for (int32_t at = order.first[d]; at < order.first[d + 1]; ++at) {
            int32_t out = order.out_first[order.source[at]]++;
            order.out_place[out] = at;
            order.out_destination[out] = int32_t(d);
        }
    restore(order.out_first, edges.num_sources);
}

template <class I>
int64_t sort(const Edges &edges, const Order &order) {
    for (int64_t n = 0; n <= edges.num_destinations; ++n) order.first[n] = 0;
    for (int64_t n = 0; n <= edges.num_sources; ++n) order.out_first[n] = 0;
    int64_t wrong = count<I>(edges, order);
    if (wrong >= 0) return wrong;
    sum(order.first, edges.num_destinations);
    sum(order.out_first, edges.num_sources);
    place(edges, order);
    return -1;
}

}  // namespace

int64_t sort_edges(const Edges &edges, const Order &order) {
    return edges.wide ? sort<int64_t>(edges, order) : sort<int32_t>(edges, order);
}

}  // namespace polyhead

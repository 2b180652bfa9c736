// Ids of nodes and edges, in memory that others can write to: each is checked before it is used.
#pragma once

#include "edges/edge_partition.hpp"
#include "kernel_arguments.hpp"

namespace polyhead {
namespace {

// Not inlined: this does not slow down the loops over the edges.
__attribute__((noinline)) bool all_below(const int32_t *ids, int64_t count, int64_t limit) {
    // as unsigned numbers, negative ids are larger than any limit
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; ++i) largest = uint32_t(ids[i]) > largest ? uint32_t(ids[i]) : largest;
    return count == 0 || int64_t(largest) < limit;
}

// A checked copy of indptr: it rises from 0 to the number of edges.
class CheckedIndptr {
  public:
    Status copy_and_check(const int32_t *indptr, int64_t nodes, int64_t edges) {
        const size_t bytes = size_t(nodes + 1) * sizeof(int32_t);
        if (!memory_.reserve(bytes)) return NO_MEMORY;
        int32_t *mine = memory_.as<int32_t>();
        std::memcpy(mine, indptr, bytes);
        int invalid = mine[0] != 0 || mine[nodes] != edges;
        for (int64_t n = 0; n < nodes; ++n) invalid |= mine[n] > mine[n + 1];
        return invalid ? OUT_OF_RANGE : DONE;
    }
    const int32_t *get() { return memory_.as<int32_t>(); }

  private:
    Scratch memory_;
};

}  // namespace
}  // namespace polyhead

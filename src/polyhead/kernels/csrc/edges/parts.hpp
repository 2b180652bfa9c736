// Equal parts of the edges, whatever the degrees: a node that a boundary cuts is summed in pieces and merged
// afterwards.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "simd/vector.hpp"

namespace polyhead {
namespace {

constexpr int64_t EDGES_PER_PART = 2048, MOST_PARTS = 256;

struct Part {
    int64_t begin, end;       // edges
    int64_t node, node_end;   // the nodes whose first edge lies in it
};

// The parts depend on the graph alone: results do not change with the number of threads.
inline int64_t count_parts(int64_t edges) {
    int64_t parts = edges / EDGES_PER_PART;
    return parts < 1 ? 1 : parts > MOST_PARTS ? MOST_PARTS : parts;
}

inline int64_t first_node_from(const int32_t *first, int64_t nodes, int64_t edge) {
    int64_t low = 0, high = nodes;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (first[middle] < edge)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

inline Part part_of(const int32_t *first, int64_t nodes, int64_t index, int64_t parts) {
    int64_t edges = first[nodes];
    Part part;
    part.begin = edges * index / parts;
    part.end = edges * (index + 1) / parts;
    part.node = first_node_from(first, nodes, part.begin);
    part.node_end = index + 1 == parts ? nodes : first_node_from(first, nodes, part.end);
    return part;
}

// Work on all nodes: `work.whole` for a node within a part, `piece` for one that a boundary cuts, then `merge` and `finish`.
// A part whose ids are not `in_range` is left out, and the result is false.
template <class Work>
bool over_parts(Work &work, const int32_t *first, int64_t nodes, int threads, int (*thread_number)()) {
    const int64_t parts = count_parts(first[nodes]);
    int outside = 0;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) reduction(| : outside)
    for (int64_t index = 0; index < parts; ++index) {
        Part part = part_of(first, nodes, index, parts);
        int thread = thread_number();
        if (!work.in_range(part.begin, part.end)) {
            outside = 1;
            continue;
        }
        if (first[part.node] > part.begin) {
            int64_t end = first[part.node] < part.end ? first[part.node] : part.end;
            work.piece(index, thread, part.node - 1, part.begin, end, 2 * index);
        }
        for (int64_t node = part.node; node < part.node_end; ++node) {
            if (first[node + 1] <= part.end)
                work.whole(index, thread, node, first[node], first[node + 1]);
            else
                work.piece(index, thread, node, first[node], part.end, 2 * index + 1);
        }
    }
    if (outside) return false;
    for (int64_t index = 0; index + 1 < parts; ++index) {
        Part part = part_of(first, nodes, index, parts);
        int64_t node = part.node_end - 1;
        if (part.node_end == part.node || first[node + 1] <= part.end) continue;
        for (int64_t other = index + 1; other < parts && first[nodes] * other / parts < first[node + 1]; ++other)
            work.merge(node, 2 * index + 1, 2 * other);
        work.finish(index, node, 2 * index + 1);
    }
    return true;
}

constexpr size_t HUGE_PAGE = size_t(1) << 21;

// Scratch memory, in lines of the cache; false when there is none.
class Scratch {
  public:
    Scratch() = default;
    Scratch(const Scratch &) = delete;
    Scratch &operator=(const Scratch &) = delete;
    ~Scratch() { std::free(memory_); }

    bool reserve(size_t bytes) {
        // huge pages: a random access to many small ones costs a walk through the page tables
        const bool large = bytes > 2 * HUGE_PAGE;
        const size_t unit = large ? HUGE_PAGE : 64;
        memory_ = static_cast<char *>(std::aligned_alloc(unit, (bytes + 64 + unit - 1) / unit * unit));
#if defined(MADV_HUGEPAGE)
        if (large && memory_) madvise(memory_, (bytes + unit - 1) / unit * unit, MADV_HUGEPAGE);
#endif
        return memory_ != nullptr;
    }
    bool reserve_zeros(size_t bytes) {
        if (!reserve(bytes)) return false;
        std::memset(memory_, 0, bytes);
        return true;
    }
    template <class T>
    T *as() {
        return reinterpret_cast<T *>(memory_);
    }

  private:
    char *memory_ = nullptr;
};

// The next so many elements of a block of scratch, from the start of a line.
template <class T>
T *take(char *&from, int64_t count) {
    T *taken = reinterpret_cast<T *>(from);
    from += (size_t(count) * sizeof(T) + 63) / 64 * 64;
    return taken;
}

}  // namespace
}  // namespace polyhead

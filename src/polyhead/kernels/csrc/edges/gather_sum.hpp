// A lower bound for the benchmarks: gathers and sums rows, with the partition and prefetching of attention, without its
// arithmetic.
#pragma once

#include "edges/batch_entry.hpp"

namespace polyhead {
namespace {

template <class T>
struct GatherSumWork {
    const GatherSum &in;
    const Loops<T> &loops;
    HeadShape shape;
    char *slots;
    const T *one;
    int64_t *prefetched;  // one cache line per thread

    T *slot(int64_t index) const { return reinterpret_cast<T *>(slots) + index * in.width; }
    T *out(int64_t node) const { return static_cast<T *>(in.out) + node * in.width; }

    void process_edges(int thread, int64_t begin, int64_t end, T *into) const {
        const int64_t block = edges_per_block(in.width * int64_t(sizeof(T))), edges = in.edges;
        const T *rows[MAX_BLOCK_EDGES];
        if (begin == end)
            for (int64_t x = 0; x < in.width; ++x) into[x] = 0;
        for (int64_t at = begin; at < end; at += block) {
            int64_t count = end - at < block ? end - at : block, *mine = prefetched + thread * 8;
            for (int64_t e = 0; e < count; ++e) rows[e] = static_cast<const T *>(in.v) + in.indices[at + e] * in.width;
            PrefetchRange next = next_edges_to_prefetch(mine, at + count, block, edges);
            Prefetch prefetch{static_cast<const char *>(in.v), in.indices + next.at, next.count,
                        in.width * int64_t(sizeof(T)), shape.dim * int64_t(sizeof(T))};
            loops.add_weighted_rows(shape, {one, 0, 0}, rows, count, at == begin, into, prefetch);
        }
    }

    bool ids_in_range(int64_t begin, int64_t end) const { return all_below(in.indices + begin, end - begin, in.sources); }
    void process_node(int64_t, int thread, int64_t node, int64_t begin, int64_t end) const {
        process_edges(thread, begin, end, out(node));
    }
    void process_piece(int64_t, int thread, int64_t, int64_t begin, int64_t end, int64_t index) const {
        process_edges(thread, begin, end, slot(index));
    }
    void merge_pieces(int64_t, int64_t into, int64_t from) const {
        for (int64_t x = 0; x < in.width; ++x) slot(into)[x] += slot(from)[x];
    }
    void finish_cut_node(int64_t, int64_t node, int64_t index) const {
        for (int64_t x = 0; x < in.width; ++x) out(node)[x] = slot(index)[x];
    }
};

template <class T>
Status gather_sum(const GatherSum &in) {
    CheckedIndptr indptr;
    if (const Status status = indptr.copy_and_check(in.indptr, in.destinations, in.edges)) return status;
    // "heads" of one vector each: a register block then holds eight of them
    const int64_t dim = in.width % NATIVE<T> ? 8 : NATIVE<T>;
    Loops<T> loops = select_loops<T>(dim);
    Scratch slots, ones, prefetched;
    if (!slots.reserve(2 * count_parts(in.edges) * in.width * sizeof(T))) return NO_MEMORY;
    // coefficients are read per quad, whatever the strides
    const int64_t count = MAX_BLOCK_EDGES * (in.width / dim);
    if (!ones.reserve(count * sizeof(T))) return NO_MEMORY;
    if (!prefetched.reserve_zeros(in.threads * 64)) return NO_MEMORY;
    for (int64_t x = 0; x < count; ++x) ones.as<T>()[x] = 1;
    GatherSumWork<T> work{in, loops, {in.width / dim, dim}, slots.as<char>(), ones.as<T>(), prefetched.as<int64_t>()};
    return for_each_part(work, indptr.get(), in.destinations, in.threads, thread_number) ? DONE : OUT_OF_RANGE;
}

}  // namespace
}  // namespace polyhead

// Both halves of the backward pass for every batch entry, and the sums over their parts.
#pragma once

#include "edges/backward_destinations.hpp"
#include "edges/backward_sources.hpp"

namespace polyhead {
namespace {

// The scratch memory of a backward pass; `ready` is false if allocation failed.
template <class T>
struct BackwardScratch {
    Scratch threads, slots, stats, ds, signs, da, map, a_map;
    bool ready;

    BackwardScratch(const BatchEntry<T> &in, const EdgeGradients &to, int64_t parts, int64_t lanes) {
        const EdgeProblem &p = in.problem;
        const int64_t edges = p.edges, element = sizeof(T);
        const int64_t map_row = p.edge_features * in.row;
        const int64_t workspace = larger_whole_lines(BackwardBySource<T>::workspace_bytes(in),
                                                     BackwardByDestination<T>::workspace_bytes(in));
        const int64_t slot = larger_whole_lines(BackwardBySource<T>::slot_bytes(in), BackwardByDestination<T>::slot_bytes(in));
        ready = threads.reserve_zeros(p.threads * workspace) && slots.reserve(2 * parts * slot) &&
                stats.reserve(p.destinations * 2 * p.heads * element) && ds.reserve(edges * p.heads * element) &&
                (p.kind != GATV2 || signs.reserve(edges * (in.row / lanes) * sizeof(Signs<T>))) &&
                (!to.da || da.reserve(parts * in.row * element)) &&
                (!in.map || (map.reserve(parts * map_row * element) && a_map.reserve(map_row * element)));
    }

  private:
    static int64_t larger_whole_lines(int64_t a, int64_t b) { return whole_lines(a > b ? a : b); }
};

// The parts, summed in order into the first of them.
template <class T>
void sum_parts(T *parts, int64_t count, int64_t width) {
    for (int64_t part = 1; part < count; ++part)
        for (int64_t x = 0; x < width; ++x) parts[x] += parts[part * width + x];
}

// da is the sum over nodes and, with edge features, over edges: map times the sums behind d_map
template <class T>
void write_parameter_gradients(const BatchEntry<T> &in, const EdgeGradients &to, const BackwardState<T> &state, int64_t parts) {
    const int64_t features = in.problem.edge_features, dim = in.shape.dim;
    if (state.map_parts) sum_parts(state.map_parts, parts, features * in.row);
    if (to.da) {
        sum_parts(state.da_parts, parts, in.row);
        for (int64_t x = 0; x < in.row; ++x) static_cast<T *>(to.da)[x] = state.da_parts[x];
    }
    for (int64_t x = 0; state.map_parts && x < features * in.row; ++x) {
        const int64_t at = x / (features * dim) * dim + x % dim;
        if (to.da) static_cast<T *>(to.da)[at] += in.map[x] * state.map_parts[x];
        if (to.d_map) static_cast<T *>(to.d_map)[x] = in.a[at] * state.map_parts[x];
    }
}

template <class T>
void fill_with_zeros(T *x, int64_t count) {
    for (int64_t at = 0; at < count; ++at) x[at] = 0;
}

template <class T>
BackwardState<T> make_backward_state(const BatchEntry<T> &in, const EdgeGradients &to, BackwardScratch<T> &scratch, int64_t lanes) {
    const EdgeProblem &p = in.problem;
    const int64_t to_row = in.number * p.destinations, from_row = in.number * p.sources;
    const bool sums_map = in.map && (to.d_map || to.da);
    return {to,
            pointer_at<T>(to.out, to_row * in.row),
            pointer_at<T>(to.lse, to_row * p.heads),
            pointer_at<T>(to.d_out, to_row * in.row),
            pointer_at<T>(to.d_lse, to_row * p.heads),
            pointer_at<T>(to.dq, to_row * in.q_row),
            pointer_at<T>(to.dk, from_row * in.k_row),
            pointer_at<T>(to.dv, from_row * in.row),
            pointer_at<T>(to.da, 0),
            pointer_at<T>(to.d_inside, 0),
            pointer_at<T>(to.d_weights, 0),
            pointer_at<T>(to.d_features, 0),
            scratch.stats.template as<T>(),
            scratch.ds.template as<T>(),
            scratch.signs.template as<Signs<T>>(),
            scratch.da.template as<T>(),
            sums_map ? scratch.map.template as<T>() : nullptr,
            scratch.a_map.template as<T>(),
            in.row / lanes};
}

template <class T>
Status edges_backward(const EdgeProblem &p, const EdgeGradients &to) {
    CheckedIndptr indptr, out_indptr;
    if (const Status status = indptr.copy_and_check(p.indptr, p.destinations, p.edges)) return status;
    if (const Status status = out_indptr.copy_and_check(to.out_indptr, p.sources, p.edges)) return status;
    Loops<T> loops = select_loops<T>(p.dim);
    const int64_t parts = count_parts(p.edges);
    const int gathered = p.kind == GAT ? 1 : 2;
    BatchEntry<T> shape(p, 0, gathered);
    // all at once: the first half reads them in any order
    if (shape.uses_edge_ids() && !all_below(p.edge_id, p.edges, p.edges)) return OUT_OF_RANGE;
    const int64_t map_row = p.edge_features * shape.row;
    BackwardScratch<T> scratch(shape, to, parts, loops.lanes);
    if (!scratch.ready) return NO_MEMORY;
    BackwardState<T> all = make_backward_state(shape, to, scratch, loops.lanes);
    if (all.da) fill_with_zeros(all.da_parts, parts * shape.row);
    if (all.map_parts) fill_with_zeros(all.map_parts, parts * map_row);
    for (int64_t x = 0; shape.map && x < map_row; ++x)
        all.a_map[x] = shape.a[x / (p.edge_features * p.dim) * p.dim + x % p.dim] * shape.map[x];
    char *threads = scratch.threads.template as<char>(), *slots = scratch.slots.template as<char>();
    for (int64_t number = 0; number < p.batch; ++number) {
        BatchEntry<T> in(p, number, gathered);
        BackwardState<T> state = make_backward_state(in, to, scratch, loops.lanes);
        compute_lse_and_delta(in, state);
        BackwardBySource<T> sources{in, loops, state, threads, slots};
        if (!for_each_part(sources, out_indptr.get(), p.sources, p.threads, thread_number)) return OUT_OF_RANGE;
        BackwardByDestination<T> destinations{in, loops, state, threads, slots};
        if (!for_each_part(destinations, indptr.get(), p.destinations, p.threads, thread_number)) return OUT_OF_RANGE;
    }
    write_parameter_gradients(shape, to, all, parts);
    return DONE;
}

}  // namespace
}  // namespace polyhead

// The second half of the backward pass, by destination: dq from the results of the first half.
#pragma once

#include "edges/backward_state.hpp"

namespace polyhead {
namespace {

template <class T>
struct BackwardByDestination {
    const BatchEntry<T> &in;
    const Loops<T> &loops;
    const BackwardState<T> &state;
    char *threads, *slots;

    struct Workspace {
        T *total, *queries, *slopes;
        const T **k_rows;
        const Signs<T> **signs;
        int64_t *prefetched;
    };
    struct Sums {
        T *total, *queries;  // (heads), (heads, dim)
    };

    static int64_t workspace_bytes(const BatchEntry<T> &in) {
        return (in.width + in.row + (in.map ? MAX_BLOCK_EDGES * in.row : 0)) * sizeof(T) +
               2 * MAX_BLOCK_EDGES * sizeof(void *) + 8 * 64;
    }
    static int64_t slot_bytes(const BatchEntry<T> &in) { return (in.width + in.row) * sizeof(T) + 256; }

    Workspace workspace(int thread) const {
        char *from = threads + thread * whole_lines(workspace_bytes(in));
        Workspace w;
        w.total = take<T>(from, in.width);
        w.queries = take<T>(from, in.row);
        w.k_rows = take<const T *>(from, MAX_BLOCK_EDGES);
        w.signs = take<const Signs<T> *>(from, MAX_BLOCK_EDGES);
        w.prefetched = take<int64_t>(from, 1);
        w.slopes = take<T>(from, 0);
        return w;
    }
    Sums slot(int64_t index) const {
        char *from = slots + index * whole_lines(slot_bytes(in));
        Sums s;
        s.total = take<T>(from, in.width);
        s.queries = take<T>(from, in.row);
        return s;
    }

    // edge ids were checked before the first half
    bool ids_in_range(int64_t begin, int64_t end) const {
        return in.problem.kind != DOT || all_below(in.problem.indices + begin, end - begin, in.problem.sources);
    }

    void process_node(int64_t part, int thread, int64_t node, int64_t begin, int64_t end) const {
        Workspace w = workspace(thread);
        Sums sums{w.total, w.queries};
        process_edges(part, w, begin, end, sums);
        write_node(part, node, sums);
    }
    void process_piece(int64_t part, int thread, int64_t, int64_t begin, int64_t end, int64_t index) const {
        Workspace w = workspace(thread);
        process_edges(part, w, begin, end, slot(index));
    }
    void merge_pieces(int64_t, int64_t into, int64_t from) const {
        Sums s = slot(into), other = slot(from);
        for (int64_t h = 0; h < in.shape.heads; ++h) s.total[h] += other.total[h];
        if (in.problem.kind == GAT) return;
        for (int64_t x = 0; x < in.row; ++x) s.queries[x] += other.queries[x];
    }
    void finish_cut_node(int64_t part, int64_t node, int64_t index) const { write_node(part, node, slot(index)); }

    void write_node(int64_t part, int64_t node, const Sums &sums) const {
        T *dq = state.dq + node * in.q_row;
        if (in.problem.kind == GAT) {
            for (int64_t h = 0; h < in.shape.heads; ++h) dq[h] = sums.total[h];
        } else if (in.problem.kind == DOT) {
            for (int64_t x = 0; x < in.row; ++x) dq[x] = in.factor * sums.queries[x];
        } else {
            T *da = state.da ? state.da_parts + part * in.row : nullptr;
            write_gatv2_gradients(in, in.q + node * in.row, sums.total, sums.queries, dq, da, static_cast<const T *>(nullptr));
        }
    }

    void process_edges(int64_t part, Workspace &w, int64_t begin, int64_t end, const Sums &sums) const {
        for (int64_t h = 0; h < in.shape.heads; ++h) sums.total[h] = 0;
        if (begin == end)
            for (int64_t x = 0; x < in.row; ++x) sums.queries[x] = 0;
        for (int64_t at = begin; at < end; at += in.block) {
            int64_t count = end - at < in.block ? end - at : in.block;
            Coefficients<T> ds{state.ds + at * in.shape.heads, in.shape.heads, 1};
            if (in.problem.kind == DOT) {
                for (int64_t e = 0; e < count; ++e) w.k_rows[e] = in.k + in.problem.indices[at + e] * in.k_row;
                PrefetchRange next = next_edges_to_prefetch(w.prefetched, at + count, in.block, in.problem.edges);
                loops.add_weighted_rows(in.shape, ds, w.k_rows, count, at == begin, sums.queries, prefetch(next));
                continue;
            }
            sum_rows(ds.at, count, sums.total);
            if (in.problem.kind == GAT) continue;
            for (int64_t e = 0; e < count; ++e) w.signs[e] = state.signs + (at + e) * state.signs_row;
            loops.add_weighted_signs(in.shape, ds, w.signs, count, at == begin, sums.queries);
            if (state.d_features || state.map_parts) write_feature_gradients(part, w, at, count, ds.at);
        }
    }

    Prefetch prefetch(PrefetchRange next) const {
        return {reinterpret_cast<const char *>(in.k), in.problem.indices + next.at, next.count,
                in.row * int64_t(sizeof(T)), in.shape.dim * int64_t(sizeof(T))};
    }

    void sum_rows(const T *x, int64_t count, T *total) const {
        const int64_t heads = in.shape.heads;
        int64_t h = 0;
        for (; h + 4 <= heads; h += 4) {
            Quad<T> sum = load<Quad<T>>(total + h);
            for (int64_t e = 0; e < count; ++e) sum += load<Quad<T>>(x + e * heads + h);
            store(total + h, sum);
        }
        for (; h < heads; ++h)
            for (int64_t e = 0; e < count; ++e) total[h] += x[e * heads + h];
    }

    // d_features[e, f] = <a map[f], slopes[e]> and d_map[h, f] += features[e, f] slopes[e], where slopes = ds leaky'
    void write_feature_gradients(int64_t part, Workspace &w, int64_t at, int64_t count, const T *ds) const {
        for (int64_t e = 0; e < count; ++e) write_slopes(w.signs[e], ds + e * in.shape.heads, w.slopes + e * in.row);
        const int64_t number = in.problem.edge_features;
        for (int64_t e = 0; e < count; ++e) {
            const int64_t edge = in.problem.edge_id[at + e];
            const T *slopes = w.slopes + e * in.row;
            if (state.d_features)
                for (int64_t f = 0; f < number; ++f)
                    set_or_add(state.d_features + edge * number + f, feature_gradient(slopes, f), in.number);
            if (state.map_parts) add_map_gradient(part, slopes, in.features + edge * number);
        }
    }

    void write_slopes(const Signs<T> *signs, const T *ds, T *slopes) const {
        const int64_t lanes = loops.lanes;
        for (int64_t x = 0; x < in.row; ++x) {
            const T value = ds[x / in.shape.dim];
            slopes[x] = signs[x / lanes] >> (x % lanes) & 1 ? value : in.factor * value;
        }
    }

    T feature_gradient(const T *slopes, int64_t f) const {
        Vec<T, 8> sum{};
        for (int64_t h = 0; h < in.shape.heads; ++h) {
            const T *a_map = state.a_map + (h * in.problem.edge_features + f) * in.shape.dim;
            for (int64_t x = 0; x < in.shape.dim; x += 8)
                sum += load<Vec<T, 8>>(a_map + x) * load<Vec<T, 8>>(slopes + h * in.shape.dim + x);
        }
        return ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7]));
    }

    void add_map_gradient(int64_t part, const T *slopes, const T *features) const {
        const int64_t number = in.problem.edge_features, dim = in.shape.dim;
        T *sums = state.map_parts + part * in.shape.heads * number * dim;
        for (int64_t h = 0; h < in.shape.heads; ++h)
            for (int64_t f = 0; f < number; ++f)
                for (int64_t x = 0; x < dim; x += 8) {
                    T *to = sums + (h * number + f) * dim + x;
                    store(to, load<Vec<T, 8>>(to) + features[f] * load<Vec<T, 8>>(slopes + h * dim + x));
                }
    }
};

}  // namespace
}  // namespace polyhead

// The first half of the backward pass, by source: dk, dv, and ds for the second half.
#pragma once

#include "edges/backward_state.hpp"

namespace polyhead {
namespace {

template <class T>
struct BackwardBySource {
    const BatchEntry<T> &in;
    const Loops<T> &loops;
    const BackwardState<T> &state;
    char *threads, *slots;

    struct Workspace {
        T *scores, *dp, *lse, *delta, *factor, *inner;  // quads
        T *total, *keys, *values;                       // sums of a node: (heads, 4), (heads, dim) twice
        uint32_t *hash;
        const T **q_rows, **d_rows, **feature_rows;
        Signs<T> **signs;
        T **ds_rows;
        int32_t *edge;
        int64_t *prefetched;
    };
    struct Sums {
        T *total, *keys, *values;
    };

    static int64_t workspace_bytes(const BatchEntry<T> &in) {
        return (6 * MAX_BLOCK_EDGES * in.shape.heads + in.width + 2 * in.row) * sizeof(T) + 4 * in.shape.heads +
               MAX_BLOCK_EDGES * (5 * sizeof(void *) + 4) + 18 * 64;
    }
    static int64_t slot_bytes(const BatchEntry<T> &in) { return (in.width + 2 * in.row) * sizeof(T) + 256; }

    Workspace workspace(int thread) const {
        char *from = threads + thread * whole_lines(workspace_bytes(in));
        const int64_t quads = MAX_BLOCK_EDGES * in.shape.heads;
        Workspace w;
        w.scores = take<T>(from, quads);
        w.dp = take<T>(from, quads);
        w.lse = take<T>(from, quads);
        w.delta = take<T>(from, quads);
        w.factor = take<T>(from, quads);
        w.inner = take<T>(from, quads);
        w.total = take<T>(from, in.width);
        w.keys = take<T>(from, in.row);
        w.values = take<T>(from, in.row);
        w.hash = take<uint32_t>(from, in.shape.heads);
        w.q_rows = take<const T *>(from, MAX_BLOCK_EDGES);
        w.d_rows = take<const T *>(from, MAX_BLOCK_EDGES);
        w.feature_rows = take<const T *>(from, MAX_BLOCK_EDGES);
        w.signs = take<Signs<T> *>(from, MAX_BLOCK_EDGES);
        w.ds_rows = take<T *>(from, MAX_BLOCK_EDGES);
        w.edge = take<int32_t>(from, MAX_BLOCK_EDGES);
        w.prefetched = take<int64_t>(from, 1);
        return w;
    }
    Sums slot(int64_t index) const {
        char *from = slots + index * whole_lines(slot_bytes(in));
        Sums s;
        s.total = take<T>(from, in.width);
        s.keys = take<T>(from, in.row);
        s.values = take<T>(from, in.row);
        return s;
    }

    bool ids_in_range(int64_t begin, int64_t end) const {
        const EdgeProblem &p = in.problem;
        return all_below(state.to.out_indices + begin, end - begin, p.destinations) &&
               all_below(state.to.out_slot + begin, end - begin, p.edges);
    }

    void process_node(int64_t part, int thread, int64_t node, int64_t begin, int64_t end) const {
        Workspace w = workspace(thread);
        Sums sums{w.total, w.keys, w.values};
        process_edges(w, node, begin, end, sums);
        write_node(part, node, sums);
    }
    void process_piece(int64_t, int thread, int64_t node, int64_t begin, int64_t end, int64_t index) const {
        Workspace w = workspace(thread);
        process_edges(w, node, begin, end, slot(index));
    }
    void merge_pieces(int64_t, int64_t into, int64_t from) const {
        Sums s = slot(into), other = slot(from);
        for (int64_t x = 0; x < in.width; ++x) s.total[x] += other.total[x];
        for (int64_t x = 0; x < in.row; ++x) s.values[x] += other.values[x];
        if (in.problem.kind == GAT) return;
        for (int64_t x = 0; x < in.row; ++x) s.keys[x] += other.keys[x];
    }
    void finish_cut_node(int64_t part, int64_t node, int64_t index) const { write_node(part, node, slot(index)); }

    void write_node(int64_t part, int64_t node, const Sums &sums) const {
        T *dk = state.dk + node * in.k_row;
        if (!in.tied)
            for (int64_t x = 0; x < in.row; ++x) state.dv[node * in.row + x] = sums.values[x];
        const T *add = in.tied ? sums.values : nullptr;
        if (in.problem.kind == GAT) {
            for (int64_t h = 0; h < in.shape.heads; ++h) dk[h] = sum_of_four(sums.total + 4 * h);
        } else if (in.problem.kind == DOT) {
            for (int64_t x = 0; x < in.row; ++x) dk[x] = in.factor * sums.keys[x] + (add ? add[x] : T(0));
        } else {
            for (int64_t h = 0; h < in.shape.heads; ++h) sums.total[h] = sum_of_four(sums.total + 4 * h);
            T *da = state.da ? state.da_parts + part * in.row : nullptr;
            write_gatv2_gradients(in, in.k + node * in.row, sums.total, sums.keys, dk, da, add);
        }
    }

    void process_edges(Workspace &w, int64_t node, int64_t begin, int64_t end, const Sums &sums) const {
        for (int64_t x = 0; x < in.width; ++x) sums.total[x] = 0;
        if (begin == end)
            for (int64_t x = 0; x < in.row; ++x) sums.keys[x] = sums.values[x] = 0;
        if (in.dropout.on)
            for (int64_t h = 0; h < in.shape.heads; ++h) w.hash[h] = in.head_hash(h);
        for (int64_t at = begin; at < end; at += in.block) {
            int64_t count = end - at < in.block ? end - at : in.block, quads = (count + 3) / 4;
            bool fresh = at == begin;
            PrefetchRange next = next_edges_to_prefetch(w.prefetched, at + count, in.block, in.problem.edges);
            collect_rows(w, at, count, quads);
            prefetch_edge_records(next);
            compute_scores(w, node, quads, next);
            loops.compute_dot_scores(in.shape, in.v + node * in.row, w.d_rows, quads, T(1), w.dp,
                       prefetch(state.d_out, in.row, in.shape.dim, next));
            softmax_gradient(w, node, at, count, quads);
            loops.add_weighted_rows(in.shape, {w.scores, 1, 4}, w.d_rows, count, fresh, sums.values, Prefetch{});
            if (in.problem.kind == DOT)
                loops.add_weighted_rows(in.shape, {w.dp, 1, 4}, w.q_rows, count, fresh, sums.keys, Prefetch{});
            if (in.problem.kind == GATV2)
                loops.add_weighted_signs(in.shape, {w.dp, 1, 4}, w.signs, count, fresh, sums.keys);
            with_widest_vector<T>(in.width, [&](auto vector) {
                quad_sums<decltype(vector)>(w.dp, quads, in.width, sums.total);
            });
            for (int64_t quad = 0; quad < quads; ++quad)
                quad_to_rows(w.dp + quad * in.width, in.shape.heads, w.ds_rows + 4 * quad);
        }
    }

    Prefetch prefetch(const T *base, int64_t row, int64_t head, PrefetchRange next) const {
        return {reinterpret_cast<const char *>(base), state.to.out_indices + next.at, next.count,
                row * int64_t(sizeof(T)), head * int64_t(sizeof(T))};
    }

    void collect_rows(Workspace &w, int64_t at, int64_t count, int64_t quads) const {
        const EdgeProblem &p = in.problem;
        const T *extra = in.map ? in.features : in.inside;
        const bool uses_edge_ids = extra || in.weights || state.d_weights;
        const int64_t extra_row = in.map ? p.edge_features : in.shape.heads;
        for (int64_t e = 0; e < 4 * quads; ++e) {
            int64_t out = at + (e < count ? e : count - 1);
            int64_t node = state.to.out_indices[out], place = state.to.out_slot[out];
            w.q_rows[e] = in.q + node * in.q_row;
            w.d_rows[e] = state.d_out + node * in.row;
            w.signs[e] = state.signs + place * state.signs_row;
            w.ds_rows[e] = state.ds + place * in.shape.heads;
            if (uses_edge_ids) w.edge[e] = p.edge_id[place];
            if (extra) w.feature_rows[e] = extra + w.edge[e] * extra_row;
        }
        for (int64_t quad = 0; quad < quads; ++quad) {
            const T *stats[4];
            for (int e = 0; e < 4; ++e) {
                int64_t out = at + (4 * quad + e < count ? 4 * quad + e : count - 1);
                stats[e] = state.stats + int64_t(state.to.out_indices[out]) * 2 * in.shape.heads;
            }
            rows_to_quad(stats, in.shape.heads, w.lse + quad * in.width);
            for (int e = 0; e < 4; ++e) stats[e] += in.shape.heads;
            rows_to_quad(stats, in.shape.heads, w.delta + quad * in.width);
        }
    }

    // The slots that the next block writes, and the statistics that it reads.
    void prefetch_edge_records(PrefetchRange next) const {
        for (int64_t x = next.at; x < next.at + next.count; ++x) {
            int64_t place = state.to.out_slot[x], node = state.to.out_indices[x];
            __builtin_prefetch(state.ds + place * in.shape.heads, 1);
            if (in.problem.kind == GATV2) __builtin_prefetch(state.signs + place * state.signs_row, 1);
            __builtin_prefetch(state.stats + node * 2 * in.shape.heads);
        }
    }

    void compute_scores(Workspace &w, int64_t node, int64_t quads, PrefetchRange next) const {
        const T *k = in.k + node * in.k_row;
        Prefetch rows = prefetch(in.q, in.q_row, in.problem.kind == GAT ? in.shape.heads : in.shape.dim, next);
        if (in.problem.kind == DOT) {
            loops.compute_dot_scores(in.shape, k, w.q_rows, quads, in.factor, w.scores, rows);
        } else if (in.problem.kind == GATV2) {
            loops.compute_gatv2_scores[in.map != nullptr][true](in.shape, k, w.q_rows, quads, in.factor, w.scores, rows, in.a,
                                                 {w.feature_rows, in.map, in.problem.edge_features}, w.signs);
        } else {
            compute_gat_scores(w, k, quads);
            rows.prefetch_head(0);
        }
    }

    // GAT saves the argument of leaky: its derivative multiplies ds later
    void compute_gat_scores(Workspace &w, const T *k, int64_t quads) const {
        for (int64_t quad = 0; quad < quads; ++quad) {
            T *inner = w.inner + quad * in.width, *scores = w.scores + quad * in.width;
            rows_to_quad(w.q_rows + 4 * quad, in.shape.heads, inner);
            for (int64_t h = 0; h < in.shape.heads; ++h)
                for (int e = 0; e < 4; ++e)
                    inner[4 * h + e] += k[h] + (in.inside ? w.feature_rows[4 * quad + e][h] : T(0));
            for (int64_t x = 0; x < in.width; x += 4) {
                Quad<T> y = load<Quad<T>>(inner + x);
                store(scores + x, y > T(0) ? y : in.factor * y);
            }
        }
    }

    // replaces scores by the coefficients of d_out's rows, and dp by ds; both are 0 in the padding of a short last quad
    void softmax_gradient(Workspace &w, int64_t node, int64_t at, int64_t count, int64_t quads) const {
        const bool scaled = in.dropout.on || in.weights;
        if (in.dropout.on) write_dropout_factors(w, node, at, count, quads);
        const bool wants_weights = state.d_weights;
        constexpr int W = NATIVE<T>;
        using V = Vec<T, W>;
        for (int64_t x = 0; x < quads * in.width; x += W) {
            V alpha = exponential<T, W>(load<V>(w.scores + x) - load<V>(w.lse + x));
            store(w.scores + x, alpha);
        }
        if (wants_weights) write_edge_weight_gradients(w, count);
        if (scaled) multiply_factors_by_edge_weights(w, count, quads);
        for (int64_t x = 0; x < quads * in.width; x += W) {
            V alpha = load<V>(w.scores + x), dp = load<V>(w.dp + x), delta = load<V>(w.delta + x);
            V factor = scaled ? load<V>(w.factor + x) : splat<V>(T(1));
            V ds = alpha * (factor * dp - delta);
            if (in.problem.kind == GAT) ds = load<V>(w.inner + x) > T(0) ? ds : in.factor * ds;
            store(w.scores + x, alpha * factor);
            store(w.dp + x, ds);
        }
        if (state.d_inside) write_inside_gradients(w, count);
        zero_tail(w, count, quads);
    }

    void zero_tail(Workspace &w, int64_t count, int64_t quads) const {
        const int64_t rest = count - 4 * (quads - 1), last = (quads - 1) * in.width;
        fill_tail(w.scores + last, in.shape.heads, rest, T(0));
        fill_tail(w.dp + last, in.shape.heads, rest, T(0));
        // the zeros of the padding go to a row that is never read
        for (int64_t e = rest; e < 4; ++e) w.ds_rows[4 * (quads - 1) + e] = w.inner;
    }

    // writes the dropout factor of each pair
    void write_dropout_factors(Workspace &w, int64_t node, int64_t at, int64_t count, int64_t quads) const {
        for (int64_t quad = 0; quad < quads; ++quad) {
            Words queries, key = in.key_number(node) - Words{};
            for (int64_t e = 0; e < 4; ++e) {
                const int64_t edge = 4 * quad + e < count ? 4 * quad + e : count - 1;
                queries[e] = in.query_number(state.to.out_indices[at + edge]);
            }
            for (int64_t h = 0; h < in.shape.heads; ++h)
                store(w.factor + quad * in.width + 4 * h,
                      dropout_factor<T, 4>(in.dropout, hash_query(w.hash[h], queries), key, in.keep));
        }
    }

    void multiply_factors_by_edge_weights(Workspace &w, int64_t count, int64_t quads) const {
        if (!in.dropout.on)
            for (int64_t x = 0; x < quads * in.width; ++x) w.factor[x] = 1;
        if (!in.weights) return;
        for (int64_t e = 0; e < count; ++e)
            for (int64_t h = 0; h < in.shape.heads; ++h)
                w.factor[e / 4 * in.width + 4 * h + e % 4] *= in.weights[w.edge[e]];
    }

    void write_edge_weight_gradients(Workspace &w, int64_t count) const {
        for (int64_t e = 0; e < count; ++e) {
            T sum = 0;
            for (int64_t h = 0; h < in.shape.heads; ++h) {
                const int64_t x = e / 4 * in.width + 4 * h + e % 4;
                sum += w.scores[x] * w.dp[x] * (in.dropout.on ? w.factor[x] : T(1));
            }
            set_or_add(state.d_weights + w.edge[e], sum, in.number);
        }
    }

    void write_inside_gradients(Workspace &w, int64_t count) const {
        for (int64_t e = 0; e < count; ++e)
            for (int64_t h = 0; h < in.shape.heads; ++h)
                set_or_add(state.d_inside + int64_t(w.edge[e]) * in.shape.heads + h, w.dp[e / 4 * in.width + 4 * h + e % 4],
                    in.number);
    }
};

}  // namespace
}  // namespace polyhead

// The forward pass, in the order of the destinations: scores, softmax and weighted sum of a block of edges at a time,
// with the running maximum and sum of an online softmax between blocks.
#pragma once

#include "edges/batch_entry.hpp"

namespace polyhead {
namespace {

template <class T>
struct EdgesForward {
    const BatchEntry<T> &in;
    const Loops<T> &loops;
    T *out, *lse;
    char *threads, *slots;

    // scratch memory of a thread
    struct Workspace {
        T *scores, *row_max, *row_sum, *raised;
        uint32_t *hash;
        const T **k_rows, **v_rows, **feature_rows;
        int64_t *prefetched;
    };
    // the sums of a node
    struct Sums {
        T *row_max, *row_sum, *values;  // (heads, 4), (heads, 4), (heads, dim)
    };

    static int64_t workspace_bytes(const BatchEntry<T> &in) {
        return (MAX_BLOCK_EDGES + 12) * in.shape.heads * 2 * sizeof(T) + 3 * MAX_BLOCK_EDGES * sizeof(void *) + 16 * 64;
    }
    static int64_t slot_bytes(const BatchEntry<T> &in) { return (2 * in.width + in.row) * sizeof(T) + 256; }

    Workspace workspace(int thread) const {
        char *from = threads + thread * whole_lines(workspace_bytes(in));
        Workspace w;
        w.scores = take<T>(from, MAX_BLOCK_EDGES * in.shape.heads);
        w.row_max = take<T>(from, in.width);
        w.row_sum = take<T>(from, in.width);
        w.raised = take<T>(from, in.width);
        w.hash = take<uint32_t>(from, in.shape.heads);
        w.k_rows = take<const T *>(from, MAX_BLOCK_EDGES);
        w.v_rows = take<const T *>(from, MAX_BLOCK_EDGES);
        w.feature_rows = take<const T *>(from, MAX_BLOCK_EDGES);
        w.prefetched = take<int64_t>(from, 1);
        return w;
    }
    Sums slot(int64_t index) const {
        char *from = slots + index * whole_lines(slot_bytes(in));
        Sums s;
        s.row_max = take<T>(from, in.width);
        s.row_sum = take<T>(from, in.width);
        s.values = take<T>(from, in.row);
        return s;
    }

    bool ids_in_range(int64_t begin, int64_t end) const {
        const EdgeProblem &p = in.problem;
        return all_below(p.indices + begin, end - begin, p.sources) &&
               (!in.uses_edge_ids() || all_below(p.edge_id + begin, end - begin, p.edges));
    }

    void process_node(int64_t, int thread, int64_t node, int64_t begin, int64_t end) const {
        T *values = out + node * in.row;
        if (begin == end) {
            for (int64_t x = 0; x < in.row; ++x) values[x] = 0;
            for (int64_t h = 0; h < in.shape.heads; ++h) lse[node * in.shape.heads + h] = NEGATIVE_INFINITY<T>;
            return;
        }
        Workspace w = workspace(thread);
        Sums sums{w.row_max, w.row_sum, values};
        bool short_node = end - begin <= in.block;
        process_edges(w, node, begin, end, sums, short_node);
        write_node(node, sums, !short_node);
    }

    void process_piece(int64_t, int thread, int64_t node, int64_t begin, int64_t end, int64_t index) const {
        Workspace w = workspace(thread);
        process_edges(w, node, begin, end, slot(index), false);
    }

    void merge_pieces(int64_t, int64_t into, int64_t from) const {
        Sums s = slot(into), other = slot(from);
        for (int64_t h = 0; h < in.shape.heads; ++h) {
            using Q = Quad<T>;
            Q mine = load<Q>(s.row_max + 4 * h), theirs = load<Q>(other.row_max + 4 * h), row_max = larger(mine, theirs);
            Q keep = exponential<T, 4>(mine - row_max), add = exponential<T, 4>(theirs - row_max);
            store(s.row_max + 4 * h, row_max);
            store(s.row_sum + 4 * h, load<Q>(s.row_sum + 4 * h) * keep + load<Q>(other.row_sum + 4 * h) * add);
            for (int64_t x = h * in.shape.dim; x < (h + 1) * in.shape.dim; ++x)
                s.values[x] = s.values[x] * keep[0] + other.values[x] * add[0];
        }
    }

    void finish_cut_node(int64_t, int64_t node, int64_t index) const {
        Sums s = slot(index);
        for (int64_t x = 0; x < in.row; ++x) out[node * in.row + x] = s.values[x];
        s.values = out + node * in.row;
        write_node(node, s, true);
    }

    // lse = row_max + log(row_sum), and the mean from the sum
    void write_node(int64_t node, const Sums &sums, bool divide) const {
        for (int64_t h = 0; h < in.shape.heads; ++h) {
            T row_sum = sum_of_four(sums.row_sum + 4 * h);
            if (divide)
                for (int64_t x = h * in.shape.dim; x < (h + 1) * in.shape.dim; ++x) sums.values[x] *= 1 / row_sum;
            sums.row_sum[h] = row_sum;  // 4 h >= h: nothing unread is overwritten
            sums.row_max[h] = sums.row_max[4 * h];
        }
        T *to = lse + node * in.shape.heads;
        for (int64_t h = 0; h < in.shape.heads; h += 4) {
            Quad<T> y = load<Quad<T>>(sums.row_max + h) + logarithm<T, 4>(load<Quad<T>>(sums.row_sum + h));
            for (int64_t x = 0; x < 4 && h + x < in.shape.heads; ++x) to[h + x] = y[x];
        }
    }

    void process_edges(Workspace &w, int64_t node, int64_t begin, int64_t end, const Sums &sums, bool divide) const {
        if (in.dropout.on)
            for (int64_t h = 0; h < in.shape.heads; ++h) w.hash[h] = in.head_hash(h);
        for (int64_t at = begin; at < end; at += in.block) {
            int64_t count = end - at < in.block ? end - at : in.block, quads = (count + 3) / 4;
            bool fresh = at == begin;
            collect_rows(w, at, count, quads);
            PrefetchRange next = next_edges_to_prefetch(w.prefetched, at + count, in.block, in.problem.edges);
            compute_scores(w, node, quads, prefetch_keys(next));
            fill_tail(w.scores + (quads - 1) * in.width, in.shape.heads, count - 4 * (quads - 1), NEGATIVE_INFINITY<T>);
            update_softmax(w, quads, fresh, sums);
            if (divide) divide_by_row_sum(w, quads, sums);
            if (in.dropout.on) apply_dropout(w, node, at, count, quads);
            if (in.weights) apply_edge_weights(w, at, count);
            loops.add_weighted_rows(in.shape, {w.scores, 1, 4}, w.v_rows, count, fresh, sums.values, prefetch_values(next));
        }
    }

    // The rows that a block reads; a short last quad repeats the last one.
    void collect_rows(Workspace &w, int64_t at, int64_t count, int64_t quads) const {
        const EdgeProblem &p = in.problem;
        for (int64_t e = 0; e < 4 * quads; ++e) {
            int64_t place = at + (e < count ? e : count - 1), source = p.indices[place];
            w.k_rows[e] = in.k + source * in.k_row;
            w.v_rows[e] = in.v + source * in.row;
        }
        const T *extra = in.map ? in.features : in.inside;
        int64_t extra_row = in.map ? p.edge_features : in.shape.heads;
        if (extra)
            for (int64_t e = 0; e < 4 * quads; ++e)
                w.feature_rows[e] = extra + p.edge_id[at + (e < count ? e : count - 1)] * extra_row;
    }

    Prefetch prefetch(const T *base, int64_t row, int64_t head, PrefetchRange next) const {
        return {reinterpret_cast<const char *>(base), in.problem.indices + next.at, next.count, row * int64_t(sizeof(T)),
                head * int64_t(sizeof(T))};
    }
    Prefetch prefetch_keys(PrefetchRange next) const {
        return prefetch(in.k, in.k_row, in.problem.kind == GAT ? in.shape.heads : in.shape.dim, next);
    }
    Prefetch prefetch_values(PrefetchRange next) const {
        return in.tied ? Prefetch{} : prefetch(in.v, in.row, in.shape.dim, next);
    }

    void compute_scores(Workspace &w, int64_t node, int64_t quads, const Prefetch &prefetch) const {
        const T *q = in.q + node * in.q_row;
        if (in.problem.kind == DOT)
            loops.compute_dot_scores(in.shape, q, w.k_rows, quads, in.factor, w.scores, prefetch);
        else if (in.problem.kind == GATV2)
            loops.compute_gatv2_scores[in.map != nullptr][false](in.shape, q, w.k_rows, quads, in.factor, w.scores, prefetch, in.a,
                                                       {w.feature_rows, in.map, in.problem.edge_features}, nullptr);
        else
            compute_gat_scores(w, q, quads, prefetch);
    }

    void compute_gat_scores(Workspace &w, const T *q, int64_t quads, const Prefetch &prefetch) const {
        for (int64_t quad = 0; quad < quads; ++quad) {
            T *scores = w.scores + quad * in.width;
            rows_to_quad(w.k_rows + 4 * quad, in.shape.heads, scores);
            for (int64_t h = 0; h < in.shape.heads; ++h)
                store(scores + 4 * h, load<Quad<T>>(scores + 4 * h) + q[h]);
            if (in.inside)
                for (int64_t h = 0; h < in.shape.heads; ++h)
                    for (int e = 0; e < 4; ++e) scores[4 * h + e] += w.feature_rows[4 * quad + e][h];
            leaky_relu_in_place(scores, in.width, in.factor);
        }
        prefetch.prefetch_head(0);
    }

    // replaces scores by exp(scores - row_max), and rescales earlier sums if a maximum rises
    void update_softmax(Workspace &w, int64_t quads, bool fresh, const Sums &sums) const {
        with_widest_vector<T>(in.width, [&](auto vector) {
            using V = decltype(vector);
            if (fresh) {
                quad_maxima<V>(w.scores, quads, in.width, sums.row_max);
                for (int64_t x = 0; x < in.width; ++x) sums.row_sum[x] = 0;
            } else {
                quad_maxima<V>(w.scores, quads, in.width, w.raised);
                rescale_to_new_max(w, sums);
            }
            quad_exponentials<V>(w.scores, quads, in.width, sums.row_max, sums.row_sum);
        });
    }

    void rescale_to_new_max(Workspace &w, const Sums &sums) const {
        for (int64_t h = 0; h < in.shape.heads; ++h) {
            T before = sums.row_max[4 * h], now = w.raised[4 * h];
            if (!(now > before)) continue;
            Quad<T> scale = exponential<T, 4>(splat<Quad<T>>(before - now));
            store(sums.row_max + 4 * h, splat<Quad<T>>(now));
            store(sums.row_sum + 4 * h, load<Quad<T>>(sums.row_sum + 4 * h) * scale);
            for (int64_t x = h * in.shape.dim; x < (h + 1) * in.shape.dim; ++x) sums.values[x] *= scale[0];
        }
    }

    // A node with a single block divides its coefficients instead of its row.
    void divide_by_row_sum(Workspace &w, int64_t quads, const Sums &sums) const {
        for (int64_t h = 0; h < in.shape.heads; ++h)
            store(w.raised + 4 * h, splat<Quad<T>>(1 / sum_of_four(sums.row_sum + 4 * h)));
        with_widest_vector<T>(in.width, [&](auto vector) {
            quad_scale<decltype(vector)>(w.scores, quads, in.width, w.raised);
        });
    }

    void apply_dropout(Workspace &w, int64_t node, int64_t at, int64_t count, int64_t quads) const {
        for (int64_t quad = 0; quad < quads; ++quad) {
            Words keys;
            for (int64_t e = 0; e < 4; ++e)
                keys[e] = in.key_number(in.problem.indices[at + (4 * quad + e < count ? 4 * quad + e : count - 1)]);
            Words query = in.query_number(node) - Words{};
            for (int64_t h = 0; h < in.shape.heads; ++h) {
                T *c = w.scores + quad * in.width + 4 * h;
                store(c, load<Quad<T>>(c) * dropout_factor<T, 4>(in.dropout, hash_query(w.hash[h], query), keys, in.keep));
            }
        }
    }

    void apply_edge_weights(Workspace &w, int64_t at, int64_t count) const {
        for (int64_t e = 0; e < count; ++e) {
            T weight = in.weights[in.problem.edge_id[at + e]];
            T *c = w.scores + e / 4 * in.width + e % 4;
            for (int64_t h = 0; h < in.shape.heads; ++h) c[4 * h] *= weight;
        }
    }
};

template <class T>
Status edges_forward(const EdgeProblem &p, const EdgeResult &result) {
    CheckedIndptr indptr;
    if (const Status status = indptr.copy_and_check(p.indptr, p.destinations, p.edges)) return status;
    Loops<T> loops = select_loops<T>(p.dim);
    const int gathered = p.v && p.kind != GAT ? 2 : 1;
    BatchEntry<T> shape(p, 0, gathered);
    Scratch threads, slots;
    int64_t parts = count_parts(p.edges);
    if (!threads.reserve_zeros(p.threads * whole_lines(EdgesForward<T>::workspace_bytes(shape)))) return NO_MEMORY;
    if (!slots.reserve(2 * parts * whole_lines(EdgesForward<T>::slot_bytes(shape)))) return NO_MEMORY;
    for (int64_t number = 0; number < p.batch; ++number) {
        BatchEntry<T> in(p, number, gathered);
        EdgesForward<T> work{in,
                        loops,
                        pointer_at<T>(result.out, number * p.destinations * in.row),
                        pointer_at<T>(result.lse, number * p.destinations * p.heads),
                        threads.as<char>(),
                        slots.as<char>()};
        if (!for_each_part(work, indptr.get(), p.destinations, p.threads, thread_number)) return OUT_OF_RANGE;
    }
    return DONE;
}

}  // namespace
}  // namespace polyhead

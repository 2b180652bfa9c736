// The first half of the backward pass, by source: dk, dv, and ds for the second half.
#pragma once

#include "edges/backward.hpp"

namespace polyhead {
namespace {

template <class T>
struct BySource {
    const Entry<T> &in;
    const Loops<T> &loops;
    const Between<T> &between;
    char *threads, *slots;

    struct Bench {
        T *scores, *dp, *lse, *delta, *factor, *inner;  // quads
        T *total, *keys, *values;                       // sums of a node: (heads, 4), (heads, dim) twice
        uint32_t *hash;
        const T **q_rows, **d_rows, **feature_rows;
        Signs<T> **signs;
        T **ds_rows;
        int32_t *edge;
        int64_t *asked;
    };
    struct Sums {
        T *total, *keys, *values;
    };

    static int64_t bench_bytes(const Entry<T> &in) {
        return (6 * MOST_EDGES * in.shape.heads + in.width + 2 * in.row) * sizeof(T) + 4 * in.shape.heads +
               MOST_EDGES * (5 * sizeof(void *) + 4) + 18 * 64;
    }
    static int64_t slot_bytes(const Entry<T> &in) { return (in.width + 2 * in.row) * sizeof(T) + 256; }

    Bench bench(int thread) const {
        char *from = threads + thread * ((bench_bytes(in) + 63) / 64 * 64);
        const int64_t quads = MOST_EDGES * in.shape.heads;
        Bench b;
        b.scores = take<T>(from, quads);
        b.dp = take<T>(from, quads);
        b.lse = take<T>(from, quads);
        b.delta = take<T>(from, quads);
        b.factor = take<T>(from, quads);
        b.inner = take<T>(from, quads);
        b.total = take<T>(from, in.width);
        b.keys = take<T>(from, in.row);
        b.values = take<T>(from, in.row);
        b.hash = take<uint32_t>(from, in.shape.heads);
        b.q_rows = take<const T *>(from, MOST_EDGES);
        b.d_rows = take<const T *>(from, MOST_EDGES);
        b.feature_rows = take<const T *>(from, MOST_EDGES);
        b.signs = take<Signs<T> *>(from, MOST_EDGES);
        b.ds_rows = take<T *>(from, MOST_EDGES);
        b.edge = take<int32_t>(from, MOST_EDGES);
        b.asked = take<int64_t>(from, 1);
        return b;
    }
    Sums slot(int64_t index) const {
        char *from = slots + index * ((slot_bytes(in) + 63) / 64 * 64);
        Sums s;
        s.total = take<T>(from, in.width);
        s.keys = take<T>(from, in.row);
        s.values = take<T>(from, in.row);
        return s;
    }

    bool in_range(int64_t begin, int64_t end) const {
        const Problem &p = in.problem;
        return all_below(between.to.out_destination + begin, end - begin, p.destinations) &&
               all_below(between.to.out_place + begin, end - begin, p.edges);
    }

    void whole(int64_t part, int thread, int64_t node, int64_t begin, int64_t end) const {
        Bench b = bench(thread);
        Sums sums{b.total, b.keys, b.values};
        run(b, node, begin, end, sums);
        close(part, node, sums);
    }
    void piece(int64_t, int thread, int64_t node, int64_t begin, int64_t end, int64_t index) const {
        Bench b = bench(thread);
        run(b, node, begin, end, slot(index));
    }
    void merge(int64_t, int64_t into, int64_t from) const {
        Sums s = slot(into), other = slot(from);
        for (int64_t x = 0; x < in.width; ++x) s.total[x] += other.total[x];
        for (int64_t x = 0; x < in.row; ++x) s.values[x] += other.values[x];
        if (in.problem.kind == GAT) return;
        for (int64_t x = 0; x < in.row; ++x) s.keys[x] += other.keys[x];
    }
    void finish(int64_t part, int64_t node, int64_t index) const { close(part, node, slot(index)); }

    void close(int64_t part, int64_t node, const Sums &sums) const {
        T *dk = between.dk + node * in.k_row;
        if (!in.tied)
            for (int64_t x = 0; x < in.row; ++x) between.dv[node * in.row + x] = sums.values[x];
        const T *add = in.tied ? sums.values : nullptr;
        if (in.problem.kind == GAT) {
            for (int64_t h = 0; h < in.shape.heads; ++h) dk[h] = sum_of_four(sums.total + 4 * h);
        } else if (in.problem.kind == DOT) {
            for (int64_t x = 0; x < in.row; ++x) dk[x] = in.factor * sums.keys[x] + (add ? add[x] : T(0));
        } else {
            for (int64_t h = 0; h < in.shape.heads; ++h) sums.total[h] = sum_of_four(sums.total + 4 * h);
            T *da = between.da ? between.da_parts + part * in.row : nullptr;
            close_gatv2(in, in.k + node * in.row, sums.total, sums.keys, dk, da, add);
        }
    }

    void run(Bench &b, int64_t node, int64_t begin, int64_t end, const Sums &sums) const {
        for (int64_t x = 0; x < in.width; ++x) sums.total[x] = 0;
        if (begin == end)
            for (int64_t x = 0; x < in.row; ++x) sums.keys[x] = sums.values[x] = 0;
        if (in.dropout.on)
            for (int64_t h = 0; h < in.shape.heads; ++h) b.hash[h] = in.head_hash(h);
        for (int64_t at = begin; at < end; at += in.block) {
            int64_t count = end - at < in.block ? end - at : in.block, quads = (count + 3) / 4;
            bool fresh = at == begin;
            Next next = next_edges(b.asked, at + count, in.block, in.problem.edges);
            gather(b, at, count, quads);
            ask_records(next);
            score(b, node, quads, next);
            loops.dots(in.shape, in.v + node * in.row, b.d_rows, quads, T(1), b.dp,
                       ahead(between.d_out, in.row, in.shape.dim, next));
            soften(b, node, at, count, quads);
            loops.accumulate(in.shape, {b.scores, 1, 4}, b.d_rows, count, fresh, sums.values, Ahead{});
            if (in.problem.kind == DOT)
                loops.accumulate(in.shape, {b.dp, 1, 4}, b.q_rows, count, fresh, sums.keys, Ahead{});
            if (in.problem.kind == GATV2)
                loops.accumulate_signs(in.shape, {b.dp, 1, 4}, b.signs, count, fresh, sums.keys);
            with_vector<T>(in.width, [&](auto vector) {
                quad_sums<decltype(vector)>(b.dp, quads, in.width, sums.total);
            });
            for (int64_t quad = 0; quad < quads; ++quad)
                quad_to_rows(b.dp + quad * in.width, in.shape.heads, b.ds_rows + 4 * quad);
        }
    }

    Ahead ahead(const T *base, int64_t row, int64_t head, Next next) const {
        return {reinterpret_cast<const char *>(base), between.to.out_destination + next.at, next.count,
                row * int64_t(sizeof(T)), head * int64_t(sizeof(T))};
    }

    void gather(Bench &b, int64_t at, int64_t count, int64_t quads) const {
        const Problem &p = in.problem;
        const T *extra = in.map ? in.features : in.inside;
        const bool numbered = extra || in.weights || between.d_weights;
        const int64_t extra_row = in.map ? p.edge_features : in.shape.heads;
        for (int64_t e = 0; e < 4 * quads; ++e) {
            int64_t out = at + (e < count ? e : count - 1);
            int64_t node = between.to.out_destination[out], place = between.to.out_place[out];
            b.q_rows[e] = in.q + node * in.q_row;
            b.d_rows[e] = between.d_out + node * in.row;
            b.signs[e] = between.signs + place * between.signs_row;
            b.ds_rows[e] = between.ds + place * in.shape.heads;
            if (numbered) b.edge[e] = p.edge[place];
            if (extra) b.feature_rows[e] = extra + b.edge[e] * extra_row;
        }
        for (int64_t quad = 0; quad < quads; ++quad) {
            const T *stats[4];
            for (int e = 0; e < 4; ++e) {
                int64_t out = at + (4 * quad + e < count ? 4 * quad + e : count - 1);
                stats[e] = between.stats + int64_t(between.to.out_destination[out]) * 2 * in.shape.heads;
            }
            rows_to_quad(stats, in.shape.heads, b.lse + quad * in.width);
            for (int e = 0; e < 4; ++e) stats[e] += in.shape.heads;
            rows_to_quad(stats, in.shape.heads, b.delta + quad * in.width);
        }
    }

    // The places that the next block writes, and what it reads beside rows.
    void ask_records(Next next) const {
        for (int64_t x = next.at; x < next.at + next.count; ++x) {
            int64_t place = between.to.out_place[x], node = between.to.out_destination[x];
            __builtin_prefetch(between.ds + place * in.shape.heads, 1);
            if (in.problem.kind == GATV2) __builtin_prefetch(between.signs + place * between.signs_row, 1);
            __builtin_prefetch(between.stats + node * 2 * in.shape.heads);
        }
    }

    void score(Bench &b, int64_t node, int64_t quads, Next next) const {
        const T *k = in.k + node * in.k_row;
        Ahead rows = ahead(in.q, in.q_row, in.problem.kind == GAT ? in.shape.heads : in.shape.dim, next);
        if (in.problem.kind == DOT) {
            loops.dots(in.shape, k, b.q_rows, quads, in.factor, b.scores, rows);
        } else if (in.problem.kind == GATV2) {
            loops.gatv2[in.map != nullptr][true](in.shape, k, b.q_rows, quads, in.factor, b.scores, rows, in.a,
                                                 {b.feature_rows, in.map, in.problem.edge_features}, b.signs);
        } else {
            score_gat(b, k, quads);
            rows.head(0);
        }
    }

    // GAT keeps what leaky was given: its derivative multiplies ds later
    void score_gat(Bench &b, const T *k, int64_t quads) const {
        for (int64_t quad = 0; quad < quads; ++quad) {
            T *inner = b.inner + quad * in.width, *scores = b.scores + quad * in.width;
            rows_to_quad(b.q_rows + 4 * quad, in.shape.heads, inner);
            for (int64_t h = 0; h < in.shape.heads; ++h)
                for (int e = 0; e < 4; ++e)
                    inner[4 * h + e] += k[h] + (in.inside ? b.feature_rows[4 * quad + e][h] : T(0));
            for (int64_t x = 0; x < in.width; x += 4) {
                Quad<T> y = load<Quad<T>>(inner + x);
                store(scores + x, y > T(0) ? y : in.factor * y);
            }
        }
    }

    // scores become the coefficients of d_out's rows, dp becomes ds; both are 0 where the last quad is short
    void soften(Bench &b, int64_t node, int64_t at, int64_t count, int64_t quads) const {
        const bool scaled = in.dropout.on || in.weights;
        if (in.dropout.on) drop(b, node, at, count, quads);
        const bool wants_weights = between.d_weights;
        constexpr int W = NATIVE<T>;
        using V = Vec<T, W>;
        for (int64_t x = 0; x < quads * in.width; x += W) {
            V alpha = exponential<T, W>(load<V>(b.scores + x) - load<V>(b.lse + x));
            store(b.scores + x, alpha);
        }
        if (wants_weights) put_weights(b, count);
        if (scaled) scale(b, count, quads);
        for (int64_t x = 0; x < quads * in.width; x += W) {
            V alpha = load<V>(b.scores + x), dp = load<V>(b.dp + x), delta = load<V>(b.delta + x);
            V factor = scaled ? load<V>(b.factor + x) : splat<V>(T(1));
            V ds = alpha * (factor * dp - delta);
            if (in.problem.kind == GAT) ds = load<V>(b.inner + x) > T(0) ? ds : in.factor * ds;
            store(b.scores + x, alpha * factor);
            store(b.dp + x, ds);
        }
        if (between.d_inside) put_inside(b, count);
        tail(b, count, quads);
    }

    void tail(Bench &b, int64_t count, int64_t quads) const {
        const int64_t rest = count - 4 * (quads - 1), last = (quads - 1) * in.width;
        fill_tail(b.scores + last, in.shape.heads, rest, T(0));
        fill_tail(b.dp + last, in.shape.heads, rest, T(0));
        // zeros of the missing edges go to a row that nobody reads
        for (int64_t e = rest; e < 4; ++e) b.ds_rows[4 * (quads - 1) + e] = b.inner;
    }

    // factor = the dropout factor of each pair
    void drop(Bench &b, int64_t node, int64_t at, int64_t count, int64_t quads) const {
        for (int64_t quad = 0; quad < quads; ++quad) {
            Words queries, key = uint32_t(node) - Words{};
            for (int64_t e = 0; e < 4; ++e) {
                const int64_t here = 4 * quad + e < count ? 4 * quad + e : count - 1;
                queries[e] = uint32_t(between.to.out_destination[at + here]);
            }
            for (int64_t h = 0; h < in.shape.heads; ++h)
                store(b.factor + quad * in.width + 4 * h,
                      dropout_factor<T>(in.dropout, b.hash[h], queries, key, in.kept));
        }
    }

    void scale(Bench &b, int64_t count, int64_t quads) const {
        if (!in.dropout.on)
            for (int64_t x = 0; x < quads * in.width; ++x) b.factor[x] = 1;
        if (!in.weights) return;
        for (int64_t e = 0; e < count; ++e)
            for (int64_t h = 0; h < in.shape.heads; ++h)
                b.factor[e / 4 * in.width + 4 * h + e % 4] *= in.weights[b.edge[e]];
    }

    void put_weights(Bench &b, int64_t count) const {
        for (int64_t e = 0; e < count; ++e) {
            T sum = 0;
            for (int64_t h = 0; h < in.shape.heads; ++h) {
                const int64_t x = e / 4 * in.width + 4 * h + e % 4;
                sum += b.scores[x] * b.dp[x] * (in.dropout.on ? b.factor[x] : T(1));
            }
            put(between.d_weights + b.edge[e], sum, in.number);
        }
    }

    void put_inside(Bench &b, int64_t count) const {
        for (int64_t e = 0; e < count; ++e)
            for (int64_t h = 0; h < in.shape.heads; ++h)
                put(between.d_inside + int64_t(b.edge[e]) * in.shape.heads + h, b.dp[e / 4 * in.width + 4 * h + e % 4],
                    in.number);
    }
};

}  // namespace
}  // namespace polyhead

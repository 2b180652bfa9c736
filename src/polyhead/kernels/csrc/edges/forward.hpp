// The forward pass, in the order of the destinations: scores, softmax and weighted sum of a block of edges at a time,
// with the running maximum and sum of an online softmax between blocks.
#pragma once

#include "edges/entry.hpp"

namespace polyhead {
namespace {

template <class T>
struct Forward {
    const Entry<T> &in;
    const Loops<T> &loops;
    T *out, *lse;
    char *threads, *slots;

    // scratch of a thread
    struct Bench {
        T *scores, *most, *total, *raised;
        uint32_t *hash;
        const T **k_rows, **v_rows, **feature_rows;
        int64_t *asked;
    };
    // the sums of a node
    struct Sums {
        T *most, *total, *values;  // (heads, 4), (heads, 4), (heads, dim)
    };

    static int64_t bench_bytes(const Entry<T> &in) {
        return (MOST_EDGES + 12) * in.shape.heads * 2 * sizeof(T) + 3 * MOST_EDGES * sizeof(void *) + 16 * 64;
    }
    static int64_t slot_bytes(const Entry<T> &in) { return (2 * in.width + in.row) * sizeof(T) + 256; }

    Bench bench(int thread) const {
        char *from = threads + thread * ((bench_bytes(in) + 63) / 64 * 64);
        Bench b;
        b.scores = take<T>(from, MOST_EDGES * in.shape.heads);
        b.most = take<T>(from, in.width);
        b.total = take<T>(from, in.width);
        b.raised = take<T>(from, in.width);
        b.hash = take<uint32_t>(from, in.shape.heads);
        b.k_rows = take<const T *>(from, MOST_EDGES);
        b.v_rows = take<const T *>(from, MOST_EDGES);
        b.feature_rows = take<const T *>(from, MOST_EDGES);
        b.asked = take<int64_t>(from, 1);
        return b;
    }
    Sums slot(int64_t index) const {
        char *from = slots + index * ((slot_bytes(in) + 63) / 64 * 64);
        Sums s;
        s.most = take<T>(from, in.width);
        s.total = take<T>(from, in.width);
        s.values = take<T>(from, in.row);
        return s;
    }

    bool in_range(int64_t begin, int64_t end) const {
        const Problem &p = in.problem;
        return all_below(p.source + begin, end - begin, p.sources) &&
               (!in.numbered() || all_below(p.edge + begin, end - begin, p.edges));
    }

    void whole(int64_t, int thread, int64_t node, int64_t begin, int64_t end) const {
        T *values = out + node * in.row;
        if (begin == end) {
            for (int64_t x = 0; x < in.row; ++x) values[x] = 0;
            for (int64_t h = 0; h < in.shape.heads; ++h) lse[node * in.shape.heads + h] = NEGATIVE_INFINITY<T>;
            return;
        }
        Bench b = bench(thread);
        Sums sums{b.most, b.total, values};
        bool short_node = end - begin <= in.block;
        run(b, node, begin, end, sums, short_node);
        close(node, sums, !short_node);
    }

    void piece(int64_t, int thread, int64_t node, int64_t begin, int64_t end, int64_t index) const {
        Bench b = bench(thread);
        run(b, node, begin, end, slot(index), false);
    }

    void merge(int64_t, int64_t into, int64_t from) const {
        Sums s = slot(into), other = slot(from);
        for (int64_t h = 0; h < in.shape.heads; ++h) {
            using Q = Quad<T>;
            Q mine = load<Q>(s.most + 4 * h), theirs = load<Q>(other.most + 4 * h), most = larger(mine, theirs);
            Q keep = exponential<T, 4>(mine - most), add = exponential<T, 4>(theirs - most);
            store(s.most + 4 * h, most);
            store(s.total + 4 * h, load<Q>(s.total + 4 * h) * keep + load<Q>(other.total + 4 * h) * add);
            for (int64_t x = h * in.shape.dim; x < (h + 1) * in.shape.dim; ++x)
                s.values[x] = s.values[x] * keep[0] + other.values[x] * add[0];
        }
    }

    void finish(int64_t, int64_t node, int64_t index) const {
        Sums s = slot(index);
        for (int64_t x = 0; x < in.row; ++x) out[node * in.row + x] = s.values[x];
        s.values = out + node * in.row;
        close(node, s, true);
    }

    // lse = most + log(total), and the mean from the sum
    void close(int64_t node, const Sums &sums, bool divide) const {
        for (int64_t h = 0; h < in.shape.heads; ++h) {
            T total = sum_of_four(sums.total + 4 * h);
            if (divide)
                for (int64_t x = h * in.shape.dim; x < (h + 1) * in.shape.dim; ++x) sums.values[x] *= 1 / total;
            sums.total[h] = total;  // 4 h is never below h: nothing unread is overwritten
            sums.most[h] = sums.most[4 * h];
        }
        T *to = lse + node * in.shape.heads;
        for (int64_t h = 0; h < in.shape.heads; h += 4) {
            Quad<T> y = load<Quad<T>>(sums.most + h) + logarithm<T, 4>(load<Quad<T>>(sums.total + h));
            for (int64_t x = 0; x < 4 && h + x < in.shape.heads; ++x) to[h + x] = y[x];
        }
    }

    void run(Bench &b, int64_t node, int64_t begin, int64_t end, const Sums &sums, bool divide) const {
        if (in.dropout.on)
            for (int64_t h = 0; h < in.shape.heads; ++h) b.hash[h] = in.head_hash(h);
        for (int64_t at = begin; at < end; at += in.block) {
            int64_t count = end - at < in.block ? end - at : in.block, quads = (count + 3) / 4;
            bool fresh = at == begin;
            gather(b, at, count, quads);
            Next next = next_edges(b.asked, at + count, in.block, in.problem.edges);
            score(b, node, quads, ahead_keys(next));
            fill_tail(b.scores + (quads - 1) * in.width, in.shape.heads, count - 4 * (quads - 1), NEGATIVE_INFINITY<T>);
            softmax(b, quads, fresh, sums);
            if (divide) divide_by_total(b, quads, sums);
            if (in.dropout.on) drop(b, node, at, count, quads);
            if (in.weights) weigh(b, at, count);
            loops.accumulate(in.shape, {b.scores, 1, 4}, b.v_rows, count, fresh, sums.values, ahead_values(next));
        }
    }

    // Which rows a block reads; the last one again where the last quad is short.
    void gather(Bench &b, int64_t at, int64_t count, int64_t quads) const {
        const Problem &p = in.problem;
        for (int64_t e = 0; e < 4 * quads; ++e) {
            int64_t place = at + (e < count ? e : count - 1), source = p.source[place];
            b.k_rows[e] = in.k + source * in.k_row;
            b.v_rows[e] = in.v + source * in.row;
        }
        const T *extra = in.map ? in.features : in.inside;
        int64_t extra_row = in.map ? p.edge_features : in.shape.heads;
        if (extra)
            for (int64_t e = 0; e < 4 * quads; ++e)
                b.feature_rows[e] = extra + p.edge[at + (e < count ? e : count - 1)] * extra_row;
    }

    Ahead ahead(const T *base, int64_t row, int64_t head, Next next) const {
        return {reinterpret_cast<const char *>(base), in.problem.source + next.at, next.count, row * int64_t(sizeof(T)),
                head * int64_t(sizeof(T))};
    }
    Ahead ahead_keys(Next next) const {
        return ahead(in.k, in.k_row, in.problem.kind == GAT ? in.shape.heads : in.shape.dim, next);
    }
    Ahead ahead_values(Next next) const {
        return in.tied ? Ahead{} : ahead(in.v, in.row, in.shape.dim, next);
    }

    void score(Bench &b, int64_t node, int64_t quads, const Ahead &ahead) const {
        const T *q = in.q + node * in.q_row;
        if (in.problem.kind == DOT)
            loops.dots(in.shape, q, b.k_rows, quads, in.factor, b.scores, ahead);
        else if (in.problem.kind == GATV2)
            loops.gatv2[in.map != nullptr][false](in.shape, q, b.k_rows, quads, in.factor, b.scores, ahead, in.a,
                                                       {b.feature_rows, in.map, in.problem.edge_features}, nullptr);
        else
            score_gat(b, q, quads, ahead);
    }

    void score_gat(Bench &b, const T *q, int64_t quads, const Ahead &ahead) const {
        for (int64_t quad = 0; quad < quads; ++quad) {
            T *scores = b.scores + quad * in.width;
            rows_to_quad(b.k_rows + 4 * quad, in.shape.heads, scores);
            for (int64_t h = 0; h < in.shape.heads; ++h)
                store(scores + 4 * h, load<Quad<T>>(scores + 4 * h) + q[h]);
            if (in.inside)
                for (int64_t h = 0; h < in.shape.heads; ++h)
                    for (int e = 0; e < 4; ++e) scores[4 * h + e] += b.feature_rows[4 * quad + e][h];
            leaky_all(scores, in.width, in.factor);
        }
        ahead.head(0);
    }

    // scores become exp(scores - most); earlier sums are scaled where a maximum rose
    void softmax(Bench &b, int64_t quads, bool fresh, const Sums &sums) const {
        with_vector<T>(in.width, [&](auto vector) {
            using V = decltype(vector);
            if (fresh) {
                quad_maxima<V>(b.scores, quads, in.width, sums.most);
                for (int64_t x = 0; x < in.width; ++x) sums.total[x] = 0;
            } else {
                quad_maxima<V>(b.scores, quads, in.width, b.raised);
                raise(b, sums);
            }
            quad_exponentials<V>(b.scores, quads, in.width, sums.most, sums.total);
        });
    }

    void raise(Bench &b, const Sums &sums) const {
        for (int64_t h = 0; h < in.shape.heads; ++h) {
            T before = sums.most[4 * h], now = b.raised[4 * h];
            if (!(now > before)) continue;
            Quad<T> scale = exponential<T, 4>(splat<Quad<T>>(before - now));
            store(sums.most + 4 * h, splat<Quad<T>>(now));
            store(sums.total + 4 * h, load<Quad<T>>(sums.total + 4 * h) * scale);
            for (int64_t x = h * in.shape.dim; x < (h + 1) * in.shape.dim; ++x) sums.values[x] *= scale[0];
        }
    }

    // A node of one block divides its few coefficients rather than its row.
    void divide_by_total(Bench &b, int64_t quads, const Sums &sums) const {
        for (int64_t h = 0; h < in.shape.heads; ++h)
            store(b.raised + 4 * h, splat<Quad<T>>(1 / sum_of_four(sums.total + 4 * h)));
        with_vector<T>(in.width, [&](auto vector) {
            quad_scale<decltype(vector)>(b.scores, quads, in.width, b.raised);
        });
    }

    void drop(Bench &b, int64_t node, int64_t at, int64_t count, int64_t quads) const {
        for (int64_t quad = 0; quad < quads; ++quad) {
            Words keys;
            for (int64_t e = 0; e < 4; ++e)
                keys[e] = uint32_t(in.problem.source[at + (4 * quad + e < count ? 4 * quad + e : count - 1)]);
            Words query = uint32_t(node) - Words{};
            for (int64_t h = 0; h < in.shape.heads; ++h) {
                T *c = b.scores + quad * in.width + 4 * h;
                store(c, load<Quad<T>>(c) * dropout_factor<T>(in.dropout, b.hash[h], query, keys, in.kept));
            }
        }
    }

    void weigh(Bench &b, int64_t at, int64_t count) const {
        for (int64_t e = 0; e < count; ++e) {
            T weight = in.weights[in.problem.edge[at + e]];
            T *c = b.scores + e / 4 * in.width + e % 4;
            for (int64_t h = 0; h < in.shape.heads; ++h) c[4 * h] *= weight;
        }
    }
};

template <class T>
Status forward(const Problem &p, const Result &result) {
    Starts first;
    if (const Status status = first.copy(p.first, p.destinations, p.edges)) return status;
    Loops<T> loops = loops_for<T>(p.dim);
    const int gathered = p.v && p.kind != GAT ? 2 : 1;
    Entry<T> shape(p, 0, gathered);
    Scratch threads, slots;
    int64_t parts = count_parts(p.edges);
    if (!threads.reserve_zeros(p.threads * ((Forward<T>::bench_bytes(shape) + 63) / 64 * 64))) return NO_MEMORY;
    if (!slots.reserve(2 * parts * ((Forward<T>::slot_bytes(shape) + 63) / 64 * 64))) return NO_MEMORY;
    for (int64_t number = 0; number < p.batch; ++number) {
        Entry<T> in(p, number, gathered);
        Forward<T> work{in,
                        loops,
                        offset<T>(result.out, number * p.destinations * in.row),
                        offset<T>(result.lse, number * p.destinations * p.heads),
                        threads.as<char>(),
                        slots.as<char>()};
        if (!over_parts(work, first.get(), p.destinations, p.threads, thread_number)) return OUT_OF_RANGE;
    }
    return DONE;
}

}  // namespace
}  // namespace polyhead

// Attention over few keys: one batch entry and key head at a time, all of it in the nearest caches.
//
// Scores are computed for vectors of keys, so keys and values are transposed; sums over keys for vectors of features. The
// forward pass saves only the log-sum-exp: recomputing the weights in backward costs less than reading them.
#pragma once

#include "linalg/finite.hpp"
#include "linalg/row_products.hpp"
#include "simd/hash.hpp"
#include "simd/math.hpp"
#include "simd/scratch.hpp"
#include "kernel_arguments.hpp"
#include "short/bias.hpp"

namespace polyhead {
namespace {

// Queries processed together: the data of a key is read once for all of them. Their sums fill half of the registers.
constexpr int BLOCK_QUERIES = VECTOR_BYTES == 64 ? 8 : 4;

template <class T>
struct ShortWork {
    using Products = RowProducts<T>;
    static constexpr int L = Products::L, HALF = Products::HALF;
    using V = Vec<T, L>;

    const Short &in;
    // padded sizes: keys to whole vectors, features to half vectors; the padding is always zero
    int64_t keys, dim, width;
    // (dim, keys), (keys, dim), (width, keys), (keys, width), and the gradients of keys and values
    T *k_transposed, *k, *v_transposed, *v, *dk, *dv;
    // of BLOCK_QUERIES queries: weights, score gradients, weights after dropout; and a row of features each
    T *p, *ds, *p_dropped, *q, *d_out;
    // of the queries of a head: the largest score, and the sum of exponentials
    T *row_max, *row_sum;
    bool checked = false, finite = false;
    const bool biased;
    // the gradients of the bias: where they are summed, and the sums
    BiasSums<T> bias_sums[2];
    T *bias_grads[2] = {};

    // vectors of two lanes are padded in pairs
    static constexpr int UNIT = L > 4 ? L : 4;
    static int64_t whole(int64_t n) { return (n + UNIT - 1) / UNIT * UNIT; }
    static int64_t halves(int64_t n) { return (n + HALF - 1) / HALF * HALF; }

    static BiasSums<T> sums_of(const Short &in, const ShortGradients *g, int term) {
        return BiasSums<T>(in, g ? g->d_bias[term] : ShortBias{}, whole(in.keys));
    }

    // the numbers of scratch memory per thread
    static int64_t workspace_size(const Short &in, const ShortGradients *g) {
        const int64_t keys = whole(in.keys), dim = halves(in.dim), width = halves(in.width);
        int64_t size = 3 * keys * (dim + width) + BLOCK_QUERIES * (3 * keys + dim + width) + 2 * whole(in.queries);
        for (int term : {0, 1}) size += sums_of(in, g, term).shared ? 0 : sums_of(in, g, term).size(in);
        return (size + 15) / 16 * 16;
    }

    // `workspace`: workspace_size zeros
    ShortWork(const Short &problem, const ShortGradients *g, T *workspace)
        : in(problem), keys(whole(in.keys)), dim(halves(in.dim)), width(halves(in.width)),
          biased(in.bias[0].data || in.bias[1].data), bias_sums{sums_of(in, g, 0), sums_of(in, g, 1)} {
        auto take = [&](int64_t count) {
            T *taken = workspace;
            workspace += count;
            return taken;
        };
        k_transposed = take(keys * dim), k = take(keys * dim), dk = take(keys * dim);
        v_transposed = take(keys * width), v = take(keys * width), dv = take(keys * width);
        p = take(BLOCK_QUERIES * keys), ds = take(BLOCK_QUERIES * keys), p_dropped = take(BLOCK_QUERIES * keys);
        q = take(BLOCK_QUERIES * dim), d_out = take(BLOCK_QUERIES * width);
        row_max = take(whole(in.queries)), row_sum = take(whole(in.queries));
        for (int term : {0, 1})
            if (!bias_sums[term].shared) bias_grads[term] = take(bias_sums[term].size(in));
    }

    static const T *at(const Strided &x, int64_t b, int64_t h, int64_t i) {
        return static_cast<const T *>(x.data) + b * x.batch + h * x.head + i * x.item;
    }
    static T *to(const Strided &x, int64_t b, int64_t h, int64_t i) { return const_cast<T *>(at(x, b, h, i)); }

    // The keys [first, stop) that some queries may attend to, [begin, end) in whole vectors, and whether all of these queries
    // have the same keys.
    struct Span {
        int64_t first, stop, begin, end;
        bool same;
    };

    Span span(int64_t b, int64_t query, int count) const {
        int64_t first = in.keys, stop = 0;
        bool same = true;
        for (int r = 0; r < count; ++r) {
            const int64_t from = first_of(b, query + r), until = stop_of(b, query + r);
            same &= from == first_of(b, query) && until == stop_of(b, query);
            if (from >= until) continue;
            first = from < first ? from : first, stop = until > stop ? until : stop;
        }
        if (first >= stop) return {0, 0, 0, 0, true};
        return {first, stop, first / L * L, whole(stop), same};
    }

    // Whether the keys and values of a head are finite; checked at the first call.
    bool keys_finite() {
        if (!checked) finite = all_finite(k, in.keys * dim) && all_finite(v, in.keys * width);
        checked = true;
        return finite;
    }
    int64_t interval(int64_t b, int64_t query) const { return (in.interval_rows > 1 ? b * in.queries : 0) + query; }
    // clamped, so that nothing is read beyond the keys
    int64_t first_of(int64_t b, int64_t query) const {
        const int64_t first = in.first[interval(b, query)];
        return first < 0 ? 0 : first;
    }
    int64_t stop_of(int64_t b, int64_t query) const {
        const int64_t stop = in.stop[interval(b, query)];
        return stop > in.keys ? in.keys : stop;
    }

    void prefetch(const Strided &x, int64_t b, int64_t h, int64_t items, int64_t features) const {
        const T *row = at(x, b, h, 0);
        for (int64_t i = 0; i < items; ++i, row += x.item) {
            for (int64_t d = 0; d < features; d += 64 / int64_t(sizeof(T))) __builtin_prefetch(row + d, 0, 2);
            __builtin_prefetch(row + features - 1, 0, 2);
        }
    }

    // elements c to c + L of a row, `other` outside [first, stop)
    POLYHEAD_INLINE V masked(const T *row, int64_t c, Int<T> first, Int<T> stop, T other) const {
        const auto key = iota<Int<T>, L>() + Int<T>(c);
        return ((key >= first) & (key < stop)) ? load<V>(row + c) : splat<V>(other);
    }

    // the dropout factors of keys c to c + L
    POLYHEAD_INLINE V dropout_at(Dropout dropout, uint32_t query, int64_t c) const {
        return dropout_factor<T, L>(dropout, query, iota<uint32_t, L>() + uint32_t(c), T(1 / (1 - in.dropout)));
    }

    // Adds the bias to the scores of R queries. Not inlined, nor is the next: calls without a bias keep their registers.
    template <int R>
    __attribute__((noinline)) void add_bias(int64_t b, int64_t h, int64_t query, const Span &keys_of) {
        for (const ShortBias &term : in.bias) {
            if (!term.data) continue;
            const T *from = static_cast<const T *>(term.data) + b * term.batch + h * term.head + query * term.query;
            for (int r = 0; r < R; ++r)
                add_bias_row(from + r * term.query, term.key, in.keys, p + r * keys, keys_of.begin, keys_of.end);
        }
    }

    // Adds the gradients of the scores of R queries to those of the bias.
    template <int R>
    __attribute__((noinline)) void add_bias_gradients(const ShortGradients &g, int64_t b, int64_t h, int64_t query, const Span &keys_of) {
        for (int term : {0, 1}) {
            const BiasSums<T> &sums = bias_sums[term];
            if (!sums.needed) continue;
            T *into = bias_grads[term] + sums.head(h) + sums.start + query * sums.row;
            for (int r = 0; r < R; ++r, into += sums.row) {
                const T *grads = ds + r * keys;
                const Int<T> first = Int<T>(first_of(b, query + r)), stop = Int<T>(stop_of(b, query + r));
                V sum{};
                for (int64_t c = keys_of.begin; c < keys_of.end; c += L) {
                    const V x = masked(grads, c, first, stop, T(0));
                    if (g.d_bias[term].key)
                        store(into + c, load<V>(into + c) + x);
                    else
                        sum += x;
                }
                if (!g.d_bias[term].key) *into += sum_lanes(sum);
            }
        }
    }

    template <int R>
    void forward_rows(int64_t b, int64_t h, int64_t query, Dropout dropout, uint32_t head) {
        const Span keys_of = span(b, query, R);
        if constexpr (R > 1)
            if (!keys_of.same && !keys_finite()) {
                // zero times NaN is NaN: one query at a time reads only its own keys
                for (int r = 0; r < R; ++r) forward_rows<1>(b, h, query + r, dropout, head);
                return;
            }
        Products::template product<R>(at(in.q, b, h, query), in.q.item, k_transposed, 0, in.dim, keys, p, keys_of.begin, keys_of.end);
        if (biased) add_bias<R>(b, h, query, keys_of);
        // separate short loops, so that the CPU overlaps several rows of each
        for (int r = 0; r < R; ++r) {
            T *row = p + r * keys;
            const Int<T> first = Int<T>(first_of(b, query + r)), stop = Int<T>(stop_of(b, query + r));
            V high = splat<V>(NEGATIVE_INFINITY<T>);
            for (int64_t c = keys_of.begin; c < keys_of.end; c += L) {
                const V x = masked(row, c, first, stop, NEGATIVE_INFINITY<T>);
                high = larger(high, x);
                store(row + c, x);
            }
            const T found = max_lane(high);
            row_max[query + r] = found == NEGATIVE_INFINITY<T> ? T(0) : found;
        }
        for (int r = 0; r < R; ++r) {
            T *row = p + r * keys;
            V sum{};
            for (int64_t c = keys_of.begin; c < keys_of.end; c += L) {
                const V x = exponential<T, L>(load<V>(row + c) - row_max[query + r]);
                sum += x;
                store(row + c, x);
            }
            row_sum[query + r] = sum_lanes(sum);
        }
        for (int r = 0; r < R; ++r) {
            T *row = p + r * keys;
            const T sum = row_sum[query + r], inverse = sum == 0 ? T(0) : 1 / sum;
            const uint32_t hashed = dropout.on ? hash_query(head, uint32_t(query + r)) : 0;
            for (int64_t c = keys_of.begin; c < keys_of.end; c += L) {
                const V x = load<V>(row + c) * inverse;
                store(row + c, dropout.on ? x * dropout_at(dropout, hashed, c) : x);
            }
        }
        Products::template product<R>(p, keys, v, keys_of.first, keys_of.stop, width, d_out, 0, width);
        copy_rows<L>(d_out, width, to(in.out, b, h, query), in.out.item, R, in.width);
    }

    // the log-sum-exp of all queries of a head, in vectors
    void write_lse(int64_t b, int64_t h) {
        for (int64_t i = 0; i < in.queries; i += L) {
            const V sum = load<V>(row_sum + i), lse = load<V>(row_max + i) + logarithm<T, L>(sum);
            store(row_sum + i, sum == T(0) ? splat<V>(NEGATIVE_INFINITY<T>) : lse);
        }
        copy_rows<L>(row_sum, 0, static_cast<T *>(in.lse) + (b * in.heads + h) * in.queries, 0, 1, in.queries);
    }

    // Whether the queries and gradients of these rows are finite, and their scores with a bias; q and d_out have been copied.
    bool rows_finite(const ShortGradients &g, int64_t b, int64_t h, int64_t query, int64_t rows) const {
        // a bias of NaN or inf makes the log-sum-exp NaN or inf; one of -inf has a weight of zero
        const T *lse = static_cast<const T *>(in.lse) + (b * in.heads + h) * in.queries + query;
        for (int64_t r = 0; biased && r < rows; ++r)
            if (!(lse[r] < -NEGATIVE_INFINITY<T>)) return false;
        const T *d_lse = g.d_lse ? static_cast<const T *>(g.d_lse) + (b * in.heads + h) * in.queries + query : nullptr;
        return all_finite(q, rows * dim) && all_finite(d_out, rows * width) && (!d_lse || all_finite(d_lse, rows));
    }

    template <int R>
    void backward_rows(const ShortGradients &g, int64_t b, int64_t h, int64_t query, Dropout dropout, uint32_t head) {
        copy_rows<L>(at(in.q, b, h, query), in.q.item, q, dim, R, in.dim);
        copy_rows<L>(at(g.d_out, b, h, query), g.d_out.item, d_out, width, R, in.width);
        const Span keys_of = span(b, query, R);
        if constexpr (R > 1)
            if (!keys_of.same && !(keys_finite() && rows_finite(g, b, h, query, R))) {
                for (int r = 0; r < R; ++r) backward_rows<1>(g, b, h, query + r, dropout, head);
                return;
            }
        Products::template product<R>(q, dim, k_transposed, 0, in.dim, keys, p, keys_of.begin, keys_of.end);
        if (biased) add_bias<R>(b, h, query, keys_of);
        Products::template product<R>(d_out, width, v_transposed, 0, in.width, keys, ds, keys_of.begin, keys_of.end);
        const int64_t number = (b * in.heads + h) * in.queries + query;
        T *const dropped = dropout.on ? p_dropped : p;
        V delta_sums[R];
        for (int r = 0; r < R; ++r) {
            const T lse = static_cast<const T *>(in.lse)[number + r], shift = lse == NEGATIVE_INFINITY<T> ? T(0) : lse;
            const Int<T> first = Int<T>(first_of(b, query + r)), stop = Int<T>(stop_of(b, query + r));
            const uint32_t hashed = dropout.on ? hash_query(head, uint32_t(query + r)) : 0;
            T *row = p + r * keys, *grads = ds + r * keys, *dropped_row = dropped + r * keys;
            V sum{};
            for (int64_t c = keys_of.begin; c < keys_of.end; c += L) {
                const V x = exponential<T, L>(masked(row, c, first, stop, NEGATIVE_INFINITY<T>) - shift);
                const V keep = dropout.on ? dropout_at(dropout, hashed, c) : splat<V>(T(1));
                const V grad = masked(grads, c, first, stop, T(0)) * keep;
                sum += x * grad;
                store(row + c, x), store(grads + c, grad);
                if (dropout.on) store(dropped_row + c, x * keep);
            }
            delta_sums[r] = sum;
        }
        for (int r = 0; r < R; ++r) {
            const T *row = p + r * keys;
            T *grads = ds + r * keys;
            const T delta = sum_lanes(delta_sums[r]) - (g.d_lse ? static_cast<const T *>(g.d_lse)[number + r] : T(0));
            for (int64_t c = keys_of.begin; c < keys_of.end; c += L)
                store(grads + c, load<V>(row + c) * (load<V>(grads + c) - delta));
        }
        if (biased) add_bias_gradients<R>(g, b, h, query, keys_of);
        Products::template add_outer<R>(dropped, keys, d_out, width, keys_of.first, keys_of.stop, dv);
        Products::template add_outer<R>(ds, keys, q, dim, keys_of.first, keys_of.stop, dk);
        // q is reused for dq
        Products::template product<R>(ds, keys, k, keys_of.first, keys_of.stop, dim, q, 0, dim);
        copy_rows<L>(q, dim, to(g.dq, b, h, query), g.dq.item, R, in.dim);
    }

    // R queries at a time, and the rest by half as many
    template <int R = BLOCK_QUERIES>
    void forward_queries(int64_t b, int64_t h, int64_t query, Dropout dropout, uint32_t head) {
        for (; query + R <= in.queries; query += R) forward_rows<R>(b, h, query, dropout, head);
        if constexpr (R > 1) forward_queries<R / 2>(b, h, query, dropout, head);
    }

    template <int R = BLOCK_QUERIES>
    void backward_queries(const ShortGradients &g, int64_t b, int64_t h, int64_t query, Dropout dropout, uint32_t head) {
        for (; query + R <= in.queries; query += R) backward_rows<R>(g, b, h, query, dropout, head);
        if constexpr (R > 1) backward_queries<R / 2>(g, b, h, query, dropout, head);
    }

    uint32_t head_hash(Dropout dropout, int64_t b, int64_t h) {
        return dropout.on ? hash_head(in.seed, in.numbering.number(b, in.heads, h)) : 0;
    }

    void prefetch(const ShortGradients *g, int64_t b, int64_t key_head) const {
        const int64_t h = key_head * (in.heads / in.key_heads);
        prefetch(in.k, b, key_head, in.keys, in.dim), prefetch(in.v, b, key_head, in.keys, in.width);
        prefetch(in.q, b, h, in.queries, in.dim);
        if (g) prefetch(g->d_out, b, h, in.queries, in.width);
    }

    void load_keys(int64_t b, int64_t key_head) {
        checked = false;
        copy_rows<L>(at(in.k, b, key_head, 0), in.k.item, k, dim, in.keys, in.dim, T(in.scale));
        copy_rows<L>(at(in.v, b, key_head, 0), in.v.item, v, width, in.keys, in.width);
    }

    // Clears the sums of what no other entry of the batch shares.
    void begin_bias_gradients(int64_t h) {
        for (int term : {0, 1}) {
            const BiasSums<T> &sums = bias_sums[term];
            if (!sums.needed || sums.shared || !(sums.by_head || h == 0)) continue;
            for (int64_t n = 0; n < sums.slice; ++n) bias_grads[term][n] = 0;
        }
    }

    void write_bias_gradients(const ShortGradients &g, int64_t b, int64_t h) {
        for (int term : {0, 1}) {
            const BiasSums<T> &sums = bias_sums[term];
            if (!sums.needed || sums.shared || !(sums.by_head || h + 1 == in.heads)) continue;
            sums.write(in, g.d_bias[term], bias_grads[term], b, h);
        }
    }

    // All query heads that share one key head.
    void forward(int64_t b, int64_t key_head) {
        const Dropout dropout = dropout_of(in.dropout, in.threshold);
        const int64_t group = in.heads / in.key_heads;
        load_keys(b, key_head);
        Products::transpose(k, keys, dim, k_transposed);
        for (int64_t h = key_head * group; h < (key_head + 1) * group; ++h) {
            forward_queries(b, h, 0, dropout, head_hash(dropout, b, h));
            write_lse(b, h);
        }
    }

    void backward(const ShortGradients &g, int64_t b, int64_t key_head) {
        const Dropout dropout = dropout_of(in.dropout, in.threshold);
        const int64_t group = in.heads / in.key_heads;
        load_keys(b, key_head);
        Products::transpose(k, keys, dim, k_transposed), Products::transpose(v, keys, width, v_transposed);
        for (int64_t n = 0; n < in.keys * dim; ++n) dk[n] = 0;
        for (int64_t n = 0; n < in.keys * width; ++n) dv[n] = 0;
        for (int64_t h = key_head * group; h < (key_head + 1) * group; ++h) {
            begin_bias_gradients(h);
            backward_queries(g, b, h, 0, dropout, head_hash(dropout, b, h));
            write_bias_gradients(g, b, h);
        }
        copy_rows<L>(dk, dim, to(g.dk, b, key_head, 0), g.dk.item, in.keys, in.dim, T(in.scale));
        copy_rows<L>(dv, width, to(g.dv, b, key_head, 0), g.dv.item, in.keys, in.width);
    }
};

}  // namespace
}  // namespace polyhead

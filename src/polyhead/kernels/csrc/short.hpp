// Attention over few keys: one batch entry and head of keys at a time, all of it in the nearest caches.
//
// Scores are computed for vectors of keys, so keys and values are turned; sums over keys for vectors of features. Of the
// forward pass only the log-sum-exp is kept: weights are computed anew in backward, which costs less than to read them.
#pragma once

#include <cstdlib>
#include <memory>
#include <utility>

#include "linalg/finite.hpp"
#include "simd/hash.hpp"
#include "simd/math.hpp"
#include "problem.hpp"

namespace polyhead {
namespace {

// Queries side by side: what belongs to a key is read once for all of them. Their sums fill half of the registers.
constexpr int SIDE = VECTOR_BYTES == 64 ? 8 : 4;

template <class V, class Join, int... I>
POLYHEAD_INLINE auto join_halves(V x, Join join, std::integer_sequence<int, I...>) {
    return join(SHUFFLE(x, x, I...), SHUFFLE(x, x, int(I + sizeof...(I))...));
}

// All lanes as one number.
template <class T, int W, class Join>
POLYHEAD_INLINE T folded(Vec<T, W> x, Join join) {
    if constexpr (W > 4) return folded<T, W / 2>(join_halves(x, join, std::make_integer_sequence<int, W / 2>{}), join);
    if constexpr (W == 4) return join(join(x[0], x[2]), join(x[1], x[3]));
    if constexpr (W == 2) return join(x[0], x[1]);
}

// Rows of some numbers, times `factor`. Where these fill no vector, a row's last move overlaps the one before.
template <int W, class T>
POLYHEAD_INLINE void move(const T *from, int64_t step, T *into, int64_t stride, int64_t rows, int64_t count, T factor = 1) {
    using V = Vec<T, W>;
    if constexpr (W > 2)
        if (count < W) return move<W / 2>(from, step, into, stride, rows, count, factor);
    for (; rows > 0; --rows, from += step, into += stride) {
        if (W == 2 && count < 2) {
            if (count) *into = *from * factor;
            continue;
        }
        for (int64_t i = 0; i + W <= count; i += W) store(into + i, load<V>(from + i) * factor);
        store(into + count - W, load<V>(from + count - W) * factor);
    }
}

template <class T>
struct ShortWork {
    static constexpr int L = NATIVE<T>;
    // rows of features are counted in halves of a vector, for many heads are narrow, and at least in quads
    static constexpr int HALF = L > 8 ? L / 2 : 4;
    using V = Vec<T, L>;
    using Words32 = Vec<uint32_t, L>;

    const Short &in;
    // keys in whole vectors and features in halves of them; what fills the last is zero from the beginning
    int64_t keys, dim, width;
    // (dim, keys), (keys, dim), (width, keys), (keys, width), and the gradients of keys and values
    T *turned_k, *k, *turned_v, *v, *dk, *dv;
    // of SIDE queries: weights, their gradients, what dropout leaves of them; and a row of features of each
    T *p, *ds, *kept, *q, *d_out;
    // of a head's queries: the largest score, and the sum of exponentials
    T *most, *all;
    bool looked = false, finite = false;

    // vectors of two lanes come in pairs
    static constexpr int UNIT = L > 4 ? L : 4;
    static int64_t whole(int64_t n) { return (n + UNIT - 1) / UNIT * UNIT; }
    static int64_t halves(int64_t n) { return (n + HALF - 1) / HALF * HALF; }

    // how many numbers a thread needs
    static int64_t room(const Short &in) {
        const int64_t keys = whole(in.keys), dim = halves(in.dim), width = halves(in.width);
        const int64_t all = 3 * keys * (dim + width) + SIDE * (3 * keys + dim + width) + 2 * whole(in.queries);
        return (all + 15) / 16 * 16;
    }

    // `at`: so much room, filled with zeros
    ShortWork(const Short &problem, T *at) : in(problem), keys(whole(in.keys)), dim(halves(in.dim)), width(halves(in.width)) {
        auto take = [&](int64_t count) {
            T *mine = at;
            at += count;
            return mine;
        };
        turned_k = take(keys * dim), k = take(keys * dim), dk = take(keys * dim);
        turned_v = take(keys * width), v = take(keys * width), dv = take(keys * width);
        p = take(SIDE * keys), ds = take(SIDE * keys), kept = take(SIDE * keys);
        q = take(SIDE * dim), d_out = take(SIDE * width);
        most = take(whole(in.queries)), all = take(whole(in.queries));
    }

    static const T *at(const Strided &x, int64_t b, int64_t h, int64_t i) {
        return static_cast<const T *>(x.data) + b * x.batch + h * x.head + i * x.item;
    }
    static T *to(const Strided &x, int64_t b, int64_t h, int64_t i) { return const_cast<T *>(at(x, b, h, i)); }

    // The keys that some queries may attend to: `first` to `stop`, and the whole vectors around them; and whether all of the
    // queries may attend to all of these keys.
    struct Span {
        int64_t first, stop, begin, end;
        bool even;
    };

    Span span(int64_t b, int64_t query, int count) const {
        int64_t first = in.keys, stop = 0;
        bool even = true;
        for (int r = 0; r < count; ++r) {
            const int64_t from = first_of(b, query + r), until = stop_of(b, query + r);
            even &= from == first_of(b, query) && until == stop_of(b, query);
            if (from >= until) continue;
            first = from < first ? from : first, stop = until > stop ? until : stop;
        }
        if (first >= stop) return {0, 0, 0, 0, true};
        return {first, stop, first / L * L, whole(stop), even};
    }

    // Whether a head's keys and values are finite; they are looked at where somebody asks.
    bool keys_finite() {
        if (!looked) finite = all_finite(k, in.keys * dim) && all_finite(v, in.keys * width);
        looked = true;
        return finite;
    }
    int64_t interval(int64_t b, int64_t query) const { return (in.interval_rows > 1 ? b * in.queries : 0) + query; }
    // whatever is asked for, nothing is read beyond the keys
    int64_t first_of(int64_t b, int64_t query) const {
        const int64_t first = in.first[interval(b, query)];
        return first < 0 ? 0 : first;
    }
    int64_t stop_of(int64_t b, int64_t query) const {
        const int64_t stop = in.stop[interval(b, query)];
        return stop > in.keys ? in.keys : stop;
    }

    // what comes next is brought near while something else is computed
    void fetch(const Strided &x, int64_t b, int64_t h, int64_t items, int64_t features) const {
        const T *row = at(x, b, h, 0);
        for (int64_t i = 0; i < items; ++i, row += x.item) {
            for (int64_t d = 0; d < features; d += 64 / int64_t(sizeof(T))) __builtin_prefetch(row + d, 0, 2);
            __builtin_prefetch(row + features - 1, 0, 2);
        }
    }

    // (keys, features) as (features, keys)
    void turn(const T *rows, int64_t features, T *turned) const {
        using Q = Quad<T>;
        const int64_t keys = this->keys;
        for (int64_t j = 0; j < keys; j += 4)
            for (int64_t d = 0; d < features; d += 4) {
                const T *from = rows + j * features + d;
                const Q a = load<Q>(from), b = load<Q>(from + features), c = load<Q>(from + 2 * features),
                        e = load<Q>(from + 3 * features);
                const Q ab = SHUFFLE(a, b, 0, 4, 1, 5), ce = SHUFFLE(c, e, 0, 4, 1, 5);
                const Q AB = SHUFFLE(a, b, 2, 6, 3, 7), CE = SHUFFLE(c, e, 2, 6, 3, 7);
                T *into = turned + d * keys + j;
                store(into, SHUFFLE(ab, ce, 0, 1, 4, 5)), store(into + keys, SHUFFLE(ab, ce, 2, 3, 6, 7));
                store(into + 2 * keys, SHUFFLE(AB, CE, 0, 1, 4, 5)), store(into + 3 * keys, SHUFFLE(AB, CE, 2, 3, 6, 7));
            }
    }

    // R rows times a matrix, for columns c to c + N·W: result[r][c] = Σ_i from[r][i] matrix[i][c]
    template <int R, int N, int W>
    POLYHEAD_INLINE void product_at(const T *from, int64_t step, const T *matrix, int64_t begin, int64_t end, int64_t columns,
                                    T *result, int64_t c) const {
        using X = Vec<T, W>;
        X sum[R][N] = {};
        for (int64_t i = begin; i < end; ++i) {
            X x[N];
            for (int n = 0; n < N; ++n) x[n] = load<X>(matrix + i * columns + c + n * W);
            for (int r = 0; r < R; ++r)
                for (int n = 0; n < N; ++n) sum[r][n] += from[r * step + i] * x[n];
        }
        for (int r = 0; r < R; ++r)
            for (int n = 0; n < N; ++n) store(result + r * columns + c + n * W, sum[r][n]);
    }

    // the same for the columns from c to `last`, and sums over i from `begin` to `end`
    template <int R>
    POLYHEAD_INLINE void product(const T *from, int64_t step, const T *matrix, int64_t begin, int64_t end, int64_t columns,
                                 T *result, int64_t c, int64_t last) const {
        constexpr int N = R == 1 ? 4 : 2;
        for (; c + N * L <= last; c += N * L) product_at<R, N, L>(from, step, matrix, begin, end, columns, result, c);
        for (; c + L <= last; c += L) product_at<R, 1, L>(from, step, matrix, begin, end, columns, result, c);
        if (c < last) product_at<R, 1, HALF>(from, step, matrix, begin, end, columns, result, c);
    }

    // result[i][c] += Σ_r from[r][i] rows[r][c], for i from `begin` to `end` and columns c to c + W
    template <int R, int W>
    POLYHEAD_INLINE void add_outer_at(const T *from, int64_t step, const T *rows, int64_t columns, int64_t begin, int64_t end,
                                      T *result, int64_t c) const {
        using X = Vec<T, W>;
        X x[R];
        for (int r = 0; r < R; ++r) x[r] = load<X>(rows + r * columns + c);
        for (int64_t i = begin; i < end; ++i) {
            X sum = load<X>(result + i * columns + c);
            for (int r = 0; r < R; ++r) sum += from[r * step + i] * x[r];
            store(result + i * columns + c, sum);
        }
    }

    template <int R>
    POLYHEAD_INLINE void add_outer(const T *from, int64_t step, const T *rows, int64_t columns, int64_t begin, int64_t end,
                                   T *result) const {
        int64_t c = 0;
        for (; c + L <= columns; c += L) add_outer_at<R, L>(from, step, rows, columns, begin, end, result, c);
        if (c < columns) add_outer_at<R, HALF>(from, step, rows, columns, begin, end, result, c);
    }

    // 0, 1, 2, …
    template <class I>
    static POLYHEAD_INLINE Vec<I, L> count() {
        Vec<I, L> lanes;
        for (int lane = 0; lane < L; ++lane) lanes[lane] = I(lane);
        return lanes;
    }

    // numbers c to c + L of a row, another where it may not attend
    POLYHEAD_INLINE V confined(const T *row, int64_t c, Int<T> first, Int<T> stop, T beyond) const {
        const auto here = count<Int<T>>() + Int<T>(c);
        return ((here >= first) & (here < stop)) ? load<V>(row + c) : splat<V>(beyond);
    }

    // 1 / (1 - dropout) where a pair stays, 0 where it goes
    POLYHEAD_INLINE V dropout_at(Dropout dropout, uint32_t hashed, int64_t c) const {
        const Words32 word = mix(hashed ^ ((count<uint32_t>() + uint32_t(c)) * 0x9E3779B1u));
        const auto stays = __builtin_convertvector((Vec<int32_t, L>)word > dropout.last, Vec<Int<T>, L>);
        return stays ? splat<V>(T(1 / (1 - in.dropout))) : V{};
    }

    static T total(V x) {
        return folded<T, L>(x, [](auto a, auto b) { return a + b; });
    }
    static T largest(V x) {
        return folded<T, L>(x, [](auto a, auto b) { return a > b ? a : b; });
    }

    template <int R>
    void forward_rows(int64_t b, int64_t h, int64_t query, Dropout dropout, uint32_t head) {
        const Span keys_of = span(b, query, R);
        if constexpr (R > 1)
            if (!keys_of.even && !keys_finite()) {
                // zero times NaN is NaN: a row by itself meets no keys but its own
                for (int r = 0; r < R; ++r) forward_rows<1>(b, h, query + r, dropout, head);
                return;
            }
        product<R>(at(in.q, b, h, query), in.q.item, turned_k, 0, in.dim, keys, p, keys_of.begin, keys_of.end);
        // one short loop after another: several rows of each are under way at once
        for (int r = 0; r < R; ++r) {
            T *row = p + r * keys;
            const Int<T> first = Int<T>(first_of(b, query + r)), stop = Int<T>(stop_of(b, query + r));
            V high = splat<V>(NEGATIVE_INFINITY<T>);
            for (int64_t c = keys_of.begin; c < keys_of.end; c += L) {
                const V x = confined(row, c, first, stop, NEGATIVE_INFINITY<T>);
                high = larger(high, x);
                store(row + c, x);
            }
            const T found = largest(high);
            most[query + r] = found == NEGATIVE_INFINITY<T> ? T(0) : found;
        }
        for (int r = 0; r < R; ++r) {
            T *row = p + r * keys;
            V sum{};
            for (int64_t c = keys_of.begin; c < keys_of.end; c += L) {
                const V x = exponential<T, L>(load<V>(row + c) - most[query + r]);
                sum += x;
                store(row + c, x);
            }
            all[query + r] = total(sum);
        }
        for (int r = 0; r < R; ++r) {
            T *row = p + r * keys;
            const T sum = all[query + r], share = sum == 0 ? T(0) : 1 / sum;
            const uint32_t hashed = dropout.on ? mix(head + uint32_t(query + r)) : 0;
            for (int64_t c = keys_of.begin; c < keys_of.end; c += L) {
                const V x = load<V>(row + c) * share;
                store(row + c, dropout.on ? x * dropout_at(dropout, hashed, c) : x);
            }
        }
        product<R>(p, keys, v, keys_of.first, keys_of.stop, width, d_out, 0, width);
        move<L>(d_out, width, to(in.out, b, h, query), in.out.item, R, in.width);
    }

    // the log-sum-exp of all queries of a head: logarithms are slow one by one
    void give_lse(int64_t b, int64_t h) {
        for (int64_t i = 0; i < in.queries; i += L) {
            const V sum = load<V>(all + i), lse = load<V>(most + i) + logarithm<T, L>(sum);
            store(all + i, sum == T(0) ? splat<V>(NEGATIVE_INFINITY<T>) : lse);
        }
        move<L>(all, 0, static_cast<T *>(in.lse) + (b * in.heads + h) * in.queries, 0, 1, in.queries);
    }

    // Whether what rows of queries bring along is finite; q and d_out have been moved near.
    bool rows_finite(const ShortGradients &g, int64_t b, int64_t h, int64_t query, int64_t rows) const {
        const T *d_lse = g.d_lse ? static_cast<const T *>(g.d_lse) + (b * in.heads + h) * in.queries + query : nullptr;
        return all_finite(q, rows * dim) && all_finite(d_out, rows * width) && (!d_lse || all_finite(d_lse, rows));
    }

    template <int R>
    void backward_rows(const ShortGradients &g, int64_t b, int64_t h, int64_t query, Dropout dropout, uint32_t head) {
        move<L>(at(in.q, b, h, query), in.q.item, q, dim, R, in.dim);
        move<L>(at(g.d_out, b, h, query), g.d_out.item, d_out, width, R, in.width);
        const Span keys_of = span(b, query, R);
        if constexpr (R > 1)
            if (!keys_of.even && !(keys_finite() && rows_finite(g, b, h, query, R))) {
                for (int r = 0; r < R; ++r) backward_rows<1>(g, b, h, query + r, dropout, head);
                return;
            }
        product<R>(q, dim, turned_k, 0, in.dim, keys, p, keys_of.begin, keys_of.end);
        product<R>(d_out, width, turned_v, 0, in.width, keys, ds, keys_of.begin, keys_of.end);
        const int64_t number = (b * in.heads + h) * in.queries + query;
        // without dropout all weights are kept
        T *const kept = dropout.on ? this->kept : p;
        V moved[R];
        for (int r = 0; r < R; ++r) {
            const T lse = static_cast<const T *>(in.lse)[number + r], by = lse == NEGATIVE_INFINITY<T> ? T(0) : lse;
            const Int<T> first = Int<T>(first_of(b, query + r)), stop = Int<T>(stop_of(b, query + r));
            const uint32_t hashed = dropout.on ? mix(head + uint32_t(query + r)) : 0;
            T *row = p + r * keys, *given = ds + r * keys, *left = kept + r * keys;
            V sum{};
            for (int64_t c = keys_of.begin; c < keys_of.end; c += L) {
                const V x = exponential<T, L>(confined(row, c, first, stop, NEGATIVE_INFINITY<T>) - by);
                const V some = dropout.on ? dropout_at(dropout, hashed, c) : splat<V>(T(1));
                const V grad = confined(given, c, first, stop, T(0)) * some;
                sum += x * grad;
                store(row + c, x), store(given + c, grad);
                if (dropout.on) store(left + c, x * some);
            }
            moved[r] = sum;
        }
        for (int r = 0; r < R; ++r) {
            const T *row = p + r * keys;
            T *given = ds + r * keys;
            const T delta = total(moved[r]) - (g.d_lse ? static_cast<const T *>(g.d_lse)[number + r] : T(0));
            for (int64_t c = keys_of.begin; c < keys_of.end; c += L)
                store(given + c, load<V>(row + c) * (load<V>(given + c) - delta));
        }
        add_outer<R>(kept, keys, d_out, width, keys_of.first, keys_of.stop, dv);
        add_outer<R>(ds, keys, q, dim, keys_of.first, keys_of.stop, dk);
        // q is not needed any more
        product<R>(ds, keys, k, keys_of.first, keys_of.stop, dim, q, 0, dim);
        move<L>(q, dim, to(g.dq, b, h, query), g.dq.item, R, in.dim);
    }

    // SIDE queries at a time, and the rest by half as many
    template <int R = SIDE>
    void forward_queries(int64_t b, int64_t h, int64_t query, Dropout dropout, uint32_t head) {
        for (; query + R <= in.queries; query += R) forward_rows<R>(b, h, query, dropout, head);
        if constexpr (R > 1) forward_queries<R / 2>(b, h, query, dropout, head);
    }

    template <int R = SIDE>
    void backward_queries(const ShortGradients &g, int64_t b, int64_t h, int64_t query, Dropout dropout, uint32_t head) {
        for (; query + R <= in.queries; query += R) backward_rows<R>(g, b, h, query, dropout, head);
        if constexpr (R > 1) backward_queries<R / 2>(g, b, h, query, dropout, head);
    }

    uint32_t hashed_head(Dropout dropout, int64_t b, int64_t h) {
        return dropout.on ? hash_head(in.seed, b * in.heads + h) : 0;
    }

    void fetch(const ShortGradients *g, int64_t b, int64_t key_head) const {
        const int64_t h = key_head * (in.heads / in.key_heads);
        fetch(in.k, b, key_head, in.keys, in.dim), fetch(in.v, b, key_head, in.keys, in.width);
        fetch(in.q, b, h, in.queries, in.dim);
        if (g) fetch(g->d_out, b, h, in.queries, in.width);
    }

    void take_keys(int64_t b, int64_t key_head) {
        looked = false;
        move<L>(at(in.k, b, key_head, 0), in.k.item, k, dim, in.keys, in.dim, T(in.scale));
        move<L>(at(in.v, b, key_head, 0), in.v.item, v, width, in.keys, in.width);
    }

    // All heads of queries that share one head of keys.
    void forward(int64_t b, int64_t key_head) {
        const Dropout dropout = dropout_of(in.dropout, in.threshold);
        const int64_t group = in.heads / in.key_heads;
        take_keys(b, key_head);
        turn(k, dim, turned_k);
        for (int64_t h = key_head * group; h < (key_head + 1) * group; ++h) {
            forward_queries(b, h, 0, dropout, hashed_head(dropout, b, h));
            give_lse(b, h);
        }
    }

    void backward(const ShortGradients &g, int64_t b, int64_t key_head) {
        const Dropout dropout = dropout_of(in.dropout, in.threshold);
        const int64_t group = in.heads / in.key_heads;
        take_keys(b, key_head);
        turn(k, dim, turned_k), turn(v, width, turned_v);
        for (int64_t n = 0; n < in.keys * dim; ++n) dk[n] = 0;
        for (int64_t n = 0; n < in.keys * width; ++n) dv[n] = 0;
        for (int64_t h = key_head * group; h < (key_head + 1) * group; ++h)
            backward_queries(g, b, h, 0, dropout, hashed_head(dropout, b, h));
        move<L>(dk, dim, to(g.dk, b, key_head, 0), g.dk.item, in.keys, in.dim, T(in.scale));
        move<L>(dv, width, to(g.dv, b, key_head, 0), g.dv.item, in.keys, in.width);
    }
};

// False where there is no room.
template <class T, class Work>
bool over_key_heads(const Short &in, const ShortGradients *g, Work work) {
    const int64_t count = in.batch * in.key_heads, room = ShortWork<T>::room(in);
    const int threads = int(in.threads < count ? in.threads : count > 1 ? count : 1);
    // no vector lies across two lines of the cache
    constexpr size_t LINE = 64;
    std::unique_ptr<void, decltype(&std::free)> memory(std::calloc(size_t(room) * size_t(threads) * sizeof(T) + LINE, 1), &std::free);
    if (!memory) return false;
    T *scratch = reinterpret_cast<T *>((reinterpret_cast<uintptr_t>(memory.get()) + LINE - 1) / LINE * LINE);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int part = 0; part < threads; ++part) {
        ShortWork<T> mine(in, scratch + part * room);
        const int64_t stop = count * (part + 1) / threads;
        for (int64_t n = count * part / threads; n < stop; ++n) {
            if (n + 1 < stop) mine.fetch(g, (n + 1) / in.key_heads, (n + 1) % in.key_heads);
            work(mine, n / in.key_heads, n % in.key_heads);
        }
    }
    return true;
}

template <class T>
bool short_forward(const Short &in) {
    return over_key_heads<T>(in, nullptr, [](ShortWork<T> &mine, int64_t b, int64_t h) { mine.forward(b, h); });
}

template <class T>
bool short_backward(const Short &in, const ShortGradients &g) {
    return over_key_heads<T>(in, &g, [&](ShortWork<T> &mine, int64_t b, int64_t h) { mine.backward(g, b, h); });
}

}  // namespace
}  // namespace polyhead

// Attention over few keys: one batch entry and head of keys at a time, all of it in the nearest caches.
//
// Scores are computed for vectors of keys, so keys and values are turned; sums over keys for vectors of features. Of the
// forward pass only the log-sum-exp is kept: weights are computed anew in backward, which costs less than to read them.
#pragma once

#include <cmath>
#include <cstdlib>
#include <memory>

#include "hash.hpp"
#include "math.hpp"
#include "problem.hpp"

namespace polyhead {
namespace {

// Queries side by side: what belongs to a key is read once for all of them. Their sums fill half of the registers.
constexpr int SIDE = VECTOR_BYTES == 64 ? 8 : 4;

template <class T>
struct ShortWork {
    static constexpr int L = NATIVE<T>;
    using V = Vec<T, L>;
    using Words32 = Vec<uint32_t, L>;

    const Short &in;
    // keys and features in whole vectors, the rest of the last filled with zeros
    int64_t keys, dim, width;
    // (dim, keys), (keys, dim), (width, keys), (keys, width), and the gradients of keys and values
    T *turned_k, *k, *turned_v, *v, *dk, *dv;
    // of SIDE queries: weights, their gradients, what dropout leaves of them; and a row of features of each
    T *p, *ds, *kept, *q, *d_out;

    static int64_t whole(int64_t n) { return (n + L - 1) / L * L; }

    // how many numbers a thread needs
    static int64_t room(const Short &in) {
        const int64_t keys = whole(in.keys), dim = whole(in.dim), width = whole(in.width);
        return 3 * keys * (dim + width) + SIDE * (3 * keys + dim + width);
    }

    ShortWork(const Short &problem, T *at) : in(problem), keys(whole(in.keys)), dim(whole(in.dim)), width(whole(in.width)) {
        auto take = [&](int64_t count) {
            T *mine = at;
            at += count;
            return mine;
        };
        turned_k = take(keys * dim), k = take(keys * dim), dk = take(keys * dim);
        turned_v = take(keys * width), v = take(keys * width), dv = take(keys * width);
        p = take(SIDE * keys), ds = take(SIDE * keys), kept = take(SIDE * keys);
        q = take(SIDE * dim), d_out = take(SIDE * width);
    }

    static const T *at(const Strided &x, int64_t b, int64_t h, int64_t i) {
        return static_cast<const T *>(x.data) + b * x.batch + h * x.head + i * x.item;
    }
    static T *to(const Strided &x, int64_t b, int64_t h, int64_t i) { return const_cast<T *>(at(x, b, h, i)); }

    // The keys that some queries may attend to: `first` to `stop`, and the whole vectors around them.
    struct Span {
        int64_t first, stop, begin, end;
    };

    Span span(int64_t b, int64_t query, int count) const {
        int64_t first = in.keys, stop = 0;
        for (int r = 0; r < count; ++r) {
            const int64_t from = first_of(b, query + r), until = stop_of(b, query + r);
            if (from >= until) continue;
            first = from < first ? from : first, stop = until > stop ? until : stop;
        }
        if (first >= stop) return {0, 0, 0, 0};
        return {first, stop, first / L * L, whole(stop)};
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

    void take_row(const T *from, int64_t features, int64_t padded, T *row) const {
        for (int64_t d = 0; d < features; ++d) row[d] = from[d];
        for (int64_t d = features; d < padded; ++d) row[d] = 0;
    }

    void take_rows(const Strided &x, int64_t b, int64_t h, int64_t features, int64_t padded, T *rows) const {
        for (int64_t j = 0; j < in.keys; ++j) take_row(at(x, b, h, j), features, padded, rows + j * padded);
    }

    // (keys, features) as (features, keys)
    void turn(const Strided &x, int64_t b, int64_t h, int64_t features, T *turned) const {
        for (int64_t j = 0; j < in.keys; ++j) {
            const T *from = at(x, b, h, j);
            for (int64_t d = 0; d < features; ++d) turned[d * keys + j] = from[d];
        }
        for (int64_t d = 0; d < features; ++d)
            for (int64_t j = in.keys; j < keys; ++j) turned[d * keys + j] = 0;
    }

    // R rows times a matrix, for columns c to c + N·L: result[r][c] = Σ_i from[r][i] matrix[i][c]
    template <int R, int N>
    POLYHEAD_INLINE void product_at(const T *from, int64_t step, const T *matrix, int64_t begin, int64_t end, int64_t columns,
                                    T *result, int64_t c) const {
        V sum[R][N] = {};
        for (int64_t i = begin; i < end; ++i) {
            V x[N];
            for (int n = 0; n < N; ++n) x[n] = load<V>(matrix + i * columns + c + n * L);
            for (int r = 0; r < R; ++r)
                for (int n = 0; n < N; ++n) sum[r][n] += from[r * step + i] * x[n];
        }
        for (int r = 0; r < R; ++r)
            for (int n = 0; n < N; ++n) store(result + r * columns + c + n * L, sum[r][n]);
    }

    // the same for the columns from c to `last`, and sums over i from `begin` to `end`
    template <int R>
    POLYHEAD_INLINE void product(const T *from, int64_t step, const T *matrix, int64_t begin, int64_t end, int64_t columns,
                                 T *result, int64_t c, int64_t last) const {
        constexpr int N = R == 1 ? 4 : 2;
        for (; c + N * L <= last; c += N * L) product_at<R, N>(from, step, matrix, begin, end, columns, result, c);
        for (; c < last; c += L) product_at<R, 1>(from, step, matrix, begin, end, columns, result, c);
    }

    // result[i][c] += Σ_r from[r][i] rows[r][c], for i from `begin` to `end`
    template <int R>
    POLYHEAD_INLINE void add_outer(const T *from, int64_t step, const T *rows, int64_t columns, int64_t begin, int64_t end,
                                   T *result) const {
        for (int64_t c = 0; c < columns; c += L) {
            V x[R];
            for (int r = 0; r < R; ++r) x[r] = load<V>(rows + r * columns + c);
            for (int64_t i = begin; i < end; ++i) {
                V sum = load<V>(result + i * columns + c);
                for (int r = 0; r < R; ++r) sum += from[r * step + i] * x[r];
                store(result + i * columns + c, sum);
            }
        }
    }

    POLYHEAD_INLINE Vec<Int<T>, L> places(int64_t c) const {
        Vec<Int<T>, L> here;
        for (int lane = 0; lane < L; ++lane) here[lane] = Int<T>(c + lane);
        return here;
    }

    // the scores of a row, scaled, -inf where it may not attend
    POLYHEAD_INLINE void confine(T *scores, int64_t b, int64_t query, const Span &span) const {
        const Int<T> first = Int<T>(first_of(b, query)), stop = Int<T>(stop_of(b, query));
        for (int64_t c = span.begin; c < span.end; c += L) {
            const auto here = places(c);
            const V x = load<V>(scores + c) * T(in.scale);
            store(scores + c, ((here >= first) & (here < stop)) ? x : splat<V>(NEGATIVE_INFINITY<T>));
        }
    }

    // 1 / (1 - dropout) where a pair stays, 0 where it goes
    POLYHEAD_INLINE V dropout_at(Dropout dropout, uint32_t hashed, int64_t c) const {
        Words32 key;
        for (int lane = 0; lane < L; ++lane) key[lane] = uint32_t(c + lane);
        const Words32 word = mix(hashed ^ (key * 0x9E3779B1u));
        const auto stays = __builtin_convertvector((Vec<int32_t, L>)word > dropout.last, Vec<Int<T>, L>);
        return stays ? splat<V>(T(1 / (1 - in.dropout))) : V{};
    }

    static T total(V x) {
        T sum = 0;
        for (int lane = 0; lane < L; ++lane) sum += x[lane];
        return sum;
    }

    template <int R>
    void forward_rows(int64_t b, int64_t h, int64_t query, Dropout dropout, uint32_t head) {
        for (int r = 0; r < R; ++r) take_row(at(in.q, b, h, query + r), in.dim, dim, q + r * dim);
        const Span keys_of = span(b, query, R);
        product<R>(q, dim, turned_k, 0, in.dim, keys, p, keys_of.begin, keys_of.end);
        for (int r = 0; r < R; ++r) {
            T *row = p + r * keys;
            confine(row, b, query + r, keys_of);
            V high = splat<V>(NEGATIVE_INFINITY<T>), sum{};
            for (int64_t c = keys_of.begin; c < keys_of.end; c += L) high = larger(high, load<V>(row + c));
            T most = high[0];
            for (int lane = 1; lane < L; ++lane) most = high[lane] > most ? high[lane] : most;
            const T by = most == NEGATIVE_INFINITY<T> ? T(0) : most;
            for (int64_t c = keys_of.begin; c < keys_of.end; c += L) {
                const V x = exponential<T, L>(load<V>(row + c) - by);
                sum += x;
                store(row + c, x);
            }
            const T all = total(sum);
            static_cast<T *>(in.lse)[(b * in.heads + h) * in.queries + query + r] = by + std::log(all);
            const T share = all == 0 ? T(0) : 1 / all;
            const uint32_t hashed = mix(head + uint32_t(query + r));
            for (int64_t c = keys_of.begin; c < keys_of.end; c += L) {
                V x = load<V>(row + c) * share;
                if (dropout.on) x *= dropout_at(dropout, hashed, c);
                store(row + c, x);
            }
        }
        product<R>(p, keys, v, keys_of.first, keys_of.stop, width, d_out, 0, width);
        for (int r = 0; r < R; ++r) give_row(d_out + r * width, to(in.out, b, h, query + r), in.width);
    }

    static void give_row(const T *from, T *into, int64_t features) {
        for (int64_t d = 0; d < features; ++d) into[d] = from[d];
    }

    template <int R>
    void backward_rows(const ShortGradients &g, int64_t b, int64_t h, int64_t query, Dropout dropout, uint32_t head) {
        for (int r = 0; r < R; ++r) {
            take_row(at(in.q, b, h, query + r), in.dim, dim, q + r * dim);
            take_row(at(g.d_out, b, h, query + r), in.width, width, d_out + r * width);
        }
        const Span keys_of = span(b, query, R);
        product<R>(q, dim, turned_k, 0, in.dim, keys, p, keys_of.begin, keys_of.end);
        product<R>(d_out, width, turned_v, 0, in.width, keys, ds, keys_of.begin, keys_of.end);
        for (int r = 0; r < R; ++r) {
            const int64_t number = (b * in.heads + h) * in.queries + query + r;
            const T lse = static_cast<const T *>(in.lse)[number], by = lse == NEGATIVE_INFINITY<T> ? T(0) : lse;
            const T d_lse = g.d_lse ? static_cast<const T *>(g.d_lse)[number] : T(0);
            const uint32_t hashed = mix(head + uint32_t(query + r));
            T *row = p + r * keys, *given = ds + r * keys, *left = kept + r * keys;
            confine(row, b, query + r, keys_of);
            V moved{};
            for (int64_t c = keys_of.begin; c < keys_of.end; c += L) {
                const V x = exponential<T, L>(load<V>(row + c) - by);
                const V some = dropout.on ? dropout_at(dropout, hashed, c) : splat<V>(T(1));
                const V grad = load<V>(given + c) * some;
                moved += x * grad;
                store(row + c, x), store(given + c, grad), store(left + c, x * some);
            }
            const T delta = total(moved) - d_lse;
            for (int64_t c = keys_of.begin; c < keys_of.end; c += L)
                store(given + c, load<V>(row + c) * (load<V>(given + c) - delta) * T(in.scale));
        }
        add_outer<R>(kept, keys, d_out, width, keys_of.first, keys_of.stop, dv);
        add_outer<R>(ds, keys, q, dim, keys_of.first, keys_of.stop, dk);
        // q is not needed any more
        product<R>(ds, keys, k, keys_of.first, keys_of.stop, dim, q, 0, dim);
        for (int r = 0; r < R; ++r) give_row(q + r * dim, to(g.dq, b, h, query + r), in.dim);
    }

    uint32_t hashed_head(Dropout dropout, int64_t b, int64_t h) {
        return dropout.on ? hash_head(in.seed, b * in.heads + h) : 0;
    }

    // All heads of queries that share one head of keys.
    void forward(int64_t b, int64_t key_head) {
        const Dropout dropout = dropout_of(in.dropout, in.threshold);
        const int64_t group = in.heads / in.key_heads;
        turn(in.k, b, key_head, in.dim, turned_k);
        take_rows(in.v, b, key_head, in.width, width, v);
        for (int64_t h = key_head * group; h < (key_head + 1) * group; ++h) {
            const uint32_t head = hashed_head(dropout, b, h);
            int64_t i = 0;
            for (; i + SIDE <= in.queries; i += SIDE) forward_rows<SIDE>(b, h, i, dropout, head);
            for (; i < in.queries; ++i) forward_rows<1>(b, h, i, dropout, head);
        }
    }

    void backward(const ShortGradients &g, int64_t b, int64_t key_head) {
        const Dropout dropout = dropout_of(in.dropout, in.threshold);
        const int64_t group = in.heads / in.key_heads;
        turn(in.k, b, key_head, in.dim, turned_k);
        turn(in.v, b, key_head, in.width, turned_v);
        take_rows(in.k, b, key_head, in.dim, dim, k);
        for (int64_t n = 0; n < in.keys * dim; ++n) dk[n] = 0;
        for (int64_t n = 0; n < in.keys * width; ++n) dv[n] = 0;
        for (int64_t h = key_head * group; h < (key_head + 1) * group; ++h) {
            const uint32_t head = hashed_head(dropout, b, h);
            int64_t i = 0;
            for (; i + SIDE <= in.queries; i += SIDE) backward_rows<SIDE>(g, b, h, i, dropout, head);
            for (; i < in.queries; ++i) backward_rows<1>(g, b, h, i, dropout, head);
        }
        for (int64_t j = 0; j < in.keys; ++j) {
            give_row(dk + j * dim, to(g.dk, b, key_head, j), in.dim);
            give_row(dv + j * width, to(g.dv, b, key_head, j), in.width);
        }
    }
};

// False where there is no room.
template <class T, class Work>
bool over_key_heads(const Short &in, Work work) {
    const int64_t count = in.batch * in.key_heads, room = ShortWork<T>::room(in);
    const int threads = int(in.threads < count ? in.threads : count > 1 ? count : 1);
    std::unique_ptr<T, decltype(&std::free)> scratch(
        static_cast<T *>(std::malloc(size_t(room) * size_t(threads) * sizeof(T))), &std::free);
    if (!scratch) return false;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int part = 0; part < threads; ++part) {
        ShortWork<T> mine(in, scratch.get() + part * room);
        for (int64_t n = count * part / threads; n < count * (part + 1) / threads; ++n)
            work(mine, n / in.key_heads, n % in.key_heads);
    }
    return true;
}

template <class T>
bool short_forward(const Short &in) {
    return over_key_heads<T>(in, [](ShortWork<T> &mine, int64_t b, int64_t h) { mine.forward(b, h); });
}

template <class T>
bool short_backward(const Short &in, const ShortGradients &g) {
    return over_key_heads<T>(in, [&](ShortWork<T> &mine, int64_t b, int64_t h) { mine.backward(g, b, h); });
}

}  // namespace
}  // namespace polyhead

// The scores of a block of edges in quads, (edges / 4, heads, 4): four edges of a head are adjacent, so that everything between
// the two products (activation, softmax) vectorises over one contiguous array.
#pragma once

#include "simd/math.hpp"

namespace polyhead {
namespace {

// to[h][e] = from[e][h] for four rows
template <class T>
POLYHEAD_INLINE void rows_to_quad(const T *const from[4], int64_t heads, T *to) {
    using Q = Quad<T>;
    int64_t h = 0;
    for (; h + 4 <= heads; h += 4) {
        Q a = load<Q>(from[0] + h), b = load<Q>(from[1] + h), c = load<Q>(from[2] + h), d = load<Q>(from[3] + h);
        Q ab0 = SHUFFLE(a, b, 0, 4, 1, 5), ab2 = SHUFFLE(a, b, 2, 6, 3, 7);
        Q cd0 = SHUFFLE(c, d, 0, 4, 1, 5), cd2 = SHUFFLE(c, d, 2, 6, 3, 7);
        store(to + 4 * h, SHUFFLE(ab0, cd0, 0, 1, 4, 5));
        store(to + 4 * h + 4, SHUFFLE(ab0, cd0, 2, 3, 6, 7));
        store(to + 4 * h + 8, SHUFFLE(ab2, cd2, 0, 1, 4, 5));
        store(to + 4 * h + 12, SHUFFLE(ab2, cd2, 2, 3, 6, 7));
    }
    for (; h < heads; ++h)
        for (int e = 0; e < 4; ++e) to[4 * h + e] = from[e][h];
}

// to[e][h] = from[h][e]
template <class T>
POLYHEAD_INLINE void quad_to_rows(const T *from, int64_t heads, T *const to[4]) {
    using Q = Quad<T>;
    int64_t h = 0;
    for (; h + 4 <= heads; h += 4) {
        const T *f = from + 4 * h;
        Q a = load<Q>(f), b = load<Q>(f + 4), c = load<Q>(f + 8), d = load<Q>(f + 12);
        Q ab0 = SHUFFLE(a, b, 0, 4, 1, 5), ab2 = SHUFFLE(a, b, 2, 6, 3, 7);
        Q cd0 = SHUFFLE(c, d, 0, 4, 1, 5), cd2 = SHUFFLE(c, d, 2, 6, 3, 7);
        store(to[0] + h, SHUFFLE(ab0, cd0, 0, 1, 4, 5));
        store(to[1] + h, SHUFFLE(ab0, cd0, 2, 3, 6, 7));
        store(to[2] + h, SHUFFLE(ab2, cd2, 0, 1, 4, 5));
        store(to[3] + h, SHUFFLE(ab2, cd2, 2, 3, 6, 7));
    }
    for (; h < heads; ++h)
        for (int e = 0; e < 4; ++e) to[e][h] = from[4 * h + e];
}

// Sets the lanes of the last quad from `count` on, in every head.
template <class T>
POLYHEAD_INLINE void fill_tail(T *last_quad, int64_t heads, int64_t count, T value) {
    if (count == 4) return;
    for (int64_t h = 0; h < heads; ++h)
        for (int64_t e = count; e < 4; ++e) last_quad[4 * h + e] = value;
}

template <class V>
POLYHEAD_INLINE V largest_of_four(V x) {
    constexpr int lanes = sizeof(V) / sizeof(x[0]);
    if constexpr (lanes == 4) {
        x = larger(x, SHUFFLE(x, x, 1, 0, 3, 2));
        return larger(x, SHUFFLE(x, x, 2, 3, 0, 1));
    } else if constexpr (lanes == 8) {
        x = larger(x, SHUFFLE(x, x, 1, 0, 3, 2, 5, 4, 7, 6));
        return larger(x, SHUFFLE(x, x, 2, 3, 0, 1, 6, 7, 4, 5));
    } else {
        x = larger(x, SHUFFLE(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
        return larger(x, SHUFFLE(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    }
}

template <class T>
POLYHEAD_INLINE T sum_of_four(const T *x) {
    return (x[0] + x[1]) + (x[2] + x[3]);
}

// row_max[h][0..3] = the largest score of a head, in every lane
template <class V, class T>
POLYHEAD_INLINE void quad_maxima(const T *scores, int64_t quads, int64_t width, T *row_max) {
    constexpr int64_t lanes = sizeof(V) / sizeof(T);
    for (int64_t x = 0; x < width; x += lanes) {
        V m = load<V>(scores + x);
        for (int64_t quad = 1; quad < quads; ++quad) m = larger(load<V>(scores + quad * width + x), m);
        store(row_max + x, largest_of_four(m));
    }
}

// scores = exp(scores - row_max), and their sums by lane
template <class V, class T>
POLYHEAD_INLINE void quad_exponentials(T *scores, int64_t quads, int64_t width, const T *row_max, T *total) {
    constexpr int lanes = sizeof(V) / sizeof(T);
    for (int64_t x = 0; x < width; x += lanes) {
        V m = load<V>(row_max + x), sum{};
        for (int64_t quad = 0; quad < quads; ++quad) {
            V y = exponential<T, lanes>(load<V>(scores + quad * width + x) - m);
            store(scores + quad * width + x, y);
            sum += y;
        }
        store(total + x, load<V>(total + x) + sum);
    }
}

// x[...] *= scale[...] in every quad
template <class V, class T>
POLYHEAD_INLINE void quad_scale(T *x, int64_t quads, int64_t width, const T *scale) {
    constexpr int64_t lanes = sizeof(V) / sizeof(T);
    for (int64_t at = 0; at < width; at += lanes) {
        V s = load<V>(scale + at);
        for (int64_t quad = 0; quad < quads; ++quad)
            store(x + quad * width + at, load<V>(x + quad * width + at) * s);
    }
}

// total[h][0..3] += the quads of a head
template <class V, class T>
POLYHEAD_INLINE void quad_sums(const T *x, int64_t quads, int64_t width, T *total) {
    constexpr int64_t lanes = sizeof(V) / sizeof(T);
    for (int64_t at = 0; at < width; at += lanes) {
        V sum = load<V>(total + at);
        for (int64_t quad = 0; quad < quads; ++quad) sum += load<V>(x + quad * width + at);
        store(total + at, sum);
    }
}

// Calls f with the native vector type if its lanes divide `width`, else with one of four lanes.
template <class T, class F>
POLYHEAD_INLINE void with_widest_vector(int64_t width, F f) {
    if (NATIVE<T> > 4 && width % NATIVE<T> == 0)
        f(Vec<T, (NATIVE<T> > 4 ? NATIVE<T> : 4)>{});
    else
        f(Quad<T>{});
}

}  // namespace
}  // namespace polyhead

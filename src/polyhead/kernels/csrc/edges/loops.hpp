// The four loops that touch rows of (heads, dim): dot products, GATv2's products, weighted sums, and sums under a bit
// mask. Each is specialised on the vectors in a head, and works on a block of edges.
#pragma once

#include "simd/vector.hpp"

namespace polyhead {
namespace {

// Rows to ask for while the present ones are worked on, one head's share at a time.
struct Ahead {
    const char *base;
    const int32_t *index;
    int64_t count, row_bytes, head_bytes;

    POLYHEAD_INLINE void head(int64_t h) const {
        for (int64_t x = 0; x < count; ++x) {
            const char *at = base + index[x] * row_bytes + h * head_bytes;
            // into the second cache: the first is full of the present block
            for (int64_t byte = 0; byte < head_bytes; byte += 64) __builtin_prefetch(at + byte, 0, 2);
        }
    }
};

// Numbers of a (edge, head): quads by head (1, 4), or the rows of an (edges, heads) array (heads, 1).
template <class T>
struct Coefficients {
    const T *at;
    int64_t edge, head;
};

template <class T>
struct Features {
    const T *const *rows;  // one row of features for each edge
    const T *map;          // (heads, count, dim)
    int64_t count;
};

struct Shape {
    int64_t heads, dim;
};

// A byte or two of signs for each vector of a row.
template <class T>
using Signs = typename std::conditional<(NATIVE<T> > 8), uint16_t, uint8_t>::type;

template <class T, int W, int C>
struct Tiles {
    using V = Vec<T, W>;

    static POLYHEAD_INLINE int64_t chunks(const Shape &shape) { return C ? C : shape.dim / W; }

    // scores[quad][h] = factor * <fixed[h], rows[e][h]>
    static void dots(Shape shape, const T *fixed, const T *const *rows, int64_t quads, T factor, T *scores,
                     Ahead ahead) {
        const int64_t n = chunks(shape);
        for (int64_t h = 0; h < shape.heads; ++h) {
            const T *f = fixed + h * shape.dim;
            for (int64_t quad = 0; quad < quads; ++quad) {
                const T *const *r = rows + 4 * quad;
                const int64_t o = h * shape.dim;
                V sum[4] = {};
                for (int64_t c = 0; c < n; ++c)
                    for (int e = 0; e < 4; ++e) sum[e] += load<V>(f + c * W) * load<V>(r[e] + o + c * W);
                store(scores + 4 * (quad * shape.heads + h), sums(sum[0], sum[1], sum[2], sum[3]) * factor);
            }
            ahead.head(h);
        }
    }

    // scores[quad][h] = <a[h], leaky(fixed[h] + rows[e][h] + map[h] features[e])>, and the signs of what leaky was
    // given
    template <bool HasFeatures, bool KeepsSigns>
    static void gatv2(Shape shape, const T *fixed, const T *const *rows, int64_t quads, T slope, T *scores, Ahead ahead,
                      const T *a, Features<T> features, Signs<T> *const *signs) {
        const int64_t n = chunks(shape);
        for (int64_t h = 0; h < shape.heads; ++h) {
            const int64_t o = h * shape.dim;
            for (int64_t quad = 0; quad < quads; ++quad) {
                const T *const *r = rows + 4 * quad;
                V sum[4] = {};
                for (int64_t c = 0; c < n; ++c) {
                    V x[4];
                    for (int e = 0; e < 4; ++e) x[e] = load<V>(fixed + o + c * W) + load<V>(r[e] + o + c * W);
                    if (HasFeatures) {
                        const T *m = features.map + h * features.count * shape.dim + c * W;
                        for (int64_t f = 0; f < features.count; ++f)
                            for (int e = 0; e < 4; ++e)
                                x[e] += features.rows[4 * quad + e][f] * load<V>(m + f * shape.dim);
                    }
                    for (int e = 0; e < 4; ++e) {
                        V y = x[e] > T(0) ? x[e] : slope * x[e];
                        if (KeepsSigns) {
                            const unsigned bits = positive(x[e]);
                            signs[4 * quad + e][h * n + c] = Signs<T>(bits);
                            y = choose(bits, x[e], slope * x[e]);
                        }
                        sum[e] += load<V>(a + o + c * W) * y;
                    }
                }
                store(scores + 4 * (quad * shape.heads + h), sums(sum[0], sum[1], sum[2], sum[3]));
            }
            ahead.head(h);
        }
    }

    // Runs f<heads, chunks>(head, chunk) over tiles of a row that fit the registers.
    template <class F>
    static POLYHEAD_INLINE void tiled(const Shape &shape, F f) {
        int64_t h = 0;
        if constexpr (C == 1)
            for (; h + 8 <= shape.heads; h += 8)
                f(std::integral_constant<int, 8>{}, std::integral_constant<int, 1>{}, h, 0);
        if constexpr (C == 1 || C == 2)
            for (; h + 4 <= shape.heads; h += 4)
                f(std::integral_constant<int, 4>{}, std::integral_constant<int, (C ? C : 1)>{}, h, 0);
        for (; h < shape.heads; ++h) {
            if constexpr (C > 0) {
                f(std::integral_constant<int, 1>{}, std::integral_constant<int, C>{}, h, 0);
            } else {
                int64_t c = 0;
                for (; c + 8 <= chunks(shape); c += 8)
                    f(std::integral_constant<int, 1>{}, std::integral_constant<int, 8>{}, h, c);
                for (; c + 2 <= chunks(shape); c += 2)
                    f(std::integral_constant<int, 1>{}, std::integral_constant<int, 2>{}, h, c);
                for (; c < chunks(shape); ++c)
                    f(std::integral_constant<int, 1>{}, std::integral_constant<int, 1>{}, h, c);
            }
        }
    }

    // A block is summed from zero and then added: the rounding of a long sum grows with its blocks, not with its edges.
    template <int N>
    static POLYHEAD_INLINE void put(T *into, const V *sum, bool fresh) {
        for (int x = 0; x < N; ++x) store(into + x * W, fresh ? sum[x] : load<V>(into + x * W) + sum[x]);
    }

    // into[h] (+)= sum over edges of c[e, h] * rows[e][h]
    static void accumulate(Shape shape, Coefficients<T> c, const T *const *rows, int64_t count, bool fresh, T *into,
                           Ahead ahead) {
        tiled(shape, [&](auto heads, auto vectors, int64_t h, int64_t chunk) {
            constexpr int H = decltype(heads)::value, N = decltype(vectors)::value;
            const int64_t o = h * shape.dim + chunk * W;
            V sum[H * N] = {};
            for (int64_t e = 0; e < count; ++e) {
                const T *at = c.at + (e / 4) * 4 * shape.heads + (e % 4) * c.edge + h * c.head;
                const T *row = rows[e] + o;
                for (int x = 0; x < H * N; ++x) sum[x] += at[x / N * c.head] * load<V>(row + x * W);
            }
            put<H * N>(into + o, sum, fresh);
            if (chunk == 0)
                for (int x = 0; x < H; ++x) ahead.head(h + x);
        });
    }

    // into[h] (+)= sum over edges of c[e, h] where the sign bit of (e, h, d) is set
    static void accumulate_signs(Shape shape, Coefficients<T> c, const Signs<T> *const *signs, int64_t count,
                                 bool fresh, T *into) {
        const int64_t n = chunks(shape);
        tiled(shape, [&](auto heads, auto vectors, int64_t h, int64_t chunk) {
            constexpr int H = decltype(heads)::value, N = decltype(vectors)::value;
            const int64_t o = h * shape.dim + chunk * W;
            V sum[H * N] = {};
            for (int64_t e = 0; e < count; ++e) {
                const T *at = c.at + (e / 4) * 4 * shape.heads + (e % 4) * c.edge + h * c.head;
                const Signs<T> *bits = signs[e] + h * n + chunk;
                for (int x = 0; x < H * N; ++x) sum[x] = add_where(sum[x], bits[x], splat<V>(at[x / N * c.head]));
            }
            put<H * N>(into + o, sum, fresh);
        });
    }
};

// The loops for one dim: chosen once a call, called through pointers, so that what surrounds them is compiled once.
template <class T>
struct Loops {
    int64_t lanes;
    decltype(&Tiles<T, NATIVE<T>, 0>::dots) dots;
    decltype(&Tiles<T, NATIVE<T>, 0>::template gatv2<false, false>) gatv2[2][2];  // [has features][keeps signs]
    decltype(&Tiles<T, NATIVE<T>, 0>::accumulate) accumulate;
    decltype(&Tiles<T, NATIVE<T>, 0>::accumulate_signs) accumulate_signs;
};

template <class T, int W, int C>
Loops<T> loops() {
    using L = Tiles<T, W, C>;
    return {W,
            &L::dots,
            {{&L::template gatv2<false, false>, &L::template gatv2<false, true>},
             {&L::template gatv2<true, false>, &L::template gatv2<true, true>}},
            &L::accumulate,
            &L::accumulate_signs};
}

template <class T>
Loops<T> loops_for(int64_t dim) {
    constexpr int W = NATIVE<T>;
    if constexpr (W > 8)
        if (dim % W) return dim == 8 ? loops<T, 8, 1>() : loops<T, 8, 0>();
    switch (dim / W) {
        case 1: return loops<T, W, 1>();
        case 2: return loops<T, W, 2>();
        case 4: return loops<T, W, 4>();
        default: return loops<T, W, 0>();
    }
}

}  // namespace
}  // namespace polyhead

// The four loops over rows of (heads, dim): dot products, GATv2's scores, weighted sums, and sums under a bit mask. Each
// is specialised on the number of vectors per head, and processes a block of edges.
#pragma once

#include "simd/vector.hpp"

namespace polyhead {
namespace {

// Rows to prefetch while the current ones are processed, one head at a time.
struct Prefetch {
    const char *base;
    const int32_t *index;
    int64_t count, row_bytes, head_bytes;

    POLYHEAD_INLINE void prefetch_head(int64_t h) const {
        for (int64_t x = 0; x < count; ++x) {
            const char *at = base + index[x] * row_bytes + h * head_bytes;
            // into the L2 cache: the L1 cache is full of the current block
            for (int64_t byte = 0; byte < head_bytes; byte += 64) __builtin_prefetch(at + byte, 0, 2);
        }
    }
};

// Coefficients per edge and head, with strides: quads (1, 4), or rows of an (edges, heads) array (heads, 1).
template <class T>
struct Coefficients {
    const T *at;
    int64_t edge, head;
};

template <class T>
struct Features {
    const T *const *rows;  // one row of features per edge
    const T *map;          // (heads, count, dim)
    int64_t count;
};

struct HeadShape {
    int64_t heads, dim;
};

// One or two bytes of signs per vector of a row.
template <class T>
using Signs = typename std::conditional<(NATIVE<T> > 8), uint16_t, uint8_t>::type;

template <class T, int W, int C>
struct RowLoops {
    using V = Vec<T, W>;

    static POLYHEAD_INLINE int64_t vectors_per_head(const HeadShape &shape) { return C ? C : shape.dim / W; }

    // scores[quad][h] = factor * <fixed[h], rows[e][h]>
    static void compute_dot_scores(HeadShape shape, const T *fixed, const T *const *rows, int64_t quads, T factor, T *scores,
                     Prefetch prefetch) {
        const int64_t n = vectors_per_head(shape);
        for (int64_t h = 0; h < shape.heads; ++h) {
            const T *f = fixed + h * shape.dim;
            for (int64_t quad = 0; quad < quads; ++quad) {
                const T *const *r = rows + 4 * quad;
                const int64_t o = h * shape.dim;
                V sum[4] = {};
                for (int64_t c = 0; c < n; ++c)
                    for (int e = 0; e < 4; ++e) sum[e] += load<V>(f + c * W) * load<V>(r[e] + o + c * W);
                store(scores + 4 * (quad * shape.heads + h), sum_each_of_four(sum[0], sum[1], sum[2], sum[3]) * factor);
            }
            prefetch.prefetch_head(h);
        }
    }

    // scores[quad][h] = <a[h], leaky(fixed[h] + rows[e][h] + map[h] features[e])>, and the signs of the
    // arguments of leaky
    template <bool HasFeatures, bool KeepsSigns>
    static void compute_gatv2_scores(HeadShape shape, const T *fixed, const T *const *rows, int64_t quads, T slope, T *scores,
                                     Prefetch prefetch,
                      const T *a, Features<T> features, Signs<T> *const *signs) {
        const int64_t n = vectors_per_head(shape);
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
                            const unsigned bits = positive_lane_bits(x[e]);
                            signs[4 * quad + e][h * n + c] = Signs<T>(bits);
                            y = select_lanes(bits, x[e], slope * x[e]);
                        }
                        sum[e] += load<V>(a + o + c * W) * y;
                    }
                }
                store(scores + 4 * (quad * shape.heads + h), sum_each_of_four(sum[0], sum[1], sum[2], sum[3]));
            }
            prefetch.prefetch_head(h);
        }
    }

    // Calls f<heads, chunks>(head, chunk) for blocks of a row that fit into the registers.
    template <class F>
    static POLYHEAD_INLINE void for_each_register_block(const HeadShape &shape, F f) {
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
                for (; c + 8 <= vectors_per_head(shape); c += 8)
                    f(std::integral_constant<int, 1>{}, std::integral_constant<int, 8>{}, h, c);
                for (; c + 2 <= vectors_per_head(shape); c += 2)
                    f(std::integral_constant<int, 1>{}, std::integral_constant<int, 2>{}, h, c);
                for (; c < vectors_per_head(shape); ++c)
                    f(std::integral_constant<int, 1>{}, std::integral_constant<int, 1>{}, h, c);
            }
        }
    }

    // A block is summed from zero and then added: rounding errors grow with the number of blocks, not of edges.
    template <int N>
    static POLYHEAD_INLINE void store_or_add(T *into, const V *sum, bool fresh) {
        for (int x = 0; x < N; ++x) store(into + x * W, fresh ? sum[x] : load<V>(into + x * W) + sum[x]);
    }

    // into[h] (+)= sum over edges of c[e, h] times data(e, h, chunk), where add(sum, c, data, x) adds the vector x of a block
    template <class Data, class Add>
    static POLYHEAD_INLINE void sum_edges(HeadShape shape, Coefficients<T> c, int64_t count, bool fresh, T *into,
                                          const Prefetch *prefetch, Data data, Add add) {
        for_each_register_block(shape, [&](auto heads, auto vectors, int64_t h, int64_t chunk) {
            constexpr int H = decltype(heads)::value, N = decltype(vectors)::value;
            V sum[H * N] = {};
            for (int64_t e = 0; e < count; ++e) {
                const T *at = c.at + (e / 4) * 4 * shape.heads + (e % 4) * c.edge + h * c.head;
                const auto *from = data(e, h, chunk);
                for (int x = 0; x < H * N; ++x) add(sum[x], at[x / N * c.head], from, x);
            }
            store_or_add<H * N>(into + h * shape.dim + chunk * W, sum, fresh);
            if (prefetch && chunk == 0)
                for (int x = 0; x < H; ++x) prefetch->prefetch_head(h + x);
        });
    }

    // into[h] (+)= sum over edges of c[e, h] * rows[e][h]
    static void add_weighted_rows(HeadShape shape, Coefficients<T> c, const T *const *rows, int64_t count, bool fresh, T *into,
                           Prefetch prefetch) {
        sum_edges(
            shape, c, count, fresh, into, &prefetch,
            [&](int64_t e, int64_t h, int64_t chunk) { return rows[e] + h * shape.dim + chunk * W; },
            [](V &sum, T coefficient, const T *row, int x) { sum += coefficient * load<V>(row + x * W); });
    }

    // into[h] (+)= sum over edges of c[e, h] where the sign bit of (e, h, d) is set
    static void add_weighted_signs(HeadShape shape, Coefficients<T> c, const Signs<T> *const *signs, int64_t count,
                                 bool fresh, T *into) {
        const int64_t n = vectors_per_head(shape);
        sum_edges(
            shape, c, count, fresh, into, nullptr,
            [&](int64_t e, int64_t h, int64_t chunk) { return signs[e] + h * n + chunk; },
            [](V &sum, T coefficient, const Signs<T> *bits, int x) { sum = add_where(sum, bits[x], splat<V>(coefficient)); });
    }
};

// The loops for one dim, chosen once per call and called through pointers, so that their callers are compiled once.
template <class T>
struct Loops {
    int64_t lanes;
    decltype(&RowLoops<T, NATIVE<T>, 0>::compute_dot_scores) compute_dot_scores;
    // [has features][keeps signs]
    decltype(&RowLoops<T, NATIVE<T>, 0>::template compute_gatv2_scores<false, false>) compute_gatv2_scores[2][2];
    decltype(&RowLoops<T, NATIVE<T>, 0>::add_weighted_rows) add_weighted_rows;
    decltype(&RowLoops<T, NATIVE<T>, 0>::add_weighted_signs) add_weighted_signs;
};

template <class T, int W, int C>
Loops<T> make_loops() {
    using L = RowLoops<T, W, C>;
    return {W,
            &L::compute_dot_scores,
            {{&L::template compute_gatv2_scores<false, false>, &L::template compute_gatv2_scores<false, true>},
             {&L::template compute_gatv2_scores<true, false>, &L::template compute_gatv2_scores<true, true>}},
            &L::add_weighted_rows,
            &L::add_weighted_signs};
}

template <class T>
Loops<T> select_loops(int64_t dim) {
    constexpr int W = NATIVE<T>;
    if constexpr (W > 8)
        if (dim % W) return dim == 8 ? make_loops<T, 8, 1>() : make_loops<T, 8, 0>();
    switch (dim / W) {
        case 1: return make_loops<T, W, 1>();
        case 2: return make_loops<T, W, 2>();
        case 4: return make_loops<T, W, 4>();
        default: return make_loops<T, W, 0>();
    }
}

}  // namespace
}  // namespace polyhead

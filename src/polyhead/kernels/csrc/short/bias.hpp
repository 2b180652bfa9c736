// Terms added to the scores of attention over few keys, and the sums of their gradients.
//
// A gradient is summed in memory of its own, where rows of keys are whole vectors, and written out once. What several entries of
// the batch share is summed in parts of the batch; the sums of the parts are added in a fixed order, whatever the threads do.
#pragma once

#include "linalg/row_products.hpp"
#include "kernel_arguments.hpp"
#include "simd/vector.hpp"

namespace polyhead {
namespace {

// row[c] += the term of one query at key c, for vectors of keys from `begin` to `end`; reads no more than `keys` of them
template <class T>
POLYHEAD_INLINE void add_bias_row(const T *from, int64_t stride, int64_t keys, T *row, int64_t begin, int64_t end) {
    constexpr int L = NATIVE<T>;
    using V = Vec<T, L>;
    int64_t c = begin;
    if (stride == 0) {
        const V x = splat<V>(*from);
        for (; c < end; c += L) store(row + c, load<V>(row + c) + x);
        return;
    }
    for (; c < end && c + L <= keys; c += L) store(row + c, load<V>(row + c) + load<V>(from + c));
    if (c < end && c < keys) store(row + c, load<V>(row + c) + load_first(from + c, int(keys - c)));
}

// Where the gradient of one term is summed.
template <class T>
struct BiasSums {
    bool needed = false;
    // whether heads have sums of their own, and whether entries of the batch, or heads of the only entry, have the same
    bool by_head = false, shared = false;
    // from one query to the next, from the first number to query 0, and the numbers of a head
    int64_t row = 0, start = 0, slice = 0;

    // `keys`: padded to whole vectors
    BiasSums(const Short &in, const ShortBias &gradient, int64_t keys) {
        if (!gradient.data) return;
        const bool table = gradient.query < 0;
        needed = true;
        by_head = gradient.head != 0 || in.heads == 1;
        shared = in.batch > 1 ? gradient.batch == 0 : !by_head;
        const int64_t width = gradient.key ? keys : 1;
        row = table ? -1 : gradient.query ? width : 0;
        start = table ? in.queries - 1 : 0;
        slice = table ? in.queries - 1 + width : gradient.query ? in.queries * width : width;
        slice = (slice + 15) / 16 * 16;
    }

    // the numbers of all heads that have sums at the same time
    int64_t size(const Short &in) const { return shared && by_head ? in.heads * slice : slice; }
    int64_t head(int64_t h) const { return shared && by_head ? h * slice : 0; }

    // Writes the sums of a head, or of all heads, to the gradient.
    void write(const Short &in, const ShortBias &gradient, const T *sums, int64_t b, int64_t h) const {
        T *into = static_cast<T *>(const_cast<void *>(gradient.data)) + b * gradient.batch + h * gradient.head;
        constexpr int L = NATIVE<T>;
        if (row < 0)
            copy_rows<L>(sums, 0, into - start, 0, 1, in.queries + in.keys - 1);
        else
            copy_rows<L>(sums, row, into, gradient.query, row ? in.queries : 1, gradient.key ? in.keys : 1);
    }
};

// totals[n] += the sums of all parts, in their order
template <class T>
void add_parts(const T *sums, int64_t parts, int64_t size, double *totals, int threads) {
    constexpr int64_t BLOCK = 1024;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t begin = 0; begin < size; begin += BLOCK) {
        const int64_t end = begin + BLOCK < size ? begin + BLOCK : size;
        for (int64_t part = 0; part < parts; ++part)
            for (int64_t n = begin; n < end; ++n) totals[n] += double(sums[part * size + n]);
    }
}

}  // namespace
}  // namespace polyhead

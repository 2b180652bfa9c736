// Attention over few keys, divided among threads: the batch in parts.
//
// No two threads write to the same row. Gradients of a bias that several parts share are summed by each part alone; the sums are added
// in a fixed order.
#pragma once

#include "short/head.hpp"

namespace polyhead {
namespace {

// Runs `work` on the key heads of the parts [first, last) of the batch, of `parts` in all. `begin` is called before each part. A part
// has whole multiples of `unit` key heads. False if there is no memory.
template <class T, class Begin, class Work>
bool over_key_heads(const Short &in, const ShortGradients *g, int64_t unit, int64_t parts, int64_t first, int64_t last, Begin begin,
                    Work work) {
    const int64_t units = in.batch * in.key_heads / unit, size = whole_lines(ShortWork<T>::workspace_size(in, g) * sizeof(T));
    const int threads = int(in.threads < last - first ? in.threads : last - first > 1 ? last - first : 1);
    Scratch scratch;
    if (!scratch.reserve_zeros(size_t(size * threads))) return false;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int thread = 0; thread < threads; ++thread) {
        ShortWork<T> mine(in, g, reinterpret_cast<T *>(scratch.as<char>() + thread * size));
        const int64_t end = first + (last - first) * (thread + 1) / threads;
        for (int64_t part = first + (last - first) * thread / threads; part < end; ++part) {
            begin(mine, part);
            const int64_t stop = units * (part + 1) / parts * unit;
            for (int64_t n = units * part / parts * unit; n < stop; ++n) {
                if (n + 1 < stop) mine.prefetch(g, (n + 1) / in.key_heads, (n + 1) % in.key_heads);
                work(mine, n / in.key_heads, n % in.key_heads);
            }
        }
    }
    return true;
}

// As many parts as threads: results do not depend on them.
template <class T, class Work>
bool over_key_heads(const Short &in, const ShortGradients *g, int64_t unit, Work work) {
    const int64_t units = in.batch * in.key_heads / unit, parts = in.threads < units ? in.threads : units > 1 ? units : 1;
    return over_key_heads<T>(in, g, unit, parts, 0, parts, [](ShortWork<T> &, int64_t) {}, work);
}

template <class T>
bool short_forward(const Short &in) {
    return over_key_heads<T>(in, nullptr, 1, [](ShortWork<T> &mine, int64_t b, int64_t h) { mine.forward(b, h); });
}

template <class T>
bool short_backward(const Short &in, const ShortGradients &g) {
    const BiasSums<T> sums[] = {ShortWork<T>::sums_of(in, &g, 0), ShortWork<T>::sums_of(in, &g, 1)};
    int64_t unit = 1, sizes[] = {0, 0};
    for (int term : {0, 1}) {
        if (sums[term].shared) sizes[term] = sums[term].size(in);
        // one thread adds up the heads that have one gradient
        if (sums[term].needed && !sums[term].shared && !sums[term].by_head) unit = in.key_heads;
    }
    const int64_t size = sizes[0] + sizes[1], units = in.batch * in.key_heads / unit;
    auto work = [&](ShortWork<T> &mine, int64_t b, int64_t h) { mine.backward(g, b, h); };
    if (!size) return over_key_heads<T>(in, &g, unit, work);
    // Parts depend on the sizes alone: enough of them for many threads, and each with sums of few numbers. Memory limits how many are
    // computed at once.
    constexpr int64_t PARTS = 64, UNITS = 256, SUMS = (int64_t(1) << 25) / int64_t(sizeof(T));
    const int64_t most = units < PARTS ? units : PARTS, least = (units + UNITS - 1) / UNITS, parts = most > least ? most : least;
    int64_t at_once = in.threads > SUMS / size ? in.threads : SUMS / size;
    at_once = at_once < parts ? at_once : parts;
    Scratch part_sums, totals;
    if (!part_sums.reserve(size_t(at_once * size) * sizeof(T)) || !totals.reserve_zeros(size_t(size) * sizeof(double))) return false;
    T *memory = part_sums.as<T>();
    for (int64_t first = 0, last; first < parts; first = last) {
        last = first + at_once < parts ? first + at_once : parts;
        auto begin = [&](ShortWork<T> &mine, int64_t part) {
            T *own = memory + (part - first) * size;
            for (int64_t n = 0; n < size; ++n) own[n] = 0;
            for (int term : {0, 1})
                if (sizes[term]) mine.bias_grads[term] = own + term * sizes[0];
        };
        if (!over_key_heads<T>(in, &g, unit, parts, first, last, begin, work)) return false;
        add_parts(memory, last - first, size, totals.as<double>(), in.threads);
    }
    for (int64_t n = 0; n < size; ++n) memory[n] = T(totals.as<double>()[n]);
    for (int term : {0, 1})
        for (int64_t h = 0; sizes[term] && h < (sums[term].by_head ? in.heads : 1); ++h)
            sums[term].write(in, g.d_bias[term], memory + term * sizes[0] + sums[term].head(h), 0, h);
    return true;
}

}  // namespace
}  // namespace polyhead

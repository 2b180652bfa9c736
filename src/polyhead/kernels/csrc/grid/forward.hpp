// Attention over the windows of a grid: only pairs inside of a window are computed, a vector of queries at a time.
#pragma once

#include <cstdlib>
#include <memory>

#include "grid/rows.hpp"
#include "simd/hash.hpp"
#include "simd/math.hpp"

// a lambda that is called from several loops
#define POLYHEAD_ALWAYS __attribute__((always_inline))

namespace polyhead {
namespace {

template <class T>
struct GridWork : GridRows<T> {
    using Base = GridRows<T>;
    using Base::L, Base::ROWS, Base::in, Base::cut, Base::part, Base::stretches, Base::many;
    using typename Base::V;
    using Words32 = Vec<uint32_t, L>;
    using Rows = typename Base::Rows;
    // neighbours whose scores are under way at once: in the nearest cache
    static constexpr int64_t FORWARD = 160;
    static_assert(FORWARD >= GridCut::LONG, "a stretch is not divided");

    // rows of points: those around, and those of a block
    T *around_k, *around_v, *own_q;
    // 0 in the grid and -inf beyond; scores, sums of features, and those of a vector of points one by one
    T *outside, *scores, *sum_v, *rows_out;
    Dropout dropout;
    uint32_t head = 0;
    const T *table = nullptr;

    GridWork(const Grid &problem, const GridCut &sizes, Stretch *room)
        : Base(problem, sizes, room), dropout(dropout_of(in.dropout, in.threshold)) {}

    template <class Take>
    void lay(Take take) {
        around_k = take(cut.ring * in.dim * cut.pitch), around_v = take(cut.ring * in.width * cut.pitch);
        own_q = take(ROWS * in.dim * cut.pitch), outside = take(cut.pitch), scores = take(FORWARD * ROWS * L);
        sum_v = take(ROWS * in.width * L), rows_out = take(L * most_of(in.dim, in.width));
    }

    // 0, 1, 2, …
    template <class I>
    static POLYHEAD_INLINE Vec<I, L> count() {
        Vec<I, L> lanes;
        for (int lane = 0; lane < L; ++lane) lanes[lane] = I(lane);
        return lanes;
    }

    // 1 / (1 - dropout) where a pair stays, 0 where it goes; queries and keys by the number of their first
    POLYHEAD_INLINE V kept(int64_t query, int64_t key) const {
        const Words32 hashed = mix(count<uint32_t>() + (head + uint32_t(query)));
        const Words32 word = mix(hashed ^ ((count<uint32_t>() + uint32_t(key)) * 0x9E3779B1u));
        const auto stays = __builtin_convertvector((Vec<int32_t, L>)word > dropout.last, Vec<Int<T>, L>);
        return stays ? splat<V>(T(1 / (1 - in.dropout))) : V{};
    }

    // the number of the point in column `left + x` of a row
    int64_t point(int64_t row, int64_t x) const { return row * cut.width + part.x + x; }

    // `work` for each score: its stretch, row, place, offset and shift
    template <class Each>
    POLYHEAD_INLINE void each(int64_t first, int64_t last, Each work) const {
        for (int64_t n = first; n < last; ++n) {
            const Stretch &s = stretches[n];
            if (s.to - s.from == ROWS)
                each_of<0, 2>(s, work);
            else if (s.from == 0)
                each_of<0, 1>(s, work);
            else
                each_of<1, 2>(s, work);
        }
    }

    template <int FROM, int TO, class Each>
    POLYHEAD_INLINE void each_of(const Stretch &s, Each work) const {
        for (int64_t c = 0; c < s.count; ++c)
#pragma GCC unroll 2
            for (int r = FROM; r < TO; ++r)
                work(s, r, ((s.slot + c) * ROWS + r) * L, s.number + c - r * cut.across, s.shift + c * cut.step_x);
    }

    void begin(const GridPart &next, int64_t query_head) {
        part = next;
        head = dropout.on ? hash_head(in.seed, part.b * in.heads + query_head) : 0;
        table = in.table ? static_cast<const T *>(in.table) + query_head * cut.offsets : nullptr;
    }

    void dots(int64_t first, int64_t last, const T *const *own, int64_t features, int64_t x, const T *around, const T *start,
              T *into) const {
        const int64_t from = cut.left + x;
        const T *a[ROWS];
        for (int r = 0; r < ROWS; ++r) a[r] = own[r] + from;
        Base::dots(stretches + first, last - first, a, {around + from, features * cut.pitch}, start + from, cut.pitch, cut.step_x,
                   features, into);
    }

    void sums(int64_t first, int64_t last, const T *weights, int64_t features, int64_t x, const T *around, T *into) const {
        Base::sums(stretches + first, last - first, weights, {around + cut.left + x, features * cut.pitch}, cut.pitch, cut.step_x,
                   features, into, features * L, first == 0);
    }

    static void clear(T *numbers, int64_t count) {
        for (int64_t n = 0; n < count; ++n) numbers[n] = 0;
    }

    // Sums (features, L) of a vector of points, to where these lie.
    void give(const T *sum, int64_t features, const Strided &x, int64_t h, int64_t row, int64_t from, T factor, bool add) {
        const int64_t lanes = least(L, part.points - from);
        T *into = this->to(x, part.b, h, point(row, from));
        if (lanes == L && !add) return turned<L>(sum, L, into, x.item, features, L, factor);
        turned<L>(sum, L, rows_out, features, features, L, factor);
        for (int64_t i = 0; i < lanes; ++i)
            for (int64_t d = 0; d < features; ++d)
                into[i * x.item + d] = rows_out[i * features + d] + (add ? into[i * x.item + d] : T(0));
    }

    // -inf beyond the grid
    void mark_outside() {
        const auto s = this->span(cut.pad);
        for (int64_t c = s.begin; c < s.end; ++c) outside[c] = NEGATIVE_INFINITY<T>;
        for (int64_t x = s.first; x < s.stop; ++x) outside[this->column(x)] = 0;
    }

    // the keys of a row that a head of queries sees
    void take_keys(int64_t row, int64_t query_head) {
        const int64_t h = query_head / (in.heads / in.key_heads), size = row % cut.ring * cut.pitch;
        this->take(in.k, h, row, in.dim, cut.pad, around_k + size * in.dim);
        this->take(in.v, h, row, in.width, cut.pad, around_v + size * in.width);
    }

    void forward(const GridPart &next) {
        begin(next, next.h);
        mark_outside();
        auto fetch = [&](int64_t row) { take_keys(row, part.h); };
        this->sweep(fetch, [&](int64_t row, int64_t rows) {
            for (int64_t r = 0; r < rows; ++r)
                this->take(in.q, part.h, row + r * cut.step_y, in.dim, 0, own_q + r * in.dim * cut.pitch, T(in.scale));
            for (int64_t x = 0; x < part.points; x += L) forward_at(row, rows, x);
        });
    }

    void forward_at(int64_t row, int64_t rows, int64_t x) {
        V high[ROWS], total[ROWS] = {};
        const T *own[ROWS];
        for (int r = 0; r < ROWS; ++r) own[r] = own_q + r * in.dim * cut.pitch;
        for (V &none : high) none = splat<V>(NEGATIVE_INFINITY<T>);
        for (int64_t first = 0, last; first < many; first = last) {
            last = this->chunk(first, FORWARD);
            dots(first, last, own, in.dim, x, around_k, outside, scores);
            weigh(first, last, row, x, high, total);
            sums(first, last, scores, in.width, x, around_v, sum_v);
        }
        T *lse = static_cast<T *>(in.lse) + (part.b * in.heads + part.h) * cut.rows * cut.width;
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t here = row + r * cut.step_y, lanes = least(L, part.points - x);
            scale_sums(int(r), T(1) / total[r]);
            give(sum_v + r * in.width * L, in.width, in.out, part.h, here, x, 1, false);
            const V found = high[r] + logarithm<T, L>(total[r]);
            for (int64_t lane = 0; lane < lanes; ++lane) lse[point(here, x) + lane] = found[lane];
        }
    }

    POLYHEAD_INLINE void scale_sums(int r, V factor) {
        T *sum = sum_v + r * in.width * L;
        for (int64_t d = 0; d < in.width; ++d) store(sum + d * L, load<V>(sum + d * L) * factor);
    }

    // Scores into weights, relative to the largest so far; what was summed before is made relative to it too.
    void weigh(int64_t first, int64_t last, int64_t row, int64_t x, V (&high)[ROWS], V (&total)[ROWS]) {
        V before[ROWS], sum[ROWS], by[ROWS];
        for (int r = 0; r < ROWS; ++r) before[r] = by[r] = high[r];
        each(first, last, [&](const Stretch &, int r, int64_t at, int64_t number, int64_t) POLYHEAD_ALWAYS {
            V s = load<V>(scores + at);
            if (table) store(scores + at, s = s + table[number]);
            by[r] = larger(by[r], s);
        });
        for (int r = 0; r < ROWS; ++r) {
            high[r] = by[r];
            by[r] = by[r] == NEGATIVE_INFINITY<T> ? V{} : by[r];
            const V less = exponential<T, L>(before[r] - by[r]);
            sum[r] = total[r] * less;
            if (first > 0) scale_sums(r, less);
        }
        each(first, last, [&](const Stretch &s, int r, int64_t at, int64_t, int64_t shift) POLYHEAD_ALWAYS {
            const V weight = exponential<T, L>(load<V>(scores + at) - by[r]);
            sum[r] += weight;
            const V some = dropout.on ? kept(point(row + r * cut.step_y, x), point(s.row, x + shift)) : splat<V>(T(1));
            store(scores + at, dropout.on ? weight * some : weight);
        });
        for (int r = 0; r < ROWS; ++r) total[r] = sum[r];
    }
};

// False where there is no room. Parts are taken as threads get free: those from `first` to `stop`, counted through the batch, for
// each head.
template <class T, class Worker, class Work>
bool over_parts(const Grid &in, const GridCut &cut, int64_t heads, int64_t first, int64_t stop, Work work) {
    constexpr int64_t LINE = 64, NUMBERS = LINE / int64_t(sizeof(T));
    auto lines = [](int64_t count) { return (count + NUMBERS - 1) / NUMBERS * NUMBERS; };
    int64_t numbers = 0;
    Worker(in, cut, nullptr).lay([&](int64_t count) {
        numbers += lines(count);
        return static_cast<T *>(nullptr);
    });
    const int64_t stretches = cut.stretches(Worker::ROWS) * int64_t(sizeof(Stretch));
    const int64_t bytes = numbers * int64_t(sizeof(T)) + (stretches + LINE - 1) / LINE * LINE;
    const int64_t end = stop * heads;
    const int threads = int(least(in.threads, end - first * heads));
    std::unique_ptr<void, decltype(&std::free)> memory(std::calloc(size_t(bytes * threads + LINE), 1), &std::free);
    if (!memory) return false;
    char *scratch = reinterpret_cast<char *>((reinterpret_cast<uintptr_t>(memory.get()) + LINE - 1) / LINE * LINE);
    int64_t next = first * heads;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int thread = 0; thread < threads; ++thread) {
        T *free = reinterpret_cast<T *>(scratch + thread * bytes);
        Worker own(in, cut, reinterpret_cast<Stretch *>(free + numbers));
        own.lay([&](int64_t count) {
            T *mine = free;
            free += lines(count);
            return mine;
        });
        for (;;) {
            int64_t number;
#pragma omp atomic capture
            number = next++;
            if (number >= end) break;
            work(own, part_of(cut, heads, number), number);
        }
    }
    return true;
}

template <class T>
bool grid_forward(const Grid &in) {
    using Worker = GridWork<T>;
    const GridCut cut(in, NATIVE<T>, Worker::ROWS);
    return over_parts<T, Worker>(in, cut, in.heads, 0, in.batch * cut.parts(),
                                 [](Worker &own, const GridPart &part, int64_t) { own.forward(part); });
}

}  // namespace
}  // namespace polyhead

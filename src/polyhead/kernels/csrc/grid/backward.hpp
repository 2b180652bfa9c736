// Backward over the windows of a grid. Nobody adds to a row that is another thread's.
//
// A vector of queries meets the keys around it, for dq; and a vector of keys the queries around it, for dk and dv. Where the
// weights of all rows that a window reaches find room, the second follows the first at some distance, and finds them there.
// Else the grid is swept twice, and weights are computed twice.
#pragma once

#include "grid/forward.hpp"

namespace polyhead {
namespace {

template <class T>
struct GridBackward : GridWork<T> {
    using Base = GridWork<T>;
    using Base::L, Base::ROWS, Base::in, Base::cut, Base::part, Base::stretches, Base::many, Base::dropout, Base::table;
    using Base::around_k, Base::around_v, Base::own_q, Base::outside, Base::scores, Base::sum_v;
    using typename Base::V;
    // neighbours whose scores and gradients are under way at once
    static constexpr int64_t ROOM = 96;
    static_assert(ROOM >= GridCut::LONG && ROOM <= Base::FORWARD, "a stretch is not divided, and scores find room");

    const GridGradients *given = nullptr;
    // rows of queries and of d_out: those around, those of a block; and one of the outputs
    T *around_q, *around_out, *own_out, *spare;
    // of each point the log-sum-exp, and what all gradients of its weights have less
    T *around_lse, *around_delta, *own_lse, *own_delta;
    T *zeros, *grads, *sum_k, *table_sums;
    // (rows at hand, offsets, pitch): the weights that dropout leaves, and the gradients of scores
    T *kept_weights, *kept_grads;
    // the block of rows that is computed
    const T *first_rows[ROWS], *second_rows[ROWS], *lse_rows[ROWS], *delta_rows[ROWS];

    GridBackward(const Grid &problem, const GridCut &sizes, Stretch *room) : Base(problem, sizes, room) {}

    template <class Take>
    void lay(Take take) {
        Base::lay(take);
        const int64_t kept = cut.keeps ? cut.ring * cut.offsets * cut.pitch : 0;
        around_q = cut.keeps ? take(cut.ring * in.dim * cut.pitch) : around_k;
        around_out = cut.keeps ? take(cut.ring * in.width * cut.pitch) : around_v;
        own_out = take(ROWS * in.width * cut.pitch), spare = take(in.width * cut.pitch);
        around_lse = take(cut.ring * cut.pitch), around_delta = take(cut.ring * cut.pitch);
        own_lse = take(ROWS * cut.pitch), own_delta = take(ROWS * cut.pitch), zeros = take(cut.pitch);
        grads = take(ROOM * ROWS * L), sum_k = take(ROWS * in.dim * L), table_sums = take(in.table ? cut.offsets * L : 0);
        kept_weights = take(kept), kept_grads = take(kept);
    }

    // q, d_out, the log-sum-exp of a row of queries, and Σ d_out · out less the gradient of the log-sum-exp.
    void take_queries(int64_t h, int64_t row, int64_t side, T *q, T *d_out, T *lse, T *delta) {
        const int64_t numbers = (part.b * in.heads + h) * cut.rows * cut.width;
        this->take(in.q, h, row, in.dim, side, q, T(in.scale));
        this->take(given->d_out, h, row, in.width, side, d_out);
        this->take(in.out, h, row, in.width, side, spare);
        // beyond the grid there are no weights
        this->take_numbers(static_cast<const T *>(in.lse) + numbers, row, side, lse, -NEGATIVE_INFINITY<T>);
        if (given->d_lse)
            this->take_numbers(static_cast<const T *>(given->d_lse) + numbers, row, side, delta, 0);
        else
            this->clear(delta, cut.pitch);
        for (int64_t c = 0; c < cut.pitch; c += L) {
            V sum = -load<V>(delta + c);
            for (int64_t d = 0; d < in.width * cut.pitch; d += cut.pitch) sum += load<V>(d_out + d + c) * load<V>(spare + d + c);
            store(delta + c, sum);
        }
    }

    void take_around(int64_t h, int64_t row, int64_t side) {
        const int64_t at = row % cut.ring * cut.pitch;
        take_queries(h, row, side, around_q + at * in.dim, around_out + at * in.width, around_lse + at, around_delta + at);
    }

    void begin_queries(const GridPart &next, int64_t h) {
        this->begin(next, h);
        this->mark_outside();
        if (table) this->clear(table_sums, cut.offsets * L);
    }

    void give_table(T *d_table) const {
        for (int64_t n = 0; table && n < cut.offsets; ++n) {
            d_table[n] = 0;
            for (int lane = 0; lane < L; ++lane) d_table[n] += table_sums[n * L + lane];
        }
    }

    // dq, and the table's gradient
    void by_queries(const GridPart &next, T *d_table) {
        begin_queries(next, next.h);
        for (int r = 0; r < ROWS; ++r) {
            first_rows[r] = own_q + r * in.dim * cut.pitch, second_rows[r] = own_out + r * in.width * cut.pitch;
            lse_rows[r] = own_lse + r * cut.pitch, delta_rows[r] = own_delta + r * cut.pitch;
        }
        auto fetch = [&](int64_t row) { this->take_keys(row, next.h); };
        this->sweep(fetch, [&](int64_t row, int64_t rows) {
            for (int64_t r = 0; r < rows; ++r)
                take_queries(next.h, row + r * cut.step_y, 0, own_q + r * in.dim * cut.pitch, own_out + r * in.width * cut.pitch,
                             own_lse + r * cut.pitch, own_delta + r * cut.pitch);
            for (int64_t x = 0; x < part.points; x += L) by_queries_at(next.h, row, rows, x, true);
        });
        give_table(d_table);
    }

    // where the numbers of an offset are kept
    int64_t kept_at(int64_t row, int64_t number, int64_t x) const {
        return ((row % cut.ring) * cut.offsets + number) * cut.pitch + cut.left + x;
    }

    // `whole`: with what comes of the gradients; else they are only kept
    void by_queries_at(int64_t h, int64_t row, int64_t rows, int64_t x, bool whole) {
        V lse[ROWS], delta[ROWS];
        int64_t kept[ROWS];
        for (int r = 0; r < ROWS; ++r) {
            lse[r] = load<V>(lse_rows[r] + cut.left + x), delta[r] = load<V>(delta_rows[r] + cut.left + x);
            kept[r] = kept_at(row + r * cut.step_y, 0, x);
        }
        const bool tabled = table && whole;
        for (int64_t first = 0, last; first < many; first = last) {
            last = this->chunk(first, ROOM);
            this->dots(first, last, first_rows, in.dim, x, around_k, outside, scores);
            this->dots(first, last, second_rows, in.width, x, around_v, zeros, grads);
            this->each(first, last, [&](const Stretch &s, int r, int64_t at, int64_t number, int64_t shift) POLYHEAD_ALWAYS {
                V score = load<V>(scores + at), grad = load<V>(grads + at);
                if (table) score = score + table[number];
                const V weight = exponential<T, L>(score - lse[r]);
                V left = weight;
                if (dropout.on) {
                    const V some = this->kept(this->point(row + r * cut.step_y, x), this->point(s.row, x + shift));
                    grad *= some, left *= some;
                }
                const V ds = weight * (grad - delta[r]);
                store(grads + at, ds);
                if (cut.keeps) {
                    const int64_t to = kept[r] + number * cut.pitch;
                    store(kept_weights + to, left), store(kept_grads + to, ds);
                }
                if (tabled) store(table_sums + number * L, load<V>(table_sums + number * L) + ds);
            });
            if (whole) this->sums(first, last, grads, in.dim, x, around_k, sum_k);
        }
        for (int64_t r = 0; whole && r < rows; ++r)
            this->give(sum_k + r * in.dim * L, in.dim, given->dq, h, row + r * cut.step_y, x, T(in.scale), false);
    }

    // dk and dv: from all heads of queries that share these keys, one after the other
    void by_keys(const GridPart &next) {
        const int64_t group = in.heads / in.key_heads;
        for (int r = 0; r < ROWS; ++r)
            first_rows[r] = own_q + r * in.dim * cut.pitch, second_rows[r] = own_out + r * in.width * cut.pitch;
        for (int64_t h = next.h * group; h < (next.h + 1) * group; ++h) {
            this->begin(next, h);
            auto fetch = [&](int64_t row) { take_around(h, row, cut.pad); };
            this->sweep(fetch, [&](int64_t row, int64_t rows) {
                for (int64_t r = 0; r < rows; ++r) {
                    this->take(in.k, part.h, row + r * cut.step_y, in.dim, 0, own_q + r * in.dim * cut.pitch);
                    this->take(in.v, part.h, row + r * cut.step_y, in.width, 0, own_out + r * in.width * cut.pitch);
                }
                for (int64_t x = 0; x < part.points; x += L) by_keys_at(row, rows, x, h > next.h * group);
            });
        }
    }

    void by_keys_at(int64_t row, int64_t rows, int64_t x, bool add) {
        for (int64_t first = 0, last; first < many; first = last) {
            last = this->chunk(first, ROOM);
            if (cut.keeps)
                find(first, last, x);
            else
                compute(first, last, row, x);
            this->sums(first, last, scores, in.width, x, around_out, sum_v);
            this->sums(first, last, grads, in.dim, x, around_q, sum_k);
        }
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t here = row + r * cut.step_y;
            this->give(sum_k + r * in.dim * L, in.dim, given->dk, part.h, here, x, 1, add);
            this->give(sum_v + r * in.width * L, in.width, given->dv, part.h, here, x, 1, add);
        }
    }

    // A key is as far from the query as the query from the key, the other way.
    int64_t opposite(int64_t number) const { return cut.offsets - 1 - number; }

    void find(int64_t first, int64_t last, int64_t x) {
        this->each(first, last, [&](const Stretch &s, int, int64_t at, int64_t number, int64_t shift) POLYHEAD_ALWAYS {
            const int64_t from = kept_at(s.place, opposite(number), x + shift);
            store(scores + at, load<V>(kept_weights + from)), store(grads + at, load<V>(kept_grads + from));
        });
    }

    void compute(int64_t first, int64_t last, int64_t row, int64_t x) {
        this->dots(first, last, first_rows, in.dim, x, around_q, zeros, scores);
        this->dots(first, last, second_rows, in.width, x, around_out, zeros, grads);
        this->each(first, last, [&](const Stretch &s, int r, int64_t at, int64_t number, int64_t shift) POLYHEAD_ALWAYS {
            const int64_t there = s.place * cut.pitch + cut.left + x + shift;
            V score = load<V>(scores + at), grad = load<V>(grads + at);
            if (table) score = score + table[opposite(number)];
            const V weight = exponential<T, L>(score - load<V>(around_lse + there));
            V left = weight;
            if (dropout.on) {
                const V some = this->kept(this->point(s.row, x + shift), this->point(row + r * cut.step_y, x));
                grad *= some, left *= some;
            }
            store(scores + at, left), store(grads + at, weight * (grad - load<V>(around_delta + there)));
        });
    }

    // All gradients, of one head of keys and those of queries that share it: keys follow when all queries around are done.
    void together(const GridPart &next, T *tables) {
        const int64_t group = in.heads / in.key_heads;
        for (int64_t h = next.h * group; h < (next.h + 1) * group; ++h) {
            begin_queries(next, h);
            follow(h, h > next.h * group);
            give_table(tables + h * cut.offsets);
        }
    }

    void follow(int64_t h, bool add) {
        const int64_t last = least(cut.rows, part.stop + cut.halo);
        int64_t row = most_of(0, part.row - cut.halo), next = most_of(0, row - cut.halo), done = part.row;
        while (row < last) {
            // a block of queries is in the part, or around it
            const bool whole = row >= part.row && row < part.stop;
            const int64_t end = this->block_end(row, row < part.row ? part.row : whole ? part.stop : last);
            for (; next < least(cut.rows, end + cut.halo); ++next) this->take_keys(next, h);
            for (int64_t at = row; at < end; ++at) take_around(h, at, 0);
            this->blocks(row, end, [&](int64_t at, int64_t rows) {
                for (int r = 0; r < ROWS; ++r) point_at(r, at + (r < rows ? r : 0) * cut.step_y);
                for (int64_t x = 0; x < part.points; x += L) by_queries_at(h, at, rows, x, whole);
            });
            for (row = end; done < part.stop;) {
                const int64_t stop = this->block_end(done, part.stop);
                if (row < least(last, stop + cut.halo)) break;
                this->blocks(done, stop, [&](int64_t at, int64_t rows) {
                    for (int64_t x = 0; x < part.points; x += L) by_keys_at(at, rows, x, add);
                });
                done = stop;
            }
        }
    }

    void point_at(int r, int64_t row) {
        const int64_t at = row % cut.ring * cut.pitch;
        first_rows[r] = around_q + at * in.dim, second_rows[r] = around_out + at * in.width;
        lse_rows[r] = around_lse + at, delta_rows[r] = around_delta + at;
    }
};

template <class T>
bool grid_backward(const Grid &in, const GridGradients &g) {
    using Worker = GridBackward<T>;
    // numbers of weights and gradients that a thread keeps: what is beyond a core's own cache is sooner computed again
    constexpr int64_t KEPT = (int64_t(3) << 19) / int64_t(sizeof(T));
    GridCut cut(in, NATIVE<T>, Worker::ROWS, true);
    if (cut.pieces > 1 || 2 * cut.ring * cut.offsets * cut.pitch > KEPT) cut = GridCut(in, NATIVE<T>, Worker::ROWS);
    // Each part has sums of its own, which are added in one order whatever the threads do. So many parts are done at once that
    // their sums take little memory, and that no thread is idle.
    constexpr int64_t SUMS = (int64_t(1) << 25) / int64_t(sizeof(T));
    const int64_t offsets = in.table ? cut.offsets : 0, each = in.heads * offsets, parts = in.batch * cut.parts();
    const int64_t at_once = each ? least(parts, most_of(in.threads, SUMS / each)) : parts;
    std::unique_ptr<void, decltype(&std::free)> memory(
        std::calloc(size_t(each) * sizeof(double) + size_t(at_once * each) * sizeof(T) + 1, 1), &std::free);
    if (!memory) return false;
    double *sums = static_cast<double *>(memory.get());
    T *tables = reinterpret_cast<T *>(sums + each), *d_table = static_cast<T *>(g.d_table);
    auto over = [&](int64_t heads, int64_t first, int64_t stop, auto work) {
        return over_parts<T, Worker>(in, cut, heads, first, stop, [&](Worker &own, const GridPart &part, int64_t number) {
            own.given = &g;
            work(own, part, number);
        });
    };
    bool done = true;
    for (int64_t first = 0, stop; done && first < parts; first = stop) {
        stop = least(parts, first + at_once);
        if (cut.keeps)
            done = over(in.key_heads, first, stop, [&](Worker &own, const GridPart &part, int64_t number) {
                own.together(part, tables + (number / in.key_heads - first) * each);
            });
        else
            done = over(in.heads, first, stop, [&](Worker &own, const GridPart &part, int64_t number) {
                own.by_queries(part, tables + (number - first * in.heads) * offsets);
            });
        for (int64_t p = 0; done && p < stop - first; ++p)
            for (int64_t n = 0; n < each; ++n) sums[n] += double(tables[p * each + n]);
    }
    if (done && !cut.keeps)
        done = over(in.key_heads, 0, parts, [&](Worker &own, const GridPart &part, int64_t) { own.by_keys(part); });
    for (int64_t n = 0; done && n < each; ++n) d_table[n] = T(sums[n]);
    return done;
}

}  // namespace
}  // namespace polyhead

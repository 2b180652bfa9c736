// Backward over the windows of a grid. No thread writes to the rows of another.
//
// Each vector of queries visits the keys around it, for dq, and each vector of keys the queries around it, for dk and dv. If the
// weights of all rows that a window reaches fit into the cache, the keys follow the queries at a distance and reuse the weights.
// Otherwise the grid is swept twice, and weights are computed twice.
#pragma once

#include "grid/forward.hpp"

namespace polyhead {
namespace {

template <class T>
struct GridBackward : GridForward<T> {
    using Base = GridForward<T>;
    using Base::L, Base::ROWS, Base::in, Base::cut, Base::part, Base::runs, Base::num_runs, Base::dropout, Base::table;
    using Base::around_k, Base::around_v, Base::own_q, Base::outside, Base::scores, Base::sum_v;
    using typename Base::V;
    // neighbours processed at once, with scores and gradients
    static constexpr int64_t CAPACITY = 96;
    static_assert(CAPACITY >= GridPartition::MAX_RUN && CAPACITY <= Base::FORWARD, "a run is not divided, and its scores fit");

    const GridGradients *gradients = nullptr;
    // rows of queries and of d_out: those in the ring, those of a block; and one row of the outputs
    T *around_q, *around_out, *own_out, *spare;
    // per point: the log-sum-exp, and delta = Σ d_out · out - d_lse, subtracted from the gradients of its weights
    T *around_lse, *around_delta, *own_lse, *own_delta;
    T *zeros, *grads, *sum_k, *table_sums;
    // (ring, offsets, pitch): the weights after dropout, and the gradients of scores
    T *ring_weights, *ring_grads;
    // the rows of the current block
    const T *first_rows[ROWS], *second_rows[ROWS], *lse_rows[ROWS], *delta_rows[ROWS];

    GridBackward(const Grid &problem, const GridPartition &sizes, KeyRun *run_memory) : Base(problem, sizes, run_memory) {}

    template <class Take>
    void allocate(Take take) {
        Base::allocate(take);
        const int64_t ring_size = cut.keeps ? cut.ring * cut.offsets * cut.pitch : 0;
        around_q = cut.keeps ? take(cut.ring * in.dim * cut.pitch) : around_k;
        around_out = cut.keeps ? take(cut.ring * in.width * cut.pitch) : around_v;
        own_out = take(ROWS * in.width * cut.pitch), spare = take(in.width * cut.pitch);
        around_lse = take(cut.ring * cut.pitch), around_delta = take(cut.ring * cut.pitch);
        own_lse = take(ROWS * cut.pitch), own_delta = take(ROWS * cut.pitch), zeros = take(cut.pitch);
        grads = take(CAPACITY * ROWS * L), sum_k = take(ROWS * in.dim * L), table_sums = take(in.table ? cut.offsets * L : 0);
        ring_weights = take(ring_size), ring_grads = take(ring_size);
    }

    // Loads q, d_out, the log-sum-exp and delta of a row of queries.
    void load_queries(int64_t h, int64_t row, int64_t side, T *q, T *d_out, T *lse, T *delta) {
        const int64_t numbers = (part.b * in.heads + h) * cut.rows * cut.width;
        this->load_row(in.q, h, row, in.dim, side, q, T(in.scale));
        this->load_row(gradients->d_out, h, row, in.width, side, d_out);
        this->load_row(in.out, h, row, in.width, side, spare);
        // weights outside the grid are zero
        this->load_point_scalars(static_cast<const T *>(in.lse) + numbers, row, side, lse, -NEGATIVE_INFINITY<T>);
        if (gradients->d_lse)
            this->load_point_scalars(static_cast<const T *>(gradients->d_lse) + numbers, row, side, delta, 0);
        else
            this->fill_with_zeros(delta, cut.pitch);
        for (int64_t c = 0; c < cut.pitch; c += L) {
            V sum = -load<V>(delta + c);
            for (int64_t d = 0; d < in.width * cut.pitch; d += cut.pitch) sum += load<V>(d_out + d + c) * load<V>(spare + d + c);
            store(delta + c, sum);
        }
    }

    void load_queries_into_ring(int64_t h, int64_t row, int64_t side) {
        const int64_t at = row % cut.ring * cut.pitch;
        load_queries(h, row, side, around_q + at * in.dim, around_out + at * in.width, around_lse + at, around_delta + at);
    }

    void begin_queries(const GridPart &next, int64_t h) {
        this->begin_part(next, h);
        this->mark_outside();
        if (table) this->fill_with_zeros(table_sums, cut.offsets * L);
    }

    void write_table(T *d_table) const {
        for (int64_t n = 0; table && n < cut.offsets; ++n) {
            d_table[n] = 0;
            for (int lane = 0; lane < L; ++lane) d_table[n] += table_sums[n * L + lane];
        }
    }

    // dq, and the gradient of the table
    void compute_query_gradients(const GridPart &next, T *d_table) {
        begin_queries(next, next.h);
        for (int r = 0; r < ROWS; ++r) {
            first_rows[r] = own_q + r * in.dim * cut.pitch, second_rows[r] = own_out + r * in.width * cut.pitch;
            lse_rows[r] = own_lse + r * cut.pitch, delta_rows[r] = own_delta + r * cut.pitch;
        }
        auto fetch = [&](int64_t row) { this->load_keys(row, next.h); };
        this->sweep_rows(fetch, [&](int64_t row, int64_t rows) {
            for (int64_t r = 0; r < rows; ++r)
                load_queries(next.h, row + r * cut.step_y, 0, own_q + r * in.dim * cut.pitch, own_out + r * in.width * cut.pitch,
                             own_lse + r * cut.pitch, own_delta + r * cut.pitch);
            for (int64_t x = 0; x < part.points; x += L) query_gradients_of_vector(next.h, row, rows, x, true);
        });
        write_table(d_table);
    }

    // the place of an offset in ring_weights and ring_grads
    int64_t ring_index(int64_t row, int64_t number, int64_t x) const {
        return ((row % cut.ring) * cut.offsets + number) * cut.pitch + cut.left + x;
    }

    // `whole`: also sum dq and the gradient of the table; else only fill the ring
    void query_gradients_of_vector(int64_t h, int64_t row, int64_t rows, int64_t x, bool whole) {
        V lse[ROWS], delta[ROWS];
        int64_t at_ring[ROWS];
        for (int r = 0; r < ROWS; ++r) {
            lse[r] = load<V>(lse_rows[r] + cut.left + x), delta[r] = load<V>(delta_rows[r] + cut.left + x);
            at_ring[r] = ring_index(row + r * cut.step_y, 0, x);
        }
        const bool tabled = table && whole;
        for (int64_t first = 0, last; first < num_runs; first = last) {
            last = this->assign_score_slots(first, CAPACITY);
            this->compute_dots(first, last, first_rows, in.dim, x, around_k, outside, scores);
            this->compute_dots(first, last, second_rows, in.width, x, around_v, zeros, grads);
            this->for_each_score(first, last,
                                 [&](const KeyRun &s, int r, int64_t at, int64_t number, int64_t shift) POLYHEAD_ALWAYS_INLINE {
                V score = load<V>(scores + at), grad = load<V>(grads + at);
                if (table) score = score + table[number];
                const V weight = exponential<T, L>(score - lse[r]);
                V dropped = weight;
                if (dropout.on) {
                    const V keep = this->dropout_at(this->point_index(row + r * cut.step_y, x),
                                                    this->point_index(s.row, x + shift));
                    grad *= keep, dropped *= keep;
                }
                const V ds = weight * (grad - delta[r]);
                store(grads + at, ds);
                if (cut.keeps) {
                    const int64_t to = at_ring[r] + number * cut.pitch;
                    store(ring_weights + to, dropped), store(ring_grads + to, ds);
                }
                if (tabled) store(table_sums + number * L, load<V>(table_sums + number * L) + ds);
            });
            if (whole) this->compute_sums(first, last, grads, in.dim, x, around_k, sum_k);
        }
        for (int64_t r = 0; whole && r < rows; ++r)
            this->store_sums(sum_k + r * in.dim * L, in.dim, gradients->dq, h, row + r * cut.step_y, x, T(in.scale), false);
    }

    // dk and dv, from all query heads that share these keys, one after the other
    void compute_key_gradients(const GridPart &next) {
        const int64_t group = in.heads / in.key_heads;
        for (int r = 0; r < ROWS; ++r)
            first_rows[r] = own_q + r * in.dim * cut.pitch, second_rows[r] = own_out + r * in.width * cut.pitch;
        for (int64_t h = next.h * group; h < (next.h + 1) * group; ++h) {
            this->begin_part(next, h);
            auto fetch = [&](int64_t row) { load_queries_into_ring(h, row, cut.pad); };
            this->sweep_rows(fetch, [&](int64_t row, int64_t rows) {
                for (int64_t r = 0; r < rows; ++r) {
                    this->load_row(in.k, part.h, row + r * cut.step_y, in.dim, 0, own_q + r * in.dim * cut.pitch);
                    this->load_row(in.v, part.h, row + r * cut.step_y, in.width, 0, own_out + r * in.width * cut.pitch);
                }
                for (int64_t x = 0; x < part.points; x += L) key_gradients_of_vector(row, rows, x, h > next.h * group);
            });
        }
    }

    void key_gradients_of_vector(int64_t row, int64_t rows, int64_t x, bool add) {
        for (int64_t first = 0, last; first < num_runs; first = last) {
            last = this->assign_score_slots(first, CAPACITY);
            if (cut.keeps)
                load_weights_from_ring(first, last, x);
            else
                recompute_weights(first, last, row, x);
            this->compute_sums(first, last, scores, in.width, x, around_out, sum_v);
            this->compute_sums(first, last, grads, in.dim, x, around_q, sum_k);
        }
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t key_row = row + r * cut.step_y;
            this->store_sums(sum_k + r * in.dim * L, in.dim, gradients->dk, part.h, key_row, x, 1, add);
            this->store_sums(sum_v + r * in.width * L, in.width, gradients->dv, part.h, key_row, x, 1, add);
        }
    }

    // The offset from key to query, given the one from query to key.
    int64_t opposite(int64_t number) const { return cut.offsets - 1 - number; }

    void load_weights_from_ring(int64_t first, int64_t last, int64_t x) {
        this->for_each_score(first, last,
                             [&](const KeyRun &s, int, int64_t at, int64_t number, int64_t shift) POLYHEAD_ALWAYS_INLINE {
            const int64_t from = ring_index(s.ring_slot, opposite(number), x + shift);
            store(scores + at, load<V>(ring_weights + from)), store(grads + at, load<V>(ring_grads + from));
        });
    }

    void recompute_weights(int64_t first, int64_t last, int64_t row, int64_t x) {
        this->compute_dots(first, last, first_rows, in.dim, x, around_q, zeros, scores);
        this->compute_dots(first, last, second_rows, in.width, x, around_out, zeros, grads);
        this->for_each_score(first, last,
                             [&](const KeyRun &s, int r, int64_t at, int64_t number, int64_t shift) POLYHEAD_ALWAYS_INLINE {
            const int64_t place = s.ring_slot * cut.pitch + cut.left + x + shift;
            V score = load<V>(scores + at), grad = load<V>(grads + at);
            if (table) score = score + table[opposite(number)];
            const V weight = exponential<T, L>(score - load<V>(around_lse + place));
            V dropped = weight;
            if (dropout.on) {
                const V keep = this->dropout_at(this->point_index(s.row, x + shift), this->point_index(row + r * cut.step_y, x));
                grad *= keep, dropped *= keep;
            }
            store(scores + at, dropped), store(grads + at, weight * (grad - load<V>(around_delta + place)));
        });
    }

    // All gradients of one key head and of the query heads that share it: keys follow when all queries around them are done.
    void compute_all_gradients(const GridPart &next, T *tables) {
        const int64_t group = in.heads / in.key_heads;
        for (int64_t h = next.h * group; h < (next.h + 1) * group; ++h) {
            begin_queries(next, h);
            sweep_queries_then_keys(h, h > next.h * group);
            write_table(tables + h * cut.offsets);
        }
    }

    void sweep_queries_then_keys(int64_t h, bool add) {
        const int64_t last = min_of(cut.rows, part.stop + cut.halo);
        int64_t row = max_of(0, part.row - cut.halo), next = max_of(0, row - cut.halo), done = part.row;
        while (row < last) {
            // a block of queries is inside the part, or around it
            const bool whole = row >= part.row && row < part.stop;
            const int64_t end = this->block_end(row, row < part.row ? part.row : whole ? part.stop : last);
            for (; next < min_of(cut.rows, end + cut.halo); ++next) this->load_keys(next, h);
            for (int64_t at = row; at < end; ++at) load_queries_into_ring(h, at, 0);
            this->for_each_row_block(row, end, [&](int64_t at, int64_t rows) {
                for (int r = 0; r < ROWS; ++r) use_ring_row(r, at + (r < rows ? r : 0) * cut.step_y);
                for (int64_t x = 0; x < part.points; x += L) query_gradients_of_vector(h, at, rows, x, whole);
            });
            for (row = end; done < part.stop;) {
                const int64_t stop = this->block_end(done, part.stop);
                if (row < min_of(last, stop + cut.halo)) break;
                this->for_each_row_block(done, stop, [&](int64_t at, int64_t rows) {
                    for (int64_t x = 0; x < part.points; x += L) key_gradients_of_vector(at, rows, x, add);
                });
                done = stop;
            }
        }
    }

    void use_ring_row(int r, int64_t row) {
        const int64_t at = row % cut.ring * cut.pitch;
        first_rows[r] = around_q + at * in.dim, second_rows[r] = around_out + at * in.width;
        lse_rows[r] = around_lse + at, delta_rows[r] = around_delta + at;
    }
};

template <class T>
bool grid_backward(const Grid &in, const GridGradients &g) {
    using Worker = GridBackward<T>;
    // the weights and gradients that a thread keeps: beyond a core's own cache it is faster to compute them again
    constexpr int64_t MAX_KEPT = (int64_t(3) << 19) / int64_t(sizeof(T));
    GridPartition cut(in, NATIVE<T>, Worker::ROWS, true);
    if (cut.pieces > 1 || 2 * cut.ring * cut.offsets * cut.pitch > MAX_KEPT) cut = GridPartition(in, NATIVE<T>, Worker::ROWS);
    // Each part has its own sums, added in a fixed order whatever the threads do. The memory of the sums limits the number of
    // parts computed at once, which is at least the number of threads.
    constexpr int64_t SUMS = (int64_t(1) << 25) / int64_t(sizeof(T));
    const int64_t offsets = in.table ? cut.offsets : 0, each = in.heads * offsets, parts = in.batch * cut.parts();
    const int64_t at_once = each ? min_of(parts, max_of(in.threads, SUMS / each)) : parts;
    Scratch table_sums, part_tables;
    if (!table_sums.reserve_zeros(size_t(each) * sizeof(double))) return false;
    if (!part_tables.reserve(size_t(at_once * each) * sizeof(T))) return false;
    double *sums = table_sums.as<double>();
    T *tables = part_tables.as<T>(), *d_table = static_cast<T *>(g.d_table);
    auto over = [&](int64_t heads, int64_t first, int64_t stop, auto work) {
        return for_each_part<T, Worker>(in, cut, heads, first, stop, [&](Worker &own, const GridPart &part, int64_t number) {
            own.gradients = &g;
            work(own, part, number);
        });
    };
    bool done = true;
    for (int64_t first = 0, stop; done && first < parts; first = stop) {
        stop = min_of(parts, first + at_once);
        if (cut.keeps)
            done = over(in.key_heads, first, stop, [&](Worker &own, const GridPart &part, int64_t number) {
                own.compute_all_gradients(part, tables + (number / in.key_heads - first) * each);
            });
        else
            done = over(in.heads, first, stop, [&](Worker &own, const GridPart &part, int64_t number) {
                own.compute_query_gradients(part, tables + (number - first * in.heads) * offsets);
            });
        for (int64_t p = 0; done && p < stop - first; ++p)
            for (int64_t n = 0; n < each; ++n) sums[n] += double(tables[p * each + n]);
    }
    if (done && !cut.keeps)
        done = over(in.key_heads, 0, parts, [&](Worker &own, const GridPart &part, int64_t) { own.compute_key_gradients(part); });
    for (int64_t n = 0; done && n < each; ++n) d_table[n] = T(sums[n]);
    return done;
}

}  // namespace
}  // namespace polyhead

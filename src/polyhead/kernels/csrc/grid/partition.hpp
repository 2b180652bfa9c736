// A grid cut into parts that threads compute independently, and the ring of rows that a part has loaded.
//
// A part is some rows along the last axis, or a piece of each if they are long. It is swept row by row; a ring holds the
// rows that the window reaches, each transposed once. How a grid is cut does not depend on the number of threads.
#pragma once

#include "grid/window_products.hpp"

namespace polyhead {
namespace {

inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }

// Sizes derived from a call. Rows are counted along all axes but the last, which has `width` points; y is the axis before it.
struct GridPartition {
    bool keeps;                                // whether weights are kept from queries to keys
    int64_t axes, slabs, height, width, rows;  // slabs: along all axes before y
    int64_t reach_y, step_y, reach_x, step_x, across, offsets, views;  // views: slabs that a window reaches
    int64_t pad, halo;                         // the reach of a window, in points and in rows
    int64_t ring;                              // loaded rows
    int64_t strip, strips, piece, pieces;      // rows and points per part
    int64_t left, pitch;                       // where the points of a row begin, and its length with padding

    // The largest number of neighbours in a run.
    static constexpr int64_t MAX_RUN = 64;
    // Points per piece, and rows per strip, from which on the rows around them are worth loading.
    static constexpr int64_t POINTS = 256, STRIP = 16;

    // `weights`: keep the weights of the loaded rows; rows computed for two strips are then expensive
    GridPartition(const Grid &in, int lanes, int rows_at_once, bool weights = false) : keeps(weights), axes(in.axes) {
        derive_sizes(in);
        cut_rows(rows_at_once);
        cut_points(lanes);
    }

    // The sizes before cutting.
    void derive_sizes(const Grid &in) {
        height = in.sizes[axes - 2], reach_y = in.reach[axes - 2], step_y = in.steps[axes - 2];
        width = in.sizes[axes - 1], reach_x = in.reach[axes - 1], step_x = in.steps[axes - 1];
        slabs = views = 1;
        halo = reach_y * step_y, pad = reach_x * step_x;
        for (int64_t axis = axes - 3; axis >= 0; --axis) {
            // a step along this axis skips all slabs of the axes after it
            halo += in.reach[axis] * in.steps[axis] * slabs * height;
            slabs *= in.sizes[axis], views *= 2 * in.reach[axis] + 1;
        }
        rows = slabs * height;
        across = 2 * reach_x + 1, offsets = views * (2 * reach_y + 1) * across;
    }

    // Strips of whole blocks of rows.
    void cut_rows(int rows_at_once) {
        const int64_t block = rows_at_once * step_y;
        strip = round_up(keeps ? max_of(2 * STRIP, 8 * halo) : max_of(STRIP, halo / 2), block);
        strips = divide_up(rows, strip);
        ring = min_of(rows, 2 * halo + (keeps ? 2 : 1) * block);
    }

    // Pieces of whole vectors, of nearly equal size.
    void cut_points(int lanes) {
        piece = round_up(divide_up(width, divide_up(width, max_of(POINTS, 4 * pad))), lanes);
        pieces = divide_up(width, piece);
        left = round_up(pad, lanes), pitch = left + piece + round_up(pad, lanes);
        // features at distances of a power of two would collide in the cache
        if (pitch / lanes % 4 == 0) pitch += lanes;
    }

    // the number of pieces of `size` that hold n, and their total size
    static int64_t divide_up(int64_t n, int64_t size) { return (n + size - 1) / size; }
    static int64_t round_up(int64_t n, int64_t size) { return divide_up(n, size) * size; }

    int64_t parts() const { return strips * pieces; }
    // the largest number of runs of a block of rows
    int64_t max_runs(int rows_at_once) const {
        return views * (2 * reach_y + rows_at_once) * divide_up(across, MAX_RUN);
    }
};

// A part of one head: rows `row` to `stop`, and `points` points from x on.
struct GridPart {
    int64_t b, h, row, stop, x, points;
};

// Heads vary fastest, because they are adjacent in memory.
inline GridPart find_part(const GridPartition &cut, int64_t heads, int64_t number) {
    const int64_t h = number % heads, piece = number / heads % cut.pieces, strip = number / heads / cut.pieces % cut.strips;
    const int64_t x = piece * cut.piece, row = strip * cut.strip, b = number / heads / cut.parts();
    return {b, h, row, min_of(row + cut.strip, cut.rows), x, min_of(cut.piece, cut.width - x)};
}

template <class T>
struct GridRows : WindowProducts<T> {
    using Base = WindowProducts<T>;
    using Base::L, Base::ROWS;
    using typename Base::V;

    const Grid &in;
    const GridPartition &cut;
    GridPart part{};
    // the runs of a block of rows
    KeyRun *runs;
    int64_t num_runs = 0;

    GridRows(const Grid &problem, const GridPartition &sizes, KeyRun *run_memory) : in(problem), cut(sizes), runs(run_memory) {}

    static const T *item_address(const Strided &x, int64_t b, int64_t h, int64_t i) {
        return static_cast<const T *>(x.data) + b * x.batch + h * x.head + i * x.item;
    }
    static T *mutable_item_address(const Strided &x, int64_t b, int64_t h,
                                   int64_t i) { return const_cast<T *>(item_address(x, b, h, i)); }

    // The points of a row within `side` of the part, as columns of its transpose.
    struct Span {
        int64_t first, stop, begin, end;  // points, and the columns that are read
    };
    Span span(int64_t side) const {
        const int64_t whole = (part.points + L - 1) / L * L;
        return {max_of(0, part.x - side), min_of(cut.width, part.x + part.points + side), cut.left - side,
                cut.left + whole + side};
    }
    int64_t column(int64_t point) const { return cut.left + point - part.x; }

    // A row of points as (features, pitch), with zeros beyond the grid.
    void load_row(const Strided &x, int64_t h, int64_t row, int64_t features, int64_t side, T *into, T factor = 1) const {
        const Span s = span(side);
        const int64_t first = column(s.first), stop = column(s.stop);
        for (int64_t d = 0; d < features; ++d) {
            T *to = into + d * cut.pitch;
            // whole vectors, written before the points
            for (int64_t c = s.begin / L * L; c < first; c += L) store(to + c, V{});
            for (int64_t c = stop / L * L; c < s.end; c += L) store(to + c, V{});
        }
        transpose<L>(item_address(x, part.b, h, row * cut.width + s.first), x.item, into + first, cut.pitch, s.stop - s.first,
                     features,
                  factor);
    }

    // One number per point, `beyond` outside the grid.
    void load_point_scalars(const T *numbers, int64_t row, int64_t side, T *into, T beyond) const {
        const Span s = span(side);
        for (int64_t c = s.begin; c < s.end; ++c) into[c] = beyond;
        for (int64_t x = s.first; x < s.stop; ++x) into[column(x)] = numbers[row * cut.width + x];
    }

    // The slab in a given view of the window from `slab`; -1 outside the grid.
    int64_t slab_in_view(int64_t slab, int64_t view) const {
        int64_t found = 0, size = 1;
        for (int64_t axis = cut.axes - 3; axis >= 0; --axis) {
            const int64_t window_width = 2 * in.reach[axis] + 1;
            const int64_t place = slab % in.sizes[axis] + (view % window_width - in.reach[axis]) * in.steps[axis];
            if (place < 0 || place >= in.sizes[axis]) return -1;
            found += place * size, size *= in.sizes[axis], slab /= in.sizes[axis], view /= window_width;
        }
        return found;
    }

    // Lists the runs that `count` rows see: `row` and the following ones, `step_y` apart.
    void find_runs(int64_t row, int64_t count) {
        const int64_t slab = row / cut.height, y = row % cut.height;
        num_runs = 0;
        for (int64_t view = 0; view < cut.views; ++view) {
            const int64_t other = slab_in_view(slab, view);
            if (other < 0) continue;
            for (int64_t j = -cut.reach_y; j < count + cut.reach_y; ++j) {
                const int64_t there = y + j * cut.step_y;
                if (there < 0 || there >= cut.height) continue;
                const int64_t number = (view * (2 * cut.reach_y + 1) + j + cut.reach_y) * cut.across;
                const int64_t from = max_of(0, j - cut.reach_y), to = min_of(count, j + cut.reach_y + 1);
                add_runs(other * cut.height + there, int(from), int(to), number);
            }
        }
    }

    void add_runs(int64_t row, int from, int to, int64_t number) {
        for (int64_t c = 0; c < cut.across; c += GridPartition::MAX_RUN)
            runs[num_runs++] = {row, row % cut.ring, from, to, number + c, (c - cut.reach_x) * cut.step_x,
                                 min_of(GridPartition::MAX_RUN, cut.across - c), 0};
    }

    // Assigns slots to the runs from `first` on whose scores fit into `capacity`, and returns the end of these runs.
    int64_t assign_score_slots(int64_t first, int64_t capacity) {
        int64_t slot = 0, n = first;
        for (; n < num_runs && (n == first || slot + runs[n].count <= capacity); ++n) {
            runs[n].score_slot = slot;
            slot += runs[n].count;
        }
        return n;
    }

    // The end of the rows that are computed together with `row`, within its slab and before `stop`.
    int64_t block_end(int64_t row, int64_t stop) const {
        return min_of(min_of(stop, (row / cut.height + 1) * cut.height), row + ROWS * cut.step_y);
    }

    // Up to ROWS rows at a time, `step_y` apart: they see the same rows.
    template <class Block>
    void for_each_row_block(int64_t row, int64_t end, Block block) {
        for (int64_t at = row; at < min_of(end, row + cut.step_y); ++at) {
            const int64_t count = (end - at + cut.step_y - 1) / cut.step_y;
            find_runs(at, count);
            block(at, count);
        }
    }

    // Calls `block` for every block of rows of the part, after `fetch` has loaded the rows that it sees into the ring.
    template <class Load, class Block>
    void sweep_rows(Load fetch, Block block) {
        int64_t next = max_of(0, part.row - cut.halo);
        for (int64_t row = part.row, end; row < part.stop; row = end) {
            end = block_end(row, part.stop);
            for (; next < min_of(cut.rows, end + cut.halo); ++next) fetch(next);
            for_each_row_block(row, end, block);
        }
    }
};

}  // namespace
}  // namespace polyhead

// A grid cut into parts that a thread computes on its own, and the rows of points that a part has at hand.
//
// A part is some rows along the last axis, or a piece of each where they are long. It is swept row by row; a ring holds the
// rows that the window reaches, each turned once. How a grid is cut does not depend on the threads.
#pragma once

#include "grid/lanes.hpp"

namespace polyhead {
namespace {

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most_of(int64_t a, int64_t b) { return a > b ? a : b; }

// The sizes that follow from a call. Rows are counted along all axes but the last, which is `width` points long; y is the axis
// before it.
struct GridCut {
    bool keeps;                                // weights, from queries to keys
    int64_t axes, slabs, height, width, rows;  // slabs: of all axes before y
    int64_t reach_y, step_y, reach_x, step_x, across, offsets, views;  // views: slabs that a window reaches
    int64_t pad, halo;                         // how far a window reaches, in points and in rows
    int64_t ring;                              // rows at hand
    int64_t strip, strips, piece, pieces;      // rows and points of a part
    int64_t left, pitch;                       // where the points of a row begin, and how long it is with its sides

    // Scores that are under way at once are divided into stretches of at most so many neighbours.
    static constexpr int64_t LONG = 64;
    // Points of a piece, and rows of a strip, that are worth the rows around them.
    static constexpr int64_t POINTS = 256, STRIP = 16;

    // `weights`: those of the rows at hand are kept, and rows that are computed for two strips are dear
    GridCut(const Grid &in, int lanes, int rows_at_once, bool weights = false) : keeps(weights), axes(in.axes) {
        measure(in);
        cut_rows(rows_at_once);
        cut_points(lanes);
    }

    // What there is before anything is cut.
    void measure(const Grid &in) {
        height = in.sizes[axes - 2], reach_y = in.reach[axes - 2], step_y = in.steps[axes - 2];
        width = in.sizes[axes - 1], reach_x = in.reach[axes - 1], step_x = in.steps[axes - 1];
        slabs = views = 1;
        halo = reach_y * step_y, pad = reach_x * step_x;
        for (int64_t axis = axes - 3; axis >= 0; --axis) {
            // a step along this axis passes all slabs of those after it
            halo += in.reach[axis] * in.steps[axis] * slabs * height;
            slabs *= in.sizes[axis], views *= 2 * in.reach[axis] + 1;
        }
        rows = slabs * height;
        across = 2 * reach_x + 1, offsets = views * (2 * reach_y + 1) * across;
    }

    // Strips of whole blocks of rows.
    void cut_rows(int rows_at_once) {
        const int64_t block = rows_at_once * step_y;
        strip = up_to(keeps ? most_of(2 * STRIP, 8 * halo) : most_of(STRIP, halo / 2), block);
        strips = pieces_of(rows, strip);
        ring = least(rows, 2 * halo + (keeps ? 2 : 1) * block);
    }

    // Pieces of whole vectors, of nearly one size.
    void cut_points(int lanes) {
        piece = up_to(pieces_of(width, pieces_of(width, most_of(POINTS, 4 * pad))), lanes);
        pieces = pieces_of(width, piece);
        left = up_to(pad, lanes), pitch = left + piece + up_to(pad, lanes);
        // features that are a power of two apart would share few places of the cache
        if (pitch / lanes % 4 == 0) pitch += lanes;
    }

    // so many pieces of `size` hold n; and what they hold
    static int64_t pieces_of(int64_t n, int64_t size) { return (n + size - 1) / size; }
    static int64_t up_to(int64_t n, int64_t size) { return pieces_of(n, size) * size; }

    int64_t parts() const { return strips * pieces; }
    // the stretches that a block of rows can have
    int64_t stretches(int rows_at_once) const {
        return views * (2 * reach_y + rows_at_once) * pieces_of(across, LONG);
    }
};

// One head's part: rows `row` to `stop`, and the points from x on.
struct GridPart {
    int64_t b, h, row, stop, x, points;
};

// Heads come one after the other, for they lie side by side.
inline GridPart part_of(const GridCut &cut, int64_t heads, int64_t number) {
    const int64_t h = number % heads, piece = number / heads % cut.pieces, strip = number / heads / cut.pieces % cut.strips;
    const int64_t x = piece * cut.piece, row = strip * cut.strip, b = number / heads / cut.parts();
    return {b, h, row, least(row + cut.strip, cut.rows), x, least(cut.piece, cut.width - x)};
}

template <class T>
struct GridRows : GridLanes<T> {
    using Base = GridLanes<T>;
    using Base::L, Base::ROWS;
    using typename Base::V;

    const Grid &in;
    const GridCut &cut;
    GridPart part{};
    // the stretches of a block of rows
    Stretch *stretches;
    int64_t many = 0;

    GridRows(const Grid &problem, const GridCut &sizes, Stretch *room) : in(problem), cut(sizes), stretches(room) {}

    static const T *at(const Strided &x, int64_t b, int64_t h, int64_t i) {
        return static_cast<const T *>(x.data) + b * x.batch + h * x.head + i * x.item;
    }
    static T *to(const Strided &x, int64_t b, int64_t h, int64_t i) { return const_cast<T *>(at(x, b, h, i)); }

    // The points of a row within `side` of the part, as columns of its turned form.
    struct Span {
        int64_t first, stop, begin, end;  // points, and the columns between which something is read
    };
    Span span(int64_t side) const {
        const int64_t whole = (part.points + L - 1) / L * L;
        return {most_of(0, part.x - side), least(cut.width, part.x + part.points + side), cut.left - side,
                cut.left + whole + side};
    }
    int64_t column(int64_t point) const { return cut.left + point - part.x; }

    // A row of points as (features, pitch), with zeros beyond the grid.
    void take(const Strided &x, int64_t h, int64_t row, int64_t features, int64_t side, T *into, T factor = 1) const {
        const Span s = span(side);
        const int64_t first = column(s.first), stop = column(s.stop);
        for (int64_t d = 0; d < features; ++d) {
            T *to = into + d * cut.pitch;
            // in whole vectors, before the points come
            for (int64_t c = s.begin / L * L; c < first; c += L) store(to + c, V{});
            for (int64_t c = stop / L * L; c < s.end; c += L) store(to + c, V{});
        }
        turned<L>(at(x, part.b, h, row * cut.width + s.first), x.item, into + first, cut.pitch, s.stop - s.first, features,
                  factor);
    }

    // One number a point, `beyond` the grid another.
    void take_numbers(const T *numbers, int64_t row, int64_t side, T *into, T beyond) const {
        const Span s = span(side);
        for (int64_t c = s.begin; c < s.end; ++c) into[c] = beyond;
        for (int64_t x = s.first; x < s.stop; ++x) into[column(x)] = numbers[row * cut.width + x];
    }

    // The slab that a window sees from another, by the number of the view; -1 beyond the grid.
    int64_t seen(int64_t slab, int64_t view) const {
        int64_t found = 0, size = 1;
        for (int64_t axis = cut.axes - 3; axis >= 0; --axis) {
            const int64_t wide = 2 * in.reach[axis] + 1;
            const int64_t here = slab % in.sizes[axis] + (view % wide - in.reach[axis]) * in.steps[axis];
            if (here < 0 || here >= in.sizes[axis]) return -1;
            found += here * size, size *= in.sizes[axis], slab /= in.sizes[axis], view /= wide;
        }
        return found;
    }

    // What `count` rows see, the first of which is `row`, and the next `step_y` further.
    void look(int64_t row, int64_t count) {
        const int64_t slab = row / cut.height, y = row % cut.height;
        many = 0;
        for (int64_t view = 0; view < cut.views; ++view) {
            const int64_t other = seen(slab, view);
            if (other < 0) continue;
            for (int64_t j = -cut.reach_y; j < count + cut.reach_y; ++j) {
                const int64_t there = y + j * cut.step_y;
                if (there < 0 || there >= cut.height) continue;
                const int64_t number = (view * (2 * cut.reach_y + 1) + j + cut.reach_y) * cut.across;
                const int64_t from = most_of(0, j - cut.reach_y), to = least(count, j + cut.reach_y + 1);
                add_stretches(other * cut.height + there, int(from), int(to), number);
            }
        }
    }

    void add_stretches(int64_t row, int from, int to, int64_t number) {
        for (int64_t c = 0; c < cut.across; c += GridCut::LONG)
            stretches[many++] = {row, row % cut.ring, from, to, number + c, (c - cut.reach_x) * cut.step_x,
                                 least(GridCut::LONG, cut.across - c), 0};
    }

    // The end of the stretches from `first` on whose scores find room, which is given out to them.
    int64_t chunk(int64_t first, int64_t room) {
        int64_t slot = 0, n = first;
        for (; n < many && (n == first || slot + stretches[n].count <= room); ++n) {
            stretches[n].slot = slot;
            slot += stretches[n].count;
        }
        return n;
    }

    // Where the rows end that are computed together with `row`: in its slab, and before `stop`.
    int64_t block_end(int64_t row, int64_t stop) const {
        return least(least(stop, (row / cut.height + 1) * cut.height), row + ROWS * cut.step_y);
    }

    // ROWS rows at a time, or what is left, `step_y` apart: they see the same rows.
    template <class Block>
    void blocks(int64_t row, int64_t end, Block block) {
        for (int64_t at = row; at < least(end, row + cut.step_y); ++at) {
            const int64_t count = (end - at + cut.step_y - 1) / cut.step_y;
            look(at, count);
            block(at, count);
        }
    }

    // Every block of rows of the part, with all rows in the ring that it sees.
    template <class Load, class Block>
    void sweep(Load fetch, Block block) {
        int64_t next = most_of(0, part.row - cut.halo);
        for (int64_t row = part.row, end; row < part.stop; row = end) {
            end = block_end(row, part.stop);
            for (; next < least(cut.rows, end + cut.halo); ++next) fetch(next);
            blocks(row, end, block);
        }
    }
};

}  // namespace
}  // namespace polyhead

// Steps of gradient descent on the Stiefel manifold: one matrix at a time, in the cache of one core.
//
// With A = xᵀd, D = dᵀd and B = s·sym(A), the step ends at (x + Δ)Z, where x + Δ = x(I − B) + s·d, and Z, the inverse root of
// (x + Δ)ᵀ(x + Δ), is computed from k x k matrices only. These are stored as differences from I, which loses little to
// rounding: y = x − (x(I − (I − B)Z) − d·sZ). Nothing is written before Z is known.
#pragma once

#include <cmath>
#include <limits>

#include "linalg/narrow_matrices.hpp"
#include "kernel_arguments.hpp"
#include "simd/scratch.hpp"
#include "simd/threads.hpp"

namespace polyhead {
namespace {

// Rows processed together: they stay in the L1 cache.
constexpr int64_t STIEFEL_ROWS = 64;
// Gram matrices with a norm beyond FAR are skipped; beyond NEAR, their rounding errors are visible in the result.
constexpr double STIEFEL_FAR = 1e3, STIEFEL_NEAR = 1.05;

template <class T>
struct StiefelWork {
    using M = Dense<T>;
    static constexpr int L = M::L;
    using V = Vec<T, L>;
    static constexpr int SMALL = 9;

    const StiefelStep &in;
    const int64_t n, k, wide, rows, square;  // rows: n padded; square: the size of a small matrix
    const bool elementwise, scalar;
    T *x, *d, *first, *second;  // (rows, wide); d initially holds the gradient
    T *block;                   // (STIEFEL_ROWS, wide)
    T *inside;                  // (wide): 1 in the first k columns, 0 in the padding
    T *small[SMALL];            // (wide, wide)

    static int64_t workspace_size(const StiefelStep &in) {
        const int64_t wide = M::whole(in.k), rows = M::whole(in.n);
        return (4 * rows + STIEFEL_ROWS + 1 + SMALL * wide) * wide;
    }

    // `workspace`: workspace_size numbers
    StiefelWork(const StiefelStep &step, T *workspace)
        : in(step), n(in.n), k(in.k), wide(M::whole(k)), rows(M::whole(n)), square(wide * wide),
          elementwise(in.second.data && !in.copies), scalar(in.second.data && in.copies) {
        auto next = [&](int64_t count) {
            T *taken = workspace;
            workspace += count;
            return taken;
        };
        x = next(rows * wide), d = next(rows * wide), first = next(rows * wide), second = next(rows * wide);
        block = next(STIEFEL_ROWS * wide), inside = next(wide);
        for (T *&matrix : small) matrix = next(square);
        clear();
    }

    void clear() {
        std::memset(x, 0, size_t(workspace_size(in)) * sizeof(T));
        for (int64_t c = 0; c < k; ++c) inside[c] = 1;
    }

    static T *at(const Matrices &m, int64_t tensor, int64_t matrix, int64_t row = 0) {
        return reinterpret_cast<T *>(m.data[tensor]) + matrix * m.matrix + row * m.row;
    }

    template <class Do>
    void blocks(Do act) const {
        for (int64_t row = 0; row < n; row += STIEFEL_ROWS) act(row, n - row < STIEFEL_ROWS ? n - row : STIEFEL_ROWS);
    }

    // False, with nothing written, if the step is too long.
    bool step(int64_t tensor, int64_t matrix) {
        T *gram = small[0], *a = small[1], *dd = small[2], *s = small[3], *b = small[4];
        std::memset(gram, 0, size_t(3 * square) * sizeof(T));
        blocks([&](int64_t row, int64_t count) {
            T *point = x + row * wide, *g = d + row * wide;
            M::gather(at(in.x, tensor, matrix, row), in.x.row, in.x.column, point, count, k);
            M::gather(at(in.g, tensor, matrix, row), in.g.row, in.g.column, g, count, k, T(in.sign));
            M::inside(point, point, gram, count, k, true);
            M::inside(point, g, a, count, k);
        });
        M::mirror(gram, k);
        // the gradient is g − xS
        if (in.canonical)
            M::transpose_square(a, s, k);
        else
            M::symmetric(a, s, k, T(0.5));
        const double skew = in.canonical ? squares_of_difference(a, s) : 0;
        std::memset(a, 0, size_t(square) * sizeof(T));
        double squares = 0;
        blocks([&](int64_t row, int64_t count) {
            T *point = x + row * wide, *along = d + row * wide;
            M::times(point, s, along, M::whole(count), k, along);
            if (in.first.data)
                M::gather(at(in.first, tensor, matrix, row), in.first.row, in.first.column, first + row * wide, count, k);
            if (elementwise)
                M::gather(at(in.second, tensor, matrix, row), in.second.row, in.second.column, second + row * wide, count, k);
            squares += moments(along, first + row * wide, second + row * wide, count);
            M::inside(point, along, a, count, k);
            M::inside(along, along, dd, count, k, true);
        });
        M::mirror(dd, k);
        double scale = in.scale, mean = 0;
        if (scalar) {
            mean = (1 - in.keep_second) * (squares - 0.5 * skew) / double(n * k);
            mean += in.keep_second * double(*at(in.second, tensor, matrix));
            scale /= std::sqrt(mean) * in.root + in.eps;
        }
        excess(b, T(scale));
        const double bound = largest_row(gram);
        if (!(bound < STIEFEL_FAR)) {
            clear();
            return false;
        }
        // I − (I − B)Z = B + B(Z − I) − (Z − I), and −sZ
        T *z = root_of_inverse(gram, bound), *correction = s;
        M::times(b, z, correction, wide, k);
        each([&](int64_t i) {
            store(correction + i, load<V>(correction + i) + load<V>(b + i) - load<V>(z + i));
            store(z + i, load<V>(z + i) * T(-scale));
        });
        for (int64_t i = 0; i < k; ++i) z[i * wide + i] -= T(scale);
        blocks([&](int64_t row, int64_t count) {
            M::times(x + row * wide, correction, block, M::whole(count), k, x + row * wide, d + row * wide, z);
            std::memcpy(x + row * wide, block, size_t(count * wide) * sizeof(T));
        });
        if (bound > STIEFEL_NEAR) polish();
        if (in.transport) transport();
        write(tensor, matrix, T(mean));
        return true;
    }

    // Updates first and second with the gradient r, and replaces r by d; returns the sum of r².
    double moments(T *along, T *f, T *s, int64_t count) const {
        const T keep = T(in.keep), add = T(in.add), now = T(in.now), ahead = T(in.ahead), kept = T(in.keep_second);
        const T other = T(1 - in.keep_second), root = T(in.root), eps = T(in.eps);
        V total = {};
        for (int64_t r = 0; r < count; ++r)
            for (int64_t c = 0; c < wide; c += L) {
                const int64_t i = r * wide + c;
                const V g = load<V>(along + i);
                V to = g;
                if (in.first.data) {
                    const V moment = load<V>(f + i) * keep + g * add;
                    store(f + i, moment);
                    to = g * now + moment * ahead;
                }
                if (elementwise) {
                    const V moment = load<V>(s + i) * kept + g * g * other;
                    store(s + i, moment);
                    // without eps the padding would be 0 / 0
                    to = load<V>(inside + c) != 0 ? to / (root_of(moment) * root + eps) : V{};
                }
                if (scalar) total += g * g;
                store(along + i, to);
            }
        double sum = 0;
        for (int lane = 0; lane < L; ++lane) sum += double(total[lane]);
        return sum;
    }

    static POLYHEAD_INLINE V root_of(V x) {
        V y;
        for (int lane = 0; lane < L; ++lane) y[lane] = std::sqrt(x[lane]);
        return y;
    }

    // B = s·sym(A); replaces xᵀx by the Gram matrix of x + Δ, minus I.
    void excess(T *b, T scale) const {
        T *gram = small[0], *a = small[1], *dd = small[2], *p = small[5], *q = small[6];
        for (int64_t i = 0; i < k; ++i) gram[i * wide + i] -= 1;
        if (in.tangent) {
            // with H = xᵀx − I: H + s²D − sym(B(2H − HB + 2sA − B))
            M::symmetric(a, b, k, T(0.5) * scale);
            M::times(gram, b, p, wide, k);
            each([&](int64_t i) {
                const V h = load<V>(gram + i) - load<V>(b + i) * T(0.5) + load<V>(a + i) * scale;
                store(p + i, h + h - load<V>(p + i));
            });
            M::times(b, p, q, wide, k);
            M::symmetric(q, p, k, T(-0.5));
        } else {
            // H + s²D + 2s·sym(A)
            std::memset(b, 0, size_t(square) * sizeof(T));
            M::symmetric(a, p, k, scale);
        }
        each([&](int64_t i) { store(gram + i, load<V>(gram + i) + load<V>(p + i) + load<V>(dd + i) * (scale * scale)); });
    }

    // Z − I by Newton's iteration, whose error is known; all factors commute.
    T *root_of_inverse(const T *more, double bound) const {
        // the Gram matrix times the iterate so far, one step, and all steps, each minus I
        T *of = small[5], *step = small[6], *root = small[7], *product = small[8];
        // scaled so that the spectrum is centred at 1
        const double scale = bound > 1 ? 2 / (1 + bound) : 1;
        double error = std::abs(1 - scale);
        each([&](int64_t i) { store(of + i, load<V>(more + i) * T(scale)); });
        for (int64_t i = 0; i < k; ++i) of[i * wide + i] += T(scale - 1);
        for (bool started = false;; started = true) {
            error = error * error * (0.75 + 0.25 * error);
            if (started) {
                M::times(root, of, product, wide, k);
                each([&](int64_t i) {
                    store(step + i, (load<V>(root + i) + load<V>(of + i) + load<V>(product + i)) * T(-0.5));
                });
                M::times(step, root, product, wide, k);
                each([&](int64_t i) { store(root + i, load<V>(root + i) + load<V>(step + i) + load<V>(product + i)); });
            } else {
                each([&](int64_t i) { store(step + i, load<V>(of + i) * T(-0.5)); });
                std::memcpy(root, step, size_t(square) * sizeof(T));
            }
            if (error < double(std::numeric_limits<T>::epsilon()) / 4) break;
            M::times(of, step, product, wide, k);
            each([&](int64_t i) { store(of + i, load<V>(of + i) + load<V>(step + i) + load<V>(product + i)); });
        }
        each([&](int64_t i) { store(root + i, load<V>(root + i) * T(std::sqrt(scale))); });
        for (int64_t i = 0; i < k; ++i) root[i * wide + i] += T(std::sqrt(scale) - 1);
        return root;
    }

    // Calls act(i) for each vector of a small matrix.
    template <class Do>
    POLYHEAD_INLINE void each(Do act) const {
        for (int64_t i = 0; i < square; i += L) act(i);
    }

    // x − x(xᵀx − I) / 2: one step towards the nearest point, which removes rounding errors.
    void polish() const {
        T *gram = small[0];
        std::memset(gram, 0, size_t(square) * sizeof(T));
        blocks([&](int64_t row, int64_t count) { M::inside(x + row * wide, x + row * wide, gram, count, k, true); });
        M::mirror(gram, k);
        for (int64_t i = 0; i < k; ++i) gram[i * wide + i] -= 1;
        each([&](int64_t i) { store(gram + i, load<V>(gram + i) * T(0.5)); });
        blocks([&](int64_t row, int64_t count) {
            M::times(x + row * wide, gram, block, M::whole(count), k, x + row * wide);
            std::memcpy(x + row * wide, block, size_t(count * wide) * sizeof(T));
        });
    }

    // Projects the first moment onto the tangent space at x.
    void transport() const {
        T *a = small[0], *s = small[1];
        std::memset(a, 0, size_t(square) * sizeof(T));
        blocks([&](int64_t row, int64_t count) { M::inside(x + row * wide, first + row * wide, a, count, k); });
        M::symmetric(a, s, k, T(0.5));
        blocks([&](int64_t row, int64_t count) {
            M::times(x + row * wide, s, first + row * wide, M::whole(count), k, first + row * wide);
        });
    }

    void write(int64_t tensor, int64_t matrix, T mean) const {
        M::scatter(x, at(in.x, tensor, matrix), in.x.row, in.x.column, n, k);
        if (in.first.data) M::scatter(first, at(in.first, tensor, matrix), in.first.row, in.first.column, n, k);
        if (elementwise) M::scatter(second, at(in.second, tensor, matrix), in.second.row, in.second.column, n, k);
        if (scalar)
            for (int64_t copy = 0; copy < in.copies; ++copy) *at(in.second, tensor, matrix, copy) = mean;
    }

    // The largest absolute row sum of I + a.
    double largest_row(const T *a) const {
        double largest = 0;
        for (int64_t i = 0; i < k; ++i) {
            double sum = 0;
            for (int64_t j = 0; j < k; ++j) sum += std::abs(double(i == j) + double(a[i * wide + j]));
            // also true for NaN
            if (!(sum < STIEFEL_FAR)) return STIEFEL_FAR;
            if (sum > largest) largest = sum;
        }
        return largest;
    }

    double squares_of_difference(const T *a, const T *b) const {
        double sum = 0;
        for (int64_t i = 0; i < k * wide; ++i) sum += double(a[i] - b[i]) * double(a[i] - b[i]);
        return sum;
    }
};

// False if there is no memory.
template <class T>
bool stiefel_step(const StiefelStep &in) {
    const int64_t count = in.tensors * in.matrices;
    const int64_t size = whole_lines(StiefelWork<T>::workspace_size(in) * int64_t(sizeof(T)));
    const int threads = int(in.threads < count ? in.threads : count > 1 ? count : 1);
    Scratch scratch;
    if (!scratch.reserve(size_t(size * threads))) return false;
#pragma omp parallel num_threads(threads)
    {
        StiefelWork<T> mine(in, reinterpret_cast<T *>(scratch.as<char>() + size * thread_number()));
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < count; ++i) in.skipped[i] = !mine.step(i / in.matrices, i % in.matrices);
    }
    return true;
}

}  // namespace
}  // namespace polyhead

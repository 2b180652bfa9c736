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
    using M = NarrowMatrices<T>;
    static constexpr int L = M::L;
    using V = Vec<T, L>;
    static constexpr int SMALL = 9;

    const StiefelStep &in;
    const int64_t n, k, padded_k, rows, square;  // rows: n padded; square: the size of a small matrix
    const bool elementwise, scalar;
    T *x, *d, *first, *second;  // (rows, padded_k); d initially holds the gradient
    T *block;                   // (STIEFEL_ROWS, padded_k)
    T *inside;                  // (padded_k): 1 in the first k columns, 0 in the padding
    T *small[SMALL];            // (padded_k, padded_k)

    static int64_t workspace_size(const StiefelStep &in) {
        const int64_t padded_k = M::round_up(in.k), rows = M::round_up(in.n);
        return (4 * rows + STIEFEL_ROWS + 1 + SMALL * padded_k) * padded_k;
    }

    // `workspace`: workspace_size numbers
    StiefelWork(const StiefelStep &step, T *workspace)
        : in(step), n(in.n), k(in.k), padded_k(M::round_up(k)), rows(M::round_up(n)), square(padded_k * padded_k),
          elementwise(in.second.data && !in.copies), scalar(in.second.data && in.copies) {
        auto next = [&](int64_t count) {
            T *taken = workspace;
            workspace += count;
            return taken;
        };
        x = next(rows * padded_k), d = next(rows * padded_k), first = next(rows * padded_k), second = next(rows * padded_k);
        block = next(STIEFEL_ROWS * padded_k), inside = next(padded_k);
        for (T *&matrix : small) matrix = next(square);
        clear_workspace();
    }

    void clear_workspace() {
        std::memset(x, 0, size_t(workspace_size(in)) * sizeof(T));
        for (int64_t c = 0; c < k; ++c) inside[c] = 1;
    }

    static T *matrix_address(const Matrices &m, int64_t tensor, int64_t matrix, int64_t row = 0) {
        return reinterpret_cast<T *>(m.data[tensor]) + matrix * m.matrix + row * m.row;
    }

    template <class Do>
    void for_each_row_block(Do act) const {
        for (int64_t row = 0; row < n; row += STIEFEL_ROWS) act(row, n - row < STIEFEL_ROWS ? n - row : STIEFEL_ROWS);
    }

    // False, with nothing written, if the step is too long.
    bool step_matrix(int64_t tensor, int64_t matrix) {
        T *gram = small[0], *a = small[1], *dd = small[2], *s = small[3], *b = small[4];
        std::memset(gram, 0, size_t(3 * square) * sizeof(T));
        for_each_row_block([&](int64_t row, int64_t count) {
            T *point = x + row * padded_k, *g = d + row * padded_k;
            M::load_strided(matrix_address(in.x, tensor, matrix, row), in.x.row, in.x.column, point, count, k);
            M::load_strided(matrix_address(in.g, tensor, matrix, row), in.g.row, in.g.column, g, count, k, T(in.sign));
            M::add_transposed_product(point, point, gram, count, k, true);
            M::add_transposed_product(point, g, a, count, k);
        });
        M::copy_upper_to_lower(gram, k);
        // the gradient is g − xS
        if (in.canonical)
            M::transpose_square(a, s, k);
        else
            M::symmetrise(a, s, k, T(0.5));
        const double skew = in.canonical ? squares_of_difference(a, s) : 0;
        std::memset(a, 0, size_t(square) * sizeof(T));
        double squares = 0;
        for_each_row_block([&](int64_t row, int64_t count) {
            T *point = x + row * padded_k, *along = d + row * padded_k;
            M::multiply(point, s, along, M::round_up(count), k, along);
            if (in.first.data)
                M::load_strided(matrix_address(in.first, tensor, matrix, row), in.first.row, in.first.column,
                                first + row * padded_k, count, k);
            if (elementwise)
                M::load_strided(matrix_address(in.second, tensor, matrix, row), in.second.row, in.second.column,
                                second + row * padded_k, count, k);
            squares += update_moments(along, first + row * padded_k, second + row * padded_k, count);
            M::add_transposed_product(point, along, a, count, k);
            M::add_transposed_product(along, along, dd, count, k, true);
        });
        M::copy_upper_to_lower(dd, k);
        double scale = in.scale, mean = 0;
        if (scalar) {
            mean = (1 - in.beta2) * (squares - 0.5 * skew) / double(n * k);
            mean += in.beta2 * double(*matrix_address(in.second, tensor, matrix));
            scale /= std::sqrt(mean) * in.root_factor + in.eps;
        }
        compute_gram_of_step(b, T(scale));
        const double bound = largest_row_sum(gram);
        if (!(bound < STIEFEL_FAR)) {
            clear_workspace();
            return false;
        }
        // I − (I − B)Z = B + B(Z − I) − (Z − I), and −sZ
        T *z = inverse_square_root(gram, bound), *correction = s;
        M::multiply(b, z, correction, padded_k, k);
        for_each_vector([&](int64_t i) {
            store(correction + i, load<V>(correction + i) + load<V>(b + i) - load<V>(z + i));
            store(z + i, load<V>(z + i) * T(-scale));
        });
        for (int64_t i = 0; i < k; ++i) z[i * padded_k + i] -= T(scale);
        for_each_row_block([&](int64_t row, int64_t count) {
            M::multiply(x + row * padded_k, correction, block, M::round_up(count), k, x + row * padded_k, d + row * padded_k, z);
            std::memcpy(x + row * padded_k, block, size_t(count * padded_k) * sizeof(T));
        });
        if (bound > STIEFEL_NEAR) reorthonormalise();
        if (in.transport) transport_first_moment();
        write_results(tensor, matrix, T(mean));
        return true;
    }

    // Updates first and second with the gradient r, and replaces r by d; returns the sum of r².
    double update_moments(T *along, T *f, T *s, int64_t count) const {
        const T momentum = T(in.momentum), gradient_factor = T(in.gradient_factor), direct_factor = T(in.direct_factor);
        const T momentum_factor = T(in.momentum_factor), beta2 = T(in.beta2), rest = T(1 - in.beta2);
        const T root_factor = T(in.root_factor), eps = T(in.eps);
        V total = {};
        for (int64_t r = 0; r < count; ++r)
            for (int64_t c = 0; c < padded_k; c += L) {
                const int64_t i = r * padded_k + c;
                const V g = load<V>(along + i);
                V to = g;
                if (in.first.data) {
                    const V moment = load<V>(f + i) * momentum + g * gradient_factor;
                    store(f + i, moment);
                    to = g * direct_factor + moment * momentum_factor;
                }
                if (elementwise) {
                    const V moment = load<V>(s + i) * beta2 + g * g * rest;
                    store(s + i, moment);
                    // without eps the padding would be 0 / 0
                    to = load<V>(inside + c) != 0 ? to / (square_root(moment) * root_factor + eps) : V{};
                }
                if (scalar) total += g * g;
                store(along + i, to);
            }
        double sum = 0;
        for (int lane = 0; lane < L; ++lane) sum += double(total[lane]);
        return sum;
    }

    static POLYHEAD_INLINE V square_root(V x) {
        V y;
        for (int lane = 0; lane < L; ++lane) y[lane] = std::sqrt(x[lane]);
        return y;
    }

    // B = s·sym(A); replaces xᵀx by the Gram matrix of x + Δ, minus I.
    void compute_gram_of_step(T *b, T scale) const {
        T *gram = small[0], *a = small[1], *dd = small[2], *p = small[5], *q = small[6];
        for (int64_t i = 0; i < k; ++i) gram[i * padded_k + i] -= 1;
        if (in.tangent) {
            // with H = xᵀx − I: H + s²D − sym(B(2H − HB + 2sA − B))
            M::symmetrise(a, b, k, T(0.5) * scale);
            M::multiply(gram, b, p, padded_k, k);
            for_each_vector([&](int64_t i) {
                const V h = load<V>(gram + i) - load<V>(b + i) * T(0.5) + load<V>(a + i) * scale;
                store(p + i, h + h - load<V>(p + i));
            });
            M::multiply(b, p, q, padded_k, k);
            M::symmetrise(q, p, k, T(-0.5));
        } else {
            // H + s²D + 2s·sym(A)
            std::memset(b, 0, size_t(square) * sizeof(T));
            M::symmetrise(a, p, k, scale);
        }
        for_each_vector([&](int64_t i) { store(gram + i,
                                               load<V>(gram + i) + load<V>(p + i) + load<V>(dd + i) * (scale * scale)); });
    }

    // Z − I by Newton's iteration, whose error is known; all factors commute.
    T *inverse_square_root(const T *more, double bound) const {
        // the Gram matrix times the iterate so far, one step, and all steps, each minus I
        T *of = small[5], *step = small[6], *root = small[7], *product = small[8];
        // scaled so that the spectrum is centred at 1
        const double scale = bound > 1 ? 2 / (1 + bound) : 1;
        double error = std::abs(1 - scale);
        for_each_vector([&](int64_t i) { store(of + i, load<V>(more + i) * T(scale)); });
        for (int64_t i = 0; i < k; ++i) of[i * padded_k + i] += T(scale - 1);
        for (bool started = false;; started = true) {
            error = error * error * (0.75 + 0.25 * error);
            if (started) {
                M::multiply(root, of, product, padded_k, k);
                for_each_vector([&](int64_t i) {
                    store(step + i, (load<V>(root + i) + load<V>(of + i) + load<V>(product + i)) * T(-0.5));
                });
                M::multiply(step, root, product, padded_k, k);
                for_each_vector([&](int64_t i) { store(root + i, load<V>(root + i) + load<V>(step + i) + load<V>(product + i)); });
            } else {
                for_each_vector([&](int64_t i) { store(step + i, load<V>(of + i) * T(-0.5)); });
                std::memcpy(root, step, size_t(square) * sizeof(T));
            }
            if (error < double(std::numeric_limits<T>::epsilon()) / 4) break;
            M::multiply(of, step, product, padded_k, k);
            for_each_vector([&](int64_t i) { store(of + i, load<V>(of + i) + load<V>(step + i) + load<V>(product + i)); });
        }
        for_each_vector([&](int64_t i) { store(root + i, load<V>(root + i) * T(std::sqrt(scale))); });
        for (int64_t i = 0; i < k; ++i) root[i * padded_k + i] += T(std::sqrt(scale) - 1);
        return root;
    }

    // Calls act(i) for each vector of a small matrix.
    template <class Do>
    POLYHEAD_INLINE void for_each_vector(Do act) const {
        for (int64_t i = 0; i < square; i += L) act(i);
    }

    // x − x(xᵀx − I) / 2: one step towards the nearest point, which removes rounding errors.
    void reorthonormalise() const {
        T *gram = small[0];
        std::memset(gram, 0, size_t(square) * sizeof(T));
        for_each_row_block([&](int64_t row,
                               int64_t count) { M::add_transposed_product(x + row * padded_k, x + row * padded_k, gram, count,
                                       k, true); });
        M::copy_upper_to_lower(gram, k);
        for (int64_t i = 0; i < k; ++i) gram[i * padded_k + i] -= 1;
        for_each_vector([&](int64_t i) { store(gram + i, load<V>(gram + i) * T(0.5)); });
        for_each_row_block([&](int64_t row, int64_t count) {
            M::multiply(x + row * padded_k, gram, block, M::round_up(count), k, x + row * padded_k);
            std::memcpy(x + row * padded_k, block, size_t(count * padded_k) * sizeof(T));
        });
    }

    // Projects the first moment onto the tangent space at x.
    void transport_first_moment() const {
        T *a = small[0], *s = small[1];
        std::memset(a, 0, size_t(square) * sizeof(T));
        for_each_row_block([&](int64_t row,
                               int64_t count) { M::add_transposed_product(x + row * padded_k, first + row * padded_k, a, count,
                                       k); });
        M::symmetrise(a, s, k, T(0.5));
        for_each_row_block([&](int64_t row, int64_t count) {
            M::multiply(x + row * padded_k, s, first + row * padded_k, M::round_up(count), k, first + row * padded_k);
        });
    }

    void write_results(int64_t tensor, int64_t matrix, T mean) const {
        M::store_strided(x, matrix_address(in.x, tensor, matrix), in.x.row, in.x.column, n, k);
        if (in.first.data) M::store_strided(first, matrix_address(in.first, tensor, matrix), in.first.row, in.first.column, n, k);
        if (elementwise) M::store_strided(second, matrix_address(in.second, tensor, matrix), in.second.row, in.second.column, n, k);
        if (scalar)
            for (int64_t copy = 0; copy < in.copies; ++copy) *matrix_address(in.second, tensor, matrix, copy) = mean;
    }

    // The largest absolute row sum of I + a.
    double largest_row_sum(const T *a) const {
        double largest = 0;
        for (int64_t i = 0; i < k; ++i) {
            double sum = 0;
            for (int64_t j = 0; j < k; ++j) sum += std::abs(double(i == j) + double(a[i * padded_k + j]));
            // also true for NaN
            if (!(sum < STIEFEL_FAR)) return STIEFEL_FAR;
            if (sum > largest) largest = sum;
        }
        return largest;
    }

    double squares_of_difference(const T *a, const T *b) const {
        double sum = 0;
        for (int64_t i = 0; i < k * padded_k; ++i) sum += double(a[i] - b[i]) * double(a[i] - b[i]);
        return sum;
    }
};

// False if allocation fails.
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
        for (int64_t i = 0; i < count; ++i) in.skipped[i] = !mine.step_matrix(i / in.matrices, i % in.matrices);
    }
    return true;
}

}  // namespace
}  // namespace polyhead

// polyhead._native. Pointers are passed as integers, 0 for null; Python has checked shapes, dtypes and contiguity.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <new>
#include <stdexcept>

#include "instruction_sets.hpp"
#include "edges/sort.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace polyhead;

namespace {

using Pointer = uintptr_t;

template <class T>
const T *in(Pointer p) {
    return reinterpret_cast<const T *>(p);
}
const void *in(Pointer p) { return reinterpret_cast<const void *>(p); }
void *out(Pointer p) { return reinterpret_cast<void *>(p); }
float *out_float(Pointer p) { return reinterpret_cast<float *>(p); }
int32_t *out_int(Pointer p) { return reinterpret_cast<int32_t *>(p); }

void throw_unless_allocated(bool allocated) {
    if (!allocated) throw std::bad_alloc();
}

// False if an id is out of range; the outputs are then unspecified.
bool ids_in_range(Status status) {
    throw_unless_allocated(status != NO_MEMORY);
    return status != OUT_OF_RANGE;
}

int64_t sort_edges_at(Pointer sources, int64_t sources_stride, Pointer destinations, int64_t destinations_stride, bool is_int64,
             int64_t edges, int64_t num_sources, int64_t num_destinations, Pointer indptr, Pointer indices, Pointer edge_id,
             Pointer out_indptr, Pointer out_slot, Pointer out_indices) {
    nb::gil_scoped_release free;
    return sort_edges({in(sources), in(destinations), sources_stride, destinations_stride, is_int64, edges, num_sources,
                       num_destinations},
                      {out_int(indptr), out_int(indices), out_int(edge_id), out_int(out_indptr), out_int(out_slot),
                       out_int(out_indices)});
}

bool edges_forward(int kind, bool is_double, int64_t batch, int64_t sources, int64_t destinations, int64_t edges, int64_t heads,
             int64_t dim, int64_t edge_features, Pointer q, Pointer k, Pointer v, Pointer a, Pointer inside, Pointer features,
             Pointer map, Pointer weights, Pointer indptr, Pointer indices, Pointer edge_id, Pointer out_, Pointer lse,
             double factor, double dropout, int64_t threshold, int32_t seed, int64_t first_head, int64_t num_heads,
             Pointer query_index, Pointer key_index, int threads) {
    nb::gil_scoped_release free;
    EdgeProblem p{kind, is_double, batch, sources, destinations, edges, heads, dim, edge_features, in(q), in(k), in(v), in(a),
              in(inside), in(features), in(map), in(weights), in<int32_t>(indptr), in<int32_t>(indices), in<int32_t>(edge_id),
              factor, dropout, threshold, seed, threads, {first_head, num_heads}, in<int32_t>(query_index), in<int32_t>(key_index)};
    return ids_in_range(kernels_in_use().edges_forward(p, {out(out_), out(lse)}));
}

bool edges_backward(int kind, bool is_double, int64_t batch, int64_t sources, int64_t destinations, int64_t edges,
              int64_t heads, int64_t dim, int64_t edge_features, Pointer q, Pointer k, Pointer v, Pointer a, Pointer inside, Pointer features,
              Pointer map, Pointer weights, Pointer indptr, Pointer indices, Pointer edge_id, Pointer out_indptr,
              Pointer out_slot, Pointer out_indices, Pointer out_, Pointer lse, Pointer d_out, Pointer d_lse,
              Pointer dq, Pointer dk, Pointer dv, Pointer da, Pointer d_inside, Pointer d_weights, Pointer d_features,
              Pointer d_map, double factor, double dropout, int64_t threshold, int32_t seed, int64_t first_head, int64_t num_heads,
              Pointer query_index, Pointer key_index, int threads) {
    nb::gil_scoped_release free;
    EdgeProblem p{kind, is_double, batch, sources, destinations, edges, heads, dim, edge_features, in(q), in(k), in(v), in(a),
              in(inside), in(features), in(map), in(weights), in<int32_t>(indptr), in<int32_t>(indices), in<int32_t>(edge_id),
              factor, dropout, threshold, seed, threads, {first_head, num_heads}, in<int32_t>(query_index), in<int32_t>(key_index)};
    EdgeGradients g{in<int32_t>(out_indptr), in<int32_t>(out_slot), in<int32_t>(out_indices), in(out_), in(lse),
                in(d_out), in(d_lse), out(dq), out(dk), out(dv), out(da), out(d_inside), out(d_weights),
                out(d_features), out(d_map)};
    return ids_in_range(kernels_in_use().edges_backward(p, g));
}

bool gather_sum(bool is_double, int64_t sources, int64_t destinations, int64_t edges, int64_t width, Pointer v, Pointer indptr,
                Pointer indices, Pointer out_, int threads) {
    nb::gil_scoped_release free;
    return ids_in_range(kernels_in_use().gather_sum(
        {is_double, sources, destinations, edges, width, in(v), in<int32_t>(indptr), in<int32_t>(indices), out(out_), threads}));
}

void score_stats(int64_t heads, int64_t rows, int64_t columns, int64_t queries, int64_t keys, Pointer scores, int64_t column,
             Pointer first, Pointer stop, Pointer key_bias, Pointer row_max, Pointer row_sum, Pointer high, Pointer low, Pointer position,
             Pointer row_weights, Pointer key_weights, int sums, Pointer row_sums, Pointer chunk_first, int64_t chunks,
             Pointer column_sums, Pointer top_score, Pointer top_key, int64_t top, int threads) {
    nb::gil_scoped_release free;
    kernels_in_use().score_stats({heads, rows, columns, queries, keys, in<float>(scores), column, in<int32_t>(first),
                              in<int32_t>(stop), in<float>(key_bias), out_float(row_max), out_float(row_sum), in<float>(high),
                              in<float>(low), in<float>(position), in<float>(row_weights), in<float>(key_weights), sums,
                              out_float(row_sums), in<int32_t>(chunk_first), chunks, out_float(column_sums),
                              out_float(top_score), reinterpret_cast<int64_t *>(top_key), top, threads});
}

using Sizes = std::vector<int64_t>;
// a pointer, and the strides of batch, heads and items
using Axes = std::vector<int64_t>;

Strided strided(const Axes &x) { return {reinterpret_cast<const void *>(x.at(0)), x.at(1), x.at(2), x.at(3)}; }

// the term at `place`: a pointer, and the strides of batch, heads, queries and keys; absent if the list is empty
ShortBias bias_at(const Axes &terms, size_t place) {
    if (terms.empty()) return {};
    const size_t i = 5 * place;
    return {reinterpret_cast<const void *>(terms.at(i)), terms.at(i + 1), terms.at(i + 2), terms.at(i + 3), terms.at(i + 4)};
}

Short make_short(bool is_double, const Sizes &n, const Axes &q, const Axes &k, const Axes &v, const Axes &out_, Pointer lse,
               Pointer first, Pointer stop, int64_t rows, const Axes &bias, double scale, double dropout, int64_t threshold,
               int32_t seed, int threads) {
    return {is_double, n.at(0), n.at(1), n.at(2), n.at(3), n.at(4), n.at(5), n.at(6), strided(q), strided(k), strided(v),
            strided(out_), out(lse), in<int32_t>(first), in<int32_t>(stop), rows, scale, dropout, threshold, seed, threads,
            {bias_at(bias, 0), bias_at(bias, 1)}, {n.at(7), n.at(8)}};
}

void short_forward(bool is_double, const Sizes &sizes, const Axes &q, const Axes &k, const Axes &v, const Axes &out_,
                   Pointer lse, Pointer first, Pointer stop, int64_t rows, const Axes &bias, double scale, double dropout,
                   int64_t threshold, int32_t seed, int threads) {
    const Short s = make_short(is_double, sizes, q, k, v, out_, lse, first, stop, rows, bias, scale, dropout, threshold, seed, threads);
    nb::gil_scoped_release free;
    throw_unless_allocated(kernels_in_use().short_forward(s));
}

void short_backward(bool is_double, const Sizes &sizes, const Axes &q, const Axes &k, const Axes &v, const Axes &d_out,
                    Pointer lse, Pointer first, Pointer stop, int64_t rows, const Axes &bias, double scale, double dropout,
                    int64_t threshold, int32_t seed, int threads, Pointer d_lse, const Axes &dq, const Axes &dk,
                    const Axes &dv, const Axes &d_bias) {
    const Short s = make_short(is_double, sizes, q, k, v, d_out, lse, first, stop, rows, bias, scale, dropout, threshold, seed, threads);
    const ShortGradients g{strided(d_out), in(d_lse), strided(dq), strided(dk), strided(dv), {bias_at(d_bias, 0), bias_at(d_bias, 1)}};
    nb::gil_scoped_release free;
    throw_unless_allocated(kernels_in_use().short_backward(s, g));
}

// sizes: batch, heads, key heads, dim, width, first head, heads of the whole attention; window: points, reach and step of each axis
Grid make_grid_arguments(bool is_double, const Sizes &n, const Sizes &window, const Axes &q, const Axes &k, const Axes &v,
                         const Axes &out_, Pointer lse, Pointer table, double scale, double dropout, int64_t threshold, int32_t seed, int threads) {
    const int64_t axes = int64_t(window.size()) / 3;
    return {is_double, n.at(0), n.at(1), n.at(2), n.at(3), n.at(4), axes, window.data(), window.data() + axes,
            window.data() + 2 * axes, strided(q), strided(k), strided(v), strided(out_), out(lse), in(table), scale, dropout,
            threshold, seed, threads, {n.at(5), n.at(6)}};
}

void grid_forward(bool is_double, const Sizes &sizes, const Sizes &window, const Axes &q, const Axes &k, const Axes &v,
                  const Axes &out_, Pointer lse, Pointer table, double scale, double dropout, int64_t threshold, int32_t seed,
                  int threads) {
    const Grid g = make_grid_arguments(is_double, sizes, window, q, k, v, out_, lse, table, scale, dropout, threshold, seed,
                                       threads);
    nb::gil_scoped_release free;
    throw_unless_allocated(kernels_in_use().grid_forward(g));
}

void grid_backward(bool is_double, const Sizes &sizes, const Sizes &window, const Axes &q, const Axes &k, const Axes &v,
                   const Axes &out_, Pointer lse, Pointer table, double scale, double dropout, int64_t threshold, int32_t seed,
                   int threads, const Axes &d_out, Pointer d_lse, const Axes &dq, const Axes &dk, const Axes &dv,
                   Pointer d_table) {
    const Grid g = make_grid_arguments(is_double, sizes, window, q, k, v, out_, lse, table, scale, dropout, threshold, seed,
                                       threads);
    const GridGradients gradients{strided(d_out), in(d_lse), strided(dq), strided(dk), strided(dv), out(d_table)};
    nb::gil_scoped_release free;
    throw_unless_allocated(kernels_in_use().grid_backward(g, gradients));
}

void skinny_gemm(int64_t vectors, int64_t rows, int64_t columns, Pointer x, Pointer matrix, Pointer bias, Pointer out_, int threads) {
    nb::gil_scoped_release free;
    kernels_in_use().skinny_gemm({vectors, rows, columns, in<float>(x), in<float>(matrix), in<float>(bias), out_float(out_), threads});
}

using Pointers = std::vector<int64_t>;
// strides of matrices, rows and columns
Matrices make_matrices(const Pointers &data, const Sizes &strides) {
    return {data.empty() ? nullptr : data.data(), strides.at(0), strides.at(1), strides.at(2)};
}

// Returns the indices of the matrices that were skipped.
std::vector<int64_t> stiefel_step(bool is_double, int64_t count, int64_t n, int64_t k, const Pointers &x, const Sizes &x_strides,
                                  const Pointers &g, const Sizes &g_strides, const Pointers &first, const Sizes &first_strides,
                                  const Pointers &second, const Sizes &second_strides, bool canonical, int64_t copies,
                                  bool tangent, bool transport, double sign, double momentum, double gradient_factor,
                                  double direct_factor, double momentum_factor, double beta2, double root_factor,
                                  double eps, double scale, int threads) {
    std::vector<uint8_t> skipped(x.size() * size_t(count));
    const StiefelStep step{is_double, int64_t(x.size()), count, n, k, make_matrices(x, x_strides), make_matrices(g, g_strides),
                           make_matrices(first, first_strides), make_matrices(second, second_strides), canonical, copies, tangent,
                           transport, sign, momentum, gradient_factor, direct_factor, momentum_factor, beta2,
                           root_factor, eps, scale, skipped.data(), threads};
    {
        nb::gil_scoped_release free;
        throw_unless_allocated(kernels_in_use().stiefel_step(step));
    }
    std::vector<int64_t> indices;
    for (size_t i = 0; i < skipped.size(); ++i)
        if (skipped[i]) indices.push_back(int64_t(i));
    return indices;
}

bool all_finite(bool is_double, const Pointers &data, const Sizes &counts, int threads) {
    nb::gil_scoped_release free;
    return kernels_in_use().all_finite({is_double, int64_t(data.size()), data.data(), counts.data(), threads});
}

int64_t tuple_integer(nb::handle tuple, size_t i) { return PyLong_AsLongLong(PyTuple_GET_ITEM(tuple.ptr(), Py_ssize_t(i))); }

// The dtypes of small_tensors_finite, by kind: fp32, fp64, bf16, fp16.
constexpr int64_t WIDTHS[] = {4, 8, 2, 2};
constexpr uint16_t EXPONENTS[] = {0, 0, 0x7F80, 0x7C00};

bool contiguous_finite(int kind, int64_t at, int64_t count) {
    if (kind < 2) return kernels_in_use().all_finite({kind == 1, 1, &at, &count, 1});
    const uint16_t *x = reinterpret_cast<const uint16_t *>(at), mask = EXPONENTS[kind];
    int nonfinite = 0;
    for (int64_t i = 0; i < count; ++i) nonfinite |= (x[i] & mask) == mask;
    return !nonfinite;
}

// Whether one tensor with any strides is finite.
bool strided_tensor_finite(int kind, int64_t data, nb::handle shape, nb::handle strides) {
    constexpr size_t AXES = 8;
    const size_t dims = nb::len(shape);
    if (dims > AXES || nb::len(strides) != dims) throw std::invalid_argument("tensors must have at most eight axes");
    int64_t n[AXES], step[AXES], at[AXES] = {};
    // sort the axes by stride, largest first, and merge those that are contiguous: heads inside rows are read as one row
    size_t axes = 0;
    for (size_t i = 0; i < dims; ++i) {
        const int64_t size = tuple_integer(shape, i), stride = tuple_integer(strides, i);
        if (size == 0) return true;
        if (size == 1) continue;
        size_t place = axes++;
        for (; place > 0 && step[place - 1] < stride; --place) n[place] = n[place - 1], step[place] = step[place - 1];
        n[place] = size, step[place] = stride;
    }
    size_t merged = 0;
    for (size_t i = 0; i < axes; ++i) {
        if (merged > 0 && step[merged - 1] == n[i] * step[i])
            n[merged - 1] *= n[i], step[merged - 1] = step[i];
        else
            n[merged] = n[i], step[merged++] = step[i];
    }
    axes = merged;
    const int64_t width = WIDTHS[kind];
    const bool rows = axes > 0 && step[axes - 1] == 1;
    const int64_t count = rows ? n[--axes] : 1;
    for (int64_t place = data;;) {
        if (!contiguous_finite(kind, place, count)) return false;
        size_t axis = axes;
        while (axis > 0 && ++at[axis - 1] == n[axis - 1]) {
            --axis;
            place -= (n[axis] - 1) * step[axis] * width;
            at[axis] = 0;
        }
        if (axis == 0) return true;
        place += step[axis - 1] * width;
    }
}

// Whether small tensors are finite: a pointer, a shape and strides each. Without lists and threads, to cost little more than a call.
bool small_tensors_finite(int kind, nb::args tensors) {
    if (kind < 0 || kind > 3) throw std::invalid_argument("kind must be 0, 1, 2 or 3");
    for (size_t i = 0; i + 2 < tensors.size(); i += 3) {
        nb::handle shape = tensors[i + 1], strides = tensors[i + 2];
        if (!PyTuple_Check(shape.ptr()) || !PyTuple_Check(strides.ptr())) throw std::invalid_argument("shapes must be tuples");
        if (!strided_tensor_finite(kind, tuple_integer(tensors, i), shape, strides)) return false;
    }
    return true;
}

// Adds 1 to each of these numbers.
void increment_floats(const Pointers &data) {
    for (const int64_t at : data) *reinterpret_cast<float *>(at) += 1;
}

std::vector<std::string> instruction_set_names() {
    std::vector<std::string> names;
    for (const Kernels *kernels : instruction_sets()) names.emplace_back(kernels->name);
    return names;
}

void use_instruction_set_or_throw(const std::string &name) {
    if (use_instruction_set(name)) return;
    std::string message = "name must be one of the instruction sets that this CPU can run, got '" + name + "':";
    for (const std::string &known : instruction_set_names()) message += " '" + known + "'";
    throw nb::value_error(message.c_str());
}

bool has_openmp() {
#if defined(_OPENMP)
    return true;
#else
    return false;
#endif
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "The C++ kernels: attention, head metrics and linear algebra.";
    m.def("sort_edges", &sort_edges_at, "sources"_a, "sources_stride"_a, "destinations"_a, "destinations_stride"_a, "is_int64"_a,
          "edges"_a, "num_sources"_a, "num_destinations"_a, "indptr"_a, "indices"_a, "edge_id"_a, "out_indptr"_a,
          "out_slot"_a, "out_indices"_a);
    m.def("edges_forward", &edges_forward, "kind"_a, "double"_a, "batch"_a, "sources"_a, "destinations"_a, "edges"_a, "heads"_a,
          "dim"_a, "edge_features"_a, "q"_a, "k"_a, "v"_a, "a"_a, "inside"_a, "features"_a, "map"_a, "weights"_a, "indptr"_a,
          "indices"_a, "edge_id"_a, "out"_a, "lse"_a, "factor"_a, "dropout"_a, "threshold"_a, "seed"_a,
          "first_head"_a, "num_heads"_a, "query_index"_a, "key_index"_a, "threads"_a);
    m.def("edges_backward", &edges_backward, "kind"_a, "double"_a, "batch"_a, "sources"_a, "destinations"_a, "edges"_a,
          "heads"_a, "dim"_a, "edge_features"_a, "q"_a, "k"_a, "v"_a, "a"_a, "inside"_a, "features"_a, "map"_a, "weights"_a, "indptr"_a,
          "indices"_a, "edge_id"_a, "out_indptr"_a, "out_slot"_a, "out_indices"_a, "out"_a, "lse"_a, "d_out"_a,
          "d_lse"_a, "dq"_a, "dk"_a, "dv"_a, "da"_a, "d_inside"_a, "d_weights"_a, "d_features"_a, "d_map"_a, "factor"_a,
          "dropout"_a, "threshold"_a, "seed"_a, "first_head"_a, "num_heads"_a, "query_index"_a, "key_index"_a, "threads"_a);
    m.def("gather_sum", &gather_sum, "double"_a, "sources"_a, "destinations"_a, "edges"_a, "width"_a, "v"_a, "indptr"_a, "indices"_a,
          "out"_a, "threads"_a);
    m.def("score_stats", &score_stats, "heads"_a, "rows"_a, "columns"_a, "queries"_a, "keys"_a, "scores"_a, "column"_a, "first"_a,
          "stop"_a, "key_bias"_a, "row_max"_a, "row_sum"_a, "high"_a, "low"_a, "position"_a, "row_weights"_a, "key_weights"_a, "sums"_a,
          "row_sums"_a, "chunk_first"_a, "chunks"_a, "column_sums"_a, "top_score"_a, "top_key"_a, "top"_a, "threads"_a);
    m.def("short_forward", &short_forward, "double"_a, "sizes"_a, "q"_a, "k"_a, "v"_a, "out"_a, "lse"_a, "first"_a, "stop"_a,
          "rows"_a, "bias"_a, "scale"_a, "dropout"_a, "threshold"_a, "seed"_a, "threads"_a);
    m.def("short_backward", &short_backward, "double"_a, "sizes"_a, "q"_a, "k"_a, "v"_a, "d_out"_a, "lse"_a, "first"_a,
          "stop"_a, "rows"_a, "bias"_a, "scale"_a, "dropout"_a, "threshold"_a, "seed"_a, "threads"_a, "d_lse"_a, "dq"_a, "dk"_a,
          "dv"_a, "d_bias"_a);
    m.def("grid_forward", &grid_forward, "double"_a, "sizes"_a, "window"_a, "q"_a, "k"_a, "v"_a, "out"_a, "lse"_a, "table"_a,
          "scale"_a, "dropout"_a, "threshold"_a, "seed"_a, "threads"_a);
    m.def("grid_backward", &grid_backward, "double"_a, "sizes"_a, "window"_a, "q"_a, "k"_a, "v"_a, "out"_a, "lse"_a, "table"_a,
          "scale"_a, "dropout"_a, "threshold"_a, "seed"_a, "threads"_a, "d_out"_a, "d_lse"_a, "dq"_a, "dk"_a, "dv"_a,
          "d_table"_a);
    m.def("skinny_gemm", &skinny_gemm, "vectors"_a, "rows"_a, "columns"_a, "x"_a, "matrix"_a, "bias"_a, "out"_a, "threads"_a);
    m.def("stiefel_step", &stiefel_step, "double"_a, "count"_a, "n"_a, "k"_a, "x"_a, "x_strides"_a, "g"_a, "g_strides"_a,
          "first"_a, "first_strides"_a, "second"_a, "second_strides"_a, "canonical"_a, "copies"_a, "tangent"_a, "transport"_a,
          "sign"_a, "momentum"_a, "gradient_factor"_a, "direct_factor"_a, "momentum_factor"_a, "beta2"_a, "root_factor"_a,
          "eps"_a, "scale"_a, "threads"_a);
    m.def("all_finite", &all_finite, "double"_a, "data"_a, "counts"_a, "threads"_a);
    m.def("small_tensors_finite", &small_tensors_finite);
    m.def("increment_floats", &increment_floats, "data"_a);
    m.def("instruction_sets", &instruction_set_names);
    m.def("instruction_set", [] { return std::string(kernels_in_use().name); });
    m.def("use", &use_instruction_set_or_throw, "name"_a);
    m.def("compiler", [] { return std::string(POLYHEAD_COMPILER); });
    m.def("openmp", &has_openmp);
}

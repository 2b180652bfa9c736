// The kernels of every instruction set against plain loops, at odd sizes; outputs are filled with NaN beforehand.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "instruction_sets.hpp"
#include "edges/sort.hpp"
#include "grid_test.hpp"
#include "naive.hpp"
#include "score_stats_test.hpp"
#include "short_test.hpp"
#include "stiefel_test.hpp"

using namespace polyhead;
using naive::Answer;
using naive::Case;
using naive::Numbers;

namespace {

// Each test has its own generator, so that it does not depend on earlier draws.
using Generator = std::mt19937;

Numbers normal(int64_t count, Generator &generator) {
    std::normal_distribution<float> distribution;
    Numbers x(count);
    // exact in float, so that both precisions get the same problem
    for (double &value : x) value = distribution(generator);
    return x;
}

struct Graph {
    const char *name;
    int64_t sources, destinations;
    std::vector<int32_t> source, destination;
};

Graph random_graph(const char *name, int64_t sources, int64_t destinations, int64_t edges) {
    Generator generator(1);
    Graph graph{name, sources, destinations, {}, {}};
    for (int64_t e = 0; e < edges; ++e) {
        graph.source.push_back(int32_t(generator() % sources));
        graph.destination.push_back(int32_t(generator() % destinations));
    }
    return graph;
}

// A graph with half of its edges at one node, which then spans several parts.
Graph hub(const char *name, bool of_sources) {
    Graph graph = random_graph(name, 37, 41, 9001);
    std::vector<int32_t> &ids = of_sources ? graph.source : graph.destination;
    for (size_t e = 0; e < ids.size(); e += 2) ids[e] = 5;
    return graph;
}

struct Sorted {
    std::vector<int32_t> indptr, indices, edge_id, out_indptr, out_slot, out_indices;
};

void fail(const std::string &message) {
    std::fprintf(stderr, "%s\n", message.c_str());
    std::exit(1);
}

Sorted sorted(const Graph &g) {
    const size_t edges = g.source.size();
    Sorted s;
    s.indptr.resize(g.destinations + 1);
    s.out_indptr.resize(g.sources + 1);
    for (auto *x : {&s.indices, &s.edge_id, &s.out_slot, &s.out_indices}) x->resize(edges);
    int64_t wrong = sort_edges({g.source.data(), g.destination.data(), 1, 1, false, int64_t(edges), g.sources,
                                g.destinations},
                               {s.indptr.data(), s.indices.data(), s.edge_id.data(), s.out_indptr.data(), s.out_slot.data(),
                                s.out_indices.data()});
    if (wrong != -1) fail(std::string(g.name) + ": sort refuses edge " + std::to_string(wrong));
    return s;
}

void test_sort(const Graph &g) {
    Sorted s = sorted(g);
    const std::string where = std::string("sort, ") + g.name;
    for (int64_t d = 0; d < g.destinations; ++d)
        for (int32_t at = s.indptr[d]; at < s.indptr[d + 1]; ++at) {
            if (g.destination[s.edge_id[at]] != d || g.source[s.edge_id[at]] != s.indices[at]) fail(where + ": another edge");
            if (at > s.indptr[d] && s.edge_id[at] <= s.edge_id[at - 1]) fail(where + ": not stable");
        }
    for (int64_t j = 0; j < g.sources; ++j)
        for (int32_t at = s.out_indptr[j]; at < s.out_indptr[j + 1]; ++at) {
            const int32_t slot = s.out_slot[at];
            if (s.indices[slot] != j || g.destination[s.edge_id[slot]] != s.out_indices[at])
                fail(where + ": another edge by source");
            if (at > s.out_indptr[j] && slot <= s.out_slot[at - 1]) fail(where + ": not stable by source");
        }
}

// Strided 64-bit ids, as of the columns of an (edges, 2) tensor, the third of them out of range.
void test_sort_refuses() {
    for (int64_t bad : {int64_t(-1), int64_t(3), int64_t(1) << 40})
        for (int column : {0, 1}) {
            std::vector<int64_t> ids = {0, 1, 2, 2, 1, 1, 0, 0};
            ids[4 + column] = bad;
            std::vector<int32_t> indptr(4), indices(4), edge_id(4), out_indptr(4), out_slot(4), out_indices(4);
            int64_t wrong = sort_edges({ids.data(), ids.data() + 1, 2, 2, true, 4, 3, 3},
                                       {indptr.data(), indices.data(), edge_id.data(), out_indptr.data(), out_slot.data(),
                                        out_indices.data()});
            if (wrong != 2) fail("sort takes an id that is out of range");
        }
}

template <class T>
struct Copy {
    std::vector<T> numbers;
    explicit Copy(const Numbers &from) : numbers(from.begin(), from.end()) {}
    const void *pointer() const { return numbers.empty() ? nullptr : numbers.data(); }
};

template <class T>
struct Output {
    std::vector<T> numbers;
    explicit Output(size_t count) : numbers(count, std::numeric_limits<T>::quiet_NaN()) {}
    void *pointer() { return numbers.empty() ? nullptr : numbers.data(); }

    void expect(const Numbers &expected, const std::string &name) const {
        const double tolerance = sizeof(T) == 4 ? 1e-4 : 1e-11;
        double scale = 1;
        for (double x : expected)
            if (std::isfinite(x)) scale = std::max(scale, std::fabs(x));
        for (size_t x = 0; x < expected.size(); ++x) {
            const bool same = double(numbers[x]) == expected[x] || std::fabs(numbers[x] - expected[x]) <= tolerance * scale;
            if (!same)
                fail(name + "[" + std::to_string(x) + "] is " + std::to_string(double(numbers[x])) + ", should be " +
                     std::to_string(expected[x]));
        }
    }
};

template <class T>
void compare(const Kernels &kernels, const Case &c, const Sorted &s, const Answer &expected, int threads,
             const std::string &where) {
    Copy<T> q(c.q), k(c.k), v(c.v), a(c.a), inside(c.inside), features(c.features), map(c.map), weights(c.weights),
        d_out(c.d_out), d_lse(c.d_lse);
    EdgeProblem p{c.kind, sizeof(T) == 8, c.batch, c.sources, c.destinations, c.edges(), c.heads, c.dim, c.edge_features,
              q.pointer(), k.pointer(), c.tied ? nullptr : v.pointer(), a.pointer(), inside.pointer(), features.pointer(),
              map.pointer(), weights.pointer(), s.indptr.data(), s.indices.data(), s.edge_id.data(), c.factor, c.dropout,
              c.threshold(), c.seed, threads};
    Output<T> out(expected.out.size()), lse(expected.lse.size());
    if (kernels.edges_forward(p, {out.pointer(), lse.pointer()}) != DONE) fail(where + "forward was not done");
    out.expect(expected.out, where + "out");
    lse.expect(expected.lse, where + "lse");
    Output<T> dq(c.q.size()), dk(c.k.size()), dv(expected.dv.size()), da(c.a.size()), d_inside(c.inside.size()),
        d_weights(c.weights.size()), d_features(c.features.size()), d_map(c.map.size());
    EdgeGradients g{s.out_indptr.data(), s.out_slot.data(), s.out_indices.data(), out.pointer(), lse.pointer(),
                d_out.pointer(), d_lse.pointer(), dq.pointer(), dk.pointer(), dv.pointer(), da.pointer(),
                d_inside.pointer(), d_weights.pointer(), d_features.pointer(), d_map.pointer()};
    if (kernels.edges_backward(p, g) != DONE) fail(where + "backward was not done");
    dq.expect(expected.dq, where + "dq");
    dk.expect(expected.dk, where + "dk");
    dv.expect(expected.dv, where + "dv");
    da.expect(expected.da, where + "da");
    d_inside.expect(expected.d_inside, where + "d_inside");
    d_weights.expect(expected.d_weights, where + "d_weights");
    d_features.expect(expected.d_features, where + "d_features");
    d_map.expect(expected.d_map, where + "d_map");
}

struct Options {
    int64_t batch = 1;
    double factor = 0.2, dropout = 0;
    bool weights = false, inside = false, d_lse = false, tied = false;
    int64_t features = 0;
    int threads = 2;
};

void test_attention(const Graph &g, int kind, int64_t heads, int64_t dim, const Options &o) {
    Generator generator(2);
    Case c{};
    c.kind = kind, c.batch = o.batch, c.sources = g.sources, c.destinations = g.destinations;
    c.heads = heads, c.dim = dim, c.source = g.source, c.destination = g.destination;
    c.factor = o.factor, c.dropout = o.dropout, c.seed = -77, c.tied = o.tied && kind != GAT;
    const int64_t to = o.batch * g.destinations * heads, from = o.batch * g.sources * heads, edges = c.edges();
    c.q = normal(kind == GAT ? to : to * dim, generator);
    c.k = normal(kind == GAT ? from : from * dim, generator);
    if (!c.tied) c.v = normal(from * dim, generator);
    if (kind == GATV2) c.a = normal(heads * dim, generator);
    if (kind == GATV2 && o.features) {
        c.edge_features = o.features;
        c.features = normal(edges * o.features, generator);
        c.map = normal(heads * o.features * dim, generator);
    }
    if (kind == GAT && o.inside) c.inside = normal(edges * heads, generator);
    if (o.weights) c.weights = normal(edges, generator);
    c.d_out = normal(to * dim, generator);
    if (o.d_lse) c.d_lse = normal(to, generator);
    Answer expected;
    naive::forward(c, expected);
    naive::backward(c, expected);
    Sorted s = sorted(g);
    for (const Kernels *kernels : instruction_sets()) {
        const std::string where = std::string(kernels->name) + ", " + g.name + ", kind " + std::to_string(kind) + ", " +
                                  std::to_string(heads) + " heads of " + std::to_string(dim) + ": ";
        compare<double>(*kernels, c, s, expected, o.threads, "double, " + where);
        compare<float>(*kernels, c, s, expected, o.threads, "float, " + where);
    }
}

template <class T>
void test_gather_sum(const Graph &g, int64_t width) {
    Sorted s = sorted(g);
    Generator generator(3);
    Numbers rows = normal(g.sources * width, generator), expected(g.destinations * width, 0);
    for (size_t e = 0; e < g.source.size(); ++e)
        for (int64_t x = 0; x < width; ++x) expected[g.destination[e] * width + x] += rows[g.source[e] * width + x];
    Copy<T> v(rows);
    for (const Kernels *kernels : instruction_sets()) {
        Output<T> out(expected.size());
        const GatherSum in{sizeof(T) == 8, g.sources, g.destinations, int64_t(g.source.size()), width, v.pointer(),
                           s.indptr.data(), s.indices.data(), out.pointer(), 2};
        if (kernels->gather_sum(in) != DONE) fail("gather_sum was not done");
        out.expect(expected, std::string(kernels->name) + ", " + g.name + ", gather_sum");
    }
}

using Array = std::vector<int32_t> Sorted::*;

// Forward and backward passes along edges that were changed after sorting; only the returned status is checked.
struct Changed {
    const Graph &g;
    int kind;
    const Kernels &kernels;
    const int64_t heads = 2, dim = 8;

    void expect(const Sorted &s, Status forward, Status backward, const std::string &what) const {
        const int64_t edges = int64_t(g.source.size()), row = heads * dim;
        auto some = [](int64_t count) { return std::vector<float>(size_t(count), 0.5f); };
        const std::vector<float> q = some(g.destinations * row), k = some(g.sources * row), v = some(g.sources * row), a = some(row),
                                 weights = some(edges), d_out = some(g.destinations * row);
        std::vector<float> out = d_out, lse = some(g.destinations * heads), dq = q, dk = k, dv = v, da = a, d_weights = weights;
        EdgeProblem p{kind, false, 1, g.sources, g.destinations, edges, heads, dim, 0, q.data(), k.data(), v.data(), a.data(), nullptr,
                  nullptr, nullptr, weights.data(), s.indptr.data(), s.indices.data(), s.edge_id.data(), 0.2, 0, -2147483648LL, 0, 2};
        const EdgeGradients to{s.out_indptr.data(), s.out_slot.data(), s.out_indices.data(), out.data(), lse.data(),
                           d_out.data(), nullptr, dq.data(), dk.data(), dv.data(), da.data(), nullptr, d_weights.data(), nullptr,
                           nullptr};
        const std::string where = std::string(kernels.name) + ", " + g.name + ", kind " + std::to_string(kind) + ", " + what;
        if (kernels.edges_forward(p, {out.data(), lse.data()}) != forward) fail(where + ": forward did not return as it should");
        if (kernels.edges_backward(p, to) != backward) fail(where + ": backward did not return as it should");
    }
};

// Ids out of range are refused, wherever they are, and nothing outside the tensors is read or written.
void test_changed_edges(const Graph &g) {
    const int64_t edges = int64_t(g.source.size());
    const struct {
        const char *name;
        Array array;
        int64_t limit;
        bool forward;
    } arrays[] = {{"indptr", &Sorted::indptr, edges + 1, true},         {"indices", &Sorted::indices, g.sources, true},
                  {"edge_id", &Sorted::edge_id, edges, true},               {"out_indptr", &Sorted::out_indptr, edges + 1, false},
                  {"out_slot", &Sorted::out_slot, edges, false},    {"out_indices", &Sorted::out_indices, g.destinations, false}};
    for (const Kernels *kernels : instruction_sets())
        for (int kind : {GAT, GATV2, DOT}) {
            const Changed changed{g, kind, *kernels};
            for (const auto &x : arrays) {
                // only Dot reads the rows of sources again in backward
                const Status backward = x.array == &Sorted::indices && kind != DOT ? DONE : OUT_OF_RANGE;
                for (int64_t id : {int64_t(-1), int64_t(INT32_MIN), int64_t(INT32_MAX), x.limit})
                    for (int where : {0, 1, 2}) {
                        Sorted s = sorted(g);
                        std::vector<int32_t> &array = s.*x.array;
                        array[where * (array.size() - 1) / 2] = int32_t(id);
                        changed.expect(s, x.forward ? OUT_OF_RANGE : DONE, backward, std::string(x.name) + " " + std::to_string(id));
                    }
                // wrong ids that are in range are accepted
                Sorted s = sorted(g);
                if (x.array == &Sorted::indptr || x.array == &Sorted::out_indptr) continue;
                std::fill((s.*x.array).begin(), (s.*x.array).end(), int32_t(x.limit - 1));
                changed.expect(s, DONE, DONE, std::string("one ") + x.name + " for all");
            }
            Sorted s = sorted(g);
            std::swap(s.indptr[g.destinations / 3], s.indptr[2 * g.destinations / 3]);
            changed.expect(s, OUT_OF_RANGE, OUT_OF_RANGE, "indptr falls");
        }
}

void test_score_stats() {
    Generator generator(4);
    for (int64_t keys : {1, 7, 16, 37, 130})
        for (int64_t queries : {1, 6, 33})
            for (int sums : {0, 1, 3, 4})
                for (int64_t top : {0, 1, 5}) {
                    const bool odd = (keys + queries + sums + top) % 2;
                    score_stats_test::Problem problem(2, queries, keys, 12, 29, sums, top, odd, !odd, generator);
                    for (const Kernels *kernels : instruction_sets()) {
                        std::string wrong = score_stats_test::difference(problem, score_stats_test::by_blocks(problem, *kernels, 2));
                        if (!wrong.empty()) fail(std::string(kernels->name) + ", score_stats: " + wrong);
                    }
                }
}

void test_short_and_skinny_gemm() {
    Generator generator(5);
    for (const Kernels *kernels : instruction_sets()) {
        std::string wrong = short_test::test<float>(*kernels, generator);
        if (wrong.empty()) wrong = short_test::test<double>(*kernels, generator);
        if (wrong.empty()) wrong = short_test::test_bias<float>(*kernels, generator);
        if (wrong.empty()) wrong = short_test::test_bias<double>(*kernels, generator);
        if (wrong.empty()) wrong = short_test::test_skinny_gemm(*kernels, generator);
        if (!wrong.empty()) fail(std::string(kernels->name) + ", few keys: " + wrong);
    }
}

void test_grid() {
    Generator generator(6);
    std::string wrong = grid_test::test<float>(instruction_sets(), generator);
    if (wrong.empty()) wrong = grid_test::test<double>(instruction_sets(), generator);
    if (!wrong.empty()) fail("windows of a grid: " + wrong);
}

void test_stiefel() {
    Generator generator(7);
    for (const Kernels *kernels : instruction_sets()) {
        std::string wrong = stiefel_test::test<float>(*kernels, generator);
        if (wrong.empty()) wrong = stiefel_test::test<double>(*kernels, generator);
        if (!wrong.empty()) fail(std::string(kernels->name) + ", orthonormal columns: " + wrong);
    }
}

std::vector<Options> options() {
    std::vector<Options> all(6);
    all[1].batch = 2, all[1].dropout = 0.3, all[1].factor = 1.7, all[1].threads = 1;
    all[2].weights = all[2].tied = true, all[2].factor = -0.3;
    all[3].inside = all[3].d_lse = true, all[3].features = 5;
    all[4].inside = all[4].d_lse = all[4].weights = all[4].tied = true;
    all[4].batch = 2, all[4].features = 3, all[4].dropout = 0.5, all[4].threads = 3;
    all[5].tied = true, all[5].factor = 0;
    return all;
}

}  // namespace

int main() {
    const std::vector<Graph> graphs = {
        {"no nodes", 0, 0, {}, {}},
        {"no edges", 5, 3, {}, {}},
        random_graph("small", 11, 7, 61),
        random_graph("sparse", 301, 211, 307),
        hub("a hub of destinations", false),
        hub("a hub of sources", true),
        random_graph("one node", 1, 1, 5003),
    };
    test_sort_refuses();
    test_score_stats();
    test_short_and_skinny_gemm();
    test_grid();
    test_stiefel();
    for (const Graph &graph : graphs) {
        test_sort(graph);
        if (graph.source.size() > 60 && graph.sources > 1) test_changed_edges(graph);
        test_gather_sum<float>(graph, 72);
        test_gather_sum<double>(graph, 16);
        const bool large = graph.source.size() > 1000;
        for (int kind : {GAT, GATV2, DOT}) {
            for (const Options &o : options()) test_attention(graph, kind, 3, large ? 8 : 16, o);
            if (large) continue;
            for (int64_t dim : {8, 16, 24, 32, 64, 72})
                for (int64_t heads : {1, 3, 8}) test_attention(graph, kind, heads, dim, {});
        }
    }
    std::printf("every kernel agrees with the plain loops:");
    for (const Kernels *kernels : instruction_sets()) std::printf(" %s", kernels->name);
    std::printf("\n");
    return 0;
}

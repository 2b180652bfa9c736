// Compiled once per instruction set, named by POLYHEAD_SET.
#include "linalg/finite.hpp"
#include "edges/forward.hpp"
#include "edges/gather_sum.hpp"
#include "edges/backward_pass.hpp"
#include "grid/backward.hpp"
#include "score_stats.hpp"
#include "short/parts.hpp"
#include "linalg/stiefel.hpp"
#include "linalg/skinny_gemm.hpp"

#define POLYHEAD_TEXT(x) #x
#define POLYHEAD_NAME(x) POLYHEAD_TEXT(x)

namespace polyhead {
namespace POLYHEAD_SET {

extern const Kernels kernels;
const Kernels kernels = {
    POLYHEAD_NAME(POLYHEAD_SET),
    [](const EdgeProblem &p,
       const EdgeResult &r) { return p.is_double ? edges_forward<double>(p, r) : edges_forward<float>(p, r); },
    [](const EdgeProblem &p,
       const EdgeGradients &g) { return p.is_double ? edges_backward<double>(p, g) : edges_backward<float>(p, g); },
    [](const GatherSum &g) { return g.is_double ? gather_sum<double>(g) : gather_sum<float>(g); },
    [](const ScoreStats &s) { score_stats(s); },
    [](const Short &s) { return s.is_double ? short_forward<double>(s) : short_forward<float>(s); },
    [](const Short &s, const ShortGradients &g) {
        return s.is_double ? short_backward<double>(s, g) : short_backward<float>(s, g);
    },
    [](const Grid &g) { return g.is_double ? grid_forward<double>(g) : grid_forward<float>(g); },
    [](const Grid &g, const GridGradients &d) { return g.is_double ? grid_backward<double>(g, d) : grid_backward<float>(g, d); },
    [](const SkinnyGemm &g) { skinny_gemm(g); },
    [](const StiefelStep &s) { return s.is_double ? stiefel_step<double>(s) : stiefel_step<float>(s); },
    [](const Arrays &x) { return x.is_double ? all_arrays_finite<double>(x) : all_arrays_finite<float>(x); },
};

}  // namespace POLYHEAD_SET
}  // namespace polyhead

// Compiled once per instruction set, named by POLYHEAD_SET.
#include "linalg/finite.hpp"
#include "edges/forward.hpp"
#include "edges/gather.hpp"
#include "edges/gradients.hpp"
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
    [](const Problem &p, const Result &r) { return p.wide ? forward<double>(p, r) : forward<float>(p, r); },
    [](const Problem &p, const Gradients &g) { return p.wide ? backward<double>(p, g) : backward<float>(p, g); },
    [](const GatherSum &g) { return g.wide ? gather_sum<double>(g) : gather_sum<float>(g); },
    [](const ScoreStats &s) { score_stats(s); },
    [](const Short &s) { return s.wide ? short_forward<double>(s) : short_forward<float>(s); },
    [](const Short &s, const ShortGradients &g) {
        return s.wide ? short_backward<double>(s, g) : short_backward<float>(s, g);
    },
    [](const Grid &g) { return g.wide ? grid_forward<double>(g) : grid_forward<float>(g); },
    [](const Grid &g, const GridGradients &d) { return g.wide ? grid_backward<double>(g, d) : grid_backward<float>(g, d); },
    [](const SkinnyGemm &g) { skinny_gemm(g); },
    [](const StiefelStep &s) { return s.wide ? stiefel_step<double>(s) : stiefel_step<float>(s); },
    [](const Pieces &x) { return x.wide ? finite_numbers<double>(x) : finite_numbers<float>(x); },
};

}  // namespace POLYHEAD_SET
}  // namespace polyhead

#include "instruction_sets.hpp"

#include <atomic>

namespace polyhead {

namespace baseline {
extern const Kernels kernels;
}
#if defined(POLYHEAD_X86)
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
#endif

std::vector<const Kernels *> instruction_sets() {
    std::vector<const Kernels *> sets;
#if defined(POLYHEAD_X86)
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (has_avx512) sets.push_back(&avx512::kernels);
    if (has_avx2) sets.push_back(&avx2::kernels);
#endif
    sets.push_back(&baseline::kernels);
    return sets;
}

namespace {
std::atomic<const Kernels *> &current_kernels() {
    static std::atomic<const Kernels *> kernels{instruction_sets().front()};
    return kernels;
}
}  // namespace

const Kernels &kernels_in_use() { return *current_kernels(); }

bool use_instruction_set(const std::string &name) {
    for (const Kernels *kernels : instruction_sets())
        if (name == kernels->name) {
            current_kernels() = kernels;
            return true;
        }
    return false;
}

}  // namespace polyhead

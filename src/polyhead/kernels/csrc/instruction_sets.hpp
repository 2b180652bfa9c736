// The instruction sets that were compiled, and the one in use.
#pragma once

#include <string>
#include <vector>

#include "kernel_arguments.hpp"

namespace polyhead {

// The instruction sets that this CPU can run, best first.
std::vector<const Kernels *> instruction_sets();

// The best one, or the one set by `use_instruction_set`, which returns false if this CPU cannot run it.
const Kernels &kernels_in_use();
bool use_instruction_set(const std::string &name);

}  // namespace polyhead

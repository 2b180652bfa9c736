// The instruction sets that were compiled, and the one in use.
#pragma once

#include <string>
#include <vector>

#include "problem.hpp"

namespace polyhead {

// Those that this CPU can run, the best first.
std::vector<const Kernels *> instruction_sets();

// The best one, until `use` names another: false when this CPU cannot run it.
const Kernels &kernels_in_use();
bool use(const std::string &name);

}  // namespace polyhead

// The number of the current thread, with and without OpenMP.
#pragma once

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace polyhead {
namespace {

inline int thread_number() {
#if defined(_OPENMP)
    return omp_get_thread_num();
#else
    return 0;
#endif
}

}  // namespace
}  // namespace polyhead

// Scratch memory of the kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace polyhead {
namespace {

constexpr int64_t CACHE_LINE = 64;

// `bytes` rounded up to whole cache lines.
constexpr int64_t whole_lines(int64_t bytes) { return (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE; }

constexpr size_t HUGE_PAGE = size_t(1) << 21;

// Memory aligned to cache lines. `reserve` returns false if allocation fails.
class Scratch {
  public:
    Scratch() = default;
    Scratch(const Scratch &) = delete;
    Scratch &operator=(const Scratch &) = delete;
    ~Scratch() { std::free(memory_); }

    bool reserve(size_t bytes) {
        // huge pages: random accesses to many small pages cost page-table walks
        const bool large = bytes > 2 * HUGE_PAGE;
        const size_t unit = large ? HUGE_PAGE : 64;
        memory_ = static_cast<char *>(std::aligned_alloc(unit, (bytes + 64 + unit - 1) / unit * unit));
#if defined(MADV_HUGEPAGE)
        if (large && memory_) madvise(memory_, (bytes + unit - 1) / unit * unit, MADV_HUGEPAGE);
#endif
        return memory_ != nullptr;
    }
    bool reserve_zeros(size_t bytes) {
        if (!reserve(bytes)) return false;
        std::memset(memory_, 0, bytes);
        return true;
    }
    template <class T>
    T *as() {
        return reinterpret_cast<T *>(memory_);
    }

  private:
    char *memory_ = nullptr;
};

// The next `count` elements of a block of scratch memory, aligned to a cache line.
template <class T>
T *take(char *&from, int64_t count) {
    T *taken = reinterpret_cast<T *>(from);
    from += (size_t(count) * sizeof(T) + 63) / 64 * 64;
    return taken;
}

}  // namespace
}  // namespace polyhead

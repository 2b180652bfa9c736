// Which pairs dropout removes: the same integer hash as kernels/dropout.py, four pairs at a time.
#pragma once

#include "simd/vector.hpp"

namespace polyhead {
namespace {

using Words = Vec<uint32_t, 4>;

template <class U>
POLYHEAD_INLINE U mix(U x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

POLYHEAD_INLINE uint32_t hash_head(int32_t seed, int64_t head) { return mix(mix(uint32_t(seed)) + uint32_t(head)); }

struct Dropout {
    bool on;
    int32_t last;  // the largest word that goes
};

POLYHEAD_INLINE Dropout dropout_of(double dropout, int64_t threshold) {
    return {dropout > 0 && threshold > INT32_MIN, int32_t(threshold - 1)};
}

// 1 / (1 - dropout) where the pair stays, 0 where it goes.
template <class T>
POLYHEAD_INLINE Quad<T> dropout_factor(Dropout dropout, uint32_t head, Words query, Words key, T kept) {
    Words word = mix(mix(query + head) ^ (key * 0x9E3779B1u));
    auto stays = __builtin_convertvector((Vec<int32_t, 4>)word > dropout.last, Vec<Int<T>, 4>);
    return stays ? splat<Quad<T>>(kept) : Quad<T>{};
}

}  // namespace
}  // namespace polyhead

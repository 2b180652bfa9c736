// Which pairs dropout removes: the integer hash of kernels/dropout.py, for a vector of pairs.
#pragma once

#include "simd/vector.hpp"

namespace polyhead {
namespace {

using Words = Vec<uint32_t, 4>;

constexpr uint32_t KEY_FACTOR = 0x9E3779B1u;

template <class U>
POLYHEAD_INLINE U mix_bits(U x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

POLYHEAD_INLINE uint32_t hash_head(int32_t seed, int64_t head) { return mix_bits(mix_bits(uint32_t(seed)) + uint32_t(head)); }

// The hash of one query, or of a vector of queries, of a head.
template <class U>
POLYHEAD_INLINE U hash_query(uint32_t head, U query) {
    return mix_bits(query + head);
}

struct Dropout {
    bool on;
    int32_t last;  // the largest hash of a pair that is dropped
};

POLYHEAD_INLINE Dropout dropout_of(double dropout, int64_t threshold) {
    return {dropout > 0 && threshold > INT32_MIN, int32_t(threshold - 1)};
}

// `keep` = 1 / (1 - dropout) for the pairs that are kept, 0 for the others. `query` is from hash_query: one hash, or one per key.
template <class T, int W, class Query>
POLYHEAD_INLINE Vec<T, W> dropout_factor(Dropout dropout, Query query, Vec<uint32_t, W> key, T keep) {
    const Vec<uint32_t, W> hash = mix_bits(query ^ (key * KEY_FACTOR));
    const auto stays = __builtin_convertvector((Vec<int32_t, W>)hash > dropout.last, Vec<Int<T>, W>);
    return stays ? splat<Vec<T, W>>(keep) : Vec<T, W>{};
}

}  // namespace
}  // namespace polyhead

// The start-up test of the inboxes: every rank writes a pattern into all that it will ever write to, with the stores
// that a call uses, and every rank looks whether it is there. Between the two the host makes the ranks meet.
#pragma once

#include "cuda/tile.cuh"
#include "cuda/scoped.cuh"
#include "cuda/slab.h"

namespace fc::cuda {

struct SelfTest {
  uint8_t* slab[kMaxRanks];
  uint8_t* home;  // of `rank`
  int32_t world, slots, rank;

  FC_DEVICE Slab of(int32_t r) const { return {slab[r], r == rank ? home : nullptr, world, slots}; }
};

FC_DEVICE uint4 pattern(int32_t from, int32_t to, int64_t at) {
  const uint32_t word = (static_cast<uint32_t>(at) * 2654435761u) ^ (static_cast<uint32_t>(from * kMaxRanks + to) << 24);
  return {word, ~word, word * 3u, word + 1u};
}

// Calls visit(vector, offset) for all inboxes of one slab that hold what `source` sends.
template <class Visit>
FC_DEVICE void visit_inboxes(const Slab& slab, bool own, int32_t source, const Visit& visit) {
  for (int32_t phase = 0; phase < kPhases; ++phase) {
    const int32_t generations = phase == kPartials ? kPartialGenerations : kSumGenerations;
    for (int32_t g = 0; g < generations; ++g) {
      uint8_t* from = slab.inbox(own, phase, static_cast<int32_t>(blockIdx.x), static_cast<uint32_t>(g), source, 0);
      for (int64_t at = 16 * static_cast<int64_t>(threadIdx.x); at < Slab::inbox_bytes(); at += 16 * 256)
        visit(reinterpret_cast<uint4*>(from + at), from + at - (own ? slab.home : slab.base));
    }
  }
}

// One block per slot.
static __global__ void write_patterns(FC_GRID_CONSTANT const SelfTest t) {
  for (int32_t to = 0; to < t.world; ++to)
    visit_inboxes(t.of(to), to == t.rank, t.rank,
                  [&](uint4* vector, int64_t at) { store_vector(vector, pattern(t.rank, to, at)); });
}

static __global__ void verify_patterns(FC_GRID_CONSTANT const SelfTest t) {
  const Slab own = t.of(t.rank);
  for (int32_t source = 0; source < t.world; ++source)
    visit_inboxes(own, source == t.rank, source, [&](const uint4* vector, int64_t at) {
      const uint4 found = *vector, expected = pattern(source, t.rank, at);
      if (found.x != expected.x || found.y != expected.y || found.z != expected.z || found.w != expected.w)
        atomicAdd(reinterpret_cast<unsigned long long*>(&own.control()->wrong[source]), 1ull);
    });
}

}  // namespace fc::cuda

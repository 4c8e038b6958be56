// The extremes of every group of a tile: packed minima in a lane, butterflies over the lanes that share a group.
#pragma once

#include "cuda/tile.cuh"

namespace fc::cuda {

// Least and negated most of a set of values, so that one kind of minimum serves both. 16-bit: both in one word.
template <class D, bool = kIs16Bit<D>>
struct Spread {
  uint32_t pair;  // low half: min, high half: -max

  static FC_DEVICE Spread none() {
    return {std::is_same_v<D, Bf16> ? 0x7F807F80u : 0x7C007C00u};  // +Inf, and -(-Inf)
  }
  static FC_DEVICE Spread of(const Raw<D>& r) {
    const uint32_t least = min_pair<D>(min_pair<D>(r.w[0], r.w[1]), min_pair<D>(r.w[2], r.w[3]));
    const uint32_t most = max_pair<D>(max_pair<D>(r.w[0], r.w[1]), max_pair<D>(r.w[2], r.w[3])) ^ kSignsOfPair;
    return {min_pair<D>(low_halves(least, most), high_halves(least, most))};
  }
  FC_DEVICE Spread merged(const Spread& o) const { return {min_pair<D>(pair, o.pair)}; }
  FC_DEVICE Spread from_lane(int mask) const { return {__shfl_xor_sync(kFullWarp, pair, mask)}; }
  FC_DEVICE float lo() const { return widen_half<D>(pair, 0); }
  FC_DEVICE float hi() const { return -widen_half<D>(pair, 1); }
};

template <class D>
struct Spread<D, false> {
  float least, negated_most;

  static FC_DEVICE Spread none() { return {float_of(0x7F800000u), float_of(0x7F800000u)}; }
  static FC_DEVICE Spread of(const Raw<D>& r) {
    Spread s{float_of(r.w[0]), -float_of(r.w[0])};
#pragma unroll
    for (int j = 1; j < kPerLane; ++j) s = s.merged({float_of(r.w[j]), -float_of(r.w[j])});
    return s;
  }
  FC_DEVICE Spread merged(const Spread& o) const {
    return {min_nan(least, o.least), min_nan(negated_most, o.negated_most)};
  }
  FC_DEVICE Spread from_lane(int mask) const {
    return {__shfl_xor_sync(kFullWarp, least, mask), __shfl_xor_sync(kFullWarp, negated_most, mask)};
  }
  FC_DEVICE float lo() const { return least; }
  FC_DEVICE float hi() const { return -negated_most; }
};

// Merges over the lanes and loads that share a group of `group` elements. Every lane of the group ends with the result.
template <class T, class Merge, class FromLane>
FC_DEVICE void merge_groups(T (&v)[kLoads], int32_t group, const Merge& merge, const FromLane& from_lane) {
  const int lanes = group < kLoadElements ? group / kPerLane : 32;
  for (int mask = 1; mask < lanes; mask <<= 1) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) v[i] = merge(v[i], from_lane(v[i], mask));
  }
  if (group > kLoadElements) {
    v[0] = v[1] = merge(v[0], v[1]);
    v[2] = v[3] = merge(v[2], v[3]);
  }
  if (group > 2 * kLoadElements) v[0] = v[1] = v[2] = v[3] = merge(v[0], v[2]);
}

// Signed-extreme: both signs have the largest magnitude, so it matters which of them stands first in the group.
FC_DEVICE bool is_tie(const Extremes& x) { return x.lo == -x.hi && x.hi != 0.0f; }

template <class D>
FC_DEVICE void order_extremes(const Raw<D> (&raw)[kLoads], const int32_t (&count)[kLoads], int32_t group,
                              Extremes (&x)[kLoads]) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  int32_t first[kLoads];  // twice the first place of an extreme, plus 1 where that is the positive one
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    first[i] = 2 * kTile;
#pragma unroll
    for (int j = kPerLane - 1; j >= 0; --j) {
      const float v = value_of<D>(raw[i], j);
      const bool low = v == x[i].lo, high = v == x[i].hi;
      if (j < count[i] && (low || high)) first[i] = 2 * (kLoadElements * i + kPerLane * lane + j) + (high ? 1 : 0);
    }
  }
  merge_groups(
      first, group, [](int32_t a, int32_t b) { return a < b ? a : b; },
      [](int32_t v, int mask) { return __shfl_xor_sync(kFullWarp, v, mask); });
#pragma unroll
  for (int i = 0; i < kLoads; ++i) x[i].low_first = (first[i] & 1) == 0;
}

// Extremes of the group that each load's 8 elements belong to. A group without elements has lo = +Inf > hi = -Inf.
template <class D, class S>
FC_DEVICE void tile_extremes(const Raw<D> (&raw)[kLoads], const int32_t (&count)[kLoads], int32_t group,
                             Extremes (&x)[kLoads]) {
  Spread<D> s[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) s[i] = count[i] ? Spread<D>::of(raw[i]) : Spread<D>::none();
  merge_groups(
      s, group, [](const Spread<D>& a, const Spread<D>& b) { return a.merged(b); },
      [](const Spread<D>& a, int mask) { return a.from_lane(mask); });
#pragma unroll
  for (int i = 0; i < kLoads; ++i) x[i] = {s[i].lo(), s[i].hi(), false};
  if constexpr (std::is_same_v<S, SignedExtreme>) {
    const bool tie = is_tie(x[0]) || is_tie(x[1]) || is_tie(x[2]) || is_tie(x[3]);
    if (__any_sync(kFullWarp, tie)) order_extremes<D>(raw, count, group, x);
  }
}

// The same for groups of at least 32 elements, at a quarter of the work: lane L ends with the extremes of the group that
// load L % 4 of lanes L / 4 * 4 to L / 4 * 4 + 3 belongs to, instead of with those of all its loads.
template <class D, class S>
FC_DEVICE Extremes quad_extremes(const Raw<D> (&raw)[kLoads], const int32_t (&count)[kLoads], int32_t group,
                                 int32_t lane) {
  Spread<D> s[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) s[i] = count[i] ? Spread<D>::of(raw[i]) : Spread<D>::none();
  // A lane keeps the loads whose number has its own low bit and gives the others away; then the same with the next bit.
  const bool odd = lane & 1, high = lane & 2;
  const Spread<D> even = (odd ? s[1] : s[0]).merged((odd ? s[0] : s[1]).from_lane(1));
  const Spread<D> upper = (odd ? s[3] : s[2]).merged((odd ? s[2] : s[3]).from_lane(1));
  Spread<D> mine = (high ? upper : even).merged((high ? even : upper).from_lane(2));
  for (int mask = 4; mask < 32 && mask * kPerLane < group; mask <<= 1) mine = mine.merged(mine.from_lane(mask));
  if (group > kLoadElements) mine = mine.merged(mine.from_lane(1));
  if (group > 2 * kLoadElements) mine = mine.merged(mine.from_lane(2));

  Extremes x{mine.lo(), mine.hi(), false};
  if constexpr (std::is_same_v<S, SignedExtreme>) {
    if (__any_sync(kFullWarp, is_tie(x))) {
      Extremes all[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i)
        all[i] = {__shfl_sync(kFullWarp, x.lo, i, kLoads), __shfl_sync(kFullWarp, x.hi, i, kLoads), false};
      order_extremes<D>(raw, count, group, all);
#pragma unroll
      for (int i = 0; i < kLoads; ++i)
        if (i == lane % kLoads) x.low_first = all[i].low_first;
    }
  }
  return x;
}

FC_DEVICE bool is_empty(const Extremes& x) { return x.lo > x.hi; }

}  // namespace fc::cuda

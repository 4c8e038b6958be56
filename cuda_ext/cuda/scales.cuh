// The metadata and the scale of every group of a tile: extremes over the lanes, then the scheme.
#pragma once

#include "cuda/extremes.cuh"

namespace fc::cuda {

// Which scheme a format uses, in the order of the tables of the launchers.
enum SchemeIndex : int32_t { kIsAsym, kIsSym, kIsSignedExtreme, kIsFloat, kIsMx };

// Calls f with a value of the scheme's type; the same for all lanes.
template <class F>
FC_DEVICE void with_scheme_of(int32_t scheme, const F& f) {
  switch (scheme) {
    case kIsAsym: return f(Asym{});
    case kIsSym: return f(Sym{});
    case kIsSignedExtreme: return f(SignedExtreme{});
    case kIsFloat: return f(Float{});
    case kIsMx: return f(Mx{});
  }
}

struct TileScales {
  Scale of[kLoads];  // of the group that each load's 8 elements belong to
  uint32_t broken;   // bit i: the group of load i is not finite
};

// Calls owner(first element, meta, empty) on one lane of every group. `kStep`: the steps are wanted, NaN where the group
// is not finite; otherwise they are undefined.
template <class D, class S, bool kStep, class Owner>
FC_DEVICE TileScales tile_scales(const Raw<D> (&raw)[kLoads], const int32_t (&count)[kLoads], const Quantizer& q,
                                 int32_t group, const Owner& owner) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  TileScales t{};
  const auto scale_of = [&](const Extremes& x, int32_t first, bool& finite) {
    const Meta m = S::meta(q, x);
    Scale s = S::encoder_scale(q, m);
    finite = m.finite;
    if (!finite) s.step = canonical_nan();
    if ((first & (group - 1)) == 0) owner(first, m, is_empty(x));
    return s;
  };
  if (group < kLoads * kPerLane) {
    Extremes x[kLoads];
    tile_extremes<D, S>(raw, count, group, x);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      bool finite;
      t.of[i] = scale_of(x[i], kLoadElements * i + kPerLane * lane, finite);
      t.broken |= finite ? 0u : 1u << i;
    }
    return t;
  }
  // One group per lane, then each lane fetches what it needs from the four of its quad.
  const int32_t first = kLoadElements * (lane % kLoads) + kPerLane * (lane - lane % kLoads);
  bool finite;
  const Scale s = scale_of(quad_extremes<D, S>(raw, count, group, lane), first, finite);
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if constexpr (S::kTwoMeta) t.of[i].low = __shfl_sync(kFullWarp, s.low, i, kLoads);
    if constexpr (kStep) t.of[i].step = __shfl_sync(kFullWarp, s.step, i, kLoads);
    t.of[i].inverse = __shfl_sync(kFullWarp, s.inverse, i, kLoads);
  }
  if (__any_sync(kFullWarp, !finite)) {  // rare
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      t.broken |= static_cast<uint32_t>(__shfl_sync(kFullWarp, finite ? 0 : 1, i, kLoads)) << i;
  }
  return t;
}

}  // namespace fc::cuda

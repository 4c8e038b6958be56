// The emulated all-reduce in one launch: a warp takes a tile of every rank in rank order, adds what the receiver would
// decode, and sends the sum through the gather stage. Each partial is read once, the result is written once.
#pragma once

#include "cuda/codec_kernels.cuh"

namespace fc::cuda {

enum class After : int32_t { kStoreFp32, kRound, kGather };

// Which scheme a format uses, in the order of the tables of the launchers.
enum SchemeIndex : int32_t { kIsAsym, kIsSym, kIsSignedExtreme, kIsFloat, kIsMxFloat, kIsMxInt, kSchemeCount };

struct Stage {
  Quantizer quantizer;
  int32_t group, scheme;
};

// One contribution: values become what a decoder gives. NaN of any pattern in non-finite groups.
template <class D, class S, class Sink>
FC_DEVICE void send_tile(const Raw<D> (&raw)[kLoads], const int32_t (&count)[kLoads], const Stage& stage,
                     unsigned long long* nonfinite, const Sink& sink) {
  const Quantizer q = stage.quantizer;
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  Extremes extremes[kLoads];
  tile_extremes<D, S>(raw, count, stage.group, extremes);
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const Meta m = S::meta(q, extremes[i]);
    Scale s = S::encoder_scale(q, m);
    if (!m.finite) {
      s.step = canonical_nan();
      const int32_t e = kLoadElements * i + kPerLane * lane;
      if ((e & (stage.group - 1)) == 0 && !is_empty(extremes[i])) atomicAdd(nonfinite, 1ull);
    }
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) sink(i, j, S::value(s, S::level(q, s, value_of<D>(raw[i], j))));
  }
}

template <class D, class S>
FC_DEVICE void gather_tile(float (&acc)[kLoads][kPerLane], const int32_t (&count)[kLoads], const Stage& stage,
                       unsigned long long* nonfinite) {
  Raw<D> raw[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) raw[i] = round_raw<D>(acc[i]);
  send_tile<D, S>(raw, count, stage, nonfinite, [&acc](int i, int j, float v) { acc[i][j] = v; });
}

// partials [W, T, H], `rank_stride` and `stride` elements between ranks and rows -> out [T, H] contiguous, in the dtype
// or in fp32. nonfinite[0] counts the groups of all contributions, nonfinite[1] those of the gather stage.
template <class D, class S>
__global__ void __launch_bounds__(kThreads)
reduce_kernel(const typename D::Bits* partials, int32_t ranks, int64_t rank_stride, int64_t stride, TileMap map,
              Stage reduce, Stage gather, After after, void* out, unsigned long long* nonfinite, int64_t tiles) {
  const int64_t tile = warp_tile();
  if (tile >= tiles) return;
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);

  int32_t count[kLoads];
  const typename D::Bits* from[kLoads];
  Raw<D> next[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const TileMap::Place at = map.place(tile, kLoadElements * i + kPerLane * lane, kPerLane);
    count[i] = at.count;
    from[i] = partials + at.row * stride + at.column;
    next[i] = load_raw<D>(from[i], count[i], map.vectors);
  }
  // A sum starts at +0. A round trip starts at -0, which leaves the sign of every value alone.
  const float start = after == After::kStoreFp32 ? -0.0f : 0.0f;
  float acc[kLoads][kPerLane];
#pragma unroll
  for (int i = 0; i < kLoads; ++i)
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) acc[i][j] = start;

  for (int32_t r = 0; r < ranks; ++r) {
    Raw<D> raw[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      raw[i] = next[i];
      from[i] += rank_stride;
      if (r + 1 < ranks) next[i] = load_raw<D>(from[i], count[i], map.vectors);
    }
    send_tile<D, S>(raw, count, reduce, nonfinite, [&acc](int i, int j, float v) { acc[i][j] = add(acc[i][j], v); });
  }

  if (after == After::kGather) {
    switch (gather.scheme) {  // the same for all lanes
      case kIsAsym: gather_tile<D, Asym>(acc, count, gather, nonfinite + 1); break;
      case kIsSym: gather_tile<D, Sym>(acc, count, gather, nonfinite + 1); break;
      case kIsSignedExtreme: gather_tile<D, SignedExtreme>(acc, count, gather, nonfinite + 1); break;
      case kIsFloat: gather_tile<D, Float>(acc, count, gather, nonfinite + 1); break;
      case kIsMxFloat: gather_tile<D, MxFloat>(acc, count, gather, nonfinite + 1); break;
      case kIsMxInt: gather_tile<D, MxInt>(acc, count, gather, nonfinite + 1); break;
    }
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const TileMap::Place at = map.place(tile, kLoadElements * i + kPerLane * lane, kPerLane);
    const int64_t offset = at.row * map.columns + at.column;
    if (after == After::kStoreFp32) {
      Raw<Fp32> values;
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) values.w[j] = Fp32::round(acc[i][j]);
      store_raw<Fp32>(static_cast<uint32_t*>(out) + offset, values, count[i], map.vectors);
    } else {
      store_raw<D>(static_cast<typename D::Bits*>(out) + offset, round_raw<D>(acc[i]), count[i], map.vectors);
    }
  }
}

// The unquantized ordered sum: acc = +0, then every rank in order, rounded once.
template <class D>
__global__ void __launch_bounds__(kThreads)
sum_kernel(const typename D::Bits* partials, int32_t ranks, int64_t rank_stride, int64_t stride, TileMap map,
           typename D::Bits* out, int64_t tiles) {
  const int64_t tile = warp_tile();
  if (tile >= tiles) return;
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const TileMap::Place at = map.place(tile, kLoadElements * i + kPerLane * lane, kPerLane);
    const typename D::Bits* from = partials + at.row * stride + at.column;
    float acc[kPerLane] = {};
#pragma unroll 4
    for (int32_t r = 0; r < ranks; ++r) {
      const Raw<D> raw = load_raw<D>(from + r * rank_stride, at.count, map.vectors);
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) acc[j] = add(acc[j], value_of<D>(raw, j));
    }
    store_raw<D>(out + at.row * map.columns + at.column, round_raw<D>(acc), at.count, map.vectors);
  }
}

}  // namespace fc::cuda

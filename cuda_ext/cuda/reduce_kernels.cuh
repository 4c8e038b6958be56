// The emulated all-reduce in one launch: a warp takes a tile of every rank in rank order, adds what the receiver would
// decode, and sends the sum through the gather stage. Each partial is read once, the result is written once.
#pragma once

#include "cuda/codec_kernels.cuh"

namespace fc::cuda {

enum class After : int32_t { kStoreFp32, kRound, kGather };

struct Stage {
  Quantizer quantizer;
  int32_t group, scheme;
};

// partials [W, T, H], `rank_stride` and `stride` elements between ranks and rows -> out [T, H] contiguous, in the dtype
// or in fp32. nonfinite[0] counts the groups of all contributions, nonfinite[1] those of the gather stage.
struct ReduceParams {
  const void* partials;
  int64_t rank_stride, stride;
  int32_t ranks;
  After after;
  TileMap map;
  Stage reduce, gather;
  void* out;
  unsigned long long* nonfinite;
  int64_t tiles;
};

// One contribution through a stage: sink(load, element, value that a decoder gives), NaN of any pattern in non-finite
// groups. The scheme is known to the compiler.
template <class S>
struct OneScheme {
  template <class D, class Sink>
  static FC_DEVICE void send(const Raw<D> (&raw)[kLoads], const int32_t (&count)[kLoads], const Stage& stage,
                             unsigned long long* nonfinite, const Sink& sink) {
    const Quantizer q = stage.quantizer;
    const TileScales t =
        tile_scales<D, S, true>(raw, count, q, stage.group, [nonfinite](int32_t, const Meta& m, bool empty) {
          if (!m.finite && !empty) atomicAdd(nonfinite, 1ull);
        });
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
#pragma unroll
      for (int j = 0; j < kPerLane; ++j)
        sink(i, j, S::value(t.of[i], S::level(q, t.of[i], value_of<D>(raw[i], j))));
  }
};

// The scheme is looked up, the same for all lanes: less code where speed matters less.
struct AnyScheme {
  template <class D, class Sink>
  static FC_DEVICE void send(const Raw<D> (&raw)[kLoads], const int32_t (&count)[kLoads], const Stage& stage,
                             unsigned long long* nonfinite, const Sink& sink) {
    with_scheme_of(stage.scheme,
                   [&](auto s) { OneScheme<decltype(s)>::template send<D>(raw, count, stage, nonfinite, sink); });
  }
};

// `kVectors` is map.vectors. The next rank's values are on their way while those of one rank are worked on.
template <class D, class Reduce, bool kVectors>
__global__ void __launch_bounds__(kThreads) reduce_kernel(const ReduceParams p) {
  using Bits = typename D::Bits;
  const int64_t tile = warp_tile();
  if (tile >= p.tiles) return;
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);

  int32_t count[kLoads];
  const Bits* from[kLoads];
  Raw<D> next[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const TileMap::Place at = p.map.place(tile, kLoadElements * i + kPerLane * lane, kPerLane);
    count[i] = at.count;
    from[i] = static_cast<const Bits*>(p.partials) + at.row * p.stride + at.column;
    next[i] = load_raw<D>(from[i], count[i], kVectors);
  }
  // A sum starts at +0. A round trip starts at -0, which leaves the sign of every value alone.
  const float start = p.after == After::kStoreFp32 ? -0.0f : 0.0f;
  float acc[kLoads][kPerLane];
#pragma unroll
  for (int i = 0; i < kLoads; ++i)
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) acc[i][j] = start;

#pragma unroll 1
  for (int32_t r = 0; r < p.ranks; ++r) {
    Raw<D> raw[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      raw[i] = next[i];
      from[i] += p.rank_stride;
      if (r + 1 < p.ranks) next[i] = load_raw<D>(from[i], count[i], kVectors);
    }
    Reduce::template send<D>(raw, count, p.reduce, p.nonfinite,
                             [&acc](int i, int j, float v) { acc[i][j] = add(acc[i][j], v); });
  }

  if (p.after == After::kGather) {
    Raw<D> raw[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) raw[i] = round_raw<D>(acc[i]);
    AnyScheme::send<D>(raw, count, p.gather, p.nonfinite + 1, [&acc](int i, int j, float v) { acc[i][j] = v; });
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const TileMap::Place at = p.map.place(tile, kLoadElements * i + kPerLane * lane, kPerLane);
    const int64_t offset = at.row * p.map.columns + at.column;
    if (p.after == After::kStoreFp32) {
      Raw<Fp32> values;
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) values.w[j] = Fp32::round(acc[i][j]);
      store_raw<Fp32>(static_cast<uint32_t*>(p.out) + offset, values, count[i], kVectors);
    } else {
      store_raw<D>(static_cast<Bits*>(p.out) + offset, round_raw<D>(acc[i]), count[i], kVectors);
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

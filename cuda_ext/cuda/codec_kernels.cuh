// Encode and decode: a warp owns a block of 1024 elements. Each value and each byte is touched once.
#pragma once

#include "cuda/codec.h"
#include "cuda/planes.cuh"
#include "cuda/scales.cuh"

namespace fc::cuda {

FC_DEVICE int64_t warp_tile() { return static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; }

// The metadata of group `k` of a block; zero bytes where the group is all padding.
template <class D, class S>
FC_DEVICE void store_meta(uint8_t* block, const WireParams& p, int32_t k, const Meta& m, bool empty) {
  using Bits = typename D::Bits;
  if constexpr (S::kScaleCode) {
    block[p.scale + k] = static_cast<uint8_t>(empty ? 0u : m.scale_code);
  } else {
    const Bits first = m.finite ? D::round(m.first) : D::kNan;
    reinterpret_cast<Bits*>(block + p.meta[0])[k] = empty ? Bits{0} : first;
  }
  if constexpr (S::kTwoMeta) {
    const Bits second = m.finite ? D::round(m.second) : D::kNan;
    reinterpret_cast<Bits*>(block + p.meta[1])[k] = empty ? Bits{0} : second;
  }
}

// The values of a tile to the bytes of a block, all of them, by a whole warp. `count` is used up. Non-finite groups are
// added to *nonfinite where that is not null.
template <class D, class S>
FC_DEVICE void encode_tile(const Raw<D> (&raw)[kLoads], int32_t (&count)[kLoads], const WireParams& p, uint8_t* block,
                           unsigned long long* nonfinite) {
  using Bits = typename D::Bits;
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  const TileScales scales =
      tile_scales<D, S, false>(raw, count, p.quantizer, p.group, [&](int32_t first, const Meta& m, bool empty) {
        store_meta<D, S>(block, p, first >> p.group_shift, m, empty);
        if (nonfinite != nullptr && !m.finite && !empty) atomicAdd(nonfinite, 1ull);
      });
  // Missing elements and non-finite groups have code 0.
#pragma unroll
  for (int i = 0; i < kLoads; ++i) count[i] = scales.broken >> i & 1u ? 0 : count[i];
  with_bits(p.bits, [&](auto bits) { store_codes<D, S, decltype(bits)::value>(block, p, lane, raw, count, scales.of); });

  // Padding of the metadata sections, at most 15 bytes each.
  const int32_t slot = p.groups_per_block + lane;
  if (slot < p.meta_slots) {
    if constexpr (S::kScaleCode) block[p.scale + slot] = 0;
    else reinterpret_cast<Bits*>(block + p.meta[0])[slot] = Bits{0};
    if constexpr (S::kTwoMeta) reinterpret_cast<Bits*>(block + p.meta[1])[slot] = Bits{0};
  }
}

// x [T, H] with `stride` elements between rows -> wire [tiles * block_bytes]. `kWhole` is map.whole().
template <class D, class S, bool kWhole>
__global__ void __launch_bounds__(kThreads)
    encode_kernel(const typename D::Bits* x, int64_t stride, TileMap map, WireParams p, uint8_t* wire, int64_t tiles) {
  const int64_t tile = warp_tile();
  if (tile >= tiles) return;  // the whole warp
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  Raw<D> raw[kLoads];
  int32_t count[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int32_t e = kLoadElements * i + kPerLane * lane;
    if constexpr (kWhole) {
      count[i] = kPerLane;
      raw[i] = load_raw<D>(x + tile * kTile + e, kPerLane, true);
    } else {
      const TileMap::Place at = map.place(tile, e, kPerLane);
      count[i] = at.count;
      raw[i] = load_raw<D>(x + at.row * stride + at.column, at.count, map.vectors);
    }
  }
  encode_tile<D, S>(raw, count, p, wire + tile * p.block_bytes, nullptr);
}

// Metadata value `index` of a section, in the dtype of the values that were encoded (the same for all lanes).
FC_DEVICE float load_meta(const uint8_t* section, int32_t index, DType dtype) {
  if (dtype == kFp32) return Fp32::widen(reinterpret_cast<const uint32_t*>(section)[index]);
  const uint16_t bits = reinterpret_cast<const uint16_t*>(section)[index];
  return dtype == kBf16 ? Bf16::widen(bits) : Fp16::widen(bits);
}

// A lane takes 4 consecutive elements at a time, so that each store of the warp is one run of 512 bytes.
template <class S, int Bits>
FC_DEVICE void decode_tile(const uint8_t* block, const TileMap& map, const WireParams& p, DType dtype, int64_t tile,
                           float* out, unsigned long long* nonfinite) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  const Quantizer q = p.quantizer;
#pragma unroll
  for (int run = 0; run < 2 * kLoads; ++run) {
    const int32_t e = 128 * run + 4 * lane;
    const TileMap::Place at = map.place(tile, e, 4);
    uint32_t codes[4];
    load_codes<Bits>(block, p, static_cast<int32_t>(place_of(e)), codes);
    const int32_t k = e >> p.group_shift;
    Meta m{};
    if constexpr (S::kScaleCode) m.scale_code = block[p.scale + k];
    else m.first = load_meta(block + p.meta[0], k, dtype);
    if constexpr (S::kTwoMeta) m.second = load_meta(block + p.meta[1], k, dtype);
    const bool finite = travelled_finite<S>(q, m);
    const Scale s = S::scale(q, m);
    float v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = finite ? canonical(S::value(s, S::level_of(q, codes[j]))) : canonical_nan();
    if (!finite && (e & (p.group - 1)) == 0 && at.count) atomicAdd(nonfinite, 1ull);
    float* to = out + at.row * map.columns + at.column;
    if (map.vectors) {
      if (at.count) store_vector(to, uint4{bits_of(v[0]), bits_of(v[1]), bits_of(v[2]), bits_of(v[3])});
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (j < at.count) to[j] = v[j];
    }
  }
}

// wire of values in `dtype` -> out [T, H] fp32, contiguous; non-finite groups are added to *nonfinite.
template <class S>
__global__ void __launch_bounds__(kThreads, 6)
    decode_kernel(const uint8_t* wire, TileMap map, WireParams p, DType dtype, float* out,
                  unsigned long long* nonfinite, int64_t tiles) {
  const int64_t tile = warp_tile();
  if (tile >= tiles) return;
  const uint8_t* block = wire + tile * p.block_bytes;
  with_bits(p.bits, [&](auto bits) {
    decode_tile<S, decltype(bits)::value>(block, map, p, dtype, tile, out, nonfinite);
  });
}

}  // namespace fc::cuda

// Codes of a lane to the bit planes of its block and back. A lane's 32 codes are neighbours in every plane.
#pragma once

#include "cuda/tile.cuh"

namespace fc::cuda {

// What a kernel needs to know of a format: constants, and where the sections of a block lie.
struct WireParams {
  Quantizer quantizer;
  int32_t bits, group, group_shift;
  int32_t groups_per_block;
  int32_t block_bytes;
  int32_t plane[4];    // byte offset of the plane of 8, 4, 2, 1 bits, -1 where there is none
  int32_t meta[2];     // byte offset, -1 where there is none
  int32_t meta_slots;  // values that fill a metadata section with its padding
  int32_t scale;       // byte offset of 8-bit mx scales, -1 where there are none

  static WireParams make(const Format& f, const Layout& l) {
    WireParams p{};
    p.quantizer = make_quantizer(f);
    p.bits = f.bits;
    p.group = static_cast<int32_t>(l.group);
    while ((1 << p.group_shift) < p.group) ++p.group_shift;
    p.groups_per_block = static_cast<int32_t>(l.groups_per_block);
    p.block_bytes = static_cast<int32_t>(l.block_bytes);
    for (int i = 0; i < 4; ++i) p.plane[i] = static_cast<int32_t>(l.plane[i]);
    p.meta[0] = static_cast<int32_t>(l.meta[0]);
    p.meta[1] = static_cast<int32_t>(l.meta[1]);
    p.scale = static_cast<int32_t>(l.scale[0]);
    const int64_t bytes = f.kind == kMx ? l.groups_per_block : l.groups_per_block * l.value_bytes;
    p.meta_slots =
        static_cast<int32_t>(ceil_div(bytes, kSectionAlign) * kSectionAlign / (f.kind == kMx ? 1 : l.value_bytes));
    return p;
  }
};

// Bits [Shift, Shift + K) of eight codes, packed into 8 K bits. K < 8. `Only`: the codes have no other bits.
template <int K, int Shift, bool Only>
FC_DEVICE uint32_t pack_load(const uint32_t* c) {
  constexpr uint32_t mask = (1u << K) - 1;
  uint32_t word = 0;
#pragma unroll
  for (int j = kPerLane - 1; j >= 0; --j) {
    const uint32_t part = Only ? c[j] : (c[j] >> Shift) & mask;
    word = (word << K) + part;  // one multiply-add or shift-add
  }
  return word;
}

// c [4 loads][8] -> the planes of one block.
template <int Bits>
FC_DEVICE void store_codes(uint8_t* block, const WireParams& p, int32_t lane, const uint32_t (&c)[kLoads][kPerLane]) {
  constexpr int shift2 = Bits & 4, shift1 = (Bits & 4) + (Bits & 2);
  if constexpr (Bits == 8) {
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      const auto& a = c[2 * v];
      const auto& b = c[2 * v + 1];
      store_vector(block + p.plane[0] + 32 * lane + 16 * v,
                   uint4{four_bytes(a[0], a[1], a[2], a[3]), four_bytes(a[4], a[5], a[6], a[7]),
                         four_bytes(b[0], b[1], b[2], b[3]), four_bytes(b[4], b[5], b[6], b[7])});
    }
  }
  if constexpr ((Bits & 4) != 0) {
    uint32_t w[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) w[i] = pack_load<4, 0, Bits == 4>(c[i]);
    store_vector(block + p.plane[1] + 16 * lane, uint4{w[0], w[1], w[2], w[3]});
  }
  if constexpr ((Bits & 2) != 0) {
    uint32_t w[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) w[i] = pack_load<2, shift2, Bits == 2>(c[i]);
    *reinterpret_cast<uint2*>(block + p.plane[2] + 8 * lane) = uint2{w[0] | w[1] << 16, w[2] | w[3] << 16};
  }
  if constexpr ((Bits & 1) != 0) {
    uint32_t w[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) w[i] = pack_load<1, shift1, false>(c[i]);
    *reinterpret_cast<uint32_t*>(block + p.plane[3] + 4 * lane) = w[0] | w[1] << 8 | w[2] << 16 | w[3] << 24;
  }
}

FC_DEVICE void store_codes(uint8_t* block, const WireParams& p, int32_t lane, const uint32_t (&c)[kLoads][kPerLane]) {
  switch (p.bits) {  // the same for all lanes
    case 2: return store_codes<2>(block, p, lane, c);
    case 3: return store_codes<3>(block, p, lane, c);
    case 4: return store_codes<4>(block, p, lane, c);
    case 5: return store_codes<5>(block, p, lane, c);
    case 6: return store_codes<6>(block, p, lane, c);
    case 7: return store_codes<7>(block, p, lane, c);
    case 8: return store_codes<8>(block, p, lane, c);
  }
}

// Four codes whose first stands at `place`, a multiple of 4.
template <int Bits>
FC_DEVICE void load_codes(const uint8_t* block, const WireParams& p, int32_t place, uint32_t (&c)[4]) {
  uint32_t w8 = 0, w4 = 0, w2 = 0, w1 = 0;
  if constexpr (Bits == 8) w8 = *reinterpret_cast<const uint32_t*>(block + p.plane[0] + place);
  if constexpr ((Bits & 4) != 0) w4 = *reinterpret_cast<const uint16_t*>(block + p.plane[1] + place / 2);
  if constexpr ((Bits & 2) != 0) w2 = block[p.plane[2] + place / 4];
  if constexpr ((Bits & 1) != 0) w1 = static_cast<uint32_t>(block[p.plane[3] + place / 8]) >> (place & 4);
  constexpr int shift2 = Bits & 4, shift1 = (Bits & 4) + (Bits & 2);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if constexpr (Bits == 8) c[j] = (w8 >> (8 * j)) & 255u;
    else c[j] = ((w4 >> (4 * j)) & 15u) | ((w2 >> (2 * j)) & 3u) << shift2 | ((w1 >> j) & 1u) << shift1;
  }
}

}  // namespace fc::cuda

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

// Calls f with the width of a code as a constant; the same for all lanes.
template <class F>
FC_DEVICE void with_bits(int32_t bits, const F& f) {
  switch (bits) {
    case 2: return f(std::integral_constant<int, 2>{});
    case 3: return f(std::integral_constant<int, 3>{});
    case 4: return f(std::integral_constant<int, 4>{});
    case 5: return f(std::integral_constant<int, 5>{});
    case 6: return f(std::integral_constant<int, 6>{});
    case 7: return f(std::integral_constant<int, 7>{});
    case 8: return f(std::integral_constant<int, 8>{});
  }
}

// The first `count` of four bytes; none where it is not positive.
FC_DEVICE uint32_t first_bytes(uint32_t word, int32_t count) {
  return count >= 4 ? word : count <= 0 ? 0u : word & ((1u << (8 * count)) - 1u);
}

// Eight fields of K bits side by side, the first one lowest; K <= 4. Fields may exceed K bits where the sum is exact
// modulo 2^32.
template <int K>
FC_DEVICE uint32_t side_by_side(const uint32_t* fields) {
  uint32_t word = 0;
#pragma unroll
  for (int j = kPerLane - 1; j >= 0; --j) word = (word << K) + fields[j];  // one multiply-add or shift-add
  return word;
}

// Bits [Shift, Shift + K) of eight codes, packed into 8 K bits.
template <int K, int Shift>
FC_DEVICE uint32_t pack_load(const uint32_t* codes) {
  uint32_t fields[kPerLane];
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) fields[j] = (codes[j] >> Shift) & ((1u << K) - 1);
  return side_by_side<K>(fields);
}

// The first `count` of eight fields of K bits.
template <int K>
FC_DEVICE uint32_t first_fields(uint32_t word, int32_t count) {
  return count >= kPerLane ? word : word & ((1u << (K * count)) - 1u);
}

// Quantizes the values of a lane and writes their codes to the planes of the block; those beyond a load's count are 0.
template <class D, class S, int Bits>
FC_DEVICE void store_codes(uint8_t* block, const WireParams& p, int32_t lane, const Raw<D> (&raw)[kLoads],
                           const int32_t (&count)[kLoads], const Scale (&scales)[kLoads]) {
  constexpr bool one_plane = Bits == 2 || Bits == 4 || Bits == 8;
  constexpr int shift2 = Bits & 4, shift1 = (Bits & 4) + (Bits & 2);
  const Quantizer q = p.quantizer;
  const uint32_t lift = S::lift(q);
  uint32_t w8[2 * kLoads], w4[kLoads], w2[kLoads], w1[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    uint32_t c[kPerLane];
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) c[j] = S::lifted(q, scales[i], value_of<D>(raw[i], j)) - (one_plane ? 0u : lift);
    // Where a plane holds whole codes, their lift is taken off the word. In bytes it is 0 or 128.
    if constexpr (Bits == 8) {
      const uint32_t lifts = (lift & 255u) * 0x01010101u;
      w8[2 * i] = four_bytes(c[0], c[1], c[2], c[3]) ^ lifts;
      w8[2 * i + 1] = four_bytes(c[4], c[5], c[6], c[7]) ^ lifts;
    } else if constexpr (Bits == 4) {
      w4[i] = side_by_side<4>(c) - lift * 0x11111111u;
    } else if constexpr (Bits == 2) {
      w2[i] = side_by_side<2>(c) - lift * 0x5555u;
    } else {
      if constexpr ((Bits & 4) != 0) w4[i] = pack_load<4, 0>(c);
      if constexpr ((Bits & 2) != 0) w2[i] = pack_load<2, shift2>(c);
      if constexpr ((Bits & 1) != 0) w1[i] = pack_load<1, shift1>(c);
    }
  }
  const bool whole = count[0] >= kPerLane && count[1] >= kPerLane && count[2] >= kPerLane && count[3] >= kPerLane;
  if (__any_sync(kFullWarp, !whole)) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if constexpr (Bits == 8) {
        w8[2 * i] = first_bytes(w8[2 * i], count[i]);
        w8[2 * i + 1] = first_bytes(w8[2 * i + 1], count[i] - 4);
      }
      if constexpr ((Bits & 4) != 0) w4[i] = first_fields<4>(w4[i], count[i]);
      if constexpr ((Bits & 2) != 0) w2[i] = first_fields<2>(w2[i], count[i]);
      if constexpr ((Bits & 1) != 0) w1[i] = first_fields<1>(w1[i], count[i]);
    }
  }
  if constexpr (Bits == 8) {
    store_vector(block + p.plane[0] + 32 * lane, uint4{w8[0], w8[1], w8[2], w8[3]});
    store_vector(block + p.plane[0] + 32 * lane + 16, uint4{w8[4], w8[5], w8[6], w8[7]});
  }
  if constexpr ((Bits & 4) != 0) store_vector(block + p.plane[1] + 16 * lane, uint4{w4[0], w4[1], w4[2], w4[3]});
  if constexpr ((Bits & 2) != 0)
    *reinterpret_cast<uint2*>(block + p.plane[2] + 8 * lane) = uint2{w2[0] | w2[1] << 16, w2[2] | w2[3] << 16};
  if constexpr ((Bits & 1) != 0)
    *reinterpret_cast<uint32_t*>(block + p.plane[3] + 4 * lane) = w1[0] | w1[1] << 8 | w1[2] << 16 | w1[3] << 24;
}

// The codes of a lane, each plane read as `store_codes` wrote it.
template <int Bits>
struct LaneCodes {
  uint32_t w8[2 * kLoads], w4[kLoads], w2[2], w1;

  static FC_DEVICE LaneCodes load(const uint8_t* block, const WireParams& p, int32_t lane) {
    LaneCodes c{};
    const auto vector = [](const uint8_t* from, uint32_t* to) {
      const uint4 v = *reinterpret_cast<const uint4*>(from);
      to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    };
    if constexpr (Bits == 8) {
      vector(block + p.plane[0] + 32 * lane, c.w8);
      vector(block + p.plane[0] + 32 * lane + 16, c.w8 + 4);
    }
    if constexpr ((Bits & 4) != 0) vector(block + p.plane[1] + 16 * lane, c.w4);
    if constexpr ((Bits & 2) != 0) {
      const uint2 v = *reinterpret_cast<const uint2*>(block + p.plane[2] + 8 * lane);
      c.w2[0] = v.x, c.w2[1] = v.y;
    }
    if constexpr ((Bits & 1) != 0) c.w1 = *reinterpret_cast<const uint32_t*>(block + p.plane[3] + 4 * lane);
    return c;
  }
  // Code j of load i; both known to the compiler.
  FC_DEVICE uint32_t code(int i, int j) const {
    constexpr int shift2 = Bits & 4, shift1 = (Bits & 4) + (Bits & 2);
    if constexpr (Bits == 8) return (w8[2 * i + j / 4] >> (8 * (j % 4))) & 255u;
    uint32_t c = 0;
    if constexpr ((Bits & 4) != 0) c = (w4[i] >> (4 * j)) & 15u;
    if constexpr ((Bits & 2) != 0) c |= ((w2[i / 2] >> (16 * (i % 2) + 2 * j)) & 3u) << shift2;
    if constexpr ((Bits & 1) != 0) c |= ((w1 >> (8 * i + j)) & 1u) << shift1;
    return c;
  }
};

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

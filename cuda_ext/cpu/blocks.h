// Blocks to bytes and back (WIRE.md, "Wire layout").
#pragma once

#include "cpu/rows.h"

namespace fc::cpu {
namespace {

// The k bytes that eight codes of k bits fill.
template <int K>
using Unit = std::conditional_t<K == 8, uint64_t,
                                std::conditional_t<K == 4, uint32_t, std::conditional_t<K == 2, uint16_t, uint8_t>>>;

// Eight codes of k bits -> k bytes, for a whole block: word w of `codes` goes to unit w, in the lane order if permuted.
template <int K>
void pack_plane(const uint64_t* __restrict codes, uint8_t* plane, int64_t words, int shift, bool permuted) {
  auto* __restrict out = reinterpret_cast<Unit<K>*>(plane);
  if (permuted) {
    for (int lane = 0; lane < 32; ++lane)
      for (int load = 0; load < 4; ++load)
        out[4 * lane + load] = static_cast<Unit<K>>(pack8<K>(codes[32 * load + lane] >> shift));
  } else {
    for (int64_t w = 0; w < words; ++w) out[w] = static_cast<Unit<K>>(pack8<K>(codes[w] >> shift));
  }
}

template <int K>
void unpack_plane(const uint8_t* plane, uint64_t* __restrict codes, int64_t words, int shift, bool permuted) {
  const auto* __restrict in = reinterpret_cast<const Unit<K>*>(plane);
  if (permuted) {
    for (int load = 0; load < 4; ++load)
      for (int lane = 0; lane < 32; ++lane) codes[32 * load + lane] |= unpack8<K>(in[4 * lane + load]) << shift;
  } else {
    for (int64_t w = 0; w < words; ++w) codes[w] |= unpack8<K>(in[w]) << shift;
  }
}

// `offsets` are those of the planes of 8, 4, 2 and 1 bits; -1 where there is none.
void pack_planes(const uint8_t* codes, uint8_t* block, const int64_t offsets[4], int64_t elements, bool permuted) {
  const auto* words = reinterpret_cast<const uint64_t*>(codes);
  const int64_t count = ceil_div(elements, 8);
  int shift = 0;
  if (offsets[0] >= 0) pack_plane<8>(words, block + offsets[0], count, shift, permuted), shift += 8;
  if (offsets[1] >= 0) pack_plane<4>(words, block + offsets[1], count, shift, permuted), shift += 4;
  if (offsets[2] >= 0) pack_plane<2>(words, block + offsets[2], count, shift, permuted), shift += 2;
  if (offsets[3] >= 0) pack_plane<1>(words, block + offsets[3], count, shift, permuted);
}

void unpack_planes(const uint8_t* block, uint8_t* codes, const int64_t offsets[4], int64_t elements, bool permuted) {
  auto* words = reinterpret_cast<uint64_t*>(codes);
  const int64_t count = ceil_div(elements, 8);
  std::memset(codes, 0, static_cast<size_t>(count * 8));
  int shift = 0;
  if (offsets[0] >= 0) unpack_plane<8>(block + offsets[0], words, count, shift, permuted), shift += 8;
  if (offsets[1] >= 0) unpack_plane<4>(block + offsets[1], words, count, shift, permuted), shift += 4;
  if (offsets[2] >= 0) unpack_plane<2>(block + offsets[2], words, count, shift, permuted), shift += 2;
  if (offsets[3] >= 0) unpack_plane<1>(block + offsets[3], words, count, shift, permuted);
}

template <class T>
FC_FN void put(uint8_t* section, int64_t index, T value) {
  std::memcpy(section + index * static_cast<int64_t>(sizeof value), &value, sizeof value);
}
template <class T>
FC_FN T get(const uint8_t* section, int64_t index) {
  T value;
  std::memcpy(&value, section + index * static_cast<int64_t>(sizeof value), sizeof value);
  return value;
}

// The groups of a block that hold values: their place in the matrix.
struct BlockGroups {
  int64_t row, column;
  const Layout& l;
  int32_t count;

  BlockGroups(const Layout& layout, int64_t block) : l(layout) {
    const int64_t first = block * l.groups_per_block, left = l.groups() - first;
    count = static_cast<int32_t>(left < l.groups_per_block ? left : l.groups_per_block);
    row = first / l.groups_per_row;
    column = first % l.groups_per_row * l.group;
  }
  int32_t size() const { return static_cast<int32_t>(l.hidden - column < l.group ? l.hidden - column : l.group); }
  void next() {
    column += l.group;
    if (column >= l.hidden) column = 0, ++row;
  }
};

template <class D>
void put_spikes(const Layout& l, uint8_t* wire, int64_t group, int side, typename D::Bits value, int32_t position) {
  const int64_t index = side * l.groups_per_block + group;
  put(wire + l.spike_values, index, value);
  if (l.position_bytes == 1) put(wire + l.spike_positions, index, static_cast<uint8_t>(position));
  else put(wire + l.spike_positions, index, static_cast<uint16_t>(position));
}

template <class D, class S>
int64_t encode_block(const Codec& codec, const void* values, int64_t stride, int64_t block, uint8_t* wire,
                     const Scratch& scratch) {
  using Bits = typename D::Bits;
  const Layout& l = codec.layout;
  const Quantizer q = codec.quantizer;
  const auto* x = static_cast<const Bits*>(values);
  std::memset(wire, 0, static_cast<size_t>(l.block_bytes));
  uint8_t* codes = scratch.codes;
  std::memset(codes, 0, static_cast<size_t>(l.block_elements + 8));

  Batch<D> b;
  BlockGroups at(l, block);
  b.count = at.count;
  for (int32_t k = 0; k < b.count; ++k, at.next()) {
    b.x[k] = x + at.row * stride + at.column;
    b.n[k] = at.size();
  }
  // Spikes: encode a patched copy; the codes at the two positions are cleared afterwards.
  const Bits* original[kBatch];
  int32_t positions[kBatch][2];
  if (codec.format.spikes) {
    for (int32_t k = 0; k < b.count; ++k) {
      original[k] = b.x[k];
      Bits* copy = static_cast<Bits*>(scratch.patched) + k * l.group;
      patch_spikes<D>(original[k], b.n[k], copy, positions[k][0], positions[k][1]);
      b.x[k] = copy;
    }
  }
  analyse<D, S>(b, q);

  int64_t nonfinite = 0;
  alignas(8) uint8_t scale_codes[kBatch + 8] = {};
  for (int32_t k = 0; k < b.count; ++k) {
    const Meta& m = b.meta[k];
    uint8_t* __restrict out = codes + k * l.group;
    if (m.finite) {
      const Bits* __restrict in = b.x[k];
      const Scale s = scale_at(b, k);
      const int32_t n = b.n[k];
      for_each_value<D>(in, n, [&](int32_t i, float v) __attribute__((always_inline)) {
        out[i] = static_cast<uint8_t>(S::code(q, s, v));
      });
    } else {
      ++nonfinite;
    }
    if constexpr (S::kScaleCode) scale_codes[k] = static_cast<uint8_t>(m.scale_code);
    else put(wire + l.meta[0], k, m.finite ? D::round(m.first) : D::kNan);
    if constexpr (S::kTwoMeta) put(wire + l.meta[1], k, m.finite ? D::round(m.second) : D::kNan);
    if (codec.format.spikes) {
      for (int side = 0; side < 2; ++side) {
        const int32_t p = m.finite ? positions[k][side] : 0;
        const Bits value = m.finite ? D::round(positive_zero(D::widen(original[k][p]))) : D::kNan;
        put_spikes<D>(l, wire, k, side, value, p);
        out[p] = 0;
      }
    }
  }
  pack_planes(codes, wire, l.plane, l.block_elements, l.permuted());
  if constexpr (S::kScaleCode) pack_planes(scale_codes, wire, l.scale, l.groups_per_block, false);
  return nonfinite;
}

template <class D, class S>
int64_t decode_block(const Codec& codec, const uint8_t* wire, int64_t block, float* values, const Scratch& scratch) {
  using Bits = typename D::Bits;
  const Layout& l = codec.layout;
  uint8_t* codes = scratch.codes;
  const Quantizer q = codec.quantizer;
  unpack_planes(wire, codes, l.plane, l.block_elements, l.permuted());
  alignas(8) uint8_t scale_codes[kBatch + 8];
  if constexpr (S::kScaleCode) unpack_planes(wire, scale_codes, l.scale, l.groups_per_block, false);

  int64_t nonfinite = 0;
  BlockGroups at(l, block);
  for (int32_t k = 0; k < at.count; ++k, at.next()) {
    Meta m{};
    if constexpr (S::kScaleCode) m.scale_code = scale_codes[k];
    else m.first = D::widen(get<Bits>(wire + l.meta[0], k));
    if constexpr (S::kTwoMeta) m.second = D::widen(get<Bits>(wire + l.meta[1], k));
    float* __restrict out = values + at.row * l.hidden + at.column;
    const int32_t n = at.size();
    if (!travelled_finite<S>(q, m)) {
      ++nonfinite;
      for (int32_t i = 0; i < n; ++i) out[i] = canonical_nan();
      continue;
    }
    const Scale s = S::scale(q, m);
    const uint8_t* __restrict in = codes + k * l.group;
    for_each(n, [&](int32_t i) __attribute__((always_inline)) { out[i] = S::value(s, S::level_of(q, in[i])); });
    // No encoder writes an infinite step or offset; of foreign bytes they may make NaN of any pattern.
    if (!is_finite(s.step) || !is_finite(s.low))
      for (int32_t i = 0; i < n; ++i) out[i] = canonical(out[i]);
    for (int side = 0; codec.format.spikes && side < 2; ++side) {
      const int64_t index = side * l.groups_per_block + k;
      const uint8_t* section = wire + l.spike_positions;
      const int32_t p = l.position_bytes == 1 ? get<uint8_t>(section, index) : get<uint16_t>(section, index);
      // Bytes of another origin may name a place outside the group: never write there.
      if (p < n) out[p] = canonical(D::widen(get<Bits>(wire + l.spike_values, index)));
    }
  }
  return nonfinite;
}

}  // namespace
}  // namespace fc::cpu

// One group of any size by one warp, a value per lane: its extremes, its spikes, and its header in a block.
#pragma once

#include "cuda/codec_kernels.cuh"

namespace fc::cuda {

// Everything that the kernels for any group need to know of a format and a tensor.
struct General {
  Quantizer quantizer;
  Layout layout;
  bool spikes;
};

// The real elements of a group in a matrix [T, H].
struct GroupPlace {
  int64_t row, column;
  int32_t count;

  FC_DEVICE GroupPlace(const Layout& l, int64_t group)
      : row(group / l.groups_per_row), column(group % l.groups_per_row * l.group),
        count(static_cast<int32_t>(l.hidden - column < l.group ? l.hidden - column : l.group)) {}
};

FC_DEVICE int64_t least_of_warp(int64_t v) {
  for (int mask = 16; mask > 0; mask >>= 1) {
    const int64_t other = __shfl_xor_sync(kFullWarp, v, mask);
    v = other < v ? other : v;
  }
  return v;
}

// The smallest and the largest element, each at its lowest place; -0 equals +0. NaN is beyond the infinities.
template <class D>
struct Ranked {
  float lo, hi;
  int32_t low, high;

  // Of x [count] without the places `skip` and `also_skip`; at least one is left. The whole warp takes part.
  static FC_DEVICE Ranked of(const typename D::Bits* x, int32_t count, int32_t skip, int32_t also_skip) {
    // Key and place in one number: its minimum has the smallest key, and of these the lowest place.
    constexpr int64_t places = int64_t{1} << 32;
    int64_t least = INT64_MAX, most = INT64_MAX;
    for (int32_t i = static_cast<int32_t>(threadIdx.x % 32); i < count; i += 32) {
      if (i == skip || i == also_skip) continue;
      const int64_t key = D::widen(x[i]) == 0.0f ? 0 : D::key(x[i]);
      const int64_t low = key * places + i, high = ~key * places + i;
      least = low < least ? low : least;
      most = high < most ? high : most;
    }
    least = least_of_warp(least);
    most = least_of_warp(most);
    const auto value = [](int64_t key) { return D::widen(D::unkey(static_cast<typename D::Key>(key))); };
    return {value(least >> 32), value(~(most >> 32)), static_cast<int32_t>(least & (places - 1)),
            static_cast<int32_t>(most & (places - 1))};
  }
  FC_DEVICE Extremes extremes() const { return {lo, hi, low < high}; }
};

// What travels of a group beside its codes; `low` and `high` are the places of the spikes, -1 where there are none.
struct GroupHeader {
  Meta meta;
  int32_t low, high;
  float least, most;
};

// The whole warp takes part, every lane ends with the result.
template <class D, class S>
FC_DEVICE GroupHeader header_of(const typename D::Bits* x, int32_t count, const General& p) {
  const Ranked<D> all = Ranked<D>::of(x, count, -1, -1);
  GroupHeader h{{}, -1, -1, 0.0f, 0.0f};
  Extremes extremes = all.extremes();
  if (p.spikes) {
    h.low = all.low;
    // Equal places mean equal elements, of which the first is the smallest one.
    h.high = all.high != all.low ? all.high : count > 1 ? 1 : 0;
    h.least = positive_zero(all.lo);
    h.most = positive_zero(all.hi);
    if (is_finite(all.lo) && is_finite(all.hi))
      extremes = count > 2 ? Ranked<D>::of(x, count, h.low, h.high).extremes() : Extremes{0.0f, 0.0f, false};
  }
  h.meta = S::meta(p.quantizer, extremes);
  return h;
}

// Writes the header of group k into a block of zeros. One lane does this for all groups of a block: scale codes of less
// than 8 bits share bytes.
template <class D, class S>
FC_DEVICE void store_header(uint8_t* block, const General& p, int32_t k, const GroupHeader& h) {
  using Bits = typename D::Bits;
  const Layout& l = p.layout;
  if constexpr (S::kScaleCode) {
    for (int i = 0, shift = 0; i < 4; ++i) {
      if (l.scale[i] < 0) continue;
      const int width = plane_width(i), at = k * width;
      const uint32_t part = (h.meta.scale_code >> shift) & ((1u << width) - 1u);
      block[l.scale[i] + at / 8] = static_cast<uint8_t>(block[l.scale[i] + at / 8] | part << at % 8);
      shift += width;
    }
  } else {
    reinterpret_cast<Bits*>(block + l.meta[0])[k] = h.meta.finite ? D::round(h.meta.first) : D::kNan;
  }
  if constexpr (S::kTwoMeta)
    reinterpret_cast<Bits*>(block + l.meta[1])[k] = h.meta.finite ? D::round(h.meta.second) : D::kNan;
  if (!p.spikes) return;
  const int32_t other = k + static_cast<int32_t>(l.groups_per_block);
  auto* values = reinterpret_cast<Bits*>(block + l.spike_values);
  values[k] = h.meta.finite ? D::round(h.least) : D::kNan;
  values[other] = h.meta.finite ? D::round(h.most) : D::kNan;
  const int32_t low = h.meta.finite ? h.low : 0, high = h.meta.finite ? h.high : 0;
  uint8_t* positions = block + l.spike_positions;
  if (l.position_bytes == 1) {
    positions[k] = static_cast<uint8_t>(low), positions[other] = static_cast<uint8_t>(high);
  } else {
    auto* wide = reinterpret_cast<uint16_t*>(positions);
    wide[k] = static_cast<uint16_t>(low), wide[other] = static_cast<uint16_t>(high);
  }
}

// The header of group k as a receiver finds it.
template <class S>
FC_DEVICE GroupHeader load_header(const uint8_t* block, const General& p, int32_t k, DType dtype) {
  const Layout& l = p.layout;
  GroupHeader h{{}, -1, -1, 0.0f, 0.0f};
  if constexpr (S::kScaleCode) {
    for (int i = 0, shift = 0; i < 4; ++i) {
      if (l.scale[i] < 0) continue;
      const int width = plane_width(i), at = k * width;
      h.meta.scale_code |= ((static_cast<uint32_t>(block[l.scale[i] + at / 8]) >> at % 8) & ((1u << width) - 1u))
                           << shift;
      shift += width;
    }
  } else {
    h.meta.first = load_meta(block + l.meta[0], k, dtype);
  }
  if constexpr (S::kTwoMeta) h.meta.second = load_meta(block + l.meta[1], k, dtype);
  h.meta.finite = travelled_finite<S>(p.quantizer, h.meta);
  if (!p.spikes) return h;
  const int32_t other = k + static_cast<int32_t>(l.groups_per_block);
  h.least = load_meta(block + l.spike_values, k, dtype);
  h.most = load_meta(block + l.spike_values, other, dtype);
  const uint8_t* positions = block + l.spike_positions;
  const auto* wide = reinterpret_cast<const uint16_t*>(positions);
  h.low = l.position_bytes == 1 ? positions[k] : wide[k];
  h.high = l.position_bytes == 1 ? positions[other] : wide[other];
  return h;
}

}  // namespace fc::cuda

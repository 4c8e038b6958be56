// Rows through a stage without making bytes: what the receiver would decode, added up or stored.
#pragma once

#include "cpu/batch.h"

namespace fc::cpu {
namespace {

// Where a decoded value goes.
struct StoreFp32 {
  float* out;
  FC_FN void operator()(int64_t c, float v) const { out[c] = v; }
};
struct StoreSum {
  float* acc;
  FC_FN void operator()(int64_t c, float v) const { acc[c] = add(0.0f, v); }
};
struct AddToSum {
  float* acc;
  FC_FN void operator()(int64_t c, float v) const { acc[c] = add(acc[c], v); }
};
template <class D>
struct StoreRounded {
  typename D::Bits* out;
  FC_FN void operator()(int64_t c, float v) const { out[c] = D::round(v); }
};

template <class D, class S, class Sink>
int64_t plain_row(const Codec& codec, const typename D::Bits* row, const Sink sink) {
  const Quantizer q = codec.quantizer;
  const int64_t hidden = codec.layout.hidden, group = codec.layout.group;
  const int64_t groups = codec.layout.groups_per_row;
  int64_t nonfinite = 0;
  Batch<D> b;
  for (int64_t first = 0; first < groups; first += kBatch) {
    b.count = static_cast<int32_t>(groups - first < kBatch ? groups - first : kBatch);
    for (int32_t k = 0; k < b.count; ++k) {
      const int64_t column = (first + k) * group;
      b.x[k] = row + column;
      b.n[k] = static_cast<int32_t>(hidden - column < group ? hidden - column : group);
    }
    analyse<D, S>(b, q);
    for (int32_t k = 0; k < b.count; ++k) {
      const int64_t column = (first + k) * group;
      const typename D::Bits* __restrict x = b.x[k];
      const int32_t n = b.n[k];
      if (!b.meta[k].finite) {
        ++nonfinite;
        for (int32_t i = 0; i < n; ++i) sink(column + i, canonical_nan());
        continue;
      }
      const Scale s = scale_at(b, k);
      for_each_value<D>(x, n, [&](int32_t i, float v) __attribute__((always_inline)) {
        sink(column + i, S::value(s, S::level(q, s, v)));
      });
    }
  }
  return nonfinite;
}

// Positions of the first smallest element and of the first largest among the others (WIRE.md, "Spikes").
template <class D>
void spike_positions(const typename D::Bits* x, int32_t n, int32_t& low, int32_t& high) {
  low = 0;
  for (int32_t i = 1; i < n; ++i)
    if (D::widen(x[i]) < D::widen(x[low])) low = i;
  high = low == 0 && n > 1 ? 1 : 0;
  for (int32_t i = high + 1; i < n; ++i)
    if (i != low && D::widen(x[i]) > D::widen(x[high])) high = i;
}

// Copies a finite group with its spikes replaced by one of the other elements, which changes neither extreme; +0 where
// there is no other element. A non-finite group is copied as it is. Returns whether it is finite.
template <class D>
bool patch_spikes(const typename D::Bits* x, int32_t n, typename D::Bits* patched, int32_t& low, int32_t& high) {
  typename D::Bits lo, hi;
  group_extremes<D>(x, n, lo, hi);
  std::memcpy(patched, x, sizeof(x[0]) * static_cast<size_t>(n));
  low = high = 0;
  if (!is_finite(D::widen(lo)) || !is_finite(D::widen(hi))) return false;
  spike_positions<D>(x, n, low, high);
  int32_t other = 0;
  while (other < n && (other == low || other == high)) ++other;
  patched[low] = patched[high] = other < n ? x[other] : typename D::Bits{0};
  return true;
}

template <class D, class S, class Sink>
int64_t spiked_row(const Codec& codec, const typename D::Bits* row, const Sink sink, const Scratch& scratch) {
  using Bits = typename D::Bits;
  const int64_t hidden = codec.layout.hidden, group = codec.layout.group;
  Bits* patched = static_cast<Bits*>(scratch.patched);
  for (int64_t j = 0, column = 0; column < hidden; ++j, column += group) {
    const int32_t n = static_cast<int32_t>(hidden - column < group ? hidden - column : group);
    int32_t* at = scratch.positions + 2 * j;
    if (!patch_spikes<D>(row + column, n, patched + column, at[0], at[1])) at[0] = -1;
  }
  const int64_t nonfinite = plain_row<D, S>(codec, patched, StoreFp32{scratch.decoded});
  for (int64_t j = 0, column = 0; column < hidden; ++j, column += group) {
    const int32_t* at = scratch.positions + 2 * j;
    // The rest of the group may have turned out too wide for fp32, and then the spikes are NaN as well.
    if (at[0] < 0 || is_nan(scratch.decoded[column])) continue;
    for (int side = 0; side < 2; ++side)
      scratch.decoded[column + at[side]] = positive_zero(D::widen(row[column + at[side]]));
  }
  for (int64_t c = 0; c < hidden; ++c) sink(c, scratch.decoded[c]);
  return nonfinite;
}

template <class D, class S, class Sink>
FC_FN int64_t any_row(const Codec& codec, const void* x, const Sink sink, const Scratch& scratch) {
  const auto* row = static_cast<const typename D::Bits*>(x);
  return codec.format.spikes ? spiked_row<D, S>(codec, row, sink, scratch) : plain_row<D, S>(codec, row, sink);
}

template <class D, class S>
int64_t accumulate_row(const Codec& codec, const void* x, float* acc, bool first, const Scratch& scratch) {
  return first ? any_row<D, S>(codec, x, StoreSum{acc}, scratch) : any_row<D, S>(codec, x, AddToSum{acc}, scratch);
}

template <class D, class S>
int64_t round_trip_fp32(const Codec& codec, const void* x, void* out, const Scratch& scratch) {
  return any_row<D, S>(codec, x, StoreFp32{static_cast<float*>(out)}, scratch);
}

template <class D, class S>
int64_t round_trip_dtype(const Codec& codec, const void* x, void* out, const Scratch& scratch) {
  return any_row<D, S>(codec, x, StoreRounded<D>{static_cast<typename D::Bits*>(out)}, scratch);
}

template <class D>
void sum_row(const void* x, float* __restrict acc, bool first, int64_t hidden) {
  const auto* __restrict row = static_cast<const typename D::Bits*>(x);
  if (first) {
    for (int64_t c = 0; c < hidden; ++c) acc[c] = add(0.0f, D::widen(row[c]));
  } else {
    for (int64_t c = 0; c < hidden; ++c) acc[c] = add(acc[c], D::widen(row[c]));
  }
}

template <class D>
void round_row(const float* __restrict acc, void* out, int64_t hidden) {
  auto* __restrict row = static_cast<typename D::Bits*>(out);
  int64_t c = 0;
  if constexpr (kConverts<D>)
    for (; c + kChunk <= hidden; c += kChunk) round_chunk(acc + c, row + c);
  for (; c < hidden; ++c) row[c] = D::round(acc[c]);
}

}  // namespace
}  // namespace fc::cpu

// Encode, decode and round trip of the formats that tiles do not cover: groups of any size, one group per row, spikes,
// scales of 4 to 7 bits. Simple rather than fast: a value or eight codes per lane at a time, headers read again.
#pragma once

#include "cuda/general_groups.cuh"

namespace fc::cuda {

// Calls visit(element of the group, its header, its scale, its place, j) for the real elements among eight codes that
// stand side by side in the planes, the first of them at place 8 * run.
template <class S, class Visit>
FC_DEVICE void visit_run(const uint8_t* block, const General& p, DType dtype, int64_t first_group, int64_t run,
                         const Visit& visit) {
  const Layout& l = p.layout;
  const int32_t group = static_cast<int32_t>(l.group), elements = static_cast<int32_t>(l.block_elements);
  const int32_t e = static_cast<int32_t>(l.permuted() ? element_at(8 * run) : 8 * run);
  for (int32_t j = 0; j < 8 && e + j < elements;) {
    const int32_t k = (e + j) / group;
    if (first_group + k >= l.groups()) return;
    const GroupPlace at(l, first_group + k);
    const GroupHeader h = load_header<S>(block, p, k, dtype);
    const Scale s = S::encoder_scale(p.quantizer, h.meta);
    for (; j < 8 && (e + j) / group == k; ++j) {
      const int32_t i = e + j - k * group;
      if (i < at.count) visit(i, h, s, at, j);
    }
  }
}

template <int K>
FC_DEVICE void store_unit(uint8_t* plane, int64_t run, uint64_t codes) {
  const uint64_t packed = pack8<K>(codes);
  uint8_t* to = plane + K * run;
  if constexpr (K == 8) *reinterpret_cast<uint64_t*>(to) = packed;
  if constexpr (K == 4) *reinterpret_cast<uint32_t*>(to) = static_cast<uint32_t>(packed);
  if constexpr (K == 2) *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(packed);
  if constexpr (K == 1) *to = static_cast<uint8_t>(packed);
}

template <int K>
FC_DEVICE uint64_t load_unit(const uint8_t* plane, int64_t run) {
  const uint8_t* from = plane + K * run;
  if constexpr (K == 8) return *reinterpret_cast<const uint64_t*>(from);
  if constexpr (K == 4) return unpack8<4>(*reinterpret_cast<const uint32_t*>(from));
  if constexpr (K == 2) return unpack8<2>(*reinterpret_cast<const uint16_t*>(from));
  return unpack8<1>(*from);
}

// Eight codes, one in each byte, to all planes of a block and back.
FC_DEVICE void store_run(uint8_t* block, const Layout& l, int64_t run, uint64_t codes) {
  int shift = 0;
  if (l.plane[0] >= 0) store_unit<8>(block + l.plane[0], run, codes), shift = 8;
  if (l.plane[1] >= 0) store_unit<4>(block + l.plane[1], run, codes), shift = 4;
  if (l.plane[2] >= 0) store_unit<2>(block + l.plane[2], run, codes >> shift), shift += 2;
  if (l.plane[3] >= 0) store_unit<1>(block + l.plane[3], run, codes >> shift);
}

FC_DEVICE uint64_t load_run(const uint8_t* block, const Layout& l, int64_t run) {
  uint64_t codes = 0;
  int shift = 0;
  if (l.plane[0] >= 0) codes = load_unit<8>(block + l.plane[0], run);
  if (l.plane[1] >= 0) codes = load_unit<4>(block + l.plane[1], run), shift = 4;
  if (l.plane[2] >= 0) codes |= load_unit<2>(block + l.plane[2], run) << shift, shift += 2;
  if (l.plane[3] >= 0) codes |= load_unit<1>(block + l.plane[3], run) << shift;
  return codes;
}

// x [T, H] with `stride` elements between rows -> wire; a warp owns a block.
template <class D, class S>
__global__ void __launch_bounds__(kThreads)
    general_encode_kernel(const typename D::Bits* x, int64_t stride, General p, DType dtype, uint8_t* wire) {
  const Layout& l = p.layout;
  const int64_t index = warp_tile(), first_group = index * l.groups_per_block;
  if (index >= l.blocks) return;  // the whole warp
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  uint8_t* block = wire + index * l.block_bytes;
  for (int64_t at = 16 * lane; at < l.block_bytes; at += 16 * 32) store_vector(block + at, uint4{0, 0, 0, 0});
  __syncwarp();
  for (int32_t k = 0; k < l.groups_per_block && first_group + k < l.groups(); ++k) {
    const GroupPlace at(l, first_group + k);
    const GroupHeader h = header_of<D, S>(x + at.row * stride + at.column, at.count, p);
    if (lane == 0) store_header<D, S>(block, p, k, h);
  }
  __syncwarp();
  for (int64_t run = lane; run < ceil_div(l.block_elements, 8); run += 32) {
    uint64_t codes = 0;
    visit_run<S>(block, p, dtype, first_group, run,
                 [&](int32_t i, const GroupHeader& h, const Scale& s, const GroupPlace& at, int32_t j) {
                   if (!h.meta.finite || i == h.low || i == h.high) return;
                   const float v = D::widen(x[at.row * stride + at.column + i]);
                   codes |= static_cast<uint64_t>(S::code(p.quantizer, s, v)) << (8 * j);
                 });
    store_run(block, l, run, codes);
  }
}

// wire of values in `dtype` -> out [T, H] fp32, contiguous; non-finite groups are added to *nonfinite.
template <class S>
__global__ void __launch_bounds__(kThreads)
    general_decode_kernel(const uint8_t* wire, General p, DType dtype, float* out, unsigned long long* nonfinite) {
  const Layout& l = p.layout;
  const int64_t index = warp_tile();
  if (index >= l.blocks) return;
  const uint8_t* block = wire + index * l.block_bytes;
  for (int64_t run = threadIdx.x % 32; run < ceil_div(l.block_elements, 8); run += 32) {
    const uint64_t codes = load_run(block, l, run);
    visit_run<S>(block, p, dtype, index * l.groups_per_block, run,
                 [&](int32_t i, const GroupHeader& h, const Scale& s, const GroupPlace& at, int32_t j) {
                   const uint32_t code = static_cast<uint32_t>(codes >> (8 * j)) & 255u;
                   float v = S::value(s, S::level_of(p.quantizer, code));
                   v = i == h.high ? h.most : i == h.low ? h.least : v;
                   out[at.row * l.hidden + at.column + i] = h.meta.finite ? canonical(v) : canonical_nan();
                   if (i == 0 && !h.meta.finite) atomicAdd(nonfinite, 1ull);
                 });
  }
}

// x [T, H] -> out [T, H] fp32, contiguous: what decode gives for encode. A warp owns a group.
template <class D, class S>
__global__ void __launch_bounds__(kThreads)
    general_round_trip_kernel(const typename D::Bits* x, int64_t stride, General p, float* out,
                              unsigned long long* nonfinite) {
  const int64_t group = warp_tile();
  if (group >= p.layout.groups()) return;
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  const GroupPlace at(p.layout, group);
  const auto* from = x + at.row * stride + at.column;
  float* to = out + at.row * p.layout.hidden + at.column;
  const GroupHeader h = header_of<D, S>(from, at.count, p);
  const Scale s = S::encoder_scale(p.quantizer, h.meta);
  if (lane == 0 && !h.meta.finite) atomicAdd(nonfinite, 1ull);
  for (int32_t i = lane; i < at.count; i += 32) {
    float v = S::value(s, S::level(p.quantizer, s, D::widen(from[i])));
    v = i == h.high ? h.most : i == h.low ? h.least : v;
    to[i] = h.meta.finite ? v : canonical_nan();
  }
}

}  // namespace fc::cuda

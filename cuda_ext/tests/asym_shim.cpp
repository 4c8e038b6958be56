// The CPU codec's asymmetric integers for bf16 and fp32, for ctypes. Tests build it with flags or with headers that break
// the contract, to see that the comparison with the reference fails; it compiles in seconds where kernels.cpp takes many.
#include <vector>

#include "cpu/blocks.h"

namespace {

using namespace fc;
using namespace fc::cpu;

template <class D>
int64_t encode(const Codec& codec, const void* x, uint8_t* wire, const Scratch& scratch) {
  int64_t nonfinite = 0;
  for (int64_t b = 0; b < codec.layout.blocks; ++b)
    nonfinite += encode_block<D, Asym>(codec, x, codec.layout.hidden, b, wire + b * codec.layout.block_bytes, scratch);
  return nonfinite;
}

template <class D>
int64_t round_trip(const Codec& codec, const void* x, float* out, const Scratch& scratch) {
  int64_t nonfinite = 0;
  const auto* rows = static_cast<const typename D::Bits*>(x);
  for (int64_t t = 0; t < codec.layout.tokens; ++t)
    nonfinite += round_trip_fp32<D, Asym>(codec, rows + t * codec.layout.hidden, out + t * codec.layout.hidden, scratch);
  return nonfinite;
}

}  // namespace

// x [tokens, hidden], bf16 or fp32 -> wire (the layout's bytes) and out [tokens, hidden]. Returns the non-finite groups.
extern "C" int64_t asym_shim(int32_t bits, int32_t group, int32_t is_fp32, int64_t tokens, int64_t hidden,
                             const void* x, uint8_t* wire, float* out) {
  const Format format{kInt, bits, group, kAsym, 0, 0, 0, 0, 0, 0, 0};
  const Codec codec{format, make_layout(format, tokens, hidden, is_fp32 ? 4 : 2), make_quantizer(format)};
  std::vector<uint64_t> codes(static_cast<size_t>(codec.layout.block_elements / 8 + 2));
  const Scratch scratch{reinterpret_cast<uint8_t*>(codes.data()), nullptr, nullptr, nullptr};
  const int64_t n = is_fp32 ? encode<Fp32>(codec, x, wire, scratch) : encode<Bf16>(codec, x, wire, scratch);
  const int64_t m = is_fp32 ? round_trip<Fp32>(codec, x, out, scratch) : round_trip<Bf16>(codec, x, out, scratch);
  return n == m ? n : -1;
}

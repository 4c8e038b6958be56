// The CPU loops, compiled once per instruction set: every build of kernels.cpp exports one table of functions.
//
// T tokens (rows), H hidden (columns), W ranks. Pointers are raw; checks are the binding's.
#pragma once

#include "fc/group.h"

namespace fc::cpu {

enum DType : int32_t { kBf16 = 0, kFp16 = 1, kFp32 = 2 };
constexpr int kDTypes = 3, kSchemes = 5;

// What a loop needs to know of a format, derived once per call.
struct Codec {
  Format format;
  Layout layout;
  Quantizer quantizer;
};

// Work space of one thread; the last three serve spikes only.
struct Scratch {
  uint8_t* codes;      // [block_elements + 8]
  void* patched;       // bits [max(H, block_elements)]: values whose spikes are replaced by a neighbour
  float* decoded;      // [H]
  int32_t* positions;  // [2 * groups per row]
};

// x [H] bits -> acc [H] fp32 (`first`: acc = 0 + x, otherwise acc += x). Returns the number of non-finite groups.
using AccumulateRow = int64_t (*)(const Codec&, const void* x, float* acc, bool first, const Scratch&);
// x [H] bits -> out [H], fp32 or bits of the dtype.
using RoundTripRow = int64_t (*)(const Codec&, const void* x, void* out, const Scratch&);
// One block: x [T, H] bits with `stride` elements between rows -> block_bytes.
using EncodeBlock = int64_t (*)(const Codec&, const void* x, int64_t stride, int64_t block, uint8_t* wire,
                                const Scratch&);
// One block: block_bytes -> out [T, H] fp32, contiguous.
using DecodeBlock = int64_t (*)(const Codec&, const uint8_t* wire, int64_t block, float* out, const Scratch&);
// Without a format: acc = 0 + x or acc += x; acc -> bits of the dtype, every NaN canonical.
using SumRow = void (*)(const void* x, float* acc, bool first, int64_t hidden);
using RoundRow = void (*)(const float* acc, void* out, int64_t hidden);

// level * step + low in two roundings, by the very function that decodes: shows whether the build contracts.
using Probe = float (*)(float level, float step, float low);

struct SchemeKernels {
  AccumulateRow accumulate;
  RoundTripRow to_fp32, to_dtype;
  EncodeBlock encode;
  DecodeBlock decode;
};

struct Kernels {
  const char* isa;
  SchemeKernels codec[kDTypes][kSchemes];
  SumRow sum[kDTypes];
  RoundRow round[kDTypes];
  Probe probe;
};

// Index into `codec`: asym, sym, signed-extreme, float, mx.
inline int scheme_index(const Format& f) { return f.kind == kMx ? 4 : f.kind == kFloat ? 3 : f.scheme - 1; }

const Kernels& kernels_baseline();
#if defined(FC_X86_KERNELS)
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();
#endif

}  // namespace fc::cpu

// The table of one instruction set. CMake compiles this file once per set and names it in FC_ISA.
#include <type_traits>
#include <vector>

#include "cpu/blocks.h"

#define FC_CONCAT(a, b) a##b
#define FC_TABLE_NAME(isa) FC_CONCAT(kernels_, isa)
#define FC_STRING(x) #x
#define FC_NAME(x) FC_STRING(x)

namespace fc::cpu {
namespace {

template <class D, class S>
constexpr SchemeKernels scheme_kernels() {
  return {accumulate_row<D, S>, round_trip_fp32<D, S>, round_trip_dtype<D, S>, encode_block<D, S>, decode_block<D, S>};
}

template <class D>
constexpr void fill(SchemeKernels (&row)[kSchemes]) {
  row[0] = scheme_kernels<D, Asym>();
  row[1] = scheme_kernels<D, Sym>();
  row[2] = scheme_kernels<D, SignedExtreme>();
  row[3] = scheme_kernels<D, Float>();
  row[4] = scheme_kernels<D, Mx>();
}

float probe(float level, float step, float low) { return Asym::value({low, step, 0.0f}, level); }

constexpr Kernels make_table() {
  Kernels k{FC_NAME(FC_ISA),
            {},
            {sum_row<Bf16>, sum_row<Fp16>, sum_row<Fp32>},
            {round_row<Bf16>, round_row<Fp16>, round_row<Fp32>},
            probe};
  fill<Bf16>(k.codec[kBf16]);
  fill<Fp16>(k.codec[kFp16]);
  fill<Fp32>(k.codec[kFp32]);
  return k;
}

constexpr Kernels kTable = make_table();

}  // namespace

const Kernels& FC_TABLE_NAME(FC_ISA)() { return kTable; }

}  // namespace fc::cpu

// All the difference between the host build and the device build: one macro and four roundings.
//
// Every other header of this folder is plain C++17 over fixed-width integers and fp32, so that g++ and nvcc compile
// the same text. Flags belong to the contract: g++ -ffp-contract=off, nvcc -fmad=false, no fast-math (CMakeLists.txt).
#pragma once

#include <cstdint>
#include <cstring>

// Always inlined, so that no copy built for one instruction set can be linked into code built for another.
#if defined(__CUDACC__)
#define FC_FN __host__ __device__ __forceinline__
#else
#define FC_FN inline __attribute__((always_inline))
#endif

namespace fc {

FC_FN uint32_t bits_of(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  return u;
#endif
}

FC_FN float float_of(uint32_t u) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(u);
#else
  float x;
  std::memcpy(&x, &u, sizeof x);
  return x;
#endif
}

// The explicit forms cannot be contracted on the device; on the host the flag forbids it.
FC_FN float add(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

FC_FN float mul(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

// IEEE division 1 / x, subnormal results kept.
FC_FN float reciprocal(float x) {
#if defined(__CUDA_ARCH__)
  return __frcp_rn(x);
#else
  return 1.0f / x;
#endif
}

// For values that are not NaN; written as a selection so that every compiler can vectorize it.
FC_FN float smaller(float a, float b) { return b < a ? b : a; }
FC_FN float magnitude(float x) { return float_of(bits_of(x) & 0x7FFFFFFFu); }
FC_FN bool is_finite(float x) { return (bits_of(x) & 0x7F800000u) != 0x7F800000u; }
FC_FN bool is_nan(float x) { return (bits_of(x) & 0x7FFFFFFFu) > 0x7F800000u; }

// -0 becomes +0, every other value stays.
FC_FN float positive_zero(float x) { return add(x, 0.0f); }

constexpr uint32_t kNanBits = 0x7FC00000u;
FC_FN float canonical_nan() { return float_of(kNanBits); }
FC_FN float canonical(float x) { return is_nan(x) ? canonical_nan() : x; }

}  // namespace fc

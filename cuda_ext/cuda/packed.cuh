// The few device instructions that have no C++ name, each with a host twin: so the kernels also compile with g++ and
// run on a simulated warp (tests/simulated_warp.h), where their bytes are checked without a GPU.
#pragma once

#include <type_traits>

#include "fc/group.h"
#include "fc/scalar.h"

#if defined(__CUDACC__)
#define FC_DEVICE __device__ __forceinline__
#else
#define FC_DEVICE inline __attribute__((always_inline))
#include "tests/simulated_warp.h"
#endif

namespace fc::cuda {

constexpr uint32_t kFullWarp = 0xFFFFFFFFu;
constexpr uint32_t kSignsOfPair = 0x80008000u;

template <class D>
constexpr bool kIs16Bit = sizeof(typename D::Bits) == 2;

// Smaller of two pairs of 16-bit values, NaN if either is NaN, -0 below +0.
template <class D>
FC_DEVICE uint32_t min_pair(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  uint32_t r;
  if constexpr (std::is_same_v<D, Bf16>) asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  else asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
#else
  const auto one = [](uint16_t x, uint16_t y) -> uint32_t {
    if (is_nan(D::widen(x)) || is_nan(D::widen(y))) return 0x7FFF;
    return D::key(x) < D::key(y) ? x : y;
  };
  return one(a & 0xFFFF, b & 0xFFFF) | one(a >> 16, b >> 16) << 16;
#endif
}

template <class D>
FC_DEVICE uint32_t max_pair(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  uint32_t r;
  if constexpr (std::is_same_v<D, Bf16>) asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  else asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
#else
  const uint32_t r = min_pair<D>(a ^ kSignsOfPair, b ^ kSignsOfPair) ^ kSignsOfPair;
  return ((r & 0x7FFF) == 0x7FFF ? 0x7FFF : r & 0xFFFF) |
         ((r >> 16 & 0x7FFF) == 0x7FFF ? 0x7FFF0000u : r & 0xFFFF0000u);
#endif
}

FC_DEVICE float min_nan(float a, float b) {
#if defined(__CUDA_ARCH__)
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
#else
  if (is_nan(a) || is_nan(b)) return canonical_nan();
  return Fp32::key(bits_of(a)) < Fp32::key(bits_of(b)) ? a : b;
#endif
}

// Half `h` (0 low, 1 high) of a pair, widened.
template <class D>
FC_DEVICE float widen_half(uint32_t pair, int h) {
  if constexpr (std::is_same_v<D, Bf16>) {
    return float_of(h ? pair & 0xFFFF0000u : pair << 16);
  } else {
#if defined(__CUDA_ARCH__)
    float r;
    const uint16_t half = static_cast<uint16_t>(h ? pair >> 16 : pair & 0xFFFFu);
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(half));
    return r;
#else
    return D::widen(static_cast<uint16_t>(h ? pair >> 16 : pair & 0xFFFF));
#endif
  }
}

// Two values rounded to nearest even; a NaN becomes 0x7FFF, which the caller makes canonical.
template <class D>
FC_DEVICE uint32_t round_pair(float low, float high) {
#if defined(__CUDA_ARCH__)
  uint32_t r;
  if constexpr (std::is_same_v<D, Bf16>) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
#else
  const auto one = [](float x) -> uint32_t { return is_nan(x) ? 0x7FFF : D::round(x); };
  return one(low) | one(high) << 16;
#endif
}

// The low halves of a and b as a pair (b high), and the high halves.
FC_DEVICE uint32_t low_halves(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(a, b, 0x5410);
#else
  return (a & 0xFFFFu) | (b << 16);
#endif
}
FC_DEVICE uint32_t high_halves(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(a, b, 0x7632);
#else
  return (a >> 16) | (b & 0xFFFF0000u);
#endif
}

// Low bytes of four words as one word.
FC_DEVICE uint32_t four_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
#else
  return (a & 255u) | (b & 255u) << 8 | (c & 255u) << 16 | (d & 255u) << 24;
#endif
}

FC_DEVICE uint32_t high_product(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __umulhi(a, b);
#else
  return static_cast<uint32_t>(static_cast<uint64_t>(a) * b >> 32);
#endif
}

}  // namespace fc::cuda

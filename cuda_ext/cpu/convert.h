// Rows of one dtype to fp32 and back: fp16 with the processor's own conversion where there is one, which takes
// fewer operations than the integer ones of fc/scalar.h and gives the same bits.
#pragma once

#include <type_traits>

#include "fc/scalar.h"
#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace fc::cpu {
namespace {

// Groups are mostly whole multiples of this: a loop of known length leaves the compiler no tail to take care of.
constexpr int32_t kChunk = 32;

#if defined(__F16C__)
template <class D>
constexpr bool kConverts = std::is_same_v<D, Fp16>;
#else
template <class D>
constexpr bool kConverts = false;
#endif

// kChunk values that are not NaN -> fp32, aligned to 64 bytes.
inline void widen_chunk([[maybe_unused]] const uint16_t* x, [[maybe_unused]] float* out) {
#if defined(__AVX512F__)  // stores as wide as the loads that follow them
  for (int i = 0; i < kChunk; i += 16)
    _mm512_store_ps(out + i, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i))));
#elif defined(__F16C__)
  for (int i = 0; i < kChunk; i += 8)
    _mm256_store_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i))));
#endif
}

// kChunk values, NaN of any pattern -> bits, NaN canonical.
inline void round_chunk([[maybe_unused]] const float* x, [[maybe_unused]] uint16_t* out) {
#if defined(__F16C__)
  for (int i = 0; i < kChunk; i += 8) {
    const __m256 v = _mm256_loadu_ps(x + i);
    const __m128i h = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m128i nan = _mm_cmpgt_epi16(_mm_and_si128(h, _mm_set1_epi16(0x7FFF)), _mm_set1_epi16(0x7C00));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm_blendv_epi8(h, _mm_set1_epi16(Fp16::kNan), nan));
  }
#endif
}

// Calls body(i, value of x[i]) for i in [0, n), independent of each other; no value is NaN.
template <class D, class Body>
FC_FN void for_each_value(const typename D::Bits* __restrict x, int32_t n, const Body& body) {
  if (n % kChunk != 0) {
#pragma GCC ivdep
    for (int32_t i = 0; i < n; ++i) body(i, D::widen(x[i]));
    return;
  }
  for (int32_t c = 0; c < n; c += kChunk) {
    if constexpr (kConverts<D>) {
      alignas(64) float wide[kChunk];
      widen_chunk(x + c, wide);
#pragma GCC ivdep
      for (int32_t i = 0; i < kChunk; ++i) body(c + i, wide[i]);
    } else {
#pragma GCC ivdep
      for (int32_t i = 0; i < kChunk; ++i) body(c + i, D::widen(x[c + i]));
    }
  }
}

}  // namespace
}  // namespace fc::cpu

// Small floats without Inf and NaN: nearest-even rounding to the grid of a type, its codes and their values.
//
// A code is sign, exponent, mantissa from the high bit down; exponent field 0 holds the subnormals. No tables and no
// hardware conversions: a few integer operations that the host vectorizes and the device runs as they are.
#pragma once

#include "fc/host_device.h"

namespace fc {

struct Minifloat {
  int32_t mantissa;      // mantissa bits
  int32_t sign_bit;      // 1 << (bits - 1)
  int32_t max_code;      // code of the largest finite magnitude
  uint32_t min_normal;   // fp32 bits of the smallest normal value, 2^(1 - bias)
  uint32_t shifter;      // fp32 bits of 2^23 times the smallest grid step, for values below min_normal
  uint32_t code_offset;  // what rebiasing subtracts from (fp32 bits >> (23 - mantissa))
  float largest;
};

FC_FN float minifloat_magnitude(const Minifloat& m, uint32_t code) {
  // (C + k) - C with C = 2^23 grid steps is k steps, exactly, and no subnormal fp32 number is met on the way.
  const uint32_t field = code >> m.mantissa;
  const uint32_t above = field > 1 ? field - 1 : 0;
  const uint32_t c = m.shifter + (above << 23);
  const uint32_t steps = code - (above << m.mantissa);
  return add(float_of(c + steps), -float_of(c));
}

FC_FN Minifloat make_minifloat(int32_t bits, int32_t mantissa, int32_t bias, int32_t max_code) {
  Minifloat m{};
  m.mantissa = mantissa;
  m.sign_bit = 1 << (bits - 1);
  m.max_code = max_code;
  m.min_normal = static_cast<uint32_t>(127 + 1 - bias) << 23;
  m.shifter = m.min_normal + (static_cast<uint32_t>(23 - mantissa) << 23);
  m.code_offset = static_cast<uint32_t>(127 - bias) << mantissa;
  m.largest = minifloat_magnitude(m, static_cast<uint32_t>(max_code));
  return m;
}

// The code of |v| <= largest, v not NaN. A magnitude that rounds to zero has code 0 whatever its sign.
FC_FN uint32_t minifloat_code(const Minifloat& m, float v) {
  const uint32_t u = bits_of(v) & 0x7FFFFFFFu;
  const int32_t drop = 23 - m.mantissa;
  const uint32_t normal = ((u + (1u << (drop - 1)) - 1u + ((u >> drop) & 1u)) >> drop) - m.code_offset;
  const uint32_t small = bits_of(add(float_of(u), float_of(m.shifter))) - m.shifter;
  const uint32_t code = u < m.min_normal ? small : normal;
  const uint32_t sign = (bits_of(v) >> 31) * static_cast<uint32_t>(m.sign_bit);
  return code == 0 ? 0 : code | sign;
}

// The grid value that `minifloat_code` stands for, without the code; a zero is +0.
FC_FN float minifloat_round(const Minifloat& m, float v) {
  const uint32_t u = bits_of(v) & 0x7FFFFFFFu;
  const int32_t drop = 23 - m.mantissa;
  const uint32_t normal = (u + (1u << (drop - 1)) - 1u + ((u >> drop) & 1u)) >> drop << drop;
  const uint32_t small = bits_of(add(add(float_of(u), float_of(m.shifter)), -float_of(m.shifter)));
  const uint32_t grid = u < m.min_normal ? small : normal;
  return positive_zero(float_of(grid | (bits_of(v) & 0x80000000u)));
}

// A code that no encoder writes (Inf or NaN of the full type) reads as the largest finite value.
FC_FN float minifloat_value(const Minifloat& m, uint32_t code) {
  const uint32_t sign_bit = static_cast<uint32_t>(m.sign_bit);
  uint32_t mag = code & (sign_bit - 1u);
  mag = mag > static_cast<uint32_t>(m.max_code) ? static_cast<uint32_t>(m.max_code) : mag;
  const uint32_t sign = code & sign_bit ? 0x80000000u : 0u;
  return float_of(bits_of(minifloat_magnitude(m, mag)) | sign);
}

}  // namespace fc

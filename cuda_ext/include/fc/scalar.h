// The three dtypes of a partial sum: exact widening to fp32, rounding to nearest even, order-preserving integer keys.
//
// `key` maps the bits of a value to a signed integer with the same order, so that a group's extremes need only integer
// minima and maxima: exact, independent of order, and NaN lands beyond the infinities, where it cannot be missed.
#pragma once

#include "fc/host_device.h"

namespace fc {

struct Bf16 {
  using Bits = uint16_t;
  using Key = int16_t;
  static constexpr Bits kNan = 0x7FC0;

  static FC_FN float widen(Bits h) { return float_of(static_cast<uint32_t>(h) << 16); }

  static FC_FN Bits round(float x) {
    const uint32_t u = bits_of(x);
    const uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
    return static_cast<Bits>((u & 0x7FFFFFFFu) > 0x7F800000u ? kNan : rounded);
  }

  static FC_FN Key key(Bits h) { return static_cast<Key>(h ^ ((static_cast<Key>(h) >> 15) & 0x7FFF)); }
  static FC_FN Bits unkey(Key k) { return static_cast<Bits>(k ^ ((k >> 15) & 0x7FFF)); }
};

struct Fp16 {
  using Bits = uint16_t;
  using Key = int16_t;
  static constexpr Bits kNan = 0x7E00;

  static FC_FN float widen(Bits h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
    const uint32_t mag = static_cast<uint32_t>(h & 0x7FFFu) << 13;
    // Normal numbers only need another exponent bias. Subnormal ones are m * 2^-24: the difference of two floats whose
    // last place is 2^-24, exact and without subnormal operands.
    const uint32_t normal = mag + ((mag >= 0x0F800000u ? 224u : 112u) << 23);
    const uint32_t small = bits_of(add(float_of(0x3F000000u + (h & 0x3FFu)), -0.5f));
    return float_of(sign | (mag < 0x00800000u ? small : normal));
  }

  static FC_FN Bits round(float x) {
    const uint32_t u = bits_of(x);
    const uint32_t mag = u & 0x7FFFFFFFu;
    const uint32_t normal = (mag - (112u << 23) + 0x0FFFu + ((mag >> 13) & 1u)) >> 13;
    // Adding 0.5 rounds to multiples of 2^-24, the subnormal grid.
    const uint32_t small = bits_of(add(float_of(mag), 0.5f)) - 0x3F000000u;
    uint32_t h = mag < 0x38800000u ? small : normal;
    h = mag >= 0x477FF000u ? 0x7C00u : h;
    h |= (u >> 16) & 0x8000u;
    return static_cast<Bits>(mag > 0x7F800000u ? kNan : h);
  }

  static FC_FN Key key(Bits h) { return Bf16::key(h); }
  static FC_FN Bits unkey(Key k) { return Bf16::unkey(k); }
};

struct Fp32 {
  using Bits = uint32_t;
  using Key = int32_t;
  static constexpr Bits kNan = kNanBits;

  static FC_FN float widen(Bits h) { return float_of(h); }
  static FC_FN Bits round(float x) { return is_nan(x) ? kNan : bits_of(x); }
  static FC_FN Key key(Bits h) { return static_cast<Key>(h) ^ ((static_cast<Key>(h) >> 31) & 0x7FFFFFFF); }
  static FC_FN Bits unkey(Key k) { return static_cast<Bits>(k ^ ((k >> 31) & 0x7FFFFFFF)); }
};

}  // namespace fc

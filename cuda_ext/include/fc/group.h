// The arithmetic of one group (WIRE.md, "Encode one group", "Decode"): the only place where it is written down in C++.
//
//   Extremes -> Meta -> [wire] -> Scale -> code (encoder)     or level (emulator, no bytes)
//                                       -> value(level)       decoder and emulator
//
// A scheme is a struct of static functions over the constants of a format. Loops, lanes and threads are the caller's.
// A level is what a code stands for before the scale is applied: 0..Q, -Q..Q, or the value of a small float.
// A lifted code is the code plus the constant `lift`, as the rounding addition leaves it: packing can take the constant
// off a whole word at once.
#pragma once

#include "fc/format.h"
#include "fc/minifloat.h"

namespace fc {

// Of a group's real elements. `low_first`: the first lo stands before the first hi (signed-extreme ties).
struct Extremes {
  float lo, hi;
  bool low_first;
};

// What travels beside the codes, as fp32: `first` is lo, amax or e, `second` is hi; `scale_code` is that of mx.
struct Meta {
  float first, second;
  uint32_t scale_code;
  bool finite;
};

struct Scale {
  float low, step, inverse;
};

// The constants of a format.
struct Quantizer {
  float factor;        // step = extent * factor
  float top;           // largest level
  float bias;          // what is added to an integer level to store it
  uint32_t code_mask;  // (1 << bits) - 1
  int32_t emax;        // mx
  int32_t scale_max;   // mx: largest exponent, 2^(scale_bits - 1) - 1
  Minifloat small;     // minifloat and mx elements
};

FC_FN Quantizer make_quantizer(const Format& f) {
  Quantizer q{};
  const int32_t half = 1 << (f.bits - 1);
  q.code_mask = static_cast<uint32_t>(2 * half - 1);
  q.emax = f.emax;
  q.scale_max = f.scale_bits ? (1 << (f.scale_bits - 1)) - 1 : 0;
  q.small.sign_bit = half;
  if (f.exponent) {
    q.small = make_minifloat(f.bits, f.mantissa, f.bias, f.max_code);
    q.top = q.small.largest;
  } else if (f.scheme == kAsym) {
    q.top = static_cast<float>(2 * half - 1);
  } else {
    q.top = static_cast<float>(half - 1);
    q.bias = static_cast<float>(half);
  }
  q.factor = f.scheme == kSignedExtreme ? -reciprocal(static_cast<float>(half)) : reciprocal(q.top);
  return q;
}

// 1 / step, or 0 where that is of no use: step is 0, or so small that the quotient overflows.
FC_FN float usable_inverse(float step) {
  const float inverse = reciprocal(step);
  return is_finite(inverse) ? inverse : 0.0f;
}

// Compared as integers, so that Inf and NaN win and one test of the result finds them.
FC_FN float largest_magnitude(const Extremes& x) {
  const uint32_t low = bits_of(x.lo) & 0x7FFFFFFFu, high = bits_of(x.hi) & 0x7FFFFFFFu;
  return float_of(low > high ? low : high);
}

// Adding 2^23 (or 1.5 * 2^23 for both signs) leaves no fraction bits: the addition rounds to nearest even.
constexpr float kRounder = 8388608.0f, kSignedRounder = 12582912.0f;

FC_FN float integer_value(uint32_t code) { return add(float_of(0x4B000000u | code), -kRounder); }

struct Asym {
  static constexpr bool kTwoMeta = true, kScaleCode = false;

  static FC_FN Meta meta(const Quantizer&, const Extremes& x) {
    const float lo = positive_zero(x.lo), hi = positive_zero(x.hi);
    return {lo, hi, 0, is_finite(add(hi, -lo))};  // an infinite or NaN extreme makes the difference so too
  }
  static FC_FN Scale scale(const Quantizer& q, const Meta& m) {
    return {m.first, mul(add(m.second, -m.first), q.factor), 0.0f};
  }
  static FC_FN Scale encoder_scale(const Quantizer& q, const Meta& m) {
    Scale s = scale(q, m);
    s.inverse = usable_inverse(s.step);
    return s;
  }
  static FC_FN float shifted(const Scale& s, float x) { return add(mul(add(x, -s.low), s.inverse), kRounder); }
  static FC_FN float level(const Quantizer&, const Scale& s, float x) { return add(shifted(s, x), -kRounder); }
  static FC_FN uint32_t lifted(const Quantizer&, const Scale& s, float x) { return bits_of(shifted(s, x)); }
  static FC_FN uint32_t lift(const Quantizer&) { return bits_of(kRounder); }
  static FC_FN uint32_t code(const Quantizer& q, const Scale& s, float x) { return lifted(q, s, x) & q.code_mask; }
  static FC_FN float level_of(const Quantizer&, uint32_t code) { return integer_value(code); }
  static FC_FN float value(const Scale& s, float level) { return add(mul(level, s.step), s.low); }
};

// sym and signed-extreme differ in what the step comes from, and in the clamp that only the latter needs.
template <bool kExtreme>
struct Signed {
  static constexpr bool kTwoMeta = false, kScaleCode = false;

  static FC_FN Meta meta(const Quantizer&, const Extremes& x) {
    const float amax = largest_magnitude(x);
    const float low = magnitude(x.lo), high = magnitude(x.hi);
    const float extreme = low > high || (low == high && x.low_first) ? x.lo : x.hi;
    return {kExtreme ? positive_zero(extreme) : amax, 0.0f, 0, is_finite(amax)};
  }
  static FC_FN Scale scale(const Quantizer& q, const Meta& m) { return {0.0f, mul(m.first, q.factor), 0.0f}; }
  static FC_FN Scale encoder_scale(const Quantizer& q, const Meta& m) {
    Scale s = scale(q, m);
    s.inverse = usable_inverse(s.step);
    return s;
  }
  static FC_FN float shifted(const Quantizer& q, const Scale& s, float x) {
    const float v = mul(x, s.inverse);
    return add(kExtreme ? smaller(v, q.top) : v, kSignedRounder);
  }
  static FC_FN float level(const Quantizer& q, const Scale& s, float x) {
    return add(shifted(q, s, x), -kSignedRounder);
  }
  static FC_FN uint32_t lifted(const Quantizer& q, const Scale& s, float x) { return bits_of(shifted(q, s, x)); }
  static FC_FN uint32_t lift(const Quantizer& q) {
    return bits_of(kSignedRounder) - static_cast<uint32_t>(q.small.sign_bit);
  }
  static FC_FN uint32_t code(const Quantizer& q, const Scale& s, float x) {
    return (lifted(q, s, x) - lift(q)) & q.code_mask;
  }
  static FC_FN float level_of(const Quantizer& q, uint32_t code) {
    return add(float_of(0x4B000000u | code), -add(kRounder, q.bias));
  }
  // A level of 0 gives +0 also where the step is negative.
  static FC_FN float value(const Scale& s, float level) { return positive_zero(mul(level, s.step)); }
};
using Sym = Signed<false>;
using SignedExtreme = Signed<true>;

struct Float {
  static constexpr bool kTwoMeta = false, kScaleCode = false;

  static FC_FN Meta meta(const Quantizer&, const Extremes& x) {
    const float amax = largest_magnitude(x);
    return {amax, 0.0f, 0, is_finite(amax)};
  }
  static FC_FN Scale scale(const Quantizer& q, const Meta& m) { return {0.0f, mul(m.first, q.factor), 0.0f}; }
  static FC_FN Scale encoder_scale(const Quantizer& q, const Meta& m) {
    Scale s = scale(q, m);
    s.inverse = usable_inverse(s.step);
    return s;
  }
  // |x * inverse| exceeds the largest value by rounding errors at most, which the grid swallows: no clamp.
  static FC_FN float level(const Quantizer& q, const Scale& s, float x) {
    return minifloat_round(q.small, mul(x, s.inverse));
  }
  static FC_FN uint32_t code(const Quantizer& q, const Scale& s, float x) {
    return minifloat_code(q.small, mul(x, s.inverse));
  }
  static FC_FN uint32_t lifted(const Quantizer& q, const Scale& s, float x) { return code(q, s, x); }
  static FC_FN uint32_t lift(const Quantizer&) { return 0; }
  static FC_FN float level_of(const Quantizer& q, uint32_t code) { return minifloat_value(q.small, code); }
  static FC_FN float value(const Scale& s, float level) { return mul(level, s.step); }
};

// 2^exponent for -127..127; 2^-127 is subnormal.
FC_FN float power_of_two(int32_t exponent) {
  return float_of(exponent > -127 ? static_cast<uint32_t>(exponent + 127) << 23 : 0x00400000u);
}

// floor(log2 x) of a positive finite x, subnormals normalised.
FC_FN int32_t floor_log2(float x) {
  const bool subnormal = bits_of(x) < 0x00800000u;
  const uint32_t u = bits_of(subnormal ? mul(x, 16777216.0f) : x);
  return static_cast<int32_t>(u >> 23) - 127 - (subnormal ? 24 : 0);
}

// A power-of-two scale. Elements are small floats; integers are floats with one exponent bit, whose grid is even.
struct Mx {
  static constexpr bool kTwoMeta = false, kScaleCode = true;

  static FC_FN Meta meta(const Quantizer& q, const Extremes& x) {
    const float amax = largest_magnitude(x);
    int32_t e = floor_log2(amax) - q.emax;
    e = e < -q.scale_max ? -q.scale_max : e > q.scale_max ? q.scale_max : e;
    const bool finite = is_finite(amax);
    const uint32_t code = amax > 0.0f ? static_cast<uint32_t>(e + q.scale_max) : 0u;
    return {0.0f, 0.0f, finite ? code : static_cast<uint32_t>(2 * q.scale_max + 1), finite};
  }
  static FC_FN Scale scale(const Quantizer& q, const Meta& m) {
    return {0.0f, power_of_two(static_cast<int32_t>(m.scale_code) - q.scale_max), 0.0f};
  }
  static FC_FN Scale encoder_scale(const Quantizer& q, const Meta& m) {
    Scale s = scale(q, m);
    s.inverse = power_of_two(q.scale_max - static_cast<int32_t>(m.scale_code));
    return s;
  }
  static FC_FN float clamped(const Quantizer& q, const Scale& s, float x) {
    const float v = mul(x, s.inverse);
    return float_of(bits_of(smaller(magnitude(v), q.top)) | (bits_of(v) & 0x80000000u));
  }
  static FC_FN float level(const Quantizer& q, const Scale& s, float x) {
    return minifloat_round(q.small, clamped(q, s, x));
  }
  static FC_FN uint32_t code(const Quantizer& q, const Scale& s, float x) {
    return minifloat_code(q.small, clamped(q, s, x));
  }
  static FC_FN uint32_t lifted(const Quantizer& q, const Scale& s, float x) { return code(q, s, x); }
  static FC_FN uint32_t lift(const Quantizer&) { return 0; }
  static FC_FN float level_of(const Quantizer& q, uint32_t code) { return minifloat_value(q.small, code); }
  static FC_FN float value(const Scale& s, float level) { return mul(level, s.step); }
};

// What a decoder finds in a finite or non-finite group's metadata.
template <class S>
FC_FN bool travelled_finite(const Quantizer& q, const Meta& m) {
  if constexpr (S::kScaleCode) return m.scale_code != static_cast<uint32_t>(2 * q.scale_max + 1);
  return !is_nan(S::scale(q, m).step);
}

}  // namespace fc

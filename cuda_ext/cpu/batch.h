// A batch of groups: extremes, then metadata and scale of all of them, so that no division waits for a single group.
//
// Everything here is in an unnamed namespace or always inlined: the file is compiled once per instruction set.
#pragma once

#include <type_traits>

#include "cpu/convert.h"
#include "cpu/kernels.h"
#include "fc/scalar.h"

namespace fc::cpu {
namespace {

constexpr int kBatch = 128;  // groups of 8 in a block of 1024

template <class D>
struct Batch {
  const typename D::Bits* x[kBatch];
  int32_t n[kBatch];  // real elements, at least 1
  int32_t count;
  Extremes extremes[kBatch];
  alignas(64) float low[kBatch], step[kBatch], inverse[kBatch];
  Meta meta[kBatch];
};

// Calls body(i) for i in [0, n), independent of each other.
template <class Body>
FC_FN void for_each(int32_t n, const Body& body) {
  if (n % kChunk == 0) {
    for (int32_t c = 0; c < n; c += kChunk)
#pragma GCC ivdep
      for (int32_t i = 0; i < kChunk; ++i) body(c + i);
  } else {
#pragma GCC ivdep
    for (int32_t i = 0; i < n; ++i) body(i);
  }
}

template <class D>
FC_FN void group_extremes(const typename D::Bits* __restrict x, int32_t n, typename D::Bits& lo, typename D::Bits& hi) {
  using Key = typename D::Key;
  Key least = D::key(x[0]), most = least;
  const auto visit = [&](int32_t i) __attribute__((always_inline)) {
    const Key k = D::key(x[i]);
    least = k < least ? k : least;
    most = k > most ? k : most;
  };
  if (n == kChunk) {
    for (int32_t i = 0; i < kChunk; ++i) visit(i);
  } else {
    for (int32_t i = 0; i < n; ++i) visit(i);
  }
  lo = D::unkey(least);
  hi = D::unkey(most);
}

// Of two extremes of equal magnitude and opposite sign: whether the negative one comes first.
template <class D>
bool negative_first(const typename D::Bits* x, int32_t n, typename D::Bits lo, typename D::Bits hi) {
  for (int32_t i = 0; i < n; ++i) {
    if (x[i] == lo) return true;
    if (x[i] == hi) return false;
  }
  return false;
}

template <class D, class S>
void analyse(Batch<D>& b, const Quantizer& quantizer) {
  const Quantizer q = quantizer;
  for (int32_t k = 0; k < b.count; ++k) {
    typename D::Bits lo, hi;
    group_extremes<D>(b.x[k], b.n[k], lo, hi);
    b.extremes[k] = {D::widen(lo), D::widen(hi), false};
    if constexpr (std::is_same_v<S, SignedExtreme>) {
      const Extremes& e = b.extremes[k];
      if (magnitude(e.lo) == magnitude(e.hi)) b.extremes[k].low_first = negative_first<D>(b.x[k], b.n[k], lo, hi);
    }
  }
  for (int32_t k = 0; k < b.count; ++k) {
    b.meta[k] = S::meta(q, b.extremes[k]);
    const Scale s = S::encoder_scale(q, b.meta[k]);
    b.low[k] = s.low;
    b.step[k] = s.step;
    b.inverse[k] = s.inverse;
  }
}

template <class D>
FC_FN Scale scale_at(const Batch<D>& b, int32_t k) {
  return {b.low[k], b.step[k], b.inverse[k]};
}

}  // namespace
}  // namespace fc::cpu

// A tile is 1024 elements that one warp owns: 4 loads of 8 consecutive elements for each of 32 lanes (WIRE.md, "Wire
// layout"). It holds whole units, a unit being a group padded to its full size; units are numbered over rows.
#pragma once

#include "cuda/packed.cuh"

namespace fc::cuda {

constexpr int kTile = 1024, kLoads = 4, kPerLane = 8, kLoadElements = 256;
constexpr int kThreads = 256, kWarps = kThreads / 32;

// n / divisor for n < 2^31 by one multiplication.
struct FastDivisor {
  uint32_t divisor, multiplier, shift;

  static FastDivisor make(uint32_t divisor) {
    uint32_t shift = 0;
    while ((uint64_t{1} << shift) < divisor) ++shift;
    const uint64_t numerator = (uint64_t{1} << 32) * ((uint64_t{1} << shift) - divisor);
    return {divisor, static_cast<uint32_t>(numerator / divisor + 1), shift};
  }
  FC_DEVICE uint32_t quotient(uint32_t n) const { return (high_product(multiplier, n) + n) >> shift; }
};

// Which elements of a matrix [rows, columns] a tile holds.
struct TileMap {
  int32_t columns;      // H
  int32_t rows;         // T
  int32_t unit_shift;   // log2 of the unit
  FastDivisor per_row;  // units in a row
  bool vectors;         // every lane's 8 elements are all there or all missing, and 16-byte accesses are aligned

  // columns <= 2^31 - 1024 and units <= 2^31 - 1024, checked by the launcher. Contiguous rows of whole units are taken
  // as one long row, where an element's place needs no division.
  static TileMap make(int64_t rows, int64_t columns, bool contiguous, int32_t unit, bool aligned) {
    if (contiguous && rows > 1 && columns % unit == 0 && rows * columns <= INT32_MAX - kTile) {
      columns *= rows;
      rows = 1;
    }
    int32_t shift = 0;
    while ((1 << shift) < unit) ++shift;
    const FastDivisor per_row = FastDivisor::make(static_cast<uint32_t>(ceil_div(columns, unit)));
    return {static_cast<int32_t>(columns), static_cast<int32_t>(rows), shift, per_row,
            aligned && columns % kPerLane == 0};
  }
  // Every tile holds 1024 consecutive elements of the matrix, at a place that is a multiple of 16 bytes.
  bool whole() const { return rows == 1 && vectors && columns % kTile == 0; }
  int64_t tiles() const { return ceil_div(static_cast<int64_t>(rows) * per_row.divisor << unit_shift, kTile); }

  // Place of element `e` of a tile; `count` of the elements from there to the end of the row, at most `span`.
  struct Place {
    int64_t row;
    int32_t column;
    int32_t count;
  };
  FC_DEVICE Place place(int64_t tile, int32_t e, int32_t span) const {
    const uint32_t unit = static_cast<uint32_t>(tile << (10 - unit_shift)) + (static_cast<uint32_t>(e) >> unit_shift);
    const uint32_t row = rows == 1 ? 0 : per_row.quotient(unit);
    const uint32_t in_row = unit - row * per_row.divisor;
    const int32_t column = static_cast<int32_t>(in_row << unit_shift) + (e & ((1 << unit_shift) - 1));
    const int32_t left = row < static_cast<uint32_t>(rows) ? columns - column : 0;
    return {row, column, left <= 0 ? 0 : left < span ? left : span};
  }
};

// Eight values as they lie in memory.
template <class D>
struct Raw {
  static constexpr int kWords = static_cast<int>(2 * sizeof(typename D::Bits));
  uint32_t w[kWords];
};

FC_DEVICE uint4 load_vector(const void* p) {
#if defined(__CUDA_ARCH__)
  return __ldcs(static_cast<const uint4*>(p));
#else
  return *static_cast<const uint4*>(p);
#endif
}
FC_DEVICE void store_vector(void* p, uint4 v) { *static_cast<uint4*>(p) = v; }

// `count` of 8 elements; missing ones repeat the first, which changes no extreme, or are 0 where there is none.
template <class D>
FC_DEVICE Raw<D> load_raw(const typename D::Bits* p, int32_t count, bool vectors) {
  Raw<D> r{};
  if (vectors) {
    if (count) {
#pragma unroll
      for (int v = 0; v < Raw<D>::kWords / 4; ++v) {
        const uint4 q = load_vector(reinterpret_cast<const uint8_t*>(p) + 16 * v);
        r.w[4 * v] = q.x, r.w[4 * v + 1] = q.y, r.w[4 * v + 2] = q.z, r.w[4 * v + 3] = q.w;
      }
    }
  } else if (count) {
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const uint32_t bits = p[j < count ? j : 0];
      if constexpr (kIs16Bit<D>) r.w[j / 2] |= bits << (16 * (j % 2));
      else r.w[j] = bits;
    }
  }
  return r;
}

template <class D>
FC_DEVICE float value_of(const Raw<D>& r, int j) {
  if constexpr (kIs16Bit<D>) return widen_half<D>(r.w[j / 2], j % 2);
  else return float_of(r.w[j]);
}

// Eight sums rounded once to the dtype, every NaN canonical.
template <class D>
FC_DEVICE Raw<D> round_raw(const float* v) {
  Raw<D> r;
  if constexpr (kIs16Bit<D>) {
#pragma unroll
    for (int j = 0; j < 4; ++j) r.w[j] = round_pair<D>(v[2 * j], v[2 * j + 1]);
    // One NaN makes the maximum of all of them NaN; that is rare, and only then each value is looked at.
    const uint32_t most = max_pair<D>(max_pair<D>(r.w[0], r.w[1]), max_pair<D>(r.w[2], r.w[3]));
    if ((most & 0xFFFFu) == 0x7FFFu || (most >> 16) == 0x7FFFu) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        r.w[j] = static_cast<uint32_t>(D::round(v[2 * j])) | static_cast<uint32_t>(D::round(v[2 * j + 1])) << 16;
    }
  } else {
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) r.w[j] = Fp32::round(v[j]);
  }
  return r;
}

template <class D>
FC_DEVICE void store_raw(typename D::Bits* p, const Raw<D>& r, int32_t count, bool vectors) {
  if (vectors) {
    if (count) {
#pragma unroll
      for (int v = 0; v < Raw<D>::kWords / 4; ++v)
        store_vector(reinterpret_cast<uint8_t*>(p) + 16 * v,
                     uint4{r.w[4 * v], r.w[4 * v + 1], r.w[4 * v + 2], r.w[4 * v + 3]});
    }
  } else {
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      if (j >= count) continue;
      if constexpr (kIs16Bit<D>) p[j] = static_cast<uint16_t>(r.w[j / 2] >> (16 * (j % 2)));
      else p[j] = r.w[j];
    }
  }
}

}  // namespace fc::cuda

// The emulated all-reduce and the round trip, which is a reduce of one rank without a sum.
#include "cuda/general.h"
#include "cuda/reduce.cuh"

namespace fc::cuda {
namespace {

Stage make_stage(const Format& f) { return {make_quantizer(f), f.group, scheme_index(f)}; }

const char* launch_any(const ReduceCall& call) {
  return with_dtype(call.partials.dtype, [&](auto d) { return launch_reduce<decltype(d)>(call); });
}

// Elements of the tiles of a sum without groups: only the row's end matters.
constexpr int32_t kSumUnit = 256;

template <class D>
const char* launch_sum(Matrix x, int64_t ranks, int64_t rank_stride, void* out, const Where& where) {
  // Contiguous rows are one long row.
  if (x.stride == x.hidden && x.tokens * x.hidden <= INT32_MAX - kTile) {
    x.hidden *= x.tokens;
    x.stride = x.hidden;
    x.tokens = 1;
  }
  if (const char* why = why_too_large(x.tokens, x.hidden, kSumUnit)) return why;
  const bool aligned =
      aligned16(x.data) && aligned16(out) && aligned_rows(x.stride, x.dtype) && aligned_rows(rank_stride, x.dtype);
  const TileMap map = TileMap::make(x.tokens, x.hidden, false, kSumUnit, aligned);
  const int64_t tiles = map.tiles();
  using Bits = typename D::Bits;
  return launch(sum_kernel<D>, tiles, where, static_cast<const Bits*>(x.data), static_cast<int32_t>(ranks), rank_stride,
                x.stride, map, static_cast<Bits*>(out), tiles);
}

}  // namespace

const char* round_trip(const Format& f, const Matrix& x, float* out, unsigned long long* nonfinite,
                       const Where& where) {
  if (why_not_tiled(f)) return general_round_trip(f, x, out, nonfinite, where);
  return launch_any({x, 1, 0, make_stage(f), Stage{}, After::kStoreFp32, out, nonfinite, where});
}

const char* all_reduce(Algorithm algorithm, const Matrix& partials, int64_t ranks, int64_t rank_stride,
                       const Format& reduce, const Format& gather, void* out, unsigned long long* nonfinite,
                       const Where& where) {
  if (partials.tokens == 0) return nullptr;
  if (algorithm == kFp32Ordered) {
    return with_dtype(partials.dtype,
                      [&](auto d) { return launch_sum<decltype(d)>(partials, ranks, rank_stride, out, where); });
  }
  const bool gathers = algorithm == kTwoStep;
  if (const char* why = why_not_tiled(reduce)) return why;
  if (const char* why = gathers ? why_not_tiled(gather) : nullptr) return why;
  return launch_any({partials, ranks, rank_stride, make_stage(reduce), gathers ? make_stage(gather) : Stage{},
                     gathers ? After::kGather : After::kRound, out, nonfinite, where});
}

}  // namespace fc::cuda

// The launcher of the reduce kernel for one dtype; reduce_<dtype>.cu instantiate it, so that they compile in parallel.
#pragma once

#include "cuda/launch.cuh"

namespace fc::cuda {

struct ReduceCall {
  Matrix partials;
  int64_t ranks, rank_stride;
  Stage reduce, gather;
  After after;
  void* out;
  unsigned long long* nonfinite;
  Where where;
};

template <class D>
const char* launch_reduce(const ReduceCall& c) {
  const Matrix& x = c.partials;
  const bool gathers = c.after == After::kGather;
  // Tiles hold whole groups of both stages: sizes are powers of two, so the larger one is a multiple of the other.
  const int32_t unit = gathers && c.gather.group > c.reduce.group ? c.gather.group : c.reduce.group;
  if (const char* why = why_too_large(x.tokens, x.hidden, unit)) return why;
  const bool aligned =
      aligned16(x.data) && aligned16(c.out) && aligned_rows(x.stride, x.dtype) && aligned_rows(c.rank_stride, x.dtype);
  const TileMap map = TileMap::make(x.tokens, x.hidden, x.stride == x.hidden, unit, aligned);
  const int64_t tiles = map.tiles();
  if (tiles == 0) return nullptr;
  const ReduceParams p{x.data, c.rank_stride, x.stride, static_cast<int32_t>(c.ranks), c.after, map, c.reduce, c.gather,
                       c.out,  c.nonfinite,   tiles};
  if (!map.vectors) return launch(reduce_kernel<D, AnyScheme, false>, tiles, c.where, p);
  return with_scheme(c.reduce.scheme,
                     [&](auto s) { return launch(reduce_kernel<D, OneScheme<decltype(s)>, true>, tiles, c.where, p); });
}

extern template const char* launch_reduce<Bf16>(const ReduceCall&);
extern template const char* launch_reduce<Fp16>(const ReduceCall&);
extern template const char* launch_reduce<Fp32>(const ReduceCall&);

}  // namespace fc::cuda

// The launcher of decode.
#include "cuda/general.h"
#include "cuda/launch.cuh"

namespace fc::cuda {

const char* decode(const Format& f, const uint8_t* wire, DType dtype, int64_t tokens, int64_t hidden, float* out,
                   unsigned long long* nonfinite, const Where& where) {
  if (why_not_tiled(f)) return general_decode(f, wire, dtype, tokens, hidden, out, nonfinite, where);
  if (const char* why = why_too_large(tokens, hidden, f.group)) return why;
  const Layout l = make_layout(f, tokens, hidden, dtype_bytes(dtype));
  if (l.blocks == 0) return nullptr;
  const TileMap map = TileMap::make(tokens, hidden, true, f.group, aligned16(out));
  const WireParams params = WireParams::make(f, l);
  return with_scheme(scheme_index(f), [&](auto s) {
    return launch(decode_kernel<decltype(s)>, l.blocks, where, wire, map, params, dtype, out, nonfinite, l.blocks);
  });
}

}  // namespace fc::cuda

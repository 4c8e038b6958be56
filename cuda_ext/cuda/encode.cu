// The launcher of encode, and which formats tiles cover.
#include "cuda/general.h"
#include "cuda/launch.cuh"

namespace fc::cuda {
namespace {

bool power_of_two_group(int32_t group) { return group >= 8 && group <= kTile && (group & (group - 1)) == 0; }

}  // namespace

const char* why_not_tiled(const Format& f) {
  if (!power_of_two_group(f.group)) return "the group is not a power of two from 8 to 1024 elements";
  if (f.spikes) return "spikes are not covered in one pass";
  if (f.kind == kMx && f.scale_bits != 8) return "mx scales of other than 8 bits are not covered in one pass";
  return nullptr;
}

const char* why_no_device() { return no_device(); }

const char* encode(const Format& f, const Matrix& x, uint8_t* wire, const Where& where) {
  if (why_not_tiled(f)) return general_encode(f, x, wire, where);
  if (const char* why = why_too_large(x.tokens, x.hidden, f.group)) return why;
  const Layout l = make_layout(f, x.tokens, x.hidden, dtype_bytes(x.dtype));
  if (l.blocks == 0) return nullptr;
  const TileMap map = TileMap::make(x.tokens, x.hidden, x.stride == x.hidden, f.group,
                                    aligned16(x.data) && aligned_rows(x.stride, x.dtype));
  const WireParams params = WireParams::make(f, l);
  return with_dtype(x.dtype, [&](auto d) {
    using D = decltype(d);
    return with_scheme(scheme_index(f), [&](auto s) {
      const auto run = [&](auto kernel) {
        return launch(kernel, l.blocks, where, static_cast<const typename D::Bits*>(x.data), x.stride, map, params,
                      wire, l.blocks);
      };
      return map.whole() ? run(encode_kernel<D, decltype(s), true>) : run(encode_kernel<D, decltype(s), false>);
    });
  });
}

}  // namespace fc::cuda

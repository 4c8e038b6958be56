// The launchers of general.h.
#include "cuda/general.h"

#include "cuda/general_kernels.cuh"
#include "cuda/launch.cuh"

namespace fc::cuda {
namespace {

General make_general(const Format& f, int64_t tokens, int64_t hidden, DType dtype) {
  return {make_quantizer(f), make_layout(f, tokens, hidden, dtype_bytes(dtype)), f.spikes != 0};
}

// A warp for each of so many pieces of work; none for an empty tensor.
template <class... P, class... A>
const char* launch_pieces(void (*kernel)(P...), int64_t pieces, const Where& where, A... arguments) {
  if (pieces == 0) return nullptr;
  if (ceil_div(pieces, kWarps) > INT32_MAX) return "the tensor has too many groups for one launch";
  return launch(kernel, pieces, where, arguments...);
}

}  // namespace

const char* general_encode(const Format& f, const Matrix& x, uint8_t* wire, const Where& where) {
  const General p = make_general(f, x.tokens, x.hidden, x.dtype);
  return with_dtype(x.dtype, [&](auto d) {
    using D = decltype(d);
    return with_scheme(scheme_index(f), [&](auto s) {
      return launch_pieces(general_encode_kernel<D, decltype(s)>, p.layout.blocks, where,
                           static_cast<const typename D::Bits*>(x.data), x.stride, p, x.dtype, wire);
    });
  });
}

const char* general_decode(const Format& f, const uint8_t* wire, DType dtype, int64_t tokens, int64_t hidden,
                           float* out, unsigned long long* nonfinite, const Where& where) {
  const General p = make_general(f, tokens, hidden, dtype);
  return with_scheme(scheme_index(f), [&](auto s) {
    return launch_pieces(general_decode_kernel<decltype(s)>, p.layout.blocks, where, wire, p, dtype, out, nonfinite);
  });
}

const char* general_round_trip(const Format& f, const Matrix& x, float* out, unsigned long long* nonfinite,
                               const Where& where) {
  const General p = make_general(f, x.tokens, x.hidden, x.dtype);
  return with_dtype(x.dtype, [&](auto d) {
    using D = decltype(d);
    return with_scheme(scheme_index(f), [&](auto s) {
      return launch_pieces(general_round_trip_kernel<D, decltype(s)>, p.layout.groups(), where,
                           static_cast<const typename D::Bits*>(x.data), x.stride, p, out, nonfinite);
    });
  });
}

}  // namespace fc::cuda

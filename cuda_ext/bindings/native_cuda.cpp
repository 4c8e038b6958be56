// fc_eval._native_cuda: the CUDA codec. Tensors arrive as integers and are checked as far as integers can tell.
#include "bindings/checks.h"
#include "bindings/communicator.h"
#include "cuda/codec.h"

namespace nb = nanobind;
using namespace fc;
using namespace fc::bind;

#if !defined(FC_MODULE_NAME)
#define FC_MODULE_NAME _native_cuda
#endif

namespace {

cuda::Where where_of(int device, uintptr_t stream) { return {device, reinterpret_cast<void*>(stream)}; }

cuda::Matrix matrix(const View& v) {
  require_value_dtype(v);
  return {reinterpret_cast<const void*>(v.pointer), static_cast<cuda::DType>(v.dtype), v.shape[v.dims - 2],
          v.shape[v.dims - 1], v.stride[v.dims - 2]};
}

Format tiled_format(nb::handle format_tuple, int64_t hidden) {
  const Format f = format(format_tuple, hidden);
  if (const char* why = cuda::why_not_tiled(f)) refuse(std::string("format: ") + why);
  return f;
}

unsigned long long* counters(nb::handle value, int64_t entries, int device) {
  const View v = view(value, "nonfinite", 1, device);
  require_dtype(v, kViewInt64);
  require_length(v, entries);
  return reinterpret_cast<unsigned long long*>(v.pointer);
}

View wire_view(nb::handle value, const Format& f, int64_t tokens, int64_t hidden, int32_t dtype, int device) {
  const View wire = view(value, "wire", 1, device, kSectionAlign);
  require_dtype(wire, kViewUint8);
  require_length(wire, make_layout(f, tokens, hidden, static_cast<int32_t>(kDTypeBytes[dtype])).total_bytes());
  return wire;
}

View out_view(nb::handle value, int32_t dtype, const cuda::Matrix& like, int device) {
  const View out = view(value, "out", 2, device);
  require_dtype(out, dtype);
  require_contiguous(out);
  if (out.shape[0] != like.tokens || out.shape[1] != like.hidden) refuse("out: not of the shape of the values");
  return out;
}

void check(const char* why) {
  if (why != nullptr) throw std::runtime_error(std::string("CUDA: ") + why);
}

void encode(nb::handle x_view, nb::handle format_tuple, nb::handle wire_tuple, int device, uintptr_t stream) {
  const cuda::Matrix x = matrix(view(x_view, "x", 2, device));
  const Format f = format(format_tuple, x.hidden);
  const View wire = wire_view(wire_tuple, f, x.tokens, x.hidden, x.dtype, device);
  check(cuda::encode(f, x, reinterpret_cast<uint8_t*>(wire.pointer), where_of(device, stream)));
}

void decode(nb::handle wire_tuple, nb::handle format_tuple, int dtype, nb::handle out_tuple, nb::handle nonfinite,
            int device, uintptr_t stream) {
  if (dtype < 0 || dtype > kViewFp32) refuse("dtype: expected bf16, fp16 or fp32");
  const View out = view(out_tuple, "out", 2, device);
  require_dtype(out, kViewFp32);
  require_contiguous(out);
  const Format f = format(format_tuple, out.shape[1]);
  const View wire = wire_view(wire_tuple, f, out.shape[0], out.shape[1], dtype, device);
  check(cuda::decode(f, reinterpret_cast<const uint8_t*>(wire.pointer), static_cast<cuda::DType>(dtype), out.shape[0],
                     out.shape[1], reinterpret_cast<float*>(out.pointer), counters(nonfinite, 1, device),
                     where_of(device, stream)));
}

void round_trip(nb::handle x_view, nb::handle format_tuple, nb::handle out_tuple, nb::handle nonfinite, int device,
                uintptr_t stream) {
  const cuda::Matrix x = matrix(view(x_view, "x", 2, device));
  const Format f = format(format_tuple, x.hidden);
  const View out = out_view(out_tuple, kViewFp32, x, device);
  check(cuda::round_trip(f, x, reinterpret_cast<float*>(out.pointer), counters(nonfinite, 1, device),
                         where_of(device, stream)));
}

void all_reduce(nb::handle partials_view, int algorithm, nb::handle reduce_tuple, nb::handle gather_tuple,
                nb::handle out_tuple, nb::handle nonfinite, int device, uintptr_t stream) {
  if (algorithm < cuda::kTwoStep || algorithm > cuda::kFp32Ordered) refuse("algorithm: see ALGORITHMS");
  const View partials = view(partials_view, "partials", 3, device);
  const cuda::Matrix x = matrix(partials);
  if (partials.shape[0] < 1 || partials.shape[0] > INT32_MAX) refuse("partials: no ranks, or too many");
  if (x.hidden < 1) refuse("partials: no columns");
  const Format reduce = algorithm == cuda::kFp32Ordered ? Format{} : tiled_format(reduce_tuple, x.hidden);
  const Format gather = algorithm == cuda::kTwoStep ? tiled_format(gather_tuple, x.hidden) : Format{};
  const View out = out_view(out_tuple, partials.dtype, x, device);
  check(cuda::all_reduce(static_cast<cuda::Algorithm>(algorithm), x, partials.shape[0], partials.stride[0], reduce,
                         gather, reinterpret_cast<void*>(out.pointer), counters(nonfinite, 2, device),
                         where_of(device, stream)));
}

}  // namespace

NB_MODULE(FC_MODULE_NAME, m) {
  m.doc() =
      "CUDA codec of fc_eval (cuda_ext/): the arithmetic of WIRE.md over device pointers. Use fc_eval.codec.native.";
  export_constants(m);
  nb::dict algorithms;
  algorithms["two_step"] = static_cast<int>(cuda::kTwoStep);
  algorithms["one_step"] = static_cast<int>(cuda::kOneStep);
  algorithms["fp32_ordered"] = static_cast<int>(cuda::kFp32Ordered);
  m.attr("ALGORITHMS") = algorithms;
  m.def("layout", &layout_dict);
  m.def("why_no_device", [] {
    const char* why = cuda::why_no_device();
    return std::string(why == nullptr ? "" : why);
  });
  m.def("encode", &encode);
  m.def("decode", &decode);
  m.def("round_trip", &round_trip);
  m.def("all_reduce", &all_reduce);
  export_communicator(m);
}

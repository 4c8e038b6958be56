// fc_eval._native: the CPU codec. Thin: arguments are checked, the interpreter lock is released, one C++ call is made.
#include "bindings/checks.h"
#include "cpu/codec.h"

namespace nb = nanobind;
using namespace fc;
using namespace fc::bind;

namespace {

cpu::Execution execution(int threads, const std::string& isa) {
  const cpu::Kernels* kernels = cpu::find_kernels(isa.empty() ? cpu::instruction_sets().front() : isa);
  if (kernels == nullptr) refuse("instruction set '" + isa + "' is not there: see instruction_sets()");
  if (threads < 1 || threads > 1024) refuse("threads = " + std::to_string(threads) + ", expected 1 to 1024");
  return {kernels, threads};
}

cpu::Matrix matrix(const View& v) {
  require_value_dtype(v);
  return {reinterpret_cast<const void*>(v.pointer), static_cast<cpu::DType>(v.dtype), v.shape[v.dims - 2],
          v.shape[v.dims - 1], v.stride[v.dims - 2]};
}

int64_t wire_bytes(const Format& f, const cpu::Matrix& x) {
  return make_layout(f, x.tokens, x.hidden, cpu::dtype_bytes(x.dtype)).total_bytes();
}

int64_t encode(nb::handle x_view, nb::handle format_tuple, nb::handle wire_view, int threads, const std::string& isa) {
  const cpu::Execution how = execution(threads, isa);
  const cpu::Matrix x = matrix(view(x_view, "x", 2, kCpuDevice));
  const Format f = format(format_tuple, x.hidden);
  const View wire = view(wire_view, "wire", 1, kCpuDevice, kSectionAlign);
  require_dtype(wire, kViewUint8);
  require_length(wire, wire_bytes(f, x));
  const nb::gil_scoped_release unlocked;
  return cpu::encode(f, x, reinterpret_cast<uint8_t*>(wire.pointer), how);
}

int64_t decode(nb::handle wire_view, nb::handle format_tuple, int dtype, nb::handle out_view, int threads,
               const std::string& isa) {
  const cpu::Execution how = execution(threads, isa);
  if (dtype < 0 || dtype > kViewFp32) refuse("dtype: expected bf16, fp16 or fp32");
  const View out = view(out_view, "out", 2, kCpuDevice);
  require_dtype(out, kViewFp32);
  require_contiguous(out);
  const cpu::Matrix x{nullptr, static_cast<cpu::DType>(dtype), out.shape[0], out.shape[1], out.shape[1]};
  const Format f = format(format_tuple, x.hidden);
  const View wire = view(wire_view, "wire", 1, kCpuDevice, kSectionAlign);
  require_dtype(wire, kViewUint8);
  require_length(wire, wire_bytes(f, x));
  const nb::gil_scoped_release unlocked;
  return cpu::decode(f, reinterpret_cast<const uint8_t*>(wire.pointer), x.dtype, x.tokens, x.hidden,
                     reinterpret_cast<float*>(out.pointer), how);
}

int64_t round_trip(nb::handle x_view, nb::handle format_tuple, nb::handle out_view, int threads,
                   const std::string& isa) {
  const cpu::Execution how = execution(threads, isa);
  const cpu::Matrix x = matrix(view(x_view, "x", 2, kCpuDevice));
  const Format f = format(format_tuple, x.hidden);
  const View out = view(out_view, "out", 2, kCpuDevice);
  require_dtype(out, kViewFp32);
  require_contiguous(out);
  if (out.shape[0] != x.tokens || out.shape[1] != x.hidden) refuse("out: not of the shape of x");
  const nb::gil_scoped_release unlocked;
  return cpu::round_trip(f, x, reinterpret_cast<float*>(out.pointer), how);
}

nb::tuple all_reduce(nb::handle partials_view, int algorithm, nb::handle reduce_tuple, nb::handle gather_tuple,
                     nb::handle out_view, int threads, const std::string& isa) {
  const cpu::Execution how = execution(threads, isa);
  if (algorithm < cpu::kTwoStep || algorithm > cpu::kFp32Ordered) refuse("algorithm: see ALGORITHMS");
  const View partials = view(partials_view, "partials", 3, kCpuDevice);
  const cpu::Matrix x = matrix(partials);
  if (partials.shape[0] < 1) refuse("partials: no ranks");
  if (x.hidden < 1) refuse("partials: no columns");
  const Format reduce = algorithm == cpu::kFp32Ordered ? Format{} : format(reduce_tuple, x.hidden);
  const Format gather = algorithm == cpu::kTwoStep ? format(gather_tuple, x.hidden) : Format{};
  const View out = view(out_view, "out", 2, kCpuDevice);
  require_dtype(out, partials.dtype);
  require_contiguous(out);
  if (out.shape[0] != x.tokens || out.shape[1] != x.hidden) refuse("out: not of the shape of one partial");
  int64_t nonfinite[2] = {0, 0};
  {
    const nb::gil_scoped_release unlocked;
    cpu::all_reduce(static_cast<cpu::Algorithm>(algorithm), x, partials.shape[0], partials.stride[0], reduce, gather,
                    reinterpret_cast<void*>(out.pointer), nonfinite, how);
  }
  return nb::make_tuple(nonfinite[0], nonfinite[1]);
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "CPU codec of fc_eval (cuda_ext/): the arithmetic of WIRE.md over raw pointers. Use fc_eval.codec.native.";
  export_constants(m);
  nb::dict algorithms;
  algorithms["two_step"] = static_cast<int>(cpu::kTwoStep);
  algorithms["one_step"] = static_cast<int>(cpu::kOneStep);
  algorithms["fp32_ordered"] = static_cast<int>(cpu::kFp32Ordered);
  m.attr("ALGORITHMS") = algorithms;
  m.attr("COMPILER") = FC_COMPILER;
  m.def("layout", &layout_dict);
  m.def("encode", &encode);
  m.def("decode", &decode);
  m.def("round_trip", &round_trip);
  m.def("all_reduce", &all_reduce);
  m.def("instruction_sets", [] {
    nb::list names;
    for (const std::string& name : cpu::instruction_sets()) names.append(name.c_str());
    return nb::tuple(names);
  });
  m.def("multiply_add", [](float level, float step, float low, const std::string& isa) {
    return execution(1, isa).kernels->probe(level, step, low);
  });
}

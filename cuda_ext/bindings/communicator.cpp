// The communicator of the fused all-reduce as a Python class; arguments are checked as those of the codec.
#include "cuda/communicator.h"

#include "bindings/checks.h"
#include "bindings/communicator.h"

namespace fc::bind {
namespace {

using cuda::Communicator;

cuda::Matrix values(const View& v) {
  require_value_dtype(v);
  require_contiguous(v);
  return {reinterpret_cast<const void*>(v.pointer), static_cast<cuda::DType>(v.dtype), v.shape[v.dims - 2],
          v.shape[v.dims - 1], v.shape[v.dims - 1]};
}

Format covered(nb::handle format_tuple, int64_t hidden) {
  const Format f = format(format_tuple, hidden);
  if (const char* why = Communicator::why_not(f)) refuse(std::string("format: ") + why);
  return f;
}

void all_reduce(Communicator& self, nb::handle partials_view, int algorithm, nb::handle reduce, nb::handle gather,
                nb::handle out_view, nb::handle nonfinite_view, int blocks, double deadline_s, uintptr_t stream,
                int late_rank, double late_s, bool unprotected) {
  if (algorithm != cuda::kTwoStep && algorithm != cuda::kOneStep) refuse("algorithm: expected two_step or one_step");
  const int32_t device = self.options().device;
  const int dims = self.options().rank < 0 ? 3 : 2;
  const View partials = view(partials_view, "partials", dims, device);
  const View out = view(out_view, "out", dims, device);
  const View nonfinite = view(nonfinite_view, "nonfinite", 1, device);
  const cuda::Matrix x = values(partials);
  require_dtype(out, partials.dtype);
  require_contiguous(out);
  for (int i = 0; i < dims; ++i)
    if (out.shape[i] != partials.shape[i]) refuse("out: not of the shape of the partials");
  if (dims == 3 && partials.shape[0] != self.options().world) refuse("partials: not one per rank");
  if (x.hidden < 1) refuse("partials: no columns");
  require_dtype(nonfinite, kViewInt64);
  require_length(nonfinite, 2);
  if (!(deadline_s >= 0 && deadline_s < 1e9) || !(late_s >= 0 && late_s < 4)) refuse("a time in seconds is expected");
  Communicator::Call call{};
  call.algorithm = static_cast<cuda::Algorithm>(algorithm);
  call.partials = x;
  call.out = reinterpret_cast<void*>(out.pointer);
  call.reduce = covered(reduce, x.hidden);
  call.gather = algorithm == cuda::kTwoStep ? covered(gather, x.hidden) : Format{};
  call.nonfinite = reinterpret_cast<unsigned long long*>(nonfinite.pointer);
  call.blocks = blocks;
  call.deadline_ns = static_cast<uint64_t>(deadline_s * 1e9);
  call.stream = reinterpret_cast<void*>(stream);
  call.mischief = {late_rank, static_cast<uint32_t>(late_s * 1e9), unprotected};
  const nb::gil_scoped_release unlocked;
  if (const char* why = self.all_reduce(call)) throw std::runtime_error(why);
}

nb::tuple wrong_patterns(Communicator& self) {
  nb::list counts;
  for (const uint64_t count : self.wrong_patterns()) counts.append(count);
  return nb::tuple(counts);
}

}  // namespace

void export_communicator(nb::module_& m) {
  nb::set_leak_warnings(false);  // a communicator may live as long as its process
  nb::class_<Communicator>(m, "Communicator")
      .def(
          "__init__",
          [](Communicator* self, int device, int world, int rank, int slots, uint32_t first_epoch, bool staged) {
            new (self) Communicator({device, world, slots, rank, first_epoch, staged});
          },
          nb::arg("device"), nb::arg("world"), nb::arg("rank"), nb::arg("slots"), nb::arg("first_epoch") = 0u,
          nb::arg("staged") = false)
      .def("handle",
           [](const Communicator& self) {
             const std::string handle = self.handle();
             return nb::bytes(handle.data(), handle.size());
           })
      .def("connect",
           [](Communicator& self, nb::list handles) {
             std::vector<std::string> all;
             for (nb::handle h : handles) {
               const nb::bytes bytes = nb::cast<nb::bytes>(h);
               all.emplace_back(bytes.c_str(), bytes.size());
             }
             self.connect(all);
           })
      .def("write_patterns", &Communicator::write_patterns)
      .def("wrong_patterns", &wrong_patterns)
      .def("most_blocks",
           [](Communicator& self, int dtype) {
             if (dtype < 0 || dtype > kViewFp32) refuse("dtype: expected bf16, fp16 or fp32");
             return self.most_blocks(static_cast<cuda::DType>(dtype));
           })
      .def("all_reduce", &all_reduce, nb::arg("partials"), nb::arg("algorithm"), nb::arg("reduce"), nb::arg("gather"),
           nb::arg("out"), nb::arg("nonfinite"), nb::arg("blocks"), nb::arg("deadline_s"), nb::arg("stream"),
           nb::arg("late_rank") = -1, nb::arg("late_s") = 0.0, nb::arg("unprotected") = false)
      .def("failure", &Communicator::failure)
      .def("close", &Communicator::close)
      .def_prop_ro("slab_bytes", &Communicator::slab_bytes);
  m.attr("VIRTUAL") = -1;
  m.attr("MOST_RANKS") = cuda::kMaxRanks;
#if defined(FC_FUSED_DEBUG)
  m.attr("FUSED_DEBUG") = true;
#else
  m.attr("FUSED_DEBUG") = false;
#endif
  m.def("why_not_fused", [](nb::handle format_tuple) {
    const char* why = Communicator::why_not(format(format_tuple, 1));
    return std::string(why == nullptr ? "" : why);
  });
}

}  // namespace fc::bind

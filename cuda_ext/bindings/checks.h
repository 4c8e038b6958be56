// Arguments from Python: every one is checked here, and what is wrong becomes an exception that names it.
//
// A tensor arrives as a tuple (data pointer, dtype, device, shape, strides in elements, bytes from the pointer to the
// end of its storage), a format as a tuple of integers in the order of kFormatFields. No tensor library is needed.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "fc/format.h"

namespace fc::bind {

namespace nb = nanobind;

enum ViewDType : int32_t { kViewBf16 = 0, kViewFp16 = 1, kViewFp32 = 2, kViewUint8 = 3, kViewInt64 = 4 };
constexpr const char* kDTypeNames[] = {"bf16", "fp16", "fp32", "uint8", "int64"};
constexpr int64_t kDTypeBytes[] = {2, 2, 4, 1, 8};
constexpr int32_t kCpuDevice = -1;

struct View {
  std::string name;
  uintptr_t pointer;
  int32_t dtype, device, dims;
  int64_t shape[3], stride[3];
  int64_t bytes;

  int64_t numel() const {
    int64_t n = 1;
    for (int i = 0; i < dims; ++i) n *= shape[i];
    return n;
  }
};

[[noreturn]] inline void refuse(const std::string& what) { throw nb::value_error(what.c_str()); }

inline int64_t integer(nb::handle value, const std::string& name) {
  if (!PyLong_Check(value.ptr())) throw nb::type_error((name + " must be an integer").c_str());
  const long long n = PyLong_AsLongLong(value.ptr());
  if (n == -1 && PyErr_Occurred()) throw nb::python_error();
  return n;
}

inline nb::tuple tuple_of(nb::handle value, size_t size, const std::string& name) {
  if (!PyTuple_Check(value.ptr())) throw nb::type_error((name + " must be a tuple").c_str());
  nb::tuple t = nb::borrow<nb::tuple>(value);
  if (size != 0 && t.size() != size) refuse(name + " must hold " + std::to_string(size) + " entries");
  return t;
}

// A tensor of `dims` dimensions on `device`, rows contiguous, all of it inside its storage and aligned to `align`
// bytes.
inline View view(nb::handle value, const std::string& name, int dims, int32_t device, int64_t align = 1) {
  const nb::tuple t = tuple_of(value, 6, name);
  View v{};
  v.name = name;
  const nb::handle pointer = t[0];
  if (!PyLong_Check(pointer.ptr())) throw nb::type_error((name + ": the pointer must be an integer").c_str());
  v.pointer = static_cast<uintptr_t>(PyLong_AsUnsignedLongLong(pointer.ptr()));
  if (PyErr_Occurred()) throw nb::python_error();
  const int64_t dtype = integer(t[1], name + ": dtype");
  if (dtype < 0 || dtype > kViewInt64) refuse(name + ": unknown dtype " + std::to_string(dtype));
  v.dtype = static_cast<int32_t>(dtype);
  const int64_t where = integer(t[2], name + ": device");
  if (where != device) refuse(name + ": on device " + std::to_string(where) + ", expected " + std::to_string(device));
  v.device = device;
  v.dims = dims;
  const nb::tuple shape = tuple_of(t[3], static_cast<size_t>(dims), name + ": shape");
  const nb::tuple strides = tuple_of(t[4], static_cast<size_t>(dims), name + ": strides");
  v.bytes = integer(t[5], name + ": bytes");

  __int128 last = 0, numel = 1;
  for (int i = 0; i < dims; ++i) {
    v.shape[i] = integer(shape[i], name + ": shape");
    v.stride[i] = integer(strides[i], name + ": strides");
    if (v.shape[i] < 0 || v.stride[i] < 0) refuse(name + ": negative shape or stride");
    numel *= v.shape[i];
    if (numel > INT64_MAX / 16) refuse(name + ": too many elements");
    last += static_cast<__int128>(v.shape[i] - 1) * v.stride[i];
  }
  if (numel == 0) return v;
  if (v.shape[dims - 1] > 1 && v.stride[dims - 1] != 1) refuse(name + ": the last dimension must be contiguous");
  const int64_t item = kDTypeBytes[v.dtype];
  if ((last + 1) * item > v.bytes) refuse(name + ": shape and strides reach beyond its storage");
  if (v.pointer == 0) refuse(name + ": null pointer");
  if (v.pointer % static_cast<uintptr_t>(align > item ? align : item) != 0) refuse(name + ": misaligned pointer");
  return v;
}

inline void require_dtype(const View& v, int32_t dtype) {
  if (v.dtype != dtype) refuse(v.name + ": dtype " + kDTypeNames[v.dtype] + ", expected " + kDTypeNames[dtype]);
}

inline void require_value_dtype(const View& v) {
  if (v.dtype > kViewFp32)
    refuse(v.name + ": dtype " + std::string(kDTypeNames[v.dtype]) + ", expected bf16, fp16 or fp32");
}

// Without elements every stride will do: torch keeps or makes up those of empty tensors.
inline void require_contiguous(const View& v) {
  for (int i = 0; i < v.dims; ++i)
    if (v.shape[i] == 0) return;
  int64_t expected = 1;
  for (int i = v.dims - 1; i >= 0; --i) {
    if (v.shape[i] > 1 && v.stride[i] != expected) refuse(v.name + ": must be contiguous");
    expected *= v.shape[i];
  }
}

inline void require_length(const View& v, int64_t expected) {
  if (v.shape[0] != expected)
    refuse(v.name + ": " + std::to_string(v.shape[0]) + " entries, expected " + std::to_string(expected));
}

constexpr const char* kFormatFields[] = {"kind", "bits",     "group", "scheme",     "exponent", "mantissa",
                                         "bias", "max_code", "emax",  "scale_bits", "spikes"};

inline int32_t in_range(const nb::tuple& t, size_t index, int64_t low, int64_t high) {
  const std::string name = std::string("format: ") + kFormatFields[index];
  const int64_t n = integer(t[index], name);
  if (n < low || n > high)
    refuse(name + " = " + std::to_string(n) + ", expected " + std::to_string(low) + " to " + std::to_string(high));
  return static_cast<int32_t>(n);
}

inline Format format(nb::handle value, int64_t hidden) {
  const nb::tuple t = tuple_of(value, std::size(kFormatFields), "format");
  Format f{};
  f.kind = in_range(t, 0, kInt, kMx);
  f.bits = in_range(t, 1, 2, 8);
  f.group = in_range(t, 2, 0, 4096);
  f.scheme = f.kind == kInt ? in_range(t, 3, kAsym, kSignedExtreme) : in_range(t, 3, kNoScheme, kNoScheme);
  f.exponent = f.kind == kInt ? in_range(t, 4, 0, 0) : in_range(t, 4, 1, 5);
  f.mantissa = f.exponent ? in_range(t, 5, f.bits - 1 - f.exponent, f.bits - 1 - f.exponent) : in_range(t, 5, 0, 0);
  f.bias = in_range(t, 6, 0, f.exponent ? 15 : 0);
  f.max_code = in_range(t, 7, f.exponent ? 1 : 0, f.exponent ? (1 << (f.bits - 1)) - 1 : 0);
  f.emax = in_range(t, 8, 0, f.kind == kMx ? 15 : 0);
  f.scale_bits = f.kind == kMx ? in_range(t, 9, 4, 8) : in_range(t, 9, 0, 0);
  f.spikes = in_range(t, 10, 0, 1);
  if (f.group != 0 && f.group < 8) refuse("format: group = " + std::to_string(f.group) + ", expected 0 or 8 to 4096");
  const int64_t widest = f.spikes && f.group == 0 ? 65536 : INT32_MAX - kTokenAlign;
  if (hidden < 1 || hidden > widest)
    refuse("hidden = " + std::to_string(hidden) + ", expected 1 to " + std::to_string(widest));
  return f;
}

// {section: (offset, bytes of one block)...} and sizes, for the test that compares them with fc_eval/wire/layout.py.
inline nb::dict layout_dict(nb::handle format_tuple, int64_t tokens, int64_t hidden, int32_t dtype) {
  if (tokens < 0) refuse("tokens must not be negative");
  if (dtype < 0 || dtype > kViewFp32) refuse("dtype: expected bf16, fp16 or fp32");
  const Layout l = make_layout(format(format_tuple, hidden), tokens, hidden, static_cast<int32_t>(kDTypeBytes[dtype]));
  nb::dict d;
  const auto set = [&d](const std::string& key, int64_t n) {
    if (n >= 0) d[key.c_str()] = n;
  };
  set("group", l.group);
  set("groups_per_row", l.groups_per_row);
  set("groups_per_block", l.groups_per_block);
  set("blocks", l.blocks);
  set("block_bytes", l.block_bytes);
  for (int i = 0; i < 4; ++i) {
    set("plane" + std::to_string(plane_width(i)), l.plane[i]);
    set("scale" + std::to_string(plane_width(i)), l.scale[i]);
  }
  set("meta0", l.meta[0]);
  set("meta1", l.meta[1]);
  set("spikes", l.spike_values);
  set("positions", l.spike_positions);
  return d;
}

// The integers behind the names, so that no table is kept twice.
inline void export_constants(nb::module_& m) {
  nb::list fields;
  for (const char* field : kFormatFields) fields.append(field);
  m.attr("FORMAT_FIELDS") = nb::tuple(fields);
  nb::dict dtypes;
  for (size_t i = 0; i < std::size(kDTypeNames); ++i) dtypes[kDTypeNames[i]] = static_cast<int>(i);
  m.attr("DTYPES") = dtypes;
  nb::dict kinds, schemes;
  kinds["int"] = static_cast<int>(kInt);
  kinds["float"] = static_cast<int>(kFloat);
  kinds["mx"] = static_cast<int>(kMx);
  schemes["asym"] = static_cast<int>(kAsym);
  schemes["sym"] = static_cast<int>(kSym);
  schemes["se"] = static_cast<int>(kSignedExtreme);
  m.attr("KINDS") = kinds;
  m.attr("SCHEMES") = schemes;
  m.attr("NO_SCHEME") = static_cast<int>(kNoScheme);
  m.attr("CPU_DEVICE") = kCpuDevice;
}

}  // namespace fc::bind

// Launchers of the CUDA codec, on raw device pointers and a stream. T tokens, H hidden, W ranks; strides in elements.
//
// Nothing is allocated and nothing waits: every function is one launch (none for an empty tensor), so all of them may
// be captured in a CUDA graph. They return nullptr, or why the launch failed. `nonfinite` counters are added to.
#pragma once

#include <cstdint>

#include "fc/format.h"

namespace fc::cuda {

enum DType : int32_t { kBf16 = 0, kFp16 = 1, kFp32 = 2 };
enum Algorithm : int32_t { kTwoStep = 0, kOneStep = 1, kFp32Ordered = 2 };

struct Matrix {
  const void* data;
  DType dtype;
  int64_t tokens, hidden, stride;
};

// On the caller's stream; the device is current during the call only.
struct Where {
  int32_t device;
  void* stream;
};

// Why a format does not fit the tiles of 1024 elements, or nullptr. `all_reduce` takes only formats that do; the other
// functions have slower kernels for the rest.
const char* why_not_tiled(const Format& format);
// Why no device can be used at all, or nullptr.
const char* why_no_device();

const char* encode(const Format& format, const Matrix& x, uint8_t* wire, const Where& where);
const char* decode(const Format& format, const uint8_t* wire, DType dtype, int64_t tokens, int64_t hidden, float* out,
                   unsigned long long* nonfinite, const Where& where);
const char* round_trip(const Format& format, const Matrix& x, float* out, unsigned long long* nonfinite,
                       const Where& where);
// nonfinite[0], nonfinite[1]: reduce and gather stage.
const char* all_reduce(Algorithm algorithm, const Matrix& partials, int64_t ranks, int64_t rank_stride,
                       const Format& reduce, const Format& gather, void* out, unsigned long long* nonfinite,
                       const Where& where);

}  // namespace fc::cuda

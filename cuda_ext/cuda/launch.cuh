// What all launchers share: the grid, limits, and the choice of a kernel by dtype and scheme.
#pragma once

#include "cuda/device.cuh"
#include "cuda/reduce_kernels.cuh"

namespace fc::cuda {

// One warp per tile.
template <class... P, class... A>
const char* launch(void (*kernel)(P...), int64_t tiles, const Where& where, A... arguments) {
  return launch_blocks(kernel, static_cast<unsigned>(ceil_div(tiles, kWarps)), kThreads, where, arguments...);
}

inline int32_t dtype_bytes(DType dtype) { return dtype == kFp32 ? 4 : 2; }
inline bool aligned16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }
inline bool aligned_rows(int64_t stride, DType dtype) { return stride * dtype_bytes(dtype) % 16 == 0; }

// Units and columns are numbered in 32 bits on the device.
inline const char* why_too_large(int64_t tokens, int64_t hidden, int32_t unit) {
  constexpr int64_t limit = INT32_MAX - kTile;
  const bool fits = hidden <= limit && tokens <= limit && ceil_div(hidden, unit) <= limit / (tokens > 0 ? tokens : 1);
  return fits ? nullptr : "the tensor has too many groups for one launch";
}

inline int32_t scheme_index(const Format& f) {
  return f.kind == kMx ? kIsMx : f.kind == kFloat ? kIsFloat : f.scheme - kAsym + kIsAsym;
}

// Calls launch with a value of the scheme's type, or of the dtype's.
template <class Launch>
const char* with_scheme(int32_t scheme, const Launch& launch) {
  switch (scheme) {
    case kIsAsym: return launch(Asym{});
    case kIsSym: return launch(Sym{});
    case kIsSignedExtreme: return launch(SignedExtreme{});
    case kIsFloat: return launch(Float{});
    case kIsMx: return launch(Mx{});
  }
  return "unknown scheme";
}

template <class Launch>
const char* with_dtype(DType dtype, const Launch& launch) {
  switch (dtype) {
    case kBf16: return launch(Bf16{});
    case kFp16: return launch(Fp16{});
    case kFp32: return launch(Fp32{});
  }
  return "unknown dtype";
}

}  // namespace fc::cuda

// The device that a call works on, and the launch itself; on a simulated warp where there is no nvcc.
#pragma once

#include "cuda/codec.h"
#include "cuda/packed.cuh"

#if defined(__CUDACC__)
#include <cuda_runtime.h>

namespace fc::cuda {

// Makes a device current for one scope.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    error_ = cudaGetDevice(&before_);
    if (error_ == cudaSuccess && before_ != device) {
      error_ = cudaSetDevice(device);
      changed_ = error_ == cudaSuccess;
    }
  }
  ~DeviceScope() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  const char* why() const { return error_ == cudaSuccess ? nullptr : cudaGetErrorString(error_); }

 private:
  int before_ = 0;
  bool changed_ = false;
  cudaError_t error_ = cudaSuccess;
};

template <class... P, class... A>
const char* launch_blocks(void (*kernel)(P...), unsigned blocks, int threads, const Where& where, A... arguments) {
  const DeviceScope scope(where.device);
  if (scope.why()) return scope.why();
  kernel<<<blocks, threads, 0, static_cast<cudaStream_t>(where.stream)>>>(arguments...);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

inline const char* no_device() {
  int driver = 0, count = 0;
  if (cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0) return "no NVIDIA driver on this machine";
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  return count > 0 ? nullptr : "no CUDA device";
}

}  // namespace fc::cuda

#else

namespace fc::cuda {

template <class... P, class... A>
const char* launch_blocks(void (*kernel)(P...), unsigned blocks, int threads, const Where&, A... arguments) {
  simulated::run(blocks, threads, [&] { kernel(arguments...); });
  return nullptr;
}

inline const char* no_device() { return nullptr; }

}  // namespace fc::cuda

#endif

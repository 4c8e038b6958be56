// The device that a call works on, and the launch itself; on a simulated warp where there is no nvcc.
#pragma once

#include "cuda/codec.h"
#include "cuda/scoped.cuh"

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

// The same with all blocks resident at once: an error where they do not fit, instead of a wait without end.
template <class P>
const char* launch_together(void (*kernel)(const P), unsigned blocks, int threads, const Where& where, P argument) {
  const DeviceScope scope(where.device);
  if (scope.why()) return scope.why();
  void* arguments[] = {&argument};
  const cudaError_t error = cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(kernel), dim3(blocks),
                                                        dim3(static_cast<unsigned>(threads)), arguments, 0,
                                                        static_cast<cudaStream_t>(where.stream));
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// How many blocks of a kernel a device holds at once; 0 where that cannot be known.
template <class P>
int resident_blocks(void (*kernel)(const P), int threads, int device) {
  const DeviceScope scope(device);
  int per_multiprocessor = 0, multiprocessors = 0;
  if (scope.why() != nullptr ||
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel, threads, 0) != cudaSuccess ||
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess)
    return 0;
  return per_multiprocessor * multiprocessors;
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

template <class P>
const char* launch_together(void (*kernel)(const P), unsigned blocks, int threads, const Where&, P argument) {
  simulated::run_together(blocks, threads, [&] { kernel(argument); });
  return nullptr;
}

template <class P>
int resident_blocks(void (*)(const P), int, int) {
  return 64;
}

inline const char* no_device() { return nullptr; }

}  // namespace fc::cuda

#endif

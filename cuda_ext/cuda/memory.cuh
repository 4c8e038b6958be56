// Memory of a communicator: on a device, exported to and imported from other processes, and where host and device both
// see it; on the host where there is no nvcc. Every failure is an exception that says what was tried.
#pragma once

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "cuda/device.cuh"
#include "cuda/host_memory.h"

namespace fc::cuda {

// What another process needs to open an allocation.
using Handle = std::string;

#if defined(__CUDACC__)

inline void require(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();  // it is told here, and must not be found again by another call
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

inline uint8_t* allocate_zeros(int64_t bytes) {
  void* memory = nullptr;
  require(cudaMalloc(&memory, static_cast<size_t>(bytes)), "the slab cannot be allocated");
  require(cudaMemset(memory, 0, static_cast<size_t>(bytes)), "the slab cannot be cleared");
  return static_cast<uint8_t*>(memory);
}
inline void release(uint8_t* memory) { (void)cudaFree(memory); }

// Copies and waits until they are done; the slab lies on the device or in pinned memory of the host.
inline void to_device(void* to, const void* from, int64_t bytes) {
  require(cudaMemcpy(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault), "the slab cannot be written");
  require(cudaDeviceSynchronize(), "the slab cannot be written");
}
inline void to_host(void* to, const void* from, int64_t bytes) {
  require(cudaDeviceSynchronize(), "waiting for the device");
  require(cudaMemcpy(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault), "the slab cannot be read");
}

inline Handle export_memory(uint8_t* memory) {
  cudaIpcMemHandle_t handle;
  require(cudaIpcGetMemHandle(&handle, memory), "the slab cannot be exported (cudaIpcGetMemHandle)");
  return Handle(handle.reserved, sizeof handle.reserved);
}
inline uint8_t* import_memory(const Handle& text) {
  cudaIpcMemHandle_t handle;
  if (text.size() != sizeof handle.reserved) throw std::runtime_error("a handle of another size");
  std::memcpy(handle.reserved, text.data(), sizeof handle.reserved);
  void* memory = nullptr;
  require(cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess),
          "its slab cannot be opened (cudaIpcOpenMemHandle)");
  return static_cast<uint8_t*>(memory);
}
inline void close_imported(uint8_t* memory) { (void)cudaIpcCloseMemHandle(memory); }

// Memory of the host where kernels of this process write and read it; the address that they use.
inline uint8_t* reachable(const HostMemory& memory) {
  void* address = nullptr;
  require(cudaHostRegister(memory.data(), static_cast<size_t>(memory.bytes()),
                           cudaHostRegisterPortable | cudaHostRegisterMapped),
          "memory of the host cannot be pinned (cudaHostRegister)");
  require(cudaHostGetDevicePointer(&address, memory.data(), 0), "pinned memory of the host cannot be reached");
  return static_cast<uint8_t*>(address);
}
inline void no_longer_reachable(const HostMemory& memory) {
  (void)cudaHostUnregister(memory.data());
  (void)cudaGetLastError();
}

// Written by kernels, read by the host at any time.
inline void* allocate_visible(int64_t bytes) {
  void* memory = nullptr;
  require(cudaHostAlloc(&memory, static_cast<size_t>(bytes), cudaHostAllocPortable | cudaHostAllocMapped),
          "pinned host memory cannot be allocated");
  std::memset(memory, 0, static_cast<size_t>(bytes));
  return memory;
}
inline void release_visible(void* memory) { (void)cudaFreeHost(memory); }

#else

inline uint8_t* allocate_zeros(int64_t bytes) {
  const size_t whole = (static_cast<size_t>(bytes) + 255) / 256 * 256;
  void* memory = std::aligned_alloc(256, whole);
  if (memory == nullptr) throw std::runtime_error("the slab cannot be allocated");
  std::memset(memory, 0, whole);
  return static_cast<uint8_t*>(memory);
}
inline void release(uint8_t* memory) { std::free(memory); }
inline void to_device(void* to, const void* from, int64_t bytes) { std::memcpy(to, from, static_cast<size_t>(bytes)); }
inline void to_host(void* to, const void* from, int64_t bytes) { std::memcpy(to, from, static_cast<size_t>(bytes)); }
inline Handle export_memory(uint8_t*) { throw std::runtime_error("memory of the host is not shared"); }
inline uint8_t* import_memory(const Handle&) { throw std::runtime_error("memory of the host is not shared"); }
inline void close_imported(uint8_t*) {}
inline uint8_t* reachable(const HostMemory& memory) { return memory.data(); }
inline void no_longer_reachable(const HostMemory&) {}
inline void* allocate_visible(int64_t bytes) { return allocate_zeros(bytes); }
inline void release_visible(void* memory) { std::free(memory); }

#endif

}  // namespace fc::cuda

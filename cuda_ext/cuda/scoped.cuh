// Words that several blocks, ranks or the host look at: system-scope release and acquire, and the few block-wide
// operations around them. Each has a host twin, so that ranks can also be threads of a CPU (tests/simulated_ranks.h).
#pragma once

#include "cuda/packed.cuh"

#if !defined(__CUDACC__)
#include "tests/simulated_ranks.h"
#endif

namespace fc::cuda {

// Everything that this thread did or, through a block's barrier, saw done before is visible to whoever acquires `value`.
FC_DEVICE void store_release(uint64_t* to, uint64_t value) {
#if defined(__CUDACC__)
  asm volatile("st.release.sys.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
#else
  __atomic_store_n(to, value, __ATOMIC_RELEASE);
#endif
}

FC_DEVICE uint64_t load_acquire(const uint64_t* from) {
#if defined(__CUDACC__)
  uint64_t value;
  asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
#else
  return __atomic_load_n(from, __ATOMIC_ACQUIRE);
#endif
}

// For polling: an acquire would empty the first-level cache of the whole multiprocessor at every turn.
FC_DEVICE uint64_t load_relaxed(const uint64_t* from) {
#if defined(__CUDACC__)
  uint64_t value;
  asm volatile("ld.relaxed.sys.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
#else
  return __atomic_load_n(from, __ATOMIC_RELAXED);
#endif
}

// What stood there before; `desired` stands there afterwards where that was `expected`. Among the blocks of one device.
FC_DEVICE uint64_t swap_if(uint64_t* at, uint64_t expected, uint64_t desired) {
#if defined(__CUDACC__)
  return atomicCAS(reinterpret_cast<unsigned long long*>(at), expected, desired);
#else
  __atomic_compare_exchange_n(at, &expected, desired, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  return expected;
#endif
}

// Counts this block among those that have come here; what they did before is visible to the last of them. One thread.
FC_DEVICE uint64_t count_arrival(uint64_t* at) {
#if defined(__CUDACC__)
  uint64_t before;
  asm volatile("atom.add.acq_rel.gpu.u64 %0, [%1], 1;" : "=l"(before) : "l"(at) : "memory");
  return before;
#else
  return __atomic_fetch_add(at, uint64_t{1}, __ATOMIC_ACQ_REL);
#endif
}

FC_DEVICE uint64_t nanoseconds() {
#if defined(__CUDACC__)
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
#else
  return simulated::nanoseconds();
#endif
}

FC_DEVICE void pause_ns(uint32_t time_ns) {
#if defined(__CUDACC__)
  __nanosleep(time_ns);
#else
  simulated::pause_ns(time_ns);
#endif
}

// A barrier of the block: whether all of its threads said yes.
FC_DEVICE bool all_threads(bool yes) {
#if defined(__CUDACC__)
  return __syncthreads_and(yes) != 0;
#else
  return simulated::Block::all(yes);
#endif
}

}  // namespace fc::cuda

// Memory that the threads of a block share; arguments that a kernel reads where they are.
#if defined(__CUDACC__)
#define FC_GRID_CONSTANT __grid_constant__
#define FC_SHARED(Type, name) __shared__ Type name
#else
#define FC_GRID_CONSTANT
#define FC_SHARED(Type, name) Type& name = ::fc::cuda::simulated::Block::shared<Type>()
#endif

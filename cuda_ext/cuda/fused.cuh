// The launcher of the fused kernel for one dtype; fused_<dtype>.cu instantiate it, so that they compile in parallel.
#pragma once

#include "cuda/fused_kernel.cuh"
#include "cuda/launch.cuh"

namespace fc::cuda {

template <class D>
const char* launch_fused(const FusedCall& call, int32_t scheme, const Where& where) {
  const unsigned blocks = static_cast<unsigned>(call.circle.blocks * call.circle.virtual_ranks);
  return with_scheme(scheme, [&](auto s) {
    const auto kernel = call.map.whole() ? &fused_kernel<D, decltype(s), true> : &fused_kernel<D, decltype(s), false>;
    // Virtual ranks wait for blocks of their own launch. A rank in a process of its own waits for the same blocks of
    // others, and blocks start in order, so that the first that is not through is running on all of them.
    return call.circle.virtual_ranks > 1 ? launch_together(kernel, blocks, kThreads, where, call)
                                         : launch_blocks(kernel, blocks, kThreads, where, call);
  });
}

// How many blocks a device holds at once, of whatever scheme.
template <class D>
int most_fused_blocks(int device) {
  int most = INT32_MAX;
  for (const int32_t scheme : {kIsAsym, kIsSym, kIsSignedExtreme, kIsFloat, kIsMx})
    with_scheme(scheme, [&](auto s) -> const char* {
      for (const auto kernel : {&fused_kernel<D, decltype(s), true>, &fused_kernel<D, decltype(s), false>}) {
        const int blocks = resident_blocks(kernel, kThreads, device);
        most = blocks < most ? blocks : most;
      }
      return nullptr;
    });
  return most;
}

#define FC_FUSED(D, word)                                                            \
  word template const char* launch_fused<D>(const FusedCall&, int32_t, const Where&); \
  word template int most_fused_blocks<D>(int);
FC_FUSED(Bf16, extern)
FC_FUSED(Fp16, extern)
FC_FUSED(Fp32, extern)

}  // namespace fc::cuda

#include "cuda/fused.cuh"

namespace fc::cuda {
FC_FUSED(Bf16, )
}  // namespace fc::cuda

#include "cuda/fused.cuh"

namespace fc::cuda {
FC_FUSED(Fp16, )
}  // namespace fc::cuda

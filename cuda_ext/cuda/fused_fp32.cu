#include "cuda/fused.cuh"

namespace fc::cuda {
FC_FUSED(Fp32, )
}  // namespace fc::cuda

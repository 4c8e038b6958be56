#include "cuda/reduce.cuh"

template const char* fc::cuda::launch_reduce<fc::Fp32>(const fc::cuda::ReduceCall&);

#include "cuda/reduce.cuh"

template const char* fc::cuda::launch_reduce<fc::Bf16>(const fc::cuda::ReduceCall&);

#include "cuda/reduce.cuh"

template const char* fc::cuda::launch_reduce<fc::Fp16>(const fc::cuda::ReduceCall&);

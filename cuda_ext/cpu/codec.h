// The CPU codec and the emulated all-reduce, on raw pointers. T tokens, H hidden, W ranks; strides in elements.
//
// The caller has checked the arguments; every function returns or fills in numbers of non-finite groups.
#pragma once

#include <string>
#include <vector>

#include "cpu/kernels.h"

namespace fc::cpu {

enum Algorithm : int32_t { kTwoStep = 0, kOneStep = 1, kFp32Ordered = 2 };

// x [T, H] in one dtype.
struct Matrix {
  const void* data;
  DType dtype;
  int64_t tokens, hidden, stride;
};

// How a call is carried out; the result does not depend on it.
struct Execution {
  const Kernels* kernels;
  int threads;
};

// The instruction sets that this machine runs, the best first, and the table of one of them (nullptr: not there).
std::vector<std::string> instruction_sets();
const Kernels* find_kernels(const std::string& isa);

int32_t dtype_bytes(DType dtype);
int64_t encode(const Format& format, const Matrix& x, uint8_t* wire, const Execution& how);
int64_t decode(const Format& format, const uint8_t* wire, DType dtype, int64_t tokens, int64_t hidden, float* out,
               const Execution& how);
int64_t round_trip(const Format& format, const Matrix& x, float* out, const Execution& how);

// partials [W, T, H], `rank_stride` elements between ranks -> out [T, H] contiguous in the same dtype.
// `reduce` and `gather` are read where the algorithm has the stage; nonfinite[stage] likewise.
void all_reduce(Algorithm algorithm, const Matrix& partials, int64_t ranks, int64_t rank_stride, const Format& reduce,
                const Format& gather, void* out, int64_t nonfinite[2], const Execution& how);

}  // namespace fc::cpu

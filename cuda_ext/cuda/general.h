// The launchers of the kernels for any format; the same arguments as those of codec.h, which call them.
#pragma once

#include "cuda/codec.h"

namespace fc::cuda {

const char* general_encode(const Format& format, const Matrix& x, uint8_t* wire, const Where& where);
const char* general_decode(const Format& format, const uint8_t* wire, DType dtype, int64_t tokens, int64_t hidden,
                           float* out, unsigned long long* nonfinite, const Where& where);
const char* general_round_trip(const Format& format, const Matrix& x, float* out, unsigned long long* nonfinite,
                               const Where& where);

}  // namespace fc::cuda

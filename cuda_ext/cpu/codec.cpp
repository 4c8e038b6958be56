#include "cpu/codec.h"

#include <algorithm>
#include <memory>

#include "cpu/parallel.h"

namespace fc::cpu {
namespace {

// Below so many elements a thread of its own costs more than it brings.
constexpr int64_t kElementsPerThread = int64_t{1} << 16;

int worker_count(const Execution& how, int64_t elements) {
  return static_cast<int>(std::clamp<int64_t>(elements / kElementsPerThread, 1, std::max(how.threads, 1)));
}

Codec make_codec(const Format& format, DType dtype, int64_t tokens, int64_t hidden) {
  return {format, make_layout(format, tokens, hidden, dtype_bytes(dtype)), make_quantizer(format)};
}

// The memory behind one thread's Scratch, and what that thread counts.
struct Worker {
  std::vector<uint64_t> codes;
  std::vector<float> patched, decoded, acc, rounded;
  std::vector<int32_t> positions;
  int64_t nonfinite[2] = {0, 0};

  void reserve(const Codec& c, bool block) {
    const auto grow = [](auto& memory, int64_t n) {
      if (static_cast<int64_t>(memory.size()) < n) memory.resize(static_cast<size_t>(n));
    };
    if (block) grow(codes, c.layout.block_elements / 8 + 2);
    if (!c.format.spikes) return;
    grow(patched, std::max(c.layout.hidden, c.layout.block_elements));
    grow(decoded, c.layout.hidden);
    grow(positions, 2 * c.layout.groups_per_row);
  }

  Scratch scratch() {
    return {reinterpret_cast<uint8_t*>(codes.data()), patched.data(), decoded.data(), positions.data()};
  }
};

const void* row_of(const Matrix& x, int64_t row) {
  return static_cast<const uint8_t*>(x.data) + row * x.stride * dtype_bytes(x.dtype);
}

int64_t total(const std::vector<Worker>& workers, int stage) {
  int64_t sum = 0;
  for (const Worker& w : workers) sum += w.nonfinite[stage];
  return sum;
}

}  // namespace

int32_t dtype_bytes(DType dtype) { return dtype == kFp32 ? 4 : 2; }

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
#if defined(FC_X86_KERNELS)
  // The levels x86-64-v3 and v4, by the features that tell them apart.
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  if (v4) names.emplace_back(kernels_avx512().isa);
  if (v3) names.emplace_back(kernels_avx2().isa);
#endif
  names.emplace_back(kernels_baseline().isa);
  return names;
}

const Kernels* find_kernels(const std::string& isa) {
  const std::vector<std::string> names = instruction_sets();
  if (std::find(names.begin(), names.end(), isa) == names.end()) return nullptr;
#if defined(FC_X86_KERNELS)
  if (isa == kernels_avx512().isa) return &kernels_avx512();
  if (isa == kernels_avx2().isa) return &kernels_avx2();
#endif
  return &kernels_baseline();
}

int64_t encode(const Format& format, const Matrix& x, uint8_t* wire, const Execution& how) {
  const Codec codec = make_codec(format, x.dtype, x.tokens, x.hidden);
  const EncodeBlock block = how.kernels->codec[x.dtype][scheme_index(format)].encode;
  std::vector<Worker> workers(static_cast<size_t>(worker_count(how, x.tokens * x.hidden)));
  for (Worker& w : workers) w.reserve(codec, true);
  parallel_for(codec.layout.blocks, static_cast<int>(workers.size()), [&](int thread, int64_t begin, int64_t end) {
    Worker& w = workers[static_cast<size_t>(thread)];
    for (int64_t b = begin; b < end; ++b)
      w.nonfinite[0] += block(codec, x.data, x.stride, b, wire + b * codec.layout.block_bytes, w.scratch());
  });
  return total(workers, 0);
}

int64_t decode(const Format& format, const uint8_t* wire, DType dtype, int64_t tokens, int64_t hidden, float* out,
               const Execution& how) {
  const Codec codec = make_codec(format, dtype, tokens, hidden);
  const DecodeBlock block = how.kernels->codec[dtype][scheme_index(format)].decode;
  std::vector<Worker> workers(static_cast<size_t>(worker_count(how, tokens * hidden)));
  for (Worker& w : workers) w.reserve(codec, true);
  parallel_for(codec.layout.blocks, static_cast<int>(workers.size()), [&](int thread, int64_t begin, int64_t end) {
    Worker& w = workers[static_cast<size_t>(thread)];
    for (int64_t b = begin; b < end; ++b)
      w.nonfinite[0] += block(codec, wire + b * codec.layout.block_bytes, b, out, w.scratch());
  });
  return total(workers, 0);
}

int64_t round_trip(const Format& format, const Matrix& x, float* out, const Execution& how) {
  const Codec codec = make_codec(format, x.dtype, x.tokens, x.hidden);
  const RoundTripRow row = how.kernels->codec[x.dtype][scheme_index(format)].to_fp32;
  std::vector<Worker> workers(static_cast<size_t>(worker_count(how, x.tokens * x.hidden)));
  for (Worker& w : workers) w.reserve(codec, false);
  parallel_for(x.tokens, static_cast<int>(workers.size()), [&](int thread, int64_t begin, int64_t end) {
    Worker& w = workers[static_cast<size_t>(thread)];
    for (int64_t t = begin; t < end; ++t) w.nonfinite[0] += row(codec, row_of(x, t), out + t * x.hidden, w.scratch());
  });
  return total(workers, 0);
}

void all_reduce(Algorithm algorithm, const Matrix& partials, int64_t ranks, int64_t rank_stride, const Format& reduce,
                const Format& gather, void* out, int64_t nonfinite[2], const Execution& how) {
  const int64_t hidden = partials.hidden, bytes = dtype_bytes(partials.dtype);
  const bool quantized = algorithm != kFp32Ordered, gathers = algorithm == kTwoStep;
  const Codec first = quantized ? make_codec(reduce, partials.dtype, partials.tokens, hidden) : Codec{};
  const Codec second = gathers ? make_codec(gather, partials.dtype, partials.tokens, hidden) : Codec{};
  const auto& table = how.kernels->codec[partials.dtype];
  const AccumulateRow accumulate = quantized ? table[scheme_index(reduce)].accumulate : nullptr;
  const RoundTripRow finish = gathers ? table[scheme_index(gather)].to_dtype : nullptr;
  const SumRow sum = how.kernels->sum[partials.dtype];
  const RoundRow round = how.kernels->round[partials.dtype];

  std::vector<Worker> workers(static_cast<size_t>(worker_count(how, ranks * partials.tokens * hidden)));
  for (Worker& w : workers) {
    if (quantized) w.reserve(first, false);
    if (gathers) w.reserve(second, false);
    w.acc.resize(static_cast<size_t>(hidden));
    w.rounded.resize(static_cast<size_t>(hidden));
  }
  // A row of all ranks at a time: every partial is read once, sums stay in the cache, the result is written once.
  parallel_for(partials.tokens, static_cast<int>(workers.size()), [&](int thread, int64_t begin, int64_t end) {
    Worker& w = workers[static_cast<size_t>(thread)];
    float* acc = w.acc.data();
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t r = 0; r < ranks; ++r) {
        const void* row = static_cast<const uint8_t*>(row_of(partials, t)) + r * rank_stride * bytes;
        if (quantized) w.nonfinite[0] += accumulate(first, row, acc, r == 0, w.scratch());
        else sum(row, acc, r == 0, hidden);
      }
      void* result = static_cast<uint8_t*>(out) + t * hidden * bytes;
      round(acc, gathers ? w.rounded.data() : result, hidden);
      if (gathers) w.nonfinite[1] += finish(second, w.rounded.data(), result, w.scratch());
    }
  });
  nonfinite[0] = total(workers, 0);
  nonfinite[1] = total(workers, 1);
}

}  // namespace fc::cpu

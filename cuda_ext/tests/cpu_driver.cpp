// The CPU codec over many shapes, formats and instruction sets, on buffers of exactly the sizes that the layout
// promises: meant to run under AddressSanitizer and UndefinedBehaviorSanitizer. Also checks what needs no second
// implementation: decode(encode(x)) equals round_trip(x), and instruction sets agree, also on bytes that no encoder
// writes. Prints the first case that fails.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "cpu/codec.h"

namespace {

using namespace fc;
using namespace fc::cpu;

// A buffer with nothing behind its last byte; 16-byte alignment as the binding demands.
struct Buffer {
  explicit Buffer(int64_t size) : size(size), data(static_cast<uint8_t*>(std::aligned_alloc(16, round_up(size)))) {}
  ~Buffer() { std::free(data); }
  static size_t round_up(int64_t n) { return static_cast<size_t>(n < 16 ? 16 : (n + 15) / 16 * 16); }
  int64_t size;
  uint8_t* data;
};

uint32_t state = 1;
uint32_t random_bits() {
  state ^= state << 13;
  state ^= state >> 17;
  return state ^= state << 5;
}

// Ordinary values with a few of every special kind.
void fill(std::vector<uint8_t>& bytes, DType dtype) {
  const size_t item = static_cast<size_t>(dtype_bytes(dtype));
  for (size_t at = 0; at + item <= bytes.size(); at += item) {
    const uint32_t r = random_bits();
    uint32_t bits = dtype == kBf16   ? 0x3F00u + (r & 0x80FFu)
                    : dtype == kFp16 ? 0x3000u + (r & 0x8FFFu)
                                     : 0x3F000000u + (r & 0x80FFFFFFu);
    if (r % 97 == 0) bits = random_bits();
    std::memcpy(&bytes[at], &bits, item);
  }
}

bool same(const void* a, const void* b, size_t n) { return n == 0 || std::memcmp(a, b, n) == 0; }

bool check(const Format& f, DType dtype, int64_t tokens, int64_t hidden, int threads) {
  const int64_t bytes = dtype_bytes(dtype), values = tokens * hidden;
  std::vector<uint8_t> x(static_cast<size_t>(values * bytes)), partials(static_cast<size_t>(3 * values * bytes));
  fill(x, dtype);
  fill(partials, dtype);
  const Matrix m{x.data(), dtype, tokens, hidden, hidden};
  const int64_t wire_bytes = make_layout(f, tokens, hidden, static_cast<int32_t>(bytes)).total_bytes();
  Buffer first_wire(wire_bytes);
  std::vector<float> first_values, first_from_noise;
  std::vector<uint8_t> first_sum;
  for (const std::string& isa : instruction_sets()) {
    const Execution how{find_kernels(isa), threads};
    Buffer wire(wire_bytes);
    std::vector<float> decoded(static_cast<size_t>(values)), direct(decoded.size());
    std::vector<uint8_t> sum(x.size());
    int64_t stages[2];
    const int64_t n = encode(f, m, wire.data, how);
    if (decode(f, wire.data, dtype, tokens, hidden, decoded.data(), how) != n) return false;
    if (round_trip(f, m, direct.data(), how) != n) return false;
    if (!same(decoded.data(), direct.data(), 4 * decoded.size())) return false;
    for (const Algorithm algorithm : {kTwoStep, kOneStep, kFp32Ordered})
      all_reduce(algorithm, {partials.data(), dtype, tokens, hidden, hidden}, 3, values, f, f, sum.data(), stages, how);
    all_reduce(kTwoStep, {partials.data(), dtype, tokens, hidden, hidden}, 3, values, f, f, sum.data(), stages, how);
    Buffer noise(wire_bytes);
    std::vector<float> from_noise(decoded.size());
    state = 7;  // the same bytes for every instruction set
    for (int64_t i = 0; i < wire_bytes; ++i) noise.data[i] = static_cast<uint8_t>(random_bits() >> 9);
    decode(f, noise.data, dtype, tokens, hidden, from_noise.data(), how);
    if (first_values.empty() && first_sum.empty()) {
      std::memcpy(first_wire.data, wire.data, static_cast<size_t>(wire_bytes));
      first_values = decoded;
      first_sum = sum;
      first_from_noise = from_noise;
    }
    if (!same(first_wire.data, wire.data, static_cast<size_t>(wire_bytes))) return false;
    if (!same(first_values.data(), decoded.data(), 4 * decoded.size()) || first_sum != sum) return false;
    if (!same(first_from_noise.data(), from_noise.data(), 4 * from_noise.size())) return false;
  }
  return true;
}

std::vector<Format> formats() {
  std::vector<Format> all;
  for (int32_t bits = 2; bits <= 8; ++bits)
    for (int32_t scheme = kAsym; scheme <= kSignedExtreme; ++scheme)
      all.push_back({kInt, bits, 0, scheme, 0, 0, 0, 0, 0, 0, 0});
  for (const int32_t kind : {static_cast<int32_t>(kFloat), static_cast<int32_t>(kMx)}) {
    const int32_t scale_bits = kind == kMx ? 8 : 0;
    all.push_back({kind, 8, 0, kNoScheme, 4, 3, 7, 126, kind == kMx ? 8 : 0, scale_bits, 0});
    all.push_back({kind, 8, 0, kNoScheme, 5, 2, 15, 123, kind == kMx ? 15 : 0, scale_bits, 0});
    all.push_back({kind, 6, 0, kNoScheme, 2, 3, 1, 31, kind == kMx ? 2 : 0, scale_bits, 0});
    all.push_back({kind, 4, 0, kNoScheme, 2, 1, 1, 7, kind == kMx ? 2 : 0, scale_bits, 0});
    all.push_back({kind, 4, 0, kNoScheme, 3, 0, 3, 7, kind == kMx ? 4 : 0, scale_bits, 0});
  }
  all.push_back({kMx, 8, 0, kNoScheme, 1, 6, 1, 127, 0, 8, 0});
  all.push_back({kMx, 4, 0, kNoScheme, 1, 2, 1, 7, 0, 5, 0});
  const size_t plain = all.size();
  for (size_t i = 0; i < plain; ++i) {
    all.push_back(all[i]);
    all.back().spikes = 1;
  }
  return all;
}

}  // namespace

// cpu_driver [n]: every n-th case only, for builds that are slow.
int main(int argc, char** argv) {
  const int every = argc > 1 ? std::atoi(argv[1]) : 1;
  constexpr int64_t shapes[][2] = {{0, 64}, {1, 1}, {3, 33}, {5, 100}, {2, 576}, {9, 1000}, {1, 4100}, {70, 1100}};
  int passed = 0, failed = 0, number = 0;
  for (Format f : formats())
    for (const int32_t group : {0, 8, 9, 32, 96, 128, 1024, 4096})
      for (const DType dtype : {kBf16, kFp16, kFp32})
        for (const auto& shape : shapes) {
          if (every > 1 && number++ % every != 0) continue;
          f.group = group;
          const bool ok = check(f, dtype, shape[0], shape[1], shape[0] > 50 ? 3 : 1);
          ok ? ++passed : ++failed;
          if (!ok && failed <= 10)
            std::printf("kind %d bits %d scheme %d exponent %d spikes %d group %d dtype %d: %ld x %ld differs\n",
                        f.kind, f.bits, f.scheme, f.exponent, f.spikes, group, dtype, static_cast<long>(shape[0]),
                        static_cast<long>(shape[1]));
        }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed != 0;
}

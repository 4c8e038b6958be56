// Threads and the floating-point environment of a call.
#pragma once

#include <atomic>
#include <cfenv>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace fc::cpu {

// Rounding to nearest even with subnormals kept, whatever the caller has set (torch.set_flush_denormal, other
// libraries).
class FloatEnvironment {
 public:
#if defined(__SSE2__)
  FloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~FloatEnvironment() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#else
  FloatEnvironment() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~FloatEnvironment() { std::fesetenv(&saved_); }

 private:
  std::fenv_t saved_;
#endif
};

// Calls work(thread, begin, end) over chunks of [0, n) on up to `threads` threads. Threads live for this call only: a
// pool would not survive a fork. `work` must not throw.
template <class Work>
void parallel_for(int64_t n, int threads, const Work& work) {
  const int64_t chunk = n / (int64_t{8} * threads) + 1;
  std::atomic<int64_t> next{0};
  const auto run = [&](int thread) {
    const FloatEnvironment environment;
    for (int64_t begin; (begin = next.fetch_add(chunk, std::memory_order_relaxed)) < n;)
      work(thread, begin, begin + chunk < n ? begin + chunk : n);
  };
  std::vector<std::thread> helpers;
  helpers.reserve(static_cast<size_t>(threads));
  try {
    for (int thread = 1; thread < threads && thread * chunk < n; ++thread) helpers.emplace_back(run, thread);
  } catch (const std::system_error&) {
    // No more threads to be had: those that there are do the work.
  }
  run(0);
  for (std::thread& helper : helpers) helper.join();
}

}  // namespace fc::cpu

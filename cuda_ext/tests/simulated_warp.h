// A warp on the host: 32 fibers that take turns at every warp-wide operation. Lets the kernels of cuda/ be compiled
// with g++ and compared with the CPU codec byte for byte where there is no GPU. It shows neither races nor speed.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#define __global__
#define __launch_bounds__(...)

struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};

// A thread sanitizer has to be told which lane runs.
#if defined(__SANITIZE_THREAD__)
#define FC_THREAD_SANITIZER
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define FC_THREAD_SANITIZER
#endif
#endif
#if defined(FC_THREAD_SANITIZER)
#include <sanitizer/tsan_interface.h>
#define FC_FIBER(call) call
#else
#define FC_FIBER(call)
#endif

namespace fc::cuda::simulated {

struct Index {
  unsigned x;
};

class Warp {
 public:
  static constexpr int kLanes = 32;

  // Runs body() on every lane of one warp.
  void run(const std::function<void()>& body) {
    body_ = &body;
    active() = this;
    FC_FIBER(told_main_ = __tsan_get_current_fiber());
    for (int lane = 0; lane < kLanes; ++lane) start(lane);
    for (bool working = true; working;) {
      working = false;
      for (lane_ = 0; lane_ < kLanes; ++lane_) {
        if (done_[lane_]) continue;
        thread().x = first_thread + static_cast<unsigned>(lane_);
        FC_FIBER(__tsan_switch_to_fiber(told_[lane_], 0));
        swapcontext(&main_, &fibers_[lane_]);
        working = true;
      }
    }
    for (int lane = 0; lane < kLanes; ++lane) FC_FIBER(__tsan_destroy_fiber(told_[lane]));
  }

  // Every lane gives a word and sees those of all lanes. Two buffers: a lane may be one operation ahead of another.
  const uint64_t* exchange(uint64_t word) {
    const int lane = lane_, turn = turn_[lane]++ % 2;
    words_[turn][lane] = word;
    FC_FIBER(__tsan_switch_to_fiber(told_main_, 0));
    swapcontext(&fibers_[lane], &main_);
    return words_[turn];
  }

  int lane() const { return lane_; }
  unsigned first_thread = 0;
  bool verdict = true;  // of the last barrier of the block (simulated_ranks.h)

  static Warp*& active() {
    static thread_local Warp* warp = nullptr;
    return warp;
  }
  static Index& thread() {
    static thread_local Index index{};
    return index;
  }
  static Index& block() {
    static thread_local Index index{};
    return index;
  }

 private:
  static constexpr size_t kStack = size_t{1} << 16;

  static void enter() {
    Warp& warp = *active();
    (*warp.body_)();
    warp.done_[warp.lane_] = true;
    FC_FIBER(__tsan_switch_to_fiber(warp.told_main_, 0));
  }

  void start(int lane) {
    stacks_[lane].resize(kStack);
    FC_FIBER(told_[lane] = __tsan_create_fiber(0));
    done_[lane] = false;
    turn_[lane] = 0;
    getcontext(&fibers_[lane]);
    fibers_[lane].uc_stack.ss_sp = stacks_[lane].data();
    fibers_[lane].uc_stack.ss_size = kStack;
    fibers_[lane].uc_link = &main_;
    makecontext(&fibers_[lane], &Warp::enter, 0);
  }

  ucontext_t main_{}, fibers_[kLanes]{};
  void *told_main_ = nullptr, *told_[kLanes]{};
  std::vector<char> stacks_[kLanes];
  bool done_[kLanes]{};
  int turn_[kLanes]{};
  uint64_t words_[2][kLanes]{};
  int lane_ = 0;
  const std::function<void()>* body_ = nullptr;
};

inline void run(unsigned blocks, int threads, const std::function<void()>& kernel) {
  Warp warp;
  for (Warp::block().x = 0; Warp::block().x < blocks; ++Warp::block().x)
    for (int first = 0; first < threads; first += Warp::kLanes) {
      warp.first_thread = static_cast<unsigned>(first);
      warp.run(kernel);
    }
}

}  // namespace fc::cuda::simulated

#define threadIdx (::fc::cuda::simulated::Warp::thread())
#define blockIdx (::fc::cuda::simulated::Warp::block())

template <class T>
T __shfl_xor_sync(uint32_t, T value, int mask) {
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof value);
  auto& warp = *fc::cuda::simulated::Warp::active();
  const int lane = warp.lane();
  const uint64_t other = warp.exchange(word)[lane ^ mask];
  std::memcpy(&value, &other, sizeof value);
  return value;
}

template <class T>
T __shfl_sync(uint32_t, T value, int source, int width) {
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof value);
  auto& warp = *fc::cuda::simulated::Warp::active();
  const int first = warp.lane() / width * width;
  const uint64_t other = warp.exchange(word)[first + source];
  std::memcpy(&value, &other, sizeof value);
  return value;
}

inline void __syncwarp() { fc::cuda::simulated::Warp::active()->exchange(0); }

inline bool __any_sync(uint32_t, bool predicate) {
  const uint64_t* words = fc::cuda::simulated::Warp::active()->exchange(predicate);
  bool any = false;
  for (int lane = 0; lane < 32; ++lane) any = any || words[lane] != 0;
  return any;
}

inline void atomicAdd(unsigned long long* counter, unsigned long long amount) {
  __atomic_fetch_add(counter, amount, __ATOMIC_RELAXED);
}

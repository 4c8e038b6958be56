// Blocks that run at the same time, on the host: every warp is a thread of the operating system, its lanes take turns
// (simulated_warp.h). So ranks really run beside each other, in an order that nobody controls, and what they tell each
// other goes through the same words with the same release and acquire; a thread sanitizer sees what is not ordered.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "tests/simulated_warp.h"

namespace fc::cuda::simulated {

inline uint64_t nanoseconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

inline void pause_ns(uint32_t time_ns) {
  if (time_ns < 100000) std::this_thread::yield();
  else std::this_thread::sleep_for(std::chrono::nanoseconds(time_ns));
}

// The warps of one block: a barrier, and shared memory.
class Block {
 public:
  explicit Block(int warps) : warps_(warps) {}

  static Block*& active() {
    static thread_local Block* block = nullptr;
    return block;
  }

  // Called by every lane of every warp of the block.
  static bool all(bool yes) {
    auto& warp = *Warp::active();
    const uint64_t* words = warp.exchange(yes);
    bool together = true;
    for (int lane = 0; lane < Warp::kLanes; ++lane) together = together && words[lane] != 0;
    // Lane 0 is the first to go on, so the whole warp waits with it.
    if (warp.lane() == 0) warp.verdict = active()->meet(together);
    return warp.verdict;
  }

  template <class T>
  static T& shared() {
    static_assert(sizeof(T) <= kSharedBytes);
    return *reinterpret_cast<T*>(active()->shared_);
  }

 private:
  static constexpr size_t kSharedBytes = size_t{48} << 10;

  bool meet(bool yes) {
    std::unique_lock<std::mutex> lock(mutex_);
    together_ = together_ && yes;
    const unsigned turn = turn_;
    if (++arrived_ == warps_) {
      verdict_ = together_;
      together_ = true;
      arrived_ = 0;
      ++turn_;
      all_here_.notify_all();
    } else {
      all_here_.wait(lock, [&] { return turn != turn_; });
    }
    return verdict_;  // the next one cannot be reached before every warp has left this one
  }

  alignas(16) unsigned char shared_[kSharedBytes];
  std::mutex mutex_;
  std::condition_variable all_here_;
  int warps_, arrived_ = 0;
  unsigned turn_ = 0;
  bool together_ = true, verdict_ = true;
};

inline void run_together(unsigned blocks, int threads, const std::function<void()>& kernel) {
  const int warps = threads / Warp::kLanes;
  std::vector<std::unique_ptr<Block>> all;
  std::vector<std::thread> running;
  for (unsigned index = 0; index < blocks; ++index) {
    all.push_back(std::make_unique<Block>(warps));
    for (int number = 0; number < warps; ++number)
      running.emplace_back([&kernel, block = all.back().get(), index, number] {
        auto warp = std::make_unique<Warp>();
        Block::active() = block;
        Warp::block().x = index;
        warp->first_thread = static_cast<unsigned>(number * Warp::kLanes);
        warp->run(kernel);
      });
  }
  for (std::thread& thread : running) thread.join();
}

}  // namespace fc::cuda::simulated

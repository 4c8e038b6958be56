// The ranks of the fused all-reduce: their slabs, how they find each other, and the call itself. No tensor library.
//
// Between processes: construct, exchange `handle()`s by any means, `connect`, then `write_patterns`, meet, and
// `wrong_patterns`. Virtual ranks: W slabs on one device, of which one call is all W ranks.
#pragma once

#include <string>
#include <vector>

#include "cuda/codec.h"
#include "cuda/host_memory.h"
#include "cuda/slab.h"

namespace fc::cuda {

struct SelfTest;

// What a debug build (FC_FUSED_DEBUG) may do wrong on purpose; other builds refuse it.
struct Mischief {
  int32_t late_rank = -1;  // pauses between the arrival of data and reading it
  uint32_t late_ns = 0;
  bool unprotected = false;  // inboxes have one generation
};

class Communicator {
 public:
  struct Options {
    int32_t device, world, slots;
    int32_t rank;          // -1: all ranks of `world` are virtual
    uint32_t first_epoch;  // of the round before the first
    bool staged;           // what others write lies in pinned memory of the host: no peer access is needed
  };

  // Throws std::runtime_error, as every function here does where CUDA refuses something.
  explicit Communicator(const Options& options);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  std::string handle() const;
  // Handles of all ranks in order; one's own is not opened. Throws with the number of the rank that cannot be reached.
  void connect(const std::vector<std::string>& handles);
  // The start-up test; all ranks have returned from the first before any calls the second, which gives, for each rank,
  // how many 16-byte vectors that it wrote into this rank's slab are not there.
  void write_patterns();
  std::vector<uint64_t> wrong_patterns();

  // Slots that are in use at a time are at most this many, and so are blocks per rank of a call.
  int32_t most_blocks(DType dtype);
  static const char* why_not(const Format& format);

  // partials and out [T, H] contiguous, or [W, T, H] of virtual ranks. `blocks` 0: as many as the size needs.
  struct Call {
    Algorithm algorithm;  // kTwoStep, kOneStep
    Matrix partials;
    void* out;
    Format reduce, gather;
    unsigned long long* nonfinite;
    int32_t blocks;
    uint64_t deadline_ns;
    void* stream;
    Mischief mischief;
  };
  // One launch, capturable. nullptr, or why there was none.
  const char* all_reduce(const Call& call);

  // The first failure of any rank here, in words; empty where there is none. Reads host memory only.
  std::string failure() const;
  void close();
  const Options& options() const { return options_; }
  // Of GPU memory, and of the host's where the transport is staged.
  int64_t slab_bytes() const;

 private:
  int32_t local_ranks() const { return options_.rank < 0 ? options_.world : 1; }
  int32_t first_rank() const { return options_.rank < 0 ? 0 : options_.rank; }
  void require_connected() const;
  SelfTest self_test(int32_t rank) const;
  Slab slab(int32_t rank) const { return {slab_[rank], home_[rank], options_.world, options_.slots}; }

  Options options_;
  uint8_t* slab_[kMaxRanks] = {};
  uint8_t* home_[kMaxRanks] = {};  // of ranks that are here; the slab itself where nothing is staged
  HostMemory host_[kMaxRanks];     // behind the slabs that are staged
  bool connected_ = false;
  Failure* failures_ = nullptr;
  uint32_t ticket_ = 0;
  int32_t resident_[3] = {};  // blocks that the device holds at once, by dtype
};

}  // namespace fc::cuda

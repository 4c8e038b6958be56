// Who may write and read what, and when: the rounds of one slot, and how a call that cannot go on ends.
//
// A round of a slot: every rank pushes its partial sums (P), waits for those of all ranks and adds them up (S); in a
// two-step it also pushes the sums (G) and waits for all of them (D). Step e of a call pushes the partial sums of the
// next round first, gathers the sums of the last one, and then announces what it has pushed with flags (f):
//
//     P(1) fP(1) | P(2) S(1) G(1) fP(2) fG(1) | P(3) S(2) G(2) D(1) fP(3) fG(2) | ... | S(n) G(n) D(n-1) fG(n) | D(n)
//
// A wait is for a flag: S(e) for fP(e) of all ranks, D(e) for fG(e) of all ranks. Each rank counts the rounds of a slot
// in its epoch, in its own memory, across calls: in step on all ranks, since all make the same calls.
//
// Why nothing is overwritten before it was read, whatever shapes, formats and algorithms follow each other:
// - partial sums of round e take the place of those of round e - 4. Before its P(e) a rank has waited for fP(e - 2) of
//   every rank r, and before that r was through with S(e - 3), or with its whole call where e - 2 begins one.
// - sums of round e take the place of those of round e - 2. Before its G(e) a rank has waited for fP(e) of every rank r,
//   and before that r was through with D(e - 2), or with its whole call where e begins one.
// A wait before one's own next step is all that protects; no acknowledgement travels.
//
// Known mistakes of such kernels, and why they are not made here:
//  1 an epoch that a CUDA graph replays: it is read from device memory and never an argument of the kernel.
//  2 flags or inboxes that move with shape or grid: their addresses come from ranks and slots alone (slab.h).
//  3 no wait at the end of a call: the argument above does not end with a call, because epochs go on.
//  4 the range of fp16: metadata are the extremes themselves, in the dtype of the values (WIRE.md).
//  5 peer memory that loses writes: `Communicator` writes and verifies every inbox of every pair at its start.
//  6 endless waits: every wait has a deadline, and every call after a failed one writes NaN and leaves; a second stream
//    finds the busy word taken; ranks that make different calls find the other's signature beside its epoch.
//  7 handles of memory that cannot be exported: the slab is our own allocation, a user's tensors are never shared.
//  8 data that look like flags, flags that share a word: a flag is a word of its own, stored with release after the
//    block's barrier, polled and then acquired; flags are set before any handle is exchanged.
//  9 sizes: tiles are masked element by element where rows do not divide; a call of any size goes round by round.
// 10 results that differ between runs or ranks: sums are in rank order, and every rank decodes the same bytes.
// 11 multicast: not used.
#pragma once

#include "cuda/planes.cuh"
#include "cuda/scoped.cuh"
#include "cuda/slab.h"

namespace fc::cuda {

// What every block of a call knows of it and of the other ranks.
struct Circle {
  uint8_t* slab[kMaxRanks];
  uint8_t* home[kMaxRanks];  // of the ranks of this launch
  Failure* failure;  // of the first rank of this launch; those of virtual ranks follow
  int32_t world, slots;
  int32_t rank;           // the first rank of this launch
  int32_t virtual_ranks;  // how many ranks this launch is
  int32_t blocks;         // slots in use
  uint32_t signature;     // of the call: ranks that make different calls notice
  uint32_t ticket;        // of the call on this rank, not 0: a second stream notices
  uint64_t deadline_ns;   // of one wait; 0 for none
#if defined(FC_FUSED_DEBUG)
  int32_t late_rank;     // pauses between arrival and reading, in each round; -1 for none
  uint32_t late_ns;
  int32_t unprotected;  // 1: one generation of inboxes, which the argument above does not cover
#endif
};

// What the threads of a block tell each other.
struct SlotNews {
  bool intruder, clean;
};

class Slot {
 public:
  FC_DEVICE Slot(const Circle& circle, SlotNews& shared_news)
      : c(circle), rank(circle.rank + static_cast<int32_t>(blockIdx.x) % circle.virtual_ranks),
        index(static_cast<int32_t>(blockIdx.x) / circle.virtual_ranks), news(shared_news) {}

  const Circle& c;
  const int32_t rank, index;

  // Whether the call may begin: no other call is under way, and none has failed. `rounds` is how many this one has.
  FC_DEVICE bool enter(int32_t rounds) {
    first_ = control()->epoch[index] + 1;
    last_ = first_ + static_cast<uint32_t>(rounds) - 1;
    bool fine = true;
    // Three warps ask at the same time.
    if (threadIdx.x == 0) {
      const uint64_t ticket = swap_if(&control()->busy, 0, c.ticket);
      news.intruder = ticket != 0 && ticket != c.ticket;
      if (news.intruder) fine = give_up(kBusy, kPartials, rank, first_);
    } else if (threadIdx.x == 32) {
      fine = load_acquire(&control()->failed) == 0;
    } else if (threadIdx.x == 64) {
      fine = load_acquire(slab(rank).told()) == 0 || give_up(kTold, kPartials, rank, first_);
    }
    return all_threads(fine);
  }
  // Whether another call holds this rank; this block then has no part in `leave`.
  FC_DEVICE bool is_intruder() const { return news.intruder; }

  FC_DEVICE uint32_t epoch(int32_t round) const { return first_ + static_cast<uint32_t>(round); }

  FC_DEVICE uint8_t* inbox(int32_t of, int32_t phase, uint32_t epoch, int32_t source) const {
#if defined(FC_FUSED_DEBUG)
    if (c.unprotected) epoch = 0;
#endif
    return slab(of).inbox(of == source, phase, index, epoch, source, static_cast<int32_t>(threadIdx.x) / 32);
  }

  // Tells all ranks that what this block has pushed is there: the partial sums of a round, the sums of the one before.
  FC_DEVICE void post(int32_t round, bool partials, bool sums) const {
    all_threads(true);
    const int32_t to = static_cast<int32_t>(threadIdx.x) % 32, phase = static_cast<int32_t>(threadIdx.x) / 32;
    if (to < c.world && (phase == kPartials ? partials : phase == kSums && sums))
      store_release(slab(to).flag(phase, index, rank),
                    static_cast<uint64_t>(c.signature) << 32 | epoch(phase == kPartials ? round : round - 1));
  }

  // Waits for all ranks; false where the call is given up.
  FC_DEVICE bool wait(int32_t phase, int32_t round) const {
    const int32_t source = static_cast<int32_t>(threadIdx.x);
    const bool fine = all_threads(source >= c.world || arrives(phase, source, epoch(round)));
#if defined(FC_FUSED_DEBUG)
    if (rank == c.late_rank) be_late();
#endif
    return fine;
  }

  // Ends the call. True for the last block of this rank where the call has failed: nobody writes to the output any more,
  // and all of it has to become NaN.
  FC_DEVICE bool leave() const {
    all_threads(true);
    if (threadIdx.x == 0) {
      control()->epoch[index] = last_;
      const bool last = count_arrival(&control()->done) == static_cast<uint64_t>(c.blocks) - 1;
      news.clean = last && (load_relaxed(&control()->failed) || load_relaxed(slab(rank).told()));
      if (last) {
        control()->done = 0;
        store_release(&control()->busy, 0);
      }
    }
    all_threads(true);
    return news.clean;
  }

 private:
#if defined(FC_FUSED_DEBUG)
  FC_DEVICE void be_late() const {
    const uint64_t until = nanoseconds() + c.late_ns;
    while (threadIdx.x == 0 && nanoseconds() < until) pause_ns(500000);
    all_threads(true);
  }
#endif
  static constexpr uint32_t kTurnsPerLook = 128, kPatientTurns = 4096, kPauseNs = 200;

  FC_DEVICE Slab slab(int32_t of) const { return {c.slab[of], c.home[of], c.world, c.slots}; }
  FC_DEVICE Control* control() const { return slab(rank).control(); }

  // Epochs may wrap around.
  static FC_DEVICE bool reached(uint32_t epoch, uint32_t wanted) { return static_cast<int32_t>(epoch - wanted) >= 0; }

  FC_DEVICE bool arrives(int32_t phase, int32_t source, uint32_t epoch) const {
    const uint64_t* flag = slab(rank).flag(phase, index, source);
    uint64_t found = load_acquire(flag);  // as a rule it is there already
    if (!reached(static_cast<uint32_t>(found), epoch)) {
      if (!polled(flag, phase, source, epoch)) return false;
      found = load_acquire(flag);
    }
    // A rank that is ahead may be in its next call already.
    const uint32_t signature = static_cast<uint32_t>(found >> 32);
    if (signature == c.signature || !reached(last_, static_cast<uint32_t>(found))) return true;
    return give_up(kOtherCall, phase, source, epoch, signature);
  }

  FC_DEVICE bool polled(const uint64_t* flag, int32_t phase, int32_t source, uint32_t epoch) const {
    uint64_t since = 0;
    for (uint32_t turn = 1; !reached(static_cast<uint32_t>(load_relaxed(flag)), epoch); ++turn) {
      if (turn % kTurnsPerLook != 0) continue;
      if (load_relaxed(&control()->failed)) return false;
      if (load_relaxed(slab(rank).told())) return give_up(kTold, phase, source, epoch);
      const uint64_t now = nanoseconds();
      if (since == 0) since = now;
      if (c.deadline_ns != 0 && now - since > c.deadline_ns) return give_up(kLate, phase, source, epoch);
      if (turn > kPatientTurns) pause_ns(kPauseNs);
    }
    return true;
  }

  // One thread. Only the first failure of a rank is kept, and the others are told of it.
  FC_DEVICE bool give_up(Reason reason, int32_t phase, int32_t source, uint32_t epoch, uint32_t signature = 0) const {
    if (swap_if(&control()->failed, 0, 1) != 0) return false;
    Failure* failure = c.failure + (rank - c.rank);
    failure->slot = static_cast<uint32_t>(index);
    failure->phase = static_cast<uint32_t>(phase);
    failure->source = static_cast<uint32_t>(reason == kTold ? load_acquire(slab(rank).told()) - 1 : source);
    failure->epoch = epoch;
    failure->expected = c.signature;
    failure->found = signature;
    store_release(&failure->reason, reason);
    for (int32_t r = 0; r < c.world; ++r)
      if (r != rank) store_release(slab(r).told(), static_cast<uint64_t>(rank) + 1);
    return false;
  }

  SlotNews& news;
  uint32_t first_ = 0, last_ = 0;
};

}  // namespace fc::cuda

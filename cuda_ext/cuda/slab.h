// The memory that the ranks of a communicator write into: one slab per rank, allocated and exchanged once.
//
//     control | flags [phase][slot][source] | partials [slot][generation 4][source][warp] | sums [slot][generation 2]...
//
// It lies in the memory of the rank's GPU, which the others reach (peer access), or twice: `home` there, for what the
// rank alone uses, and `base` in pinned memory of the host, for what others write (staged).
//
// A slot is a block of threads; block b of every rank talks to block b of the others only. Addresses depend on the
// numbers of ranks and slots alone: never on a shape, a format, or how many slots a call uses.
#pragma once

#include "fc/host_device.h"

namespace fc::cuda {

constexpr int kMaxRanks = 8, kMaxSlots = 1024;
constexpr int kSlotWarps = 8;  // each works on one block of 1024 elements at a time
// The largest encoded block: codes of 8 bits, and two fp32 metadata of 32 groups.
constexpr int kMostBlockBytes = 1024 + 2 * 4 * 32, kFewestGroup = 32;
// What a rank sends in round e of a slot stays untouched until round e + kGenerations (fused_protocol.cuh says why).
constexpr int kPartialGenerations = 4, kSumGenerations = 2;

enum Phase : int32_t { kPartials = 0, kSums = 1, kPhases = 2 };

// Why a call was given up. A rank that is told so by another one did not find out itself.
enum Reason : uint32_t { kNoFailure = 0, kLate = 1, kOtherCall = 2, kTold = 3, kBusy = 4 };

// The first failure of a rank, in memory that the host reads without waiting for the device. `reason` is written last.
struct Failure {
  uint64_t reason;
  uint32_t slot, phase, source, epoch;  // what was waited for
  uint32_t expected, found;             // calls' signatures where they differ
};

// A rank's own, at home; but `told` is written by the others: 1 + the rank that gave up.
struct Control {
  uint64_t failed;  // sticky: no later call does anything but write NaN
  uint64_t told;
  uint64_t busy;  // ticket of the call that is under way
  uint64_t done;  // its blocks that are through
  uint64_t wrong[kMaxRanks];  // vectors of each rank that the start-up test found to be wrong
  uint32_t epoch[kMaxSlots];
};

struct Slab {
  uint8_t* base;  // where others write
  uint8_t* home;  // where only the rank itself does; null for whoever is another rank
  int32_t world, slots;

  static FC_FN int64_t flags_at() { return (static_cast<int64_t>(sizeof(Control)) + 255) / 256 * 256; }
  static FC_FN int64_t inbox_bytes() { return int64_t{kSlotWarps} * kMostBlockBytes; }
  FC_FN int64_t partials_at() const {
    return flags_at() + (int64_t{kPhases} * slots * world * 8 + 255) / 256 * 256;
  }
  FC_FN int64_t sums_at() const {
    return partials_at() + int64_t{slots} * kPartialGenerations * world * inbox_bytes();
  }
  FC_FN int64_t bytes() const { return sums_at() + int64_t{slots} * kSumGenerations * world * inbox_bytes(); }

  FC_FN Control* control() const { return reinterpret_cast<Control*>(home); }
  FC_FN uint64_t* told() const { return &reinterpret_cast<Control*>(base)->told; }
  // 64 bits: the epoch in the low half, the signature of the call in the high half.
  FC_FN uint64_t* flag(int32_t phase, int32_t slot, int32_t source) const {
    return reinterpret_cast<uint64_t*>(base + flags_at()) + (int64_t{phase} * slots + slot) * world + source;
  }
  // `own`: of what the rank sends to itself.
  FC_FN uint8_t* inbox(bool own, int32_t phase, int32_t slot, uint32_t generation, int32_t source, int32_t warp) const {
    const int32_t generations = phase == kPartials ? kPartialGenerations : kSumGenerations;
    const int64_t index = (int64_t{slot} * generations + generation % generations) * world + source;
    return (own ? home : base) + (phase == kPartials ? partials_at() : sums_at()) + index * inbox_bytes() + warp * kMostBlockBytes;
  }
};

}  // namespace fc::cuda

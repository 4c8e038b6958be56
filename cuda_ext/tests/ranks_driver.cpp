// Ranks of the fused all-reduce as threads, for a thread sanitizer: what a rank reads without having waited for it, or
// writes before it was read, is a data race. With the argument `unprotected` inboxes have one generation, which must
// show. Exit status 1 where ranks end with different values (the sanitizer has a status of its own).
#include <cstdio>
#include <cstring>
#include <vector>

#include "cuda/device.cuh"
#include "cuda/fused_kernel.cuh"

using namespace fc;
using namespace fc::cuda;

namespace {

constexpr int32_t kWorld = 2, kSlots = 2;

// INT4 of groups of 32, two-step or one-step, on slabs that live through all calls.
bool ranks_agree(std::vector<std::vector<uint64_t>>& slabs, int64_t tokens, bool gathers, bool unprotected, int turn) {
  const int64_t hidden = 1000, elements = tokens * hidden;
  std::vector<uint16_t> partials(static_cast<size_t>(kWorld * elements)), out(partials.size(), 7);
  uint32_t state = 1u + static_cast<uint32_t>(turn);
  for (uint16_t& x : partials) x = static_cast<uint16_t>(0x3E00u + ((state = state * 1664525u + 1013904223u) >> 22));
  const Format format{kInt, 4, 32, kAsym, 0, 0, 0, 0, 0, 0, 0};
  Failure failures[kWorld] = {};
  unsigned long long nonfinite[2] = {};
  FusedCall call{};
  for (size_t r = 0; r < kWorld; ++r)
    call.circle.slab[r] = call.circle.home[r] = reinterpret_cast<uint8_t*>(slabs[r].data());
  call.circle.failure = failures;
  call.circle.world = call.circle.virtual_ranks = kWorld;
  call.circle.slots = kSlots;
  call.circle.blocks = 1 + turn % kSlots;
  call.circle.signature = call.circle.ticket = static_cast<uint32_t>(turn + 1);
  call.circle.late_rank = -1;
  call.circle.unprotected = unprotected;
  call.map = TileMap::make(tokens, hidden, true, format.group, false);
  call.gathers = gathers;
  call.share(call.map.tiles());
  call.reduce = call.gather = WireParams::make(format, make_layout(format, tokens, hidden, 2));
  call.partials = partials.data();
  call.out = out.data();
  call.elements = elements;
  call.nonfinite = nonfinite;
  launch_together(&fused_kernel<Bf16, Asym, false>, static_cast<unsigned>(call.circle.blocks * kWorld), kThreads, {-1, nullptr},
                  call);
  return std::memcmp(out.data(), out.data() + elements, static_cast<size_t>(2 * elements)) == 0;
}

}  // namespace

int main(int count, char** arguments) {
  const bool unprotected = count > 1 && std::strcmp(arguments[1], "unprotected") == 0;
  const size_t words = static_cast<size_t>(Slab{nullptr, nullptr, kWorld, kSlots}.bytes()) / sizeof(uint64_t) + 1;
  std::vector<std::vector<uint64_t>> slabs(kWorld, std::vector<uint64_t>(words, 0));
  for (int turn = 0; turn < 6; ++turn)
    if (!ranks_agree(slabs, 1 + 25 * (turn % 3), turn % 2 == 0, unprotected, turn) && !unprotected)
      return std::printf("ranks differ in call %d\n", turn), 1;
  std::printf("done\n");
  return 0;
}

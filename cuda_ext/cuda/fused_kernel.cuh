// The all-reduce between ranks in one launch: encode, push to the other ranks, add in rank order, and in a two-step
// encode the sums, push them, decode. Every byte that travels is a byte of the wire format (WIRE.md).
//
// A warp works on a tile of 1024 elements, a block of the message. Tile t belongs to the rank that owns block t.
// A round of a slot takes kSlotWarps tiles of every owner (two-step), or kSlotWarps tiles in all (one-step).
#pragma once

#include "cuda/codec_kernels.cuh"
#include "cuda/fused_protocol.cuh"

namespace fc::cuda {

static_assert(kSlotWarps == kWarps);
constexpr int kBlocksPerSm = 2;  // with three, masked tiles spill registers

struct FusedCall {
  Circle circle;
  bool gathers;  // two-step
  int32_t rounds;
  int64_t begin[kMaxRanks], end[kMaxRanks];  // of the tiles that each rank adds up
  TileMap map;
  WireParams reduce, gather;
  // [T, H] contiguous; virtual ranks follow each other `elements` apart.
  const void* partials;
  void* out;
  int64_t elements;
  unsigned long long* nonfinite;  // [0] groups of this rank's partial sums, [1] of the sums that it owns

  // In a two-step each rank adds up its share of the tiles, in a one-step all of them.
  void share(int64_t tiles) {
    const int64_t world = circle.world;
    for (int32_t r = 0; r < circle.world; ++r) {
      begin[r] = gathers ? r * tiles / world : 0;
      end[r] = gathers ? (r + 1) * tiles / world : tiles;
    }
    const int64_t portions = ceil_div(gathers ? ceil_div(tiles, world) : tiles, kSlotWarps);
    if (portions < circle.blocks) circle.blocks = static_cast<int32_t>(portions);
    rounds = static_cast<int32_t>(ceil_div(portions, circle.blocks));
  }
};

struct FusedShared {
  alignas(16) uint8_t staged[kWarps][kMostBlockBytes];
  SlotNews news;
};

// Adds up, or takes, what a block stands for: sink(load, element, value), NaN of any pattern in non-finite groups.
template <class D, class S, int Bits, class Sink>
FC_DEVICE void decode_block(const uint8_t* block, const WireParams& p, const Sink& sink) {
  using Raw16 = typename D::Bits;
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  const LaneCodes<Bits> codes = LaneCodes<Bits>::load(block, p, lane);
  const Quantizer q = p.quantizer;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int32_t k = (kLoadElements * i + kPerLane * lane) >> p.group_shift;
    Meta m{};
    if constexpr (S::kScaleCode) m.scale_code = block[p.scale + k];
    else m.first = D::widen(reinterpret_cast<const Raw16*>(block + p.meta[0])[k]);
    if constexpr (S::kTwoMeta) m.second = D::widen(reinterpret_cast<const Raw16*>(block + p.meta[1])[k]);
    Scale s = S::scale(q, m);
    if (!travelled_finite<S>(q, m)) s.step = canonical_nan();
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) sink(i, j, S::value(s, S::level_of(q, codes.code(i, j))));
  }
}

// One rank's block of threads in one call; both stages have the scheme S. `kWhole` is map.whole(): nothing is missing.
template <class D, class S, bool kWhole>
class Worker {
 public:
  using Bits = typename D::Bits;

  FC_DEVICE Worker(const FusedCall& call, FusedShared& shared)
      : c(call), slot(call.circle, shared.news), warp(static_cast<int32_t>(threadIdx.x) / 32),
        lane(static_cast<int32_t>(threadIdx.x) % 32), staged(shared.staged[warp]),
        partial(static_cast<const Bits*>(call.partials) + (slot.rank - call.circle.rank) * call.elements),
        out(static_cast<Bits*>(call.out) + (slot.rank - call.circle.rank) * call.elements) {}

  FC_DEVICE void run() {
    if (!slot.enter(c.rounds)) {
      if (slot.is_intruder()) return write_nan(slot.index, c.circle.blocks);
    } else {
      reduce();
    }
    if (slot.leave()) write_nan(0, 1);
  }

 private:
  // Partial sums are pushed one round ahead, sums are gathered one round behind, and what was pushed is announced at the
  // end of a round, when it has arrived: nothing waits for what was begun just before.
  FC_DEVICE void reduce() {
    push_partials(0);
    slot.post(0, true, false);
    for (int32_t round = 0; round < c.rounds; ++round) {
      const bool more = round + 1 < c.rounds;
      if (more) push_partials(round + 1);
      if (!slot.wait(kPartials, round)) return;
      add_up(round);
      if (c.gathers && round > 0 && !gather(round - 1)) return;
      if (more || c.gathers) slot.post(round + 1, more, c.gathers);
    }
    if (c.gathers) (void)gather(c.rounds - 1);
  }

  FC_DEVICE bool gather(int32_t round) const {
    if (!slot.wait(kSums, round)) return false;
    store_gathered(round);
    return true;
  }

  // The tile of this warp in a round, among those of an owner; -1 where there is none.
  FC_DEVICE int64_t tile_of(int32_t round, int32_t owner) const {
    const int64_t tile =
        c.begin[owner] + (static_cast<int64_t>(round) * c.circle.blocks + slot.index) * kWarps + warp;
    return tile < c.end[owner] ? tile : -1;
  }

  FC_DEVICE TileMap::Place place(int64_t tile, int i) const {
    const int32_t e = kLoadElements * i + kPerLane * lane;
    if constexpr (kWhole) return {0, static_cast<int32_t>(tile * kTile) + e, kPerLane};
    else return c.map.place(tile, e, kPerLane);
  }

  FC_DEVICE bool vectors() const { return kWhole || c.map.vectors; }

  // Encodes values into this warp's staging memory.
  FC_DEVICE void stage(const Raw<D> (&raw)[kLoads], int32_t (&count)[kLoads], const WireParams& p,
                       unsigned long long* nonfinite) const {
    __syncwarp();  // what stood there has been read
    encode_tile<D, S>(raw, count, p, staged, nonfinite);
    __syncwarp();
  }

  FC_DEVICE void push(uint8_t* to, int32_t bytes) const {
    for (int32_t at = 16 * lane; at < bytes; at += 16 * 32)
      store_vector(to + at, *reinterpret_cast<const uint4*>(staged + at));
  }
  FC_DEVICE void push_to_all(int32_t phase, uint32_t epoch, int32_t bytes) const {
    // Each rank begins with another one, so that no link carries what all of them send.
    for (int32_t step = 1; step <= c.circle.world; ++step)
      push(slot.inbox((slot.rank + step) % c.circle.world, phase, epoch, slot.rank), bytes);
  }

  FC_DEVICE void push_partials(int32_t round) const {
    const uint32_t epoch = slot.epoch(round);
    const int32_t parts = c.gathers ? c.circle.world : 1;
    for (int32_t step = 1; step <= parts; ++step) {
      const int32_t owner = (slot.rank + step) % c.circle.world;
      const int64_t tile = tile_of(round, owner);
      if (tile < 0) continue;  // the whole warp
      Raw<D> raw[kLoads];
      int32_t count[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const TileMap::Place at = place(tile, i);
        count[i] = at.count;
        raw[i] = load_raw<D>(partial + at.row * c.map.columns + at.column, at.count, vectors());
      }
      stage(raw, count, c.reduce, c.nonfinite);
      if (c.gathers) push(slot.inbox(owner, kPartials, epoch, slot.rank), c.reduce.block_bytes);
      else push_to_all(kPartials, epoch, c.reduce.block_bytes);
    }
  }

  // What all ranks have sent for this warp's tile, added from +0 in rank order and rounded once; missing elements as
  // `load_raw` leaves them.
  FC_DEVICE void sum(int32_t round, int64_t tile, Raw<D> (&raw)[kLoads], int32_t (&count)[kLoads]) const {
    float acc[kLoads][kPerLane] = {};
    for (int32_t source = 0; source < c.circle.world; ++source) {
      const uint8_t* block = slot.inbox(slot.rank, kPartials, slot.epoch(round), source);
      decode(block, c.reduce, [&acc](int i, int j, float v) { acc[i][j] = add(acc[i][j], v); });
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      count[i] = place(tile, i).count;
      if (!vectors()) {
#pragma unroll
        for (int j = 1; j < kPerLane; ++j) acc[i][j] = j < count[i] ? acc[i][j] : acc[i][0];
      }
      raw[i] = round_raw<D>(acc[i]);
    }
  }

  // This warp's share of what this rank adds up in a round.
  FC_DEVICE void add_up(int32_t round) const {
    const int64_t tile = tile_of(round, slot.rank);
    if (tile < 0) return;
    Raw<D> raw[kLoads];
    int32_t count[kLoads];
    sum(round, tile, raw, count);
    if (!c.gathers) return store(tile, raw);
    stage(raw, count, c.gather, c.nonfinite + 1);
    push_to_all(kSums, slot.epoch(round), c.gather.block_bytes);
  }

  FC_DEVICE void store_gathered(int32_t round) const {
    for (int32_t owner = 0; owner < c.circle.world; ++owner) {
      const int64_t tile = tile_of(round, owner);
      if (tile < 0) continue;
      float values[kLoads][kPerLane];
      Raw<D> raw[kLoads];
      decode(slot.inbox(slot.rank, kSums, slot.epoch(round), owner), c.gather,
             [&values](int i, int j, float v) { values[i][j] = v; });
#pragma unroll
      for (int i = 0; i < kLoads; ++i) raw[i] = round_raw<D>(values[i]);
      store(tile, raw);
    }
  }

  template <class Sink>
  FC_DEVICE void decode(const uint8_t* block, const WireParams& p, const Sink& sink) const {
    with_bits(p.bits, [&](auto bits) { decode_block<D, S, decltype(bits)::value>(block, p, sink); });
  }

  FC_DEVICE void store(int64_t tile, const Raw<D> (&raw)[kLoads]) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const TileMap::Place at = place(tile, i);
      store_raw<D>(out + at.row * c.map.columns + at.column, raw[i], at.count, vectors());
    }
  }

  FC_DEVICE void write_nan(int64_t share, int64_t shares) const {
    for (int64_t i = share * kThreads + threadIdx.x; i < c.elements; i += shares * kThreads) out[i] = D::kNan;
  }

  const FusedCall& c;
  Slot slot;
  const int32_t warp, lane;
  uint8_t* const staged;
  const Bits* const partial;
  Bits* const out;
};

template <class D, class S, bool kWhole>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) fused_kernel(FC_GRID_CONSTANT const FusedCall call) {
  FC_SHARED(FusedShared, shared);
  Worker<D, S, kWhole>(call, shared).run();
}

}  // namespace fc::cuda

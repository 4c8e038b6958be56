// Slabs, their exchange, and the launch of a call.
#include "cuda/communicator.h"

#include "cuda/fused.cuh"
#include "cuda/memory.cuh"
#include "cuda/self_test.cuh"

namespace fc::cuda {
namespace {

constexpr const char* kPhaseNames[] = {"partial sums", "sums"};

// FNV-1a over integers: calls that differ in any of them hardly ever have the same signature.
struct Signature {
  uint32_t value = 2166136261u;
  void add(int64_t n) {
    for (int byte = 0; byte < 8; ++byte) value = (value ^ (static_cast<uint64_t>(n) >> (8 * byte) & 255u)) * 16777619u;
  }
  void add(const Format& f) {
    for (int64_t n : {f.kind, f.bits, f.group, f.scheme, f.exponent, f.mantissa, f.bias, f.max_code, f.emax,
                      f.scale_bits, f.spikes})
      add(n);
  }
};

void check(const char* why, const char* what) {
  if (why != nullptr) throw std::runtime_error(std::string(what) + ": " + why);
}

}  // namespace

Communicator::Communicator(const Options& options) : options_(options) {
  if (options.world < 2 || options.world > kMaxRanks)
    throw std::runtime_error("a communicator has 2 to " + std::to_string(kMaxRanks) + " ranks");
  if (options.slots < 1 || options.slots > kMaxSlots)
    throw std::runtime_error("a communicator has 1 to " + std::to_string(kMaxSlots) + " slots");
  if (options.rank >= options.world) throw std::runtime_error("the rank is not one of the ranks");
#if defined(__CUDACC__)
  const DeviceScope scope(options.device);
  check(scope.why(), "the device");
#endif
  try {
    failures_ = static_cast<Failure*>(allocate_visible(static_cast<int64_t>(sizeof(Failure)) * local_ranks()));
    // Flags and epochs are set before anybody else knows of the slab.
    const std::vector<uint64_t> flags(static_cast<size_t>(kPhases * options.slots * options.world), options.first_epoch);
    const std::vector<uint32_t> epochs(kMaxSlots, options.first_epoch);
    for (int32_t r = first_rank(); r < first_rank() + local_ranks(); ++r) {
      home_[r] = allocate_zeros(slab_bytes());
      slab_[r] = home_[r];
      if (options.staged) {
        host_[r] = HostMemory::create(slab_bytes());
        slab_[r] = reachable(host_[r]);
      }
      to_device(slab(r).flag(0, 0, 0), flags.data(), static_cast<int64_t>(flags.size() * sizeof flags[0]));
      to_device(slab(r).control()->epoch, epochs.data(), static_cast<int64_t>(sizeof(Control::epoch)));
    }
  } catch (...) {
    close();
    throw;
  }
  connected_ = options.rank < 0;
}

Communicator::~Communicator() { close(); }

void Communicator::close() {
#if defined(__CUDACC__)
  const DeviceScope scope(options_.device);
#endif
  for (int32_t r = 0; r < options_.world && r < kMaxRanks; ++r) {
    if (host_[r]) no_longer_reachable(host_[r]);
    else if (slab_[r] != nullptr && home_[r] == nullptr) close_imported(slab_[r]);
    host_[r] = {};
    slab_[r] = nullptr;
    if (home_[r] != nullptr) release(home_[r]);
    home_[r] = nullptr;
  }
  if (failures_ != nullptr) release_visible(failures_);
  failures_ = nullptr;
  connected_ = false;
}

int64_t Communicator::slab_bytes() const { return Slab{nullptr, nullptr, options_.world, options_.slots}.bytes(); }

void Communicator::require_connected() const {
  if (!connected_) throw std::runtime_error("the communicator is closed, or not connected yet");
}

std::string Communicator::handle() const {
  if (options_.rank < 0 || slab_[options_.rank] == nullptr) throw std::runtime_error("there is no slab to share");
  return options_.staged ? host_[options_.rank].name() : export_memory(slab_[options_.rank]);
}

void Communicator::connect(const std::vector<std::string>& handles) {
  if (options_.rank < 0 || connected_) throw std::runtime_error("the communicator is connected already");
  if (handles.size() != static_cast<size_t>(options_.world)) throw std::runtime_error("one handle per rank is needed");
#if defined(__CUDACC__)
  const DeviceScope scope(options_.device);
  check(scope.why(), "the device");
#endif
  for (int32_t r = 0; r < options_.world; ++r) {
    if (r == options_.rank) continue;
    try {
      const std::string& handle = handles[static_cast<size_t>(r)];
      if (options_.staged) {
        host_[r] = HostMemory::open(handle, slab_bytes());
        slab_[r] = reachable(host_[r]);
      } else {
        slab_[r] = import_memory(handle);
      }
    } catch (const std::runtime_error& error) {
      throw std::runtime_error("rank " + std::to_string(r) + ": " + error.what());
    }
  }
  connected_ = true;
}

SelfTest Communicator::self_test(int32_t rank) const {
  SelfTest test{{}, home_[rank], options_.world, options_.slots, rank};
  for (int32_t r = 0; r < options_.world; ++r) test.slab[r] = slab_[r];
  return test;
}

void Communicator::write_patterns() {
  require_connected();
  for (int32_t r = first_rank(); r < first_rank() + local_ranks(); ++r)
    check(launch_blocks(&cuda::write_patterns, static_cast<unsigned>(options_.slots), kThreads,
                        {options_.device, nullptr}, self_test(r)), "the start-up test");
#if defined(__CUDACC__)
  const DeviceScope scope(options_.device);
  require(cudaDeviceSynchronize(), "the start-up test");
#endif
}

std::vector<uint64_t> Communicator::wrong_patterns() {
  require_connected();
#if defined(__CUDACC__)
  const DeviceScope scope(options_.device);
#endif
  std::vector<uint64_t> wrong(static_cast<size_t>(options_.world), 0);
  for (int32_t rank = first_rank(); rank < first_rank() + local_ranks(); ++rank) {
    check(launch_blocks(&verify_patterns, static_cast<unsigned>(options_.slots), kThreads, {options_.device, nullptr},
                        self_test(rank)), "the start-up test");
    uint64_t found[kMaxRanks];
    to_host(found, slab(rank).control()->wrong, sizeof found);
    for (size_t r = 0; r < wrong.size(); ++r) wrong[r] += found[r];
  }
  return wrong;
}

int32_t Communicator::most_blocks(DType dtype) {
  int32_t& resident = resident_[dtype];  // asked for once: it is the same for every call
  if (resident == 0)
    (void)with_dtype(dtype, [&](auto d) -> const char* {
      resident = most_fused_blocks<decltype(d)>(options_.device);
      return nullptr;
    });
  const int32_t per_rank = resident / local_ranks();
  return per_rank < options_.slots ? per_rank : options_.slots;
}

const char* Communicator::why_not(const Format& f) {
  if (const char* why = why_not_tiled(f)) return why;
  return f.group < kFewestGroup ? "groups of less than 32 elements do not fit the inboxes" : nullptr;
}

const char* Communicator::all_reduce(const Call& call) {
  require_connected();
  const Matrix& x = call.partials;
  const bool gathers = call.algorithm == kTwoStep;
  if (const char* why = why_not(call.reduce)) return why;
  if (const char* why = gathers ? why_not(call.gather) : nullptr) return why;
  const int32_t unit = gathers && call.gather.group > call.reduce.group ? call.gather.group : call.reduce.group;
  if (gathers && scheme_index(call.reduce) != scheme_index(call.gather)) return "the two stages have different schemes";
  if (gathers && call.reduce.group != call.gather.group && x.hidden % unit != 0)
    return "rows do not hold whole groups of both stages, so their blocks would hold different elements";
  if (const char* why = why_too_large(x.tokens, x.hidden, unit)) return why;
#if !defined(FC_FUSED_DEBUG)
  if (call.mischief.late_rank >= 0 || call.mischief.unprotected) return "only a debug build does anything wrong";
#endif

  const bool aligned = aligned16(x.data) && aligned16(call.out) &&
                       (local_ranks() == 1 || aligned_rows(x.tokens * x.hidden, x.dtype));
  FusedCall c{};
  c.map = TileMap::make(x.tokens, x.hidden, true, unit, aligned);
  const int64_t tiles = c.map.tiles();
  if (tiles == 0) return nullptr;
  const int32_t most = most_blocks(x.dtype);
  if (most < 1) return "the device does not hold a block of every rank at once";
  if (call.blocks < 0 || call.blocks > most) return "more blocks than slots, or than the device holds at once";
  c.circle.blocks = call.blocks != 0 ? call.blocks : most;
  c.circle.world = options_.world;
  c.gathers = gathers;
  c.share(tiles);

  const int32_t bytes = dtype_bytes(x.dtype);
  const Format& gather = gathers ? call.gather : call.reduce;
  c.reduce = WireParams::make(call.reduce, make_layout(call.reduce, x.tokens, x.hidden, bytes));
  c.gather = WireParams::make(gather, make_layout(gather, x.tokens, x.hidden, bytes));
  c.partials = x.data;
  c.out = call.out;
  c.elements = x.tokens * x.hidden;
  c.nonfinite = call.nonfinite;

  Signature signature;
  for (int64_t n : {int64_t{call.algorithm}, x.tokens, x.hidden, int64_t{x.dtype}, int64_t{c.circle.blocks}})
    signature.add(n);
  signature.add(call.reduce);
  signature.add(gather);
  Circle& circle = c.circle;
  for (int32_t r = 0; r < options_.world; ++r) {
    circle.slab[r] = slab_[r];
    circle.home[r] = home_[r];
  }
  circle.failure = failures_;
  circle.slots = options_.slots;
  circle.rank = first_rank();
  circle.virtual_ranks = local_ranks();
  circle.signature = signature.value;
  circle.ticket = ++ticket_ != 0 ? ticket_ : ++ticket_;
  circle.deadline_ns = call.deadline_ns;
#if defined(FC_FUSED_DEBUG)
  circle.late_rank = call.mischief.late_rank;
  circle.late_ns = call.mischief.late_ns;
  circle.unprotected = call.mischief.unprotected;
#endif
  const Where where{options_.device, call.stream};
  return with_dtype(x.dtype, [&](auto d) { return launch_fused<decltype(d)>(c, scheme_index(call.reduce), where); });
}

std::string Communicator::failure() const {
  for (int32_t i = 0; failures_ != nullptr && i < local_ranks(); ++i) {
    const Failure& f = failures_[i];
    const uint64_t reason = __atomic_load_n(&f.reason, __ATOMIC_ACQUIRE);
    if (reason == kNoFailure) continue;
    const std::string rank = "rank " + std::to_string(first_rank() + i), source = "rank " + std::to_string(f.source);
    const std::string where = " (slot " + std::to_string(f.slot) + ", " + kPhaseNames[f.phase % kPhases] + ", epoch " +
                              std::to_string(f.epoch) + ")";
    switch (reason) {
      case kLate: return rank + " waited for " + source + " until the deadline" + where;
      case kOtherCall:
        return rank + " found " + source + " in a call of another shape, dtype, comm or number of blocks" + where;
      case kTold: return rank + " was told by " + source + " that it had given up" + where;
      case kBusy: return rank + " was called while another call of it was under way, on a second stream" + where;
    }
    return rank + " failed for an unknown reason" + where;
  }
  return "";
}

}  // namespace fc::cuda

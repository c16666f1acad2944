// ReaderRegistry: see the header for the handshakes.
#include "store/reader_registry.h"

#include <algorithm>
#include <functional>
#include <string>
#include <thread>

namespace embertide {

ReaderRegistry::ReaderRegistry(uint32_t max_readers)
    : max_readers_(max_readers), slots_(new Slot[max_readers]) {}

Result<uint32_t> ReaderRegistry::Enter(uint64_t version) {
  // Threads start at different slots of the first few, so that they rarely meet.
  const size_t start = std::hash<std::thread::id>{}(std::this_thread::get_id()) % 16;
  for (uint32_t i = 0; i < max_readers_; ++i) {
    const uint32_t s = static_cast<uint32_t>((start + i) % max_readers_);
    bool taken = false;
    if (slots_[s].taken.load(std::memory_order_relaxed)) continue;
    if (!slots_[s].taken.compare_exchange_strong(taken, true)) continue;
    uint32_t used = slots_used_.load();
    while (used < s + 1 && !slots_used_.compare_exchange_weak(used, s + 1)) {
    }
    slots_[s].version.exchange(version);
    return s;
  }
  return Status(Code::kBusy, "all " + std::to_string(max_readers_) + " reader slots are taken");
}

void ReaderRegistry::Repin(uint32_t reader, uint64_t version) {
  slots_[reader].version.exchange(version);
}

void ReaderRegistry::Leave(uint32_t reader) {
  slots_[reader].version.store(~0ULL);
  slots_[reader].taken.store(false);
}

uint64_t ReaderRegistry::MinEpoch() const {
#if !defined(__SANITIZE_THREAD__)
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
  uint64_t least = epoch_.load();
  const uint32_t used = slots_used_.load();
  for (uint32_t s = 0; s < used; ++s) {
    const uint64_t epoch = slots_[s].epoch.load();
    if (epoch != 0) least = std::min(least, epoch);
  }
  return least;
}

std::string ReaderRegistry::OldestRead() const {
  uint64_t least = ~0ULL;
  std::string name = "no read";
  const uint32_t used = slots_used_.load();
  for (uint32_t s = 0; s < used; ++s) {
    const uint64_t epoch = slots_[s].epoch.load();
    if (epoch == 0 || epoch >= least) continue;
    least = epoch;
    const uint64_t version = slots_[s].version.load();
    name = "reader " + std::to_string(s) +
           (version == ~0ULL ? "" : " at version " + std::to_string(version)) + ", " +
           std::to_string(epoch_.load() - epoch) + " retirements old";
  }
  return name;
}

uint64_t ReaderRegistry::MinVersion() const {
  uint64_t least = ~0ULL;
  const uint32_t used = slots_used_.load();
  for (uint32_t s = 0; s < used; ++s) least = std::min(least, slots_[s].version.load());
  return least;
}

}  // namespace embertide

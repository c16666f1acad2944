// ReaderRegistry: who reads now, and at which version; hence what may be freed or folded.
//
// A reader takes a slot and writes its version into it; while it is inside a read it also shows the
// global epoch of when that read began. Something unlinked is retired under the epoch of that
// moment, and may be freed when every read in flight began later. A version may fold when no slot
// shows an older one. So a long pin holds back folding, but memory only while it reads.
//
// Both are Dekker handshakes. For versions, a reader writes its slot before it looks at the window,
// and a writer changes the window before it scans the slots; all four are sequentially consistent.
// For what is unlinked, the two that are in the middle are releases and acquires of many places
// (index words, chains, arrays), so each side has a fence between its two steps:
//
//   reader: epoch of its slot = E; fence; loads words       (BeginRead)
//   writer: stores words; epoch + 1; fence; scans the slots (Retire, MinEpoch)
//
// If the writer does not see E, its fence comes before the reader's in the single order of fences,
// and then the reader's loads see what the writer stored before its own: [atomics.order] 4. If the
// writer sees E, and E is above the epoch under which something was retired, the reader's load of
// the epoch has synchronized with that Retire. Without the fences this holds on x86, where a locked
// instruction is one, and not on Arm.
//
// Thread-safe; no call waits. One slot is used by one thread at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "embertide/status.h"

namespace embertide {

class ReaderRegistry {
 public:
  explicit ReaderRegistry(uint32_t max_readers);

  // A slot for a reader at `version`; kBusy naming the bound when all are taken.
  Result<uint32_t> Enter(uint64_t version);
  // Changes the version of a slot just taken (while it looks for one it may pin).
  void Repin(uint32_t reader, uint64_t version);
  void Leave(uint32_t reader);
  // Brackets one read: what it finds stays valid until EndRead.
  void BeginRead(uint32_t reader) {
#if defined(__SANITIZE_THREAD__)
    slots_[reader].epoch.exchange(epoch_.load());  // it knows no fences, and no weaker order either
#else
    slots_[reader].epoch.store(epoch_.load(std::memory_order_acquire), std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
  }
  void EndRead(uint32_t reader) { slots_[reader].epoch.store(0, std::memory_order_release); }

  // The epoch under which something unlinked before this call is retired.
  uint64_t Retire() { return epoch_.fetch_add(1); }
  // Everything that was retired under an epoch < this may be freed.
  uint64_t MinEpoch() const;
  // The read in flight that began first, for messages.
  std::string OldestRead() const;
  // The oldest version that a reader shows; ~0 if none.
  uint64_t MinVersion() const;

 private:
  struct alignas(64) Slot {
    std::atomic<bool> taken{false};
    std::atomic<uint64_t> version{~0ULL};  // ~0: none
    std::atomic<uint64_t> epoch{0};        // 0: not inside a read
  };
  const uint32_t max_readers_;
  std::unique_ptr<Slot[]> slots_;
  std::atomic<uint32_t> slots_used_{0};  // high-water mark: scans stop there
  std::atomic<uint64_t> epoch_{1};
};

// One read in flight, for its scope.
class Reading {
 public:
  Reading(ReaderRegistry* readers, uint32_t reader) : readers_(readers), reader_(reader) {
    readers_->BeginRead(reader_);
  }
  ~Reading() { readers_->EndRead(reader_); }
  Reading(const Reading&) = delete;
  Reading& operator=(const Reading&) = delete;

 private:
  ReaderRegistry* readers_;
  uint32_t reader_;
};

}  // namespace embertide

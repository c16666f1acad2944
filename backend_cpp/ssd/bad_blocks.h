// BadBlocks: which blocks of a log were found not to be what was written, until their rows have
// been brought again or are gone. Bounded; thread-safe.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <set>

#include "base/mutex.h"

namespace embertide {

class BadBlocks {
 public:
  // A drive that loses more at a time than these is to be replaced; what was not noted is when it
  // is read again.
  static constexpr size_t kMost = 256;

  void Note(uint64_t block) {
    const MutexLock lock(mutex_);
    if (blocks_.contains(block)) return;
    if (blocks_.size() == kMost) {
      ++dropped_;
      return;
    }
    blocks_.insert(block);
    ++found_;
    size_ = blocks_.size();
  }
  // Blocks from `first` to before `end` have no rows any more, or others.
  void Forget(uint64_t first, uint64_t end) {
    if (empty()) return;
    const MutexLock lock(mutex_);
    blocks_.erase(blocks_.lower_bound(first), blocks_.lower_bound(end));
    size_ = blocks_.size();
  }
  bool empty() const { return size_ == 0; }
  std::set<uint64_t> blocks() const {
    const MutexLock lock(mutex_);
    return blocks_;
  }
  uint64_t found() const { return found_; }
  uint64_t dropped() const { return dropped_; }  // times that there was no room to note one

 private:
  mutable Mutex mutex_;
  std::set<uint64_t> blocks_ EMBERTIDE_GUARDED_BY(mutex_);
  std::atomic<size_t> size_{0};
  std::atomic<uint64_t> found_{0};
  std::atomic<uint64_t> dropped_{0};
};

}  // namespace embertide

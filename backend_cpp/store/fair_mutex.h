// FairMutex: a mutex that is taken in turn. A thread that lets go of it and takes it again at once
// comes after those that waited meanwhile, which a std::mutex does not give: there the waiter wakes
// to find it taken.
#pragma once

#include <mutex>

namespace embertide {

class FairMutex {
 public:
  void lock() {
    const std::lock_guard next(next_);
    mutex_.lock();
  }
  bool try_lock() {
    const std::unique_lock next(next_, std::try_to_lock);
    return next.owns_lock() && mutex_.try_lock();
  }
  void unlock() { mutex_.unlock(); }

 private:
  std::mutex next_;  // held by the one who waits, so that others come after
  std::mutex mutex_;
};

}  // namespace embertide

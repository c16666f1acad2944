// Mutex and MutexLock: the standard ones, told to clang, which proves (`make check`,
// -Wthread-safety) that what is EMBERTIDE_GUARDED_BY a mutex is used by who holds it alone, and
// that functions which EMBERTIDE_REQUIRE one are called by who does. Other compilers see the
// standard mutex.
//
//   Mutex mutex_;
//   std::deque<Job> jobs_ EMBERTIDE_GUARDED_BY(mutex_);
//   void TakeOne() EMBERTIDE_REQUIRES(mutex_);
//
// Source: https://clang.llvm.org/docs/ThreadSafetyAnalysis.html.
#pragma once

#include <mutex>

#if defined(__clang__)
#define EMBERTIDE_THREAD_ATTRIBUTE(attribute) __attribute__((attribute))
#else
#define EMBERTIDE_THREAD_ATTRIBUTE(attribute)
#endif
#define EMBERTIDE_GUARDED_BY(mutex) EMBERTIDE_THREAD_ATTRIBUTE(guarded_by(mutex))
#define EMBERTIDE_REQUIRES(...) EMBERTIDE_THREAD_ATTRIBUTE(requires_capability(__VA_ARGS__))
#define EMBERTIDE_ACQUIRES(...) EMBERTIDE_THREAD_ATTRIBUTE(acquire_capability(__VA_ARGS__))
#define EMBERTIDE_RELEASES(...) EMBERTIDE_THREAD_ATTRIBUTE(release_capability(__VA_ARGS__))

namespace embertide {

class EMBERTIDE_THREAD_ATTRIBUTE(capability("mutex")) Mutex {
 public:
  void lock() EMBERTIDE_ACQUIRES() { mutex_.lock(); }
  bool try_lock() EMBERTIDE_THREAD_ATTRIBUTE(try_acquire_capability(true)) {
    return mutex_.try_lock();
  }
  void unlock() EMBERTIDE_RELEASES() { mutex_.unlock(); }

 private:
  std::mutex mutex_;
};

// Holds a mutex while it lives; lock and unlock are for a std::condition_variable_any that waits.
class EMBERTIDE_THREAD_ATTRIBUTE(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) EMBERTIDE_ACQUIRES(mutex) : mutex_(mutex) { mutex_.lock(); }
  // Takes over a mutex that the caller has taken, by try_lock.
  MutexLock(Mutex& mutex, std::adopt_lock_t) EMBERTIDE_REQUIRES(mutex) : mutex_(mutex) {}
  ~MutexLock() EMBERTIDE_RELEASES() { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;
  void lock() EMBERTIDE_ACQUIRES() { mutex_.lock(); }
  void unlock() EMBERTIDE_RELEASES() { mutex_.unlock(); }

 private:
  Mutex& mutex_;
};

}  // namespace embertide

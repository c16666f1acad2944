// PlanKeeper: the plan that a node acts by. It reads plans from the state store, proves each and
// keeps it as a routing, and writes it to the plan's file, for when the store is away.
//
// Owned by Fleet. Thread-safe. Its own thread ("plan-keeper") looks every 100 ms, or at once when
// RefreshPlan asks for it; it alone uses the connection, the reader and the plan's file, but for
// Await, which may read the file on the thread that opens the node.
//
// mutex_ guards the routing, the count of looks and the error; no other lock is taken under it.
// adopt_mutex_ lets one plan in at a time; mutex_ and the locks of `prepare` are taken under it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <stop_token>
#include <string>

#include "base/background_task.h"
#include "base/mutex.h"
#include "bus/redis.h"
#include "embertide/deadline.h"
#include "node/node_state.h"
#include "node/plan_reader.h"
#include "node/routing.h"

namespace embertide {

class PlanKeeper {
 public:
  // `prepare` is called with a plan's routing before anybody sees it, `tell_new` once it is in use;
  // both from the thread that brings the plan. All that it is given outlives it.
  PlanKeeper(const NodeState* state, RedisAddress redis_address,
             std::function<void(const Routing&)> prepare, std::function<void()> tell_new);
  ~PlanKeeper() { Stop(); }
  PlanKeeper(const PlanKeeper&) = delete;
  PlanKeeper& operator=(const PlanKeeper&) = delete;

  // Begins to look for plans, and waits for the first one, for NodeOptions::plan_wait at most. A
  // plan on disk serves where the store is away; a newer one from there replaces it. kRejected with
  // what `refusal` says, once that is not empty; kUnavailable when no plan came in time.
  Status Start(const std::function<std::string()>& refusal);
  // Ends the thread, and the waits of RefreshPlan. The last routing stays.
  void Stop();

  // Null before the first plan. The same routing until there is a newer plan.
  std::shared_ptr<const Routing> routing() const {
    const MutexLock lock(mutex_);
    return routing_;
  }
  // Epoch of the plan in use; 0 before the first.
  uint64_t epoch() const;
  // Waits, a quarter of a second and until the deadline at most, for a look that begins now.
  void RefreshPlan(Deadline deadline);
  // Why the last look brought no plan, or could not keep it; empty while all is well.
  std::string error() const;
  // That broke a rule, since the start.
  uint64_t refused_plans() const { return refused_plans_; }

 private:
  Status Look(const std::stop_token& stop);
  Status ReadNewest();
  Status Save();
  Status AdoptFile();
  Status Adopt(const v1::Plan& plan);
  Status Await(const std::function<std::string()>& refusal);

  const NodeState* const state_;
  const RedisAddress redis_address_;
  const std::string plan_file_;
  const std::function<void(const Routing&)> prepare_;
  const std::function<void()> tell_new_;
  std::atomic<uint64_t> refused_plans_{0};

  mutable Mutex mutex_;
  std::condition_variable_any wake_;
  bool stop_ EMBERTIDE_GUARDED_BY(mutex_) = false;
  // Looks that are done; and how many are wanted, if more: one is due now.
  uint64_t looks_ EMBERTIDE_GUARDED_BY(mutex_) = 0;
  uint64_t looks_wanted_ EMBERTIDE_GUARDED_BY(mutex_) = 0;
  std::shared_ptr<const Routing> routing_ EMBERTIDE_GUARDED_BY(mutex_);
  std::string error_ EMBERTIDE_GUARDED_BY(mutex_);
  Mutex adopt_mutex_;

  // --- the thread's
  std::unique_ptr<RedisConnection> redis_;
  PlanReader reader_;
  std::string unsaved_plan_;     // for plan_file_, which could not be written
  Status saved_ = Status::Ok();  // why not
  std::chrono::milliseconds save_back_off_{0};
  std::chrono::steady_clock::time_point save_again_;
  std::unique_ptr<BackgroundTask> task_;  // last: it uses the members above
};

}  // namespace embertide

// Looking for plans, adopting them and writing the plan's file.
#include "node/plan_keeper.h"

#include <algorithm>
#include <span>
#include <utility>

#include "base/file.h"

namespace embertide {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLookAtEpoch{100};
constexpr milliseconds kRedisTimeout{1000};
constexpr milliseconds kRefreshWait{250};
constexpr size_t kMaxPlanBytes = 256 << 20;
// Between attempts to write the plan's file.
constexpr milliseconds kSaveAgain{1000};
constexpr milliseconds kSaveAgainMost{5000};

}  // namespace

PlanKeeper::PlanKeeper(const NodeState* state, RedisAddress redis_address,
                       std::function<void(const Routing&)> prepare, std::function<void()> tell_new)
    : state_(state),
      redis_address_(std::move(redis_address)),
      plan_file_(state->options().plan_file),
      prepare_(std::move(prepare)),
      tell_new_(std::move(tell_new)),
      reader_(state->manifest().model) {}

Status PlanKeeper::Start(const std::function<std::string()>& refusal) {
  task_ = std::make_unique<BackgroundTask>(
      TaskOptions{.name = "plan-keeper", .board = &state_->tasks(), .own_pace = true},
      [this](const std::stop_token& stop) { return Look(stop); });
  return Await(refusal);
}

void PlanKeeper::Stop() {
  {
    const MutexLock lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  task_.reset();
}

uint64_t PlanKeeper::epoch() const {
  const MutexLock lock(mutex_);
  return routing_ == nullptr ? 0 : routing_->epoch;
}

std::string PlanKeeper::error() const {
  const MutexLock lock(mutex_);
  return error_;
}

Status PlanKeeper::Await(const std::function<std::string()>& refusal) {
  const auto deadline = std::chrono::steady_clock::now() + state_->options().plan_wait;
  while (std::chrono::steady_clock::now() < deadline) {
    if (state_->options().stop.stop_requested()) return {Code::kUnavailable, "the node is ending"};
    std::string error;
    state_->tasks().StartMissing();
    {
      MutexLock lock(mutex_);
      if (routing_ != nullptr) return Status::Ok();
      wake_.wait_for(lock, kLookAtEpoch);
      error = error_;
    }
    std::string refused = refusal();
    if (!refused.empty()) return {Code::kRejected, std::move(refused)};
    if (!plan_file_.empty() && !error.empty() && routing() == nullptr) {
      if (AdoptFile().ok()) return Status::Ok();
    }
  }
  const MutexLock lock(mutex_);
  return {
      Code::kUnavailable,
      "no plan for model \"" + state_->manifest().model + "\" came from " +
          (error_.empty() ? "the state store: is the control plane up, and are all nodes that it "
                            "expects?"
                          : "the state store: " + error_)};
}

Status PlanKeeper::Look(const std::stop_token& stop) {
  Status status = ReadNewest();
  if (status.code() == Code::kDeviceError) redis_.reset();
  if (status.ok()) status = Save();
  MutexLock lock(mutex_);
  error_ = status.ok() ? "" : status.ToString();
  ++looks_;
  looks_wanted_ = std::max(looks_wanted_, looks_);
  wake_.notify_all();
  wake_.wait_for(lock, stop, kLookAtEpoch,
                 [this]() EMBERTIDE_REQUIRES(mutex_) { return looks_wanted_ > looks_; });
  return status;
}

// A full plan folder must not drop a healthy Redis connection: the node follows a plan that it
// cannot write, and writes it later.
Status PlanKeeper::Save() {
  if (unsaved_plan_.empty()) return Status::Ok();
  if (std::chrono::steady_clock::now() < save_again_) return saved_;
  Status written = WriteFileAtomically(plan_file_, std::as_bytes(std::span(unsaved_plan_)));
  saved_ = written;
  if (written.ok()) {
    unsaved_plan_.clear();
    save_back_off_ = milliseconds(0);
    return written;
  }
  saved_ = {written.code(), "the plan cannot be kept, and is used all the same: " +
                                written.message() + "; give plan_file a folder with room"};
  save_back_off_ = std::clamp(2 * save_back_off_, kSaveAgain, kSaveAgainMost);
  save_again_ = std::chrono::steady_clock::now() + save_back_off_;
  return saved_;
}

Status PlanKeeper::ReadNewest() {
  if (redis_ == nullptr) {
    Result<std::unique_ptr<RedisConnection>> opened =
        RedisConnection::Open(redis_address_, kRedisTimeout);
    if (!opened.ok()) return opened.status();
    redis_ = std::move(*opened);
  }
  const auto plan = reader_.Read(redis_.get(), epoch());
  if (!plan.ok()) return plan.status();
  if (!plan.value()) return Status::Ok();
  EMBERTIDE_RETURN_IF_ERROR(Adopt(*plan.value()));
  if (plan_file_.empty()) return Status::Ok();
  unsaved_plan_ = plan.value()->SerializeAsString();
  save_again_ = {};
  return Status::Ok();
}

Status PlanKeeper::AdoptFile() {
  const Result<std::string> kept = ReadWholeFile(plan_file_, kMaxPlanBytes);
  if (!kept.ok()) return kept.status();
  v1::Plan plan;
  if (!plan.ParseFromString(kept.value())) return {Code::kCorrupt, plan_file_ + " is no Plan"};
  return Adopt(plan);
}

Status PlanKeeper::Adopt(const v1::Plan& plan) {
  Result<std::shared_ptr<const Routing>> made =
      MakeRouting(plan, state_->manifest(), state_->options().node);
  if (!made.ok()) {
    ++refused_plans_;
    return made.status();
  }
  // One plan at a time: the one kept on disk must not come after a newer one.
  const MutexLock adopting(adopt_mutex_);
  const auto before = routing();
  if (before != nullptr && before->epoch >= made.value()->epoch) return Status::Ok();
  prepare_(*made.value());
  {
    const MutexLock lock(mutex_);
    routing_ = std::move(*made);
  }
  wake_.notify_all();
  tell_new_();
  return Status::Ok();
}

void PlanKeeper::RefreshPlan(Deadline deadline) {
  MutexLock lock(mutex_);
  // One that begins now: the one under way may have read before the plan was written.
  const uint64_t wanted = looks_ + 2;
  looks_wanted_ = std::max(looks_wanted_, wanted);
  wake_.notify_all();
  const Deadline until = std::min(DeadlineAfter(kRefreshWait), deadline);
  wake_.wait_until(lock, until,
                   [&]() EMBERTIDE_REQUIRES(mutex_) { return stop_ || looks_ >= wanted; });
}

}  // namespace embertide

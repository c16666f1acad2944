// Which buckets a plan changes, and where their rows come from.
#include "node/bucket_mover.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <map>
#include <optional>
#include <thread>
#include <utility>

#include "base/background_task.h"
#include "base/task_faults.h"

namespace embertide {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kAddAgain{500};   // after an add that failed
constexpr milliseconds kLookAgain{100};  // after one that an older move holds up
// A bucket that joins leaves one part in so many of a device's DDR free. A node that is full can
// take no version, and then its peers can ask it for nothing.
constexpr uint64_t kVersionRoom = 8;
// Reads at a pin that peers no longer take have ended after this: it is longer than a request and
// five beats.
constexpr milliseconds kPinsEnd{1000};
// A thread that adds buckets is nicer by this than those that answer: it has a tenth of their
// weight. They get the core at once; on a machine without room it still comes to its end, which
// versions wait for.
constexpr int kNicer = 10;
const char* const kAdding = "adding-buckets";

// Runs `work` on a thread of low priority and waits for it; on this thread if none can be started.
// Rethrows what `work` throws.
template <typename Work>
void WithLowPriority(TaskReport* report, const Work& work) {
  std::exception_ptr failure;
  std::thread thread;
  try {
    FaultAt(kAdding, FaultPoint::kStart);
    thread = std::thread([&work, &failure] {
      const auto self = static_cast<id_t>(::gettid());
      ::setpriority(PRIO_PROCESS, self, ::getpriority(PRIO_PROCESS, self) + kNicer);
      try {
        FaultAt(kAdding, FaultPoint::kRound);
        work();
      } catch (...) {
        failure = std::current_exception();
      }
    });
  } catch (const std::exception& error) {
    report->NotStarted(error.what(), false);
    work();
    return;
  }
  thread.join();
  if (failure == nullptr) return report->Good();
  report->Failed("buckets could not be added; the task follower says why");
  std::rethrow_exception(failure);
}

}  // namespace

BucketMover::BucketMover(NodeState* state, const PeerPool* peers,
                         std::function<std::shared_ptr<const Routing>()> routing,
                         std::function<void()> tell_held)
    : state_(state),
      peers_(peers),
      routing_(std::move(routing)),
      tell_held_(std::move(tell_held)),
      pace_(state->options().join_step_bytes, state->options().join_rest) {}

void BucketMover::Note(const Status& status) {
  const MutexLock lock(mutex_);
  bucket_error_ = status.ok() ? "" : status.ToString();
}

std::string BucketMover::bucket_error() const {
  const MutexLock lock(mutex_);
  return bucket_error_;
}

std::string BucketMover::share_error() const {
  const MutexLock lock(mutex_);
  return share_error_;
}

std::vector<BucketMover::Change> BucketMover::Missing(const Routing& routing) {
  const ServingStore& store = state_->store();
  std::vector<Change> missing;
  uint64_t held = 0;
  for (uint32_t t = 0; t < routing.buckets.size(); ++t) {
    for (uint32_t b = 0; b < routing.buckets[t].size(); ++b) {
      const int32_t wanted = routing.buckets[t][b].device;
      const auto device = store.DeviceOf(t, b);
      if (wanted < 0) {
        if (!device) continue;
        if (state_->store().DropBucket(t, b).ok()) ++progress_.dropped;
        continue;
      }
      if (device) ++held;
      if (device != static_cast<uint32_t>(wanted)) {
        missing.push_back(
            {t, b, static_cast<uint32_t>(wanted), device.has_value(), routing.buckets[t][b].owned});
      }
    }
  }
  progress_.held = held;
  progress_.left = missing.size();
  return missing;
}

void BucketMover::FreeSuperseded() {
  const uint64_t until = state_->store().SupersededUntil();
  const auto now = std::chrono::steady_clock::now();
  if (until == 0 || !peers_->HaveReached(until)) {
    not_reached_ = now;
  } else if (now - not_reached_ >= kPinsEnd) {
    state_->store().Forget(until);
  }
}

void BucketMover::ShareDdr(const Routing& routing) {
  if (routing.epoch == shared_epoch_) return;
  shared_epoch_ = routing.epoch;
  const Status status = state_->store().SetDdrShares(routing.shares);
  if (!status.ok()) ++progress_.refused_shares;
  const MutexLock lock(mutex_);
  share_error_ = status.ok() ? "" : status.ToString();
}

bool BucketMover::Align() {
  FreeSuperseded();
  const auto plan = routing_();
  if (plan->epoch == progress_.held_epoch) return false;
  ShareDdr(*plan);
  const auto begun = std::chrono::steady_clock::now();
  if (begun < add_again_) return false;
  if (pace_.Rests(begun)) return true;
  std::vector<Change> missing = Missing(*plan);
  if (!missing.empty()) {
    if (missing.size() > pace_.buckets()) missing.resize(pace_.buckets());
    const uint64_t before = progress_.added;
    uint64_t bytes = 0;
    WithLowPriority(state_->tasks().Of(kAdding), [&] { bytes = Add(missing); });
    const auto now = std::chrono::steady_clock::now();
    pace_.Note(progress_.added - before, bytes, now - begun, now);
    missing = Missing(*plan);
  }
  if (!missing.empty()) return std::chrono::steady_clock::now() >= add_again_;
  uint64_t since = 0;
  for (uint32_t t = 0; t < plan->buckets.size(); ++t) {
    for (uint32_t b = 0; b < plan->buckets[t].size(); ++b) {
      if (plan->buckets[t][b].device < 0) continue;
      since = std::max(since, state_->store().HeldSince(t, b).value_or(0));
    }
  }
  Note(Status::Ok());
  progress_.full = false;
  progress_.held_since = since;
  progress_.held_epoch = plan->epoch;
  tell_held_();
  return false;
}

Status BucketMover::Hold(const Change& change, std::span<const std::byte> records) {
  const NodeOptions& options = state_->options();
  // Buckets that a plan relies on are held as far as there is any room.
  const uint64_t leave_bytes =
      change.owned ? 0 : options.ddr_budget_bytes / options.devices / kVersionRoom;
  const Status status =
      state_->store().AddBucket(change.table, change.bucket, change.device, records, leave_bytes);
  progress_.full = status.code() == Code::kResourceExhausted;
  if (status.ok()) ++progress_.added;
  return status;
}

uint64_t BucketMover::AddHere(const Change& change) {
  std::vector<std::byte> records;
  Status status = Status::Ok();
  {
    const Result<ReadView> view = state_->store().PinNewest();
    status = view.ok()
                 ? state_->store().ExportBucket(view.value(), change.table, change.bucket, &records)
                 : view.status();
  }
  if (status.ok()) {
    status = Hold(change, records);
  }
  if (status.ok()) return records.size();
  // Busy: an older move is not over; the next version, or the one after, ends it.
  if (status.code() != Code::kBusy) ++progress_.failed_adds;
  Note(status);
  add_again_ =
      std::chrono::steady_clock::now() + (status.code() == Code::kBusy ? kLookAgain : kAddAgain);
  return 0;
}

uint64_t BucketMover::Add(const std::vector<Change>& changes) {
  uint64_t bytes = 0;
  std::map<BucketId, Change> by_id;
  for (const Change& change : changes) {
    if (change.here) {
      bytes += AddHere(change);
    } else {
      by_id[{state_->manifest().tables[change.table].id, change.bucket}] = change;
    }
  }
  if (by_id.empty()) return bytes;
  std::vector<BucketId> wanted;
  wanted.reserve(by_id.size());
  for (const auto& [id, change] : by_id) wanted.push_back(id);
  const auto info = state_->InfoOf(state_->store().window().newest);
  const VersionId at{info->number, info->lineage};
  const auto rows = ReadBucketsAt(state_->options().publication, at, state_->manifest(), wanted,
                                  &snapshot_manifest_);
  Status status = rows.ok() ? Status::Ok() : rows.status();
  if (rows.ok()) {
    for (const auto& [id, records] : rows.value()) {
      const Change& change = by_id.at(id);
      status = Hold(change, records);
      if (!status.ok()) break;
      bytes += records.size();
    }
  }
  if (status.ok()) return bytes;
  // Files of the newest version may be a moment behind its commit; what is full may be given room.
  ++progress_.failed_adds;
  Note(status);
  add_again_ = std::chrono::steady_clock::now() + kAddAgain;
  return bytes;
}

}  // namespace embertide

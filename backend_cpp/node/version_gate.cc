// Choosing the version of ordinary requests.
#include "node/version_gate.h"

#include <algorithm>
#include <utility>

namespace embertide {

VersionGate::VersionGate(Promotion record, uint32_t window, std::chrono::milliseconds timeout)
    : window_(window), timeout_(timeout), record_(std::move(record)) {
  Publish();
}

bool VersionGate::MaySee(uint64_t number) const {
  return number <= std::max(record_.promoted, timed_out_) && !record_.IsWithdrawn(number);
}

bool VersionGate::MayTake(uint64_t number) {
  const auto above = static_cast<uint64_t>(
      std::ranges::count_if(held_, [this](const Held& each) { return each.number > served_; }));
  const bool may = number <= std::max(record_.promoted, timed_out_) || above + 2 <= window_;
  holding_ = !may;
  return may;
}

void VersionGate::SetRecord(Promotion record) {
  record_ = std::move(record);
  Choose();
}

void VersionGate::BeginCommit(uint64_t number, Time now) {
  held_.push_back({number, now});
  while (held_.size() > window_) held_.pop_front();
  if (MaySee(number)) next_ = number;
}

void VersionGate::EndCommit() { Choose(); }

void VersionGate::Tick(Time now) {
  if (timeout_.count() == 0) return;
  // A withdrawn version is a part of the versions after it: none of them is served unseen.
  const bool poisoned = std::ranges::any_of(
      record_.withdrawn, [this](const auto& range) { return range.last > record_.promoted; });
  if (poisoned) return;
  for (const Held& each : held_) {
    if (each.number <= std::max(record_.promoted, timed_out_) || each.number <= served_) continue;
    if (now - each.since < timeout_) break;
    timed_out_ = each.number;
    ++unguarded_;
  }
  Choose();
}

void VersionGate::Choose() {
  if (held_.empty()) return Publish();
  uint64_t served = served_;
  const auto seen = std::find_if(held_.rbegin(), held_.rend(),
                                 [this](const Held& each) { return MaySee(each.number); });
  if (seen != held_.rend()) served = std::max(served, seen->number);
  if (served < held_.front().number) {
    // Nothing that may be seen is held: at the start, if no snapshot is as old as the promoted
    // version, or after more withdrawn versions than the window has.
    served = held_.front().number;
    if (record_.promoted > 0) ++unguarded_;
  }
  served_ = served;
  Publish();
}

void VersionGate::Publish() {
  promoted_ = record_.promoted;
  newest_ = held_.empty() ? 0 : held_.back().number;
  for (size_t i = 0; i < kWithdrawReasons.size(); ++i) {
    const auto found = record_.totals.find(kWithdrawReasons[i]);
    withdrawn_[i] = found == record_.totals.end() ? 0 : found->second;
  }
}

GuardStats VersionGate::stats() const {
  GuardStats stats;
  stats.served = served_;
  stats.promoted = promoted_;
  const uint64_t newest = newest_;
  stats.candidate = newest > stats.served ? newest : 0;
  stats.holding = holding_;
  stats.unguarded = unguarded_;
  for (size_t i = 0; i < withdrawn_.size(); ++i) stats.withdrawn[i] = withdrawn_[i];
  return stats;
}

}  // namespace embertide

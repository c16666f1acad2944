// Choosing a version by what peers have.
#include "node/common_versions.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace embertide {

CommonVersions::CommonVersions(const NodeState* state,
                               std::function<std::vector<PeerPool::Range>()> live_ranges)
    : state_(state), live_ranges_(std::move(live_ranges)) {}

v1::VersionRange CommonVersions::Range() const {
  v1::VersionRange range;
  if (!serving_) return range;
  const Store::Window window = state_->store().window();
  const auto newest = state_->InfoOf(window.newest);
  if (newest == nullptr) return range;
  const auto oldest = state_->InfoOf(window.oldest);
  range.mutable_newest()->set_number(newest->number);
  range.mutable_newest()->set_lineage(newest->lineage);
  range.mutable_oldest()->set_number(window.oldest);
  range.mutable_oldest()->set_lineage(oldest == nullptr ? 0 : oldest->lineage);
  return range;
}

Result<Pinned> CommonVersions::Pin() {
  Result<Pinned> pinned =
      state_->PinChosen([this](uint64_t served) { return PinnableVersion(served); });
  if (pinned.ok()) NotePin(pinned->info->number);
  return pinned;
}

uint64_t CommonVersions::PinnableNow() const {
  const Result<ReadView> view = state_->PinServed();
  return view.ok() ? PinnableVersion(view.value().version()) : 0;
}

uint64_t CommonVersions::PinnableVersion(uint64_t served) const {
  const std::vector<PeerPool::Range> peers = live_ranges_();
  const auto known = state_->versions();
  const auto holders_of = [&](const VersionInfo& info) {
    return static_cast<size_t>(std::ranges::count_if(
        peers, [&](const auto& range) { return range.Has(info.number, info.lineage); }));
  };
  const auto last = known->find(served);
  if (last == known->end() || holders_of(*last->second) == peers.size()) return served;
  const uint64_t oldest = state_->store().window().oldest;
  const uint64_t floor = std::min(floor_.load(), served);
  uint64_t best = served;
  size_t most = 0;
  for (auto at = known->lower_bound(std::max(floor, oldest)); at != std::next(last); ++at) {
    const size_t holders = holders_of(*at->second);
    if (holders < most) continue;
    most = holders;
    best = at->first;
  }
  return best;
}

void CommonVersions::NotePin(uint64_t version) {
  uint64_t floor = floor_;
  while (floor < version && !floor_.compare_exchange_weak(floor, version)) {
  }
}

bool CommonVersions::IsBehindPeers() const {
  const std::vector<PeerPool::Range> peers = live_ranges_();
  const uint64_t newest = state_->newest()->number;
  const auto ahead = [newest](const PeerPool::Range& range) { return range.oldest > newest; };
  return 2 * static_cast<size_t>(std::ranges::count_if(peers, ahead)) > peers.size();
}

}  // namespace embertide

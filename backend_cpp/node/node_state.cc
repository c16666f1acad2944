// The versions that a node knows, and what is pinned of them.
#include "node/node_state.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/background_task.h"
#include "node/latency_meter.h"
#include "node/load_meter.h"
#include "node/version_gate.h"

namespace embertide {

NodeState::NodeState(Parts parts) : parts_(std::move(parts)) {}
NodeState::~NodeState() = default;

std::shared_ptr<const VersionInfo> NodeState::InfoOf(uint64_t number) const {
  const std::shared_ptr<const Versions> known = versions();
  if (known == nullptr) return nullptr;
  const auto found = known->find(number);
  return found == known->end() ? nullptr : found->second;
}

std::shared_ptr<const VersionInfo> NodeState::served() const {
  const std::shared_ptr<const Versions> known = versions();
  if (gate() != nullptr) {
    auto found = known->find(gate()->served());
    if (found == known->end()) found = known->find(gate()->next());
    if (found != known->end()) return found->second;
  }
  return known->rbegin()->second;
}

Result<ReadView> NodeState::PinGated() const {
  Result<ReadView> view = store().Pin(gate()->served());
  // Pushed out by a version that may be seen, and is about to be the served one.
  if (!view.ok()) view = store().Pin(gate()->next());
  return view;
}

Status NodeState::Commit(std::shared_ptr<const VersionInfo> info) {
  const uint64_t number = info->number;
  AddVersion(std::move(info));
  if (gate() != nullptr) gate()->BeginCommit(number, std::chrono::steady_clock::now());
  EMBERTIDE_RETURN_IF_ERROR(store().Commit(number));
  if (gate() != nullptr) gate()->EndCommit();
  return Status::Ok();
}

void NodeState::AddVersion(std::shared_ptr<const VersionInfo> info) {
  const std::shared_ptr<const Versions> old = versions();
  auto next = old ? std::make_shared<Versions>(*old) : std::make_shared<Versions>();
  const uint64_t number = info->number;
  (*next)[number] = std::move(info);
  // A reader that pinned the oldest of the window just before it left still finds it.
  while (next->size() > size_t{2} * options().window_versions) next->erase(next->begin());
  const MutexLock lock(versions_mutex_);
  versions_ = std::move(next);
}

void NodeState::NoteLatency(std::chrono::nanoseconds latency, size_t requests) const {
  tasks().StartMissing();
  if (parts_.latency != nullptr) parts_.latency->Note(latency, static_cast<uint32_t>(requests));
  if (parts_.load != nullptr) parts_.load->NoteAnswered(latency, requests);
}

std::vector<TaskHealth> NodeState::AllTasks() const {
  std::vector<TaskHealth> all = tasks().Tasks();
  std::ranges::move(TaskBoard::OfProcess().Tasks(), std::back_inserter(all));
  return all;
}

}  // namespace embertide

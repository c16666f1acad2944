// The state of a group of pruned tables in a checkpoint, beside their rows: written, read, and put
// together where a run goes on with another number of ranks.
#include <cstring>

#include "store/store_impl.h"

namespace embertide {
namespace {

// The numbers that PruneState writes first; the waiting keys come last.
struct SavedPrice {
  float price;
  uint32_t zero;
  uint64_t room;
  uint64_t step;
};

// A state in its parts.
struct SavedState {
  SavedPrice price{};
  std::vector<GroupPrice::SeenKeys> seen;
  std::vector<CountsWorth> counts;
  std::vector<UtilityScale> scales;
  std::string_view waiting;
};

std::string Written(const SavedState& saved) {
  std::string state(reinterpret_cast<const char*>(&saved.price), sizeof(saved.price));
  const auto append = [&state](const auto& values) {
    state.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(values[0]));
  };
  append(saved.seen);
  append(saved.counts);
  append(saved.scales);
  return state.append(saved.waiting);
}

Status WrongState(uint64_t bytes, uint32_t group, const std::string& must) {
  return {Code::kCorrupt, "a prune state of " + std::to_string(bytes) +
                              " bytes is not of prune group " + std::to_string(group) + ": " +
                              must + " must be those that it was saved with"};
}

// The state of a group of so many tables and kinds of rows; nullopt: it is none.
std::optional<SavedState> ReadState(const GroupPrice& group, std::string_view state)
    EMBERTIDE_REQUIRES(group.mutex) {
  SavedState saved;
  saved.seen.resize(group.seen.size());
  saved.counts.resize(group.tables.size());
  saved.scales.resize(group.tables.size());
  const uint64_t bytes = state.size();
  const uint64_t before = sizeof(saved.price) + saved.seen.size() * sizeof(saved.seen[0]) +
                          saved.counts.size() * sizeof(CountsWorth) +
                          saved.scales.size() * sizeof(UtilityScale);
  if (bytes < before) return std::nullopt;
  const auto take = [&state](void* to, uint64_t size) {
    std::memcpy(to, state.data(), size);
    state.remove_prefix(size);
  };
  take(&saved.price, sizeof(saved.price));
  take(saved.seen.data(), saved.seen.size() * sizeof(saved.seen[0]));
  take(saved.counts.data(), saved.counts.size() * sizeof(CountsWorth));
  take(saved.scales.data(), saved.scales.size() * sizeof(UtilityScale));
  saved.waiting = state;
  if (!WaitingKeys::BytesOf(state).has_value()) return std::nullopt;
  return saved;
}

// In place of all that the group keeps. Requires: at least one.
void Load(const std::vector<SavedState>& states, bool seen, GroupPrice* group)
    EMBERTIDE_REQUIRES(group->mutex) {
  const SavedState& first = states.front();
  std::vector<std::string_view> waiting;
  waiting.reserve(states.size());
  for (const SavedState& each : states) waiting.push_back(each.waiting);
  group->waiting.Load(waiting);
  for (size_t i = 0; i < group->seen.size(); ++i) {
    group->seen[i].keys = {};
    for (const SavedState& each : states) {
      if (seen) group->seen[i].keys.Merge(each.seen[i].keys);
    }
  }
  for (size_t i = 0; i < group->counts.size(); ++i) {
    const PrunedCounts of = group->counts[i].of;  // as this store is told, not the one that saved
    group->counts[i] = first.counts[i];
    group->counts[i].of = of;
  }
  group->scales = first.scales;
  group->price = first.price.price;
  group->room = first.price.room;
  group->step = first.price.step;
}

}  // namespace

Result<std::string> TrainingStore::PruneState(uint32_t g) const {
  EMBERTIDE_RETURN_IF_ERROR(impl_->store.CheckGroup(g));
  GroupPrice& group = *impl_->store.groups[g];
  const MutexLock lock(group.mutex);
  const std::string waiting = group.waiting.Save();
  return Written(
      {{group.price, 0, group.room, group.step}, group.seen, group.counts, group.scales, waiting});
}

Result<std::string> TrainingStore::PruneStateOfFormat5(uint32_t g, std::string_view state) const {
  EMBERTIDE_RETURN_IF_ERROR(impl_->store.CheckGroup(g));
  const GroupPrice& group = *impl_->store.groups[g];
  const MutexLock lock(group.mutex);
  const uint64_t seen_bytes = group.tables.size() * sizeof(DistinctKeys);
  SavedState saved;
  if (state.size() < sizeof(saved.price) + seen_bytes) {
    return WrongState(state.size(), g, "its tables and waiting_bytes");
  }
  std::memcpy(&saved.price, state.data(), sizeof(saved.price));
  state.remove_prefix(sizeof(saved.price));
  saved.seen.reserve(group.seen.size());
  for (const GroupPrice::SeenKeys& each : group.seen) saved.seen.push_back({each.row_bytes, {}});
  for (size_t i = 0; i < group.tables.size(); ++i) {
    DistinctKeys keys;
    std::memcpy(&keys, state.data() + i * sizeof(keys), sizeof(keys));
    saved.seen[group.seen_of[i]].keys.Merge(keys);
  }
  state.remove_prefix(seen_bytes);
  saved.counts.resize(group.tables.size());
  saved.scales.resize(group.tables.size());
  saved.waiting = state;
  return Written(saved);
}

Status TrainingStore::SetPruneState(uint32_t g, const std::string& state) {
  EMBERTIDE_RETURN_IF_ERROR(impl_->store.CheckGroup(g));
  GroupPrice& group = *impl_->store.groups[g];
  const MutexLock lock(group.mutex);
  std::optional<SavedState> saved = ReadState(group, state);
  if (!saved.has_value() || WaitingKeys::BytesOf(saved->waiting) != group.waiting.bytes()) {
    return WrongState(state.size(), g, "its tables and waiting_bytes");
  }
  Load({*std::move(saved)}, /*seen=*/true, &group);
  return Status::Ok();
}

Status TrainingStore::LoadPruneStates(uint32_t g, std::span<const std::string> states, bool seen) {
  EMBERTIDE_RETURN_IF_ERROR(impl_->store.CheckGroup(g));
  if (states.empty()) {
    return {Code::kInvalidArgument, "prune group " + std::to_string(g) +
                                        ": no states to load; give that of each rank that saved"};
  }
  GroupPrice& group = *impl_->store.groups[g];
  const MutexLock lock(group.mutex);
  std::vector<SavedState> read;
  for (const std::string& state : states) {
    std::optional<SavedState> saved = ReadState(group, state);
    if (!saved.has_value()) return WrongState(state.size(), g, "its tables");
    read.push_back(*std::move(saved));
  }
  Load(read, seen, &group);
  return Status::Ok();
}

}  // namespace embertide

// Keys without a row that are worth one: see the header.
#include "store/admission.h"

namespace embertide {

std::optional<float> Admission::Worth(const Table& table, uint64_t key, float earned) {
  GroupPrice& group = *table.pruned_with;
  const MutexLock lock(group.mutex);
  const uint64_t hash = PruneHash(table, key);
  group.seen[group.seen_of[table.place_in_group]].keys.Add(hash);
  const auto scale = static_cast<float>(group.scales[table.place_in_group].scale);
  const float utility = group.waiting.Add(hash, earned * scale, group.step);
  return Admit(&group, hash, utility, table.cost.FullBytes()) ? std::optional(utility / scale)
                                                              : std::nullopt;
}

bool Admission::WorthCounting(const Table& table, uint64_t key, const float* logs) {
  if (table.pruned_with == nullptr) return false;
  GroupPrice& group = *table.pruned_with;
  const MutexLock lock(group.mutex);
  const CountsWorth& counts = group.counts[table.place_in_group];
  const float worth = counts.Of(logs[counts.of.counter]);
  if (!(worth > 0.0F)) return false;
  const uint64_t hash = PruneHash(table, key);
  const float utility = group.waiting.Add(hash, worth, group.step);
  return Admit(&group, hash, utility, table.cost.LeastBytes());
}

bool Admission::Admit(GroupPrice* group, uint64_t hash, float utility, uint64_t bytes) {
  if (!(utility > group->price * static_cast<float>(bytes))) {
    ++store_.counters.unworthy_keys;
    return false;
  }
  if (group->room < bytes) {
    ++store_.counters.worthy_keys_without_room;
    return false;
  }
  group->room -= bytes;
  group->waiting.Remove(hash);
  return true;
}

}  // namespace embertide

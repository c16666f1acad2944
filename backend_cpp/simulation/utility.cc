// "utility": the rows that training finds most useful stay. The row of a sample with the least
// utility leaves; one that is not resident enters only if its own is larger. Knows nothing of the
// accesses, so it is as good as the utilities are fresh.
#include "simulation/utility.h"

#include <limits>
#include <utility>
#include <vector>

#include "policy/sampler.h"

namespace embertide {
namespace {

class Utility final : public Policy {
 public:
  Utility(uint32_t capacity, KeyOf key_of, UtilityOf utility_of)
      : sampler_(capacity),
        used_(capacity),
        key_of_(std::move(key_of)),
        utility_of_(std::move(utility_of)) {}
  void Touch(uint32_t /*slot*/) override {}
  bool Admit(uint64_t key, bool full) override {
    victim_ = full ? sampler_.Least(utility_of_(key), Rank{*this}) : SlotSampler::kNone;
    return !full || victim_ != SlotSampler::kNone;
  }
  uint32_t Evict() override {
    uint32_t slot = std::exchange(victim_, SlotSampler::kNone);
    if (slot == SlotSampler::kNone) slot = sampler_.LeastOfAny(Rank{*this});
    used_[slot] = false;
    return slot;
  }
  void Insert(uint32_t slot, uint64_t /*key*/) override { used_[slot] = true; }
  void Erase(uint32_t slot) override {
    used_[slot] = false;
    if (victim_ == slot) victim_ = SlotSampler::kNone;
  }
  uint64_t bytes() const override { return (used_.size() + 7) / 8; }

 private:
  // For the sampler.
  struct Rank {
    const Utility& policy;
    float operator()(uint32_t slot) const {
      if (!policy.used_[slot]) return std::numeric_limits<float>::infinity();
      return policy.utility_of_(policy.key_of_(slot));
    }
  };

  SlotSampler sampler_;
  std::vector<bool> used_;
  const KeyOf key_of_;
  const UtilityOf utility_of_;
  uint32_t victim_ = SlotSampler::kNone;  // for which the last key was admitted
};

}  // namespace

Result<std::unique_ptr<Policy>> MakeUtility(uint32_t capacity, KeyOf key_of, UtilityOf utility_of) {
  EMBERTIDE_RETURN_IF_ERROR(CheckCapacity(kUtilityPolicy.name, capacity));
  return std::unique_ptr<Policy>(
      std::make_unique<Utility>(capacity, std::move(key_of), std::move(utility_of)));
}

}  // namespace embertide

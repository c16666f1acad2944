// "clock": a hand passes over the slots and halves the counts that it meets; a row whose count was
// below 2 leaves. Every miss enters, with the count 1. For the simulator alone: a store does this
// in its index, whose counts cost nothing (store/evictor.cc), serve tables that share room and
// stay while a row is on the SSD, so that it hits a few points more.
#include <vector>

#include "policy/policies.h"

namespace embertide {
namespace {

class Clock final : public Policy {
 public:
  explicit Clock(uint32_t capacity) : counts_(capacity), used_(capacity) {}
  void Touch(uint32_t slot) override {
    if (counts_[slot] < 255) ++counts_[slot];
  }
  bool Admit(uint64_t /*key*/, bool /*full*/) override { return true; }
  uint32_t Evict() override {
    for (;;) {
      const uint32_t slot = hand_;
      hand_ = hand_ + 1 == counts_.size() ? 0 : hand_ + 1;
      if (!used_[slot]) continue;
      const uint8_t before = counts_[slot];
      counts_[slot] = before / 2;
      if (before > 1) continue;
      used_[slot] = false;
      return slot;
    }
  }
  void Insert(uint32_t slot, uint64_t /*key*/) override {
    counts_[slot] = 1;
    used_[slot] = true;
  }
  void Erase(uint32_t slot) override { used_[slot] = false; }
  uint64_t bytes() const override { return counts_.size() + (used_.size() + 7) / 8; }

 private:
  std::vector<uint8_t> counts_;
  std::vector<bool> used_;
  uint32_t hand_ = 0;
};

}  // namespace

std::unique_ptr<Policy> MakeClock(uint32_t capacity) { return std::make_unique<Clock>(capacity); }

}  // namespace embertide

// "lfu": the row with the least count leaves; of those, the one that was asked for longest ago.
//
// Counts are 1 at the entry, at most 255, and all halve every ten accesses a slot, so that a row of
// yesterday does not stay for ever. One list a count; halving joins the lists of 2c and 2c + 1, the
// former nearer to its end, where rows leave. Every miss enters, and nothing is known of what left.
#include <algorithm>
#include <vector>

#include "policy/policies.h"
#include "policy/slot_links.h"

namespace embertide {
namespace {

class Lfu final : public Policy {
 public:
  explicit Lfu(uint32_t capacity)
      : links_(capacity, kCounts),
        counts_(capacity),
        period_(uint64_t{kAccessesPerSlot} * capacity) {}
  void Touch(uint32_t slot) override {
    Tick();
    links_.Remove(slot);
    uint8_t& count = counts_[slot];
    if (count < kCounts - 1) ++count;
    links_.PushFront(count, slot);
  }
  bool Admit(uint64_t /*key*/, bool /*full*/) override {
    Tick();
    return true;
  }
  uint32_t Evict() override {
    while (links_.Empty(least_)) ++least_;
    const uint32_t slot = links_.Back(least_);
    links_.Remove(slot);
    return slot;
  }
  void Insert(uint32_t slot, uint64_t /*key*/) override {
    counts_[slot] = 1;
    links_.PushFront(1, slot);
    least_ = std::min(least_, 1U);
  }
  void Erase(uint32_t slot) override { links_.Remove(slot); }
  uint64_t bytes() const override { return links_.bytes() + counts_.size(); }

 private:
  static constexpr uint32_t kCounts = 256;
  static constexpr uint32_t kAccessesPerSlot = 10;
  void Tick() {
    if (++accesses_ % period_ != 0) return;
    // In ascending order a list is empty before another is moved into it.
    links_.PrependAll(0, 1);
    for (uint32_t count = 1; count < kCounts / 2; ++count) {
      links_.PrependAll(count, 2 * count);
      links_.PrependAll(count, 2 * count + 1);
    }
    for (uint8_t& count : counts_) count /= 2;
    least_ = 0;
  }

  SlotLinks links_;
  std::vector<uint8_t> counts_;
  uint32_t least_ = 0;  // no list below it has a slot
  const uint64_t period_;
  uint64_t accesses_ = 0;
};

}  // namespace

std::unique_ptr<Policy> MakeLfu(uint32_t capacity) { return std::make_unique<Lfu>(capacity); }

}  // namespace embertide

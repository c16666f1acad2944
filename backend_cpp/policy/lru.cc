// "lru": the row that was asked for longest ago leaves. Every miss enters.
#include "policy/policies.h"
#include "policy/slot_links.h"

namespace embertide {
namespace {

class Lru final : public Policy {
 public:
  explicit Lru(uint32_t capacity) : links_(capacity, 1) {}
  void Touch(uint32_t slot) override {
    links_.Remove(slot);
    links_.PushFront(0, slot);
  }
  bool Admit(uint64_t /*key*/, bool /*full*/) override { return true; }
  uint32_t Evict() override {
    const uint32_t slot = links_.Back(0);
    links_.Remove(slot);
    return slot;
  }
  void Insert(uint32_t slot, uint64_t /*key*/) override { links_.PushFront(0, slot); }
  void Erase(uint32_t slot) override { links_.Remove(slot); }
  uint64_t bytes() const override { return links_.bytes(); }

 private:
  SlotLinks links_;
};

}  // namespace

std::unique_ptr<Policy> MakeLru(uint32_t capacity) { return std::make_unique<Lru>(capacity); }

}  // namespace embertide

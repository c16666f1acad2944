// "w-tinylfu": a window before a segmented LRU that a frequency sketch guards (Einziger et al.,
// "TinyLFU", 2017; the form and constants of the Caffeine library, less its doorkeeper).
//
//   window (1 % at first) --its last row--> compared with probation's last: the one that was asked
//   for less often of late leaves; the other stays in probation --asked for--> protected (80 % of
//   main) --overflow--> probation
//
// The window's share climbs: every ten accesses a slot it moves on if the hit rate rose, back if it
// fell, by ever smaller steps, until a change of 5 % or more begins with large steps again.
#include <algorithm>
#include <array>
#include <cmath>
#include <utility>
#include <vector>

#include "policy/frequency_sketch.h"
#include "policy/policies.h"
#include "policy/slot_links.h"

namespace embertide {
namespace {

class TinyLfu final : public Policy {
 public:
  TinyLfu(uint32_t capacity, KeyOf key_of)
      : capacity_(capacity),
        window_target_(std::max(1U, capacity / 100)),
        step_(kFirstStep * capacity),
        links_(capacity, 3),
        lists_(capacity),
        key_of_(std::move(key_of)),
        sketch_(capacity) {}
  void Touch(uint32_t slot) override {
    Count(key_of_(slot), true);
    const List list = lists_[slot];
    Move(slot, list == kProbation ? kProtected : list);
    ShrinkProtected();
  }
  bool Admit(uint64_t key, bool /*full*/) override {
    Count(key, false);
    return true;
  }
  uint32_t Evict() override {
    const List main = sizes_[kProbation] > 0 ? kProbation : kProtected;
    uint32_t slot = 0;
    if (sizes_[kWindow] < window_target_ && sizes_[main] > 0) {
      slot = links_.Back(main);
    } else if (sizes_[main] == 0 || sizes_[kWindow] == 0) {
      slot = links_.Back(sizes_[main] == 0 ? kWindow : main);
    } else {
      const uint32_t candidate = links_.Back(kWindow);
      const uint32_t last = links_.Back(main);
      const bool stays = sketch_.Estimate(key_of_(candidate)) > sketch_.Estimate(key_of_(last));
      if (stays) Move(candidate, kProbation);
      slot = stays ? last : candidate;
    }
    Erase(slot);
    return slot;
  }
  void Insert(uint32_t slot, uint64_t /*key*/) override {
    Enter(slot, kWindow);
    ShrinkWindow();
  }
  void Erase(uint32_t slot) override {
    links_.Remove(slot);
    --sizes_[lists_[slot]];
  }
  uint64_t bytes() const override { return links_.bytes() + lists_.size() + sketch_.bytes(); }

 private:
  enum List : uint8_t { kWindow, kProbation, kProtected };
  static constexpr double kFirstStep = 0.0625;
  static constexpr double kStepDecay = 0.98;
  static constexpr double kRestart = 0.05;
  static constexpr double kMaxWindow = 0.8;
  static constexpr double kProtectedShare = 0.8;
  static constexpr uint64_t kSamplePerSlot = 10;

  void Enter(uint32_t slot, List list) {
    lists_[slot] = list;
    links_.PushFront(list, slot);
    ++sizes_[list];
  }
  void Move(uint32_t slot, List list) {
    Erase(slot);
    Enter(slot, list);
  }
  void ShrinkWindow() {
    while (sizes_[kWindow] > window_target_) Move(links_.Back(kWindow), kProbation);
  }
  void ShrinkProtected() {
    const auto most = static_cast<uint32_t>(kProtectedShare * (capacity_ - window_target_));
    while (sizes_[kProtected] > most) Move(links_.Back(kProtected), kProbation);
  }
  void Count(uint64_t key, bool hit) {
    sketch_.Add(key);
    hits_ += hit ? 1 : 0;
    if (++accesses_ == kSamplePerSlot * capacity_) Climb();
  }
  void Climb() {
    const double rate = static_cast<double>(hits_) / static_cast<double>(accesses_);
    const double change = rate - last_rate_;
    last_rate_ = rate;
    hits_ = accesses_ = 0;
    if (change < 0) step_ = -step_;
    window_target_ = static_cast<uint32_t>(
        std::clamp(std::round(window_target_ + step_), 1.0, std::max(1.0, kMaxWindow * capacity_)));
    step_ = std::abs(change) >= kRestart ? std::copysign(kFirstStep * capacity_, step_)
                                         : step_ * kStepDecay;
    while (sizes_[kWindow] < window_target_ && sizes_[kProbation] > 0) {
      Move(links_.Back(kProbation), kWindow);
    }
    ShrinkWindow();
    ShrinkProtected();
  }

  const uint32_t capacity_;
  uint32_t window_target_;
  double step_;
  double last_rate_ = 0;
  uint64_t hits_ = 0;  // of the sample that goes on
  uint64_t accesses_ = 0;
  SlotLinks links_;
  std::vector<List> lists_;
  const KeyOf key_of_;
  FrequencySketch sketch_;
  std::array<uint32_t, 3> sizes_{};
};

}  // namespace

std::unique_ptr<Policy> MakeTinyLfu(uint32_t capacity, KeyOf key_of) {
  return std::make_unique<TinyLfu>(capacity, std::move(key_of));
}

}  // namespace embertide

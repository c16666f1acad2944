// "s3-fifo": three queues (Yang et al., "FIFO Queues are All You Need for Cache Eviction", 2023).
//
//   small (a tenth) --asked for twice or more--> main --while its count lasts, round again
//     \--else--> ghosts, the keys alone, as many as main has slots; a miss among them enters main
//
// Ghosts lie in sets of 8, a 4-byte tag and the number of the push each: a ghost is forgotten when
// as many were pushed after it as main has slots, or a little earlier where its set overflows.
#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "embertide/hash.h"
#include "policy/policies.h"
#include "policy/slot_links.h"

namespace embertide {
namespace {

class GhostQueue {
 public:
  // Half as many places again as ghosts, so that few sets overflow.
  explicit GhostQueue(uint32_t ghosts) : ghosts_(ghosts), sets_(1 + ghosts * 3ULL / 2 / kWays) {}
  void Push(uint64_t key) {
    const uint64_t hash = HashKey(key);
    Set& set = SetOf(hash);
    *std::max_element(set.begin(), set.end(), [&](const Ghost& a, const Ghost& b) {
      return Age(a) < Age(b);
    }) = {TagOf(hash), pushes_++};
  }
  // Whether `key` is among the ghosts; it no longer is.
  bool Take(uint64_t key) {
    const uint64_t hash = HashKey(key);
    for (Ghost& ghost : SetOf(hash)) {
      if (ghost.tag == TagOf(hash) && Age(ghost) <= ghosts_) {
        ghost.tag = 0;
        return true;
      }
    }
    return false;
  }
  uint64_t bytes() const { return sets_.size() * sizeof(Set); }

 private:
  static constexpr uint32_t kWays = 8;
  struct Ghost {
    uint32_t tag = 0;  // 0: none
    uint32_t push = 0;
  };
  using Set = std::array<Ghost, kWays>;
  static uint32_t TagOf(uint64_t hash) { return static_cast<uint32_t>(hash) | 1; }
  uint32_t Age(const Ghost& ghost) const { return ghost.tag == 0 ? ~0U : pushes_ - ghost.push; }
  Set& SetOf(uint64_t hash) { return sets_[(hash >> 32) * sets_.size() >> 32]; }

  const uint32_t ghosts_;
  uint32_t pushes_ = 0;
  std::vector<Set> sets_;
};

class S3Fifo final : public Policy {
 public:
  S3Fifo(uint32_t capacity, KeyOf key_of)
      : small_target_(std::max(1U, capacity / 10)),
        main_target_(capacity - small_target_),
        links_(capacity, 2),
        rows_(capacity),
        key_of_(std::move(key_of)),
        ghosts_(main_target_) {}
  void Touch(uint32_t slot) override {
    if (rows_[slot].count < kMaxCount) ++rows_[slot].count;
  }
  bool Admit(uint64_t /*key*/, bool /*full*/) override { return true; }
  uint32_t Evict() override {
    while (sizes_[kSmall] > 0 && (sizes_[kSmall] >= small_target_ || sizes_[kMain] == 0)) {
      const uint32_t slot = links_.Back(kSmall);
      Leave(slot);
      if (rows_[slot].count < 2) {
        ghosts_.Push(key_of_(slot));
        return slot;
      }
      Enter(kMain, slot);
      if (sizes_[kMain] > main_target_) break;
    }
    for (;;) {
      const uint32_t slot = links_.Back(kMain);
      const uint8_t count = rows_[slot].count;
      Leave(slot);
      if (count == 0) return slot;
      Enter(kMain, slot);
      rows_[slot].count = count - 1;
    }
  }
  void Insert(uint32_t slot, uint64_t key) override {
    Enter(ghosts_.Take(key) ? kMain : kSmall, slot);
  }
  void Erase(uint32_t slot) override { Leave(slot); }
  uint64_t bytes() const override {
    return links_.bytes() + rows_.size() * sizeof(Row) + ghosts_.bytes();
  }

 private:
  enum List : uint8_t { kSmall, kMain };
  static constexpr uint8_t kMaxCount = 3;
  struct Row {
    List list : 4 = kSmall;
    uint8_t count : 4 = 0;
  };
  void Enter(List list, uint32_t slot) {
    rows_[slot] = {list, 0};
    links_.PushFront(list, slot);
    ++sizes_[list];
  }
  void Leave(uint32_t slot) {
    links_.Remove(slot);
    --sizes_[rows_[slot].list];
  }

  const uint32_t small_target_;
  const uint32_t main_target_;
  SlotLinks links_;
  std::vector<Row> rows_;
  const KeyOf key_of_;
  GhostQueue ghosts_;
  std::array<uint32_t, 2> sizes_{};
};

}  // namespace

std::unique_ptr<Policy> MakeS3Fifo(uint32_t capacity, KeyOf key_of) {
  return std::make_unique<S3Fifo>(capacity, std::move(key_of));
}

}  // namespace embertide

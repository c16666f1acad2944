// The promotion record: which versions ordinary requests may see (docs/formats.md, "Promotion
// record"; docs/design/0011). Written by the guard and by rollbacks. Private to bus and node.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "embertide/status.h"

namespace embertide {

// 64 entries of each list, each with a line of text.
inline constexpr size_t kMaxPromotionBytes = size_t{1} << 20;

// All zeros: nobody has said anything yet.
struct Promotion {
  struct Range {
    uint64_t first = 0;
    uint64_t last = 0;
  };
  // Version `number` restores the state of version `to`.
  struct Undone {
    uint64_t number = 0;
    uint64_t to = 0;
  };

  uint64_t revision = 0;
  uint64_t promoted = 0;  // the newest version that ordinary requests may see
  std::vector<Range> withdrawn;
  std::vector<Undone> undone;              // oldest first
  std::map<std::string, uint64_t> totals;  // withdrawals by reason

  bool IsWithdrawn(uint64_t number) const {
    for (const Range& range : withdrawn) {
      if (range.first <= number && number <= range.last) return true;
    }
    return false;
  }
  bool MaySee(uint64_t number) const { return number <= promoted && !IsWithdrawn(number); }
};

// kCorrupt naming `where` unless the bytes are a record.
Result<Promotion> ParsePromotion(const std::string& bytes, const std::string& where);

// PUB/promoted.json; all zeros if there is none.
Result<Promotion> ReadPromotion(const std::string& publication);

// Where its copy lies on the bus.
std::string PromotionKey(const std::string& model);

}  // namespace embertide

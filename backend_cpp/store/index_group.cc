// IndexGroup: what lean entries say, written and read.
#include "store/index_group.h"

#include <numeric>

#include "ddr/slab_arena.h"

namespace embertide {
namespace {

// Below the hash a word holds at least what a removed key's needs.
constexpr uint32_t kMinSlotBits = 7;
constexpr uint32_t kMaxSlotBits = 55;

}  // namespace

LeanShape LeanShape::Of(const RowLayout& layout, uint32_t bucket, uint32_t bucket_bits,
                        uint64_t slots) {
  uint32_t unit = 0;  // divides the slots of all that a row can be, in kSlotUnitBytes
  for (uint32_t live = 1; live <= layout.chunks; ++live) {
    const uint32_t bytes = layout.PayloadBytes(static_cast<uint16_t>((1U << live) - 1));
    unit = std::gcd(unit, SlotBytesOf(bytes) / kSlotUnitBytes);
  }
  LeanShape shape;
  shape.bucket = bucket;
  shape.bucket_bits = static_cast<uint8_t>(bucket_bits);
  shape.chunks = static_cast<uint8_t>(layout.chunks);
  shape.unit_shift = static_cast<uint8_t>(std::countr_zero(unit));
  const auto place = static_cast<uint32_t>(std::bit_width(slots >> shape.unit_shift));
  const uint32_t bits = std::max(place + layout.chunks + 1U, kMinSlotBits);
  shape.slot_bits = static_cast<uint8_t>(bits <= kMaxSlotBits ? bits : 0);
  return shape;
}

uint32_t LeanShape::Window(uint32_t groups) const {
  if (slot_bits == 0) return 0;
  // Bits that an entry holds of a hash's low half.
  const int held = HeldBits();
  if (held >= 32) return groups;
  // So many groups' hashes differ in them.
  const int group_bits = static_cast<int>(std::bit_width(groups)) - 1;
  if (held <= 0 || held + group_bits < 32) return 0;
  const uint64_t window = uint64_t{1} << (held + group_bits - 32);
  if (window < kMinWindow) return 0;
  return static_cast<uint32_t>(std::min<uint64_t>(window, groups));
}

uint64_t LeanShape::HashOf(uint64_t turned, uint32_t number, uint32_t groups) const {
  const uint32_t high_bits = 32U - bucket_bits;
  const int held = HeldBits();
  const uint64_t high = turned & ((uint64_t{1} << high_bits) - 1);
  const uint64_t low = turned >> high_bits & 0xffffffffU;
  uint64_t position = low;
  if (held < 32) {
    // The last hash whose first group is this one, or else the nearest before it.
    const uint64_t last = (((uint64_t{number} + 1) << 32) + groups - 1) / groups - 1;
    const uint64_t mask = (uint64_t{1} << held) - 1;
    position = (last - ((last - low) & mask)) & 0xffffffffU;
  }
  const uint64_t top = bucket_bits == 0 ? 0 : uint64_t{bucket} << (64U - bucket_bits);
  return top | high << 32 | position;
}

uint64_t LeanShape::WordOf(Location location, uint64_t turned) const {
  if (location.is_chain()) return reinterpret_cast<uintptr_t>(location.chain()) | 1U;
  if (location.tier() == TierId::kNowhere) {
    return RestOf(turned) | (location.slot() + 1) << 2 | 3U;
  }
  const uint64_t place = location.slot() >> unit_shift;
  // A row without a live chunk never lies in slot 0: of some hashes its word would be an empty one.
  EMBERTIDE_CHECK(location.tier() == TierId::kDdr && (location.live() != 0 || place != 0) &&
                  place << unit_shift == location.slot());
  return RestOf(turned) | (place << chunks | location.live()) << 1;
}

Location LeanShape::LocationOf(uint64_t word) const {
  if (IsChain(word)) return Location(ChainOf(word));
  const uint64_t below = word & ((uint64_t{1} << slot_bits) - 1);
  if ((word & 1U) != 0) return {TierId::kNowhere, 0, (below >> 2) - 1};
  return RowOf(below >> 1);
}

void LeanShape::SetBeside(IndexGroup* group, uint32_t lane, uint64_t turned) {
  const auto put = [](std::atomic<uint64_t>* at, uint64_t mask, uint64_t bits) {
    at->store((at->load(std::memory_order_relaxed) & ~mask) | bits, std::memory_order_release);
  };
  const uint32_t tag_at = lane % 4 * kTagBits;
  const uint32_t more_at = 32 + lane * kMoreBits;
  put(&group->lanes[lane / 4], uint64_t{0xffff} << tag_at, (turned & 0xffffU) << tag_at);
  put(&group->lanes[1], uint64_t{31} << more_at, (turned >> kTagBits & 31U) << more_at);
}

}  // namespace embertide

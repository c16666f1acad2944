// Location: the 64-bit word of an index entry, which says where a row lies.
//
//   bit  63       62 56   55 54   53     38   37        0
//        [chain=0][ zero ][ tier ][ live mask ][ slot      ]   one place
//        [chain=1][            zero            ][ pointer  ]   a chain of versions (47 bits)
//
// Bits 62 to 56 belong to the index (an access count and a mark), and a word of zeros is its empty
// entry: no location is 0, for no entry names the HBM tier, which holds copies. Tier kNowhere says
// that the key reads as the default; its slot field then holds the RecordKind that removed it.
#pragma once

#include <atomic>
#include <cstdint>

#include "embertide/row.h"

namespace embertide {

enum class TierId : uint8_t { kHbm = 0, kDdr = 1, kSsd = 2, kNowhere = 3 };

struct VersionNode;

class Location {
 public:
  static constexpr uint32_t kLiveShift = 38;
  static constexpr uint64_t kSlotMask = (1ULL << kLiveShift) - 1;
  // The bits of a word that is_ddr_row looks at, and their value in a row of DDR.
  static constexpr uint64_t kKindMask = (1ULL << 63) | (3ULL << 54);
  static constexpr uint64_t kDdrKind = uint64_t{static_cast<uint8_t>(TierId::kDdr)} << 54;

  Location() : Location(TierId::kNowhere, 0, 0) {}
  Location(TierId tier, uint16_t live, uint64_t slot)
      : word_((uint64_t{static_cast<uint8_t>(tier)} << 54) | (uint64_t{live} << kLiveShift) |
              slot) {}
  explicit Location(const VersionNode* chain)
      : word_(kChainBit | reinterpret_cast<uintptr_t>(chain)) {}

  static Location FromWord(uint64_t word) {
    Location location;
    location.word_ = word;
    return location;
  }
  static Location Removed(RecordKind kind) {
    return {TierId::kNowhere, 0, static_cast<uint64_t>(kind)};
  }

  uint64_t word() const { return word_; }
  bool is_chain() const { return (word_ & kChainBit) != 0; }
  // Requires: is_chain().
  VersionNode* chain() const { return reinterpret_cast<VersionNode*>(word_ & ~kChainBit); }
  // A word of an index entry, its own bits included, that names a row of DDR and no chain.
  bool is_ddr_row() const { return (word_ & kKindMask) == kDdrKind; }
  // Requires for the following: !is_chain().
  TierId tier() const { return static_cast<TierId>((word_ >> 54) & 3U); }
  uint16_t live() const { return static_cast<uint16_t>(word_ >> kLiveShift); }
  uint64_t slot() const { return word_ & kSlotMask; }
  bool operator==(const Location&) const = default;

 private:
  static constexpr uint64_t kChainBit = 1ULL << 63;
  uint64_t word_;
};

// One version of one row. The chain of a row runs from newest to oldest and ends in a node that
// every pin may read (its version is <= the oldest pinned). Nodes of one version and one pool
// are linked through `next_staged`, so that folding visits what the version changed and no more.
struct VersionNode {
  uint64_t version = 0;
  std::atomic<uint64_t> word{0};
  std::atomic<VersionNode*> older{nullptr};
  VersionNode* next_staged = nullptr;
  uint64_t key = 0;
  uint32_t table = 0;
  uint32_t bucket = 0;
};

// The place that a chain or an entry means at a version, and which version it is of (a row of no
// chain leaves `changed_at` alone).
Location Resolve(Location location, uint64_t version, uint64_t* changed_at = nullptr);

}  // namespace embertide

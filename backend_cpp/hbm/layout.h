// The memory of an HBM device, as the host, the twin and the kernels read it alike.
//
// A device's cache is set-associative: a set has 32 ways, one for each lane of a warp. A key's hash
// chooses its set; a way holds a row that is valid for the versions [since, until):
//
//   tags      set x 32 x u16         0: the way is empty; a probe reads these 64 bytes,
//   entries   set x 32 x HbmEntry    and then the 32 of the way whose tag is the key's
//   pages     64 KiB each            slots of one size class, multiples of 32 bytes
//
// A row's payload is that of embertide/row.h. All of it is plain data: no ownership, no locks.
// Versions are compared by the reader's own pin, so an entry that ended answers older pins still.
#pragma once

#include <cstddef>
#include <cstdint>

#include "embertide/hash.h"
#include "embertide/row.h"

namespace embertide {

// A warp surveys a set, a lane a way.
inline constexpr uint32_t kHbmWays = 32;
// Slots are whole sectors of DRAM; in these units a 32-bit number names 128 GiB.
inline constexpr uint32_t kHbmSlotUnit = 32;
// A class that is hardly used wastes little; all pages lie in one allocation, so the TLB is alike.
inline constexpr uint32_t kHbmPageBytes = 64 * 1024;
// No table of a store has this number: a position that is not to be looked for.
inline constexpr uint16_t kHbmNoTable = 0x7fff;
inline constexpr uint64_t kHbmOpenEnd = ~0ULL;  // `until` of a row that no version has changed

struct alignas(32) HbmEntry {
  uint64_t key = 0;
  uint64_t since = 0;
  uint64_t until = 0;  // 0: empty
  uint32_t slot = 0;   // in units of kHbmSlotUnit from the first page
  uint32_t meta = 0;   // [31: asked for of late][30..16: table][15..0: live mask]
};
static_assert(sizeof(HbmEntry) == 32, "one sector of DRAM");

inline constexpr uint32_t kHbmUsed = 1U << 31;
constexpr uint32_t HbmMeta(uint32_t table, uint16_t live) { return table << 16 | live; }
constexpr uint32_t HbmTableOf(uint32_t meta) { return meta >> 16 & 0x7fffU; }
constexpr uint16_t HbmLiveOf(uint32_t meta) { return static_cast<uint16_t>(meta); }

// Where (table, key) may stand. The hash of the key alone chooses bucket and device: it is mixed
// once more, so that the keys of a device meet all of its sets.
constexpr uint64_t HbmHash(uint32_t table, uint64_t key) {
  return HashKey(HashKey(key) + uint64_t{table});
}
constexpr uint32_t HbmSetOf(uint64_t hash, uint32_t sets) {
  return static_cast<uint32_t>(((hash & 0xffffffffULL) * sets) >> 32);
}
constexpr uint16_t HbmTagOf(uint64_t hash) { return static_cast<uint16_t>(hash >> 48 | 1U); }

// One device's cache. The pointers are the device's.
struct HbmDirectory {
  uint16_t* tags = nullptr;
  HbmEntry* entries = nullptr;
  std::byte* pages = nullptr;
  uint32_t sets = 0;
};

// A table, as far as a kernel needs it.
struct HbmTable {
  uint32_t dim = 0;
  uint16_t chunks = 0;
  uint16_t chunk_dim = 0;
  DType dtype = DType::kFp32;
};

enum class HbmRefKind : uint8_t {
  kRow = 0,      // a payload of the table's layout
  kFloats = 1,   // dim fp32: the default row
  kSums = 2,     // dim fp64: a sum made elsewhere
  kNothing = 3,  // adds nothing
};

// Where the answer of one position lies, on the device.
struct alignas(16) HbmRef {
  const std::byte* payload = nullptr;
  uint16_t live = 0;
  HbmRefKind kind = HbmRefKind::kNothing;
};
static_assert(sizeof(HbmRef) == 16);

// refs[first .. first + count) are pooled to dim values.
struct HbmBag {
  uint32_t first = 0;
  uint32_t count = 0;  // > 0
  uint32_t out = 0;    // where they go: a float of `out`, or a double of `partials`
  uint32_t divisor = 1;
  uint16_t table = 0;
  bool partial = false;  // fp64 sums for another device, not divided
};

// A row to be placed, or with bytes = 0 and entry.until = 0 a way to be emptied.
struct HbmPlacement {
  HbmEntry entry;
  uint64_t from = 0;   // in the payloads that come with it; a multiple of 16
  uint32_t way = 0;    // set x 32 + way of the set
  uint32_t bytes = 0;  // of payload; readable and writable up to the next multiple of 16
};

// The row in `way` ends with version `until`.
struct HbmEnding {
  uint64_t until = 0;
  uint32_t way = 0;
};

}  // namespace embertide

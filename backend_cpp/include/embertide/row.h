// The row: the one definition and the one encoding, shared by trainer, bus, files and node.
//
// A row is a key and the live chunks of its vector. A vector of `dim` values is cut into `chunks`
// chunks of `chunk_dim`; bit c of the live mask says that chunk c is held. A dead chunk reads as
// zeros. The payload holds the live chunks in ascending order and nothing else:
//
//   fp32, fp16, bf16:  [chunk][chunk]...           popcount(live) * chunk_dim elements
//   int8:              [f32 scale][chunk]...        value = scale * element
//   int4:              [f32 scale][chunk]...        the same; two elements a byte, the first low
//   keys:              [chunk][chunk]...           64-bit keys, and no values at all
//
// Rows of keys are copied byte for byte: no function here makes numbers of them, and their dead
// chunks read as kNoKey.
//
// A record is how a row travels (docs/formats.md, "Row record"), little-endian, unaligned:
//
//   offset  0        8        10     11        12
//           [u64 key][u16 live][u8 kind][u8 zero][payload]
//
// All functions are pure and thread-safe.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "embertide/status.h"

namespace embertide {

// Stored in files and on the bus: do not renumber.
enum class DType : uint8_t {
  kFp32 = 0,
  kFp16 = 1,
  kBf16 = 2,
  kInt8 = 3,
  kKeys = 4,
  kInt4 = 5,  // to be served in: no row of it is trained
};
inline constexpr uint32_t kDTypes = 6;

// Where a row of keys has none; the trainer's PADDING_KEY. No item has it.
inline constexpr int64_t kNoKey = std::numeric_limits<int64_t>::min();

// The state of a record's key. Stored: do not renumber. Tombstones have live = 0, no payload.
enum class RecordKind : uint8_t { kRow = 0, kPruned = 1, kExpired = 2 };

// Bits of the live mask: one 16-bit field of an index entry holds it.
inline constexpr uint32_t kMaxChunks = 16;
// A payload must fit one 4 KiB SSD block with its record and block headers.
inline constexpr uint32_t kMaxPayloadBytes = 4064;
inline constexpr size_t kRecordHeaderBytes = 12;

// "fp32", "fp16", "bf16", "int8", "keys" or "int4".
const char* DTypeName(DType dtype);
Result<DType> ParseDType(const std::string& name);
// Bits of one element.
constexpr uint32_t DTypeBits(DType dtype) {
  constexpr uint32_t kBits[kDTypes] = {32, 16, 16, 8, 64, 4};
  return kBits[static_cast<size_t>(dtype)];
}
// Whether elements are steps of a scale that stands before them.
constexpr bool IsScaled(DType dtype) { return dtype == DType::kInt8 || dtype == DType::kInt4; }

// The largest value that a row may be given, so that what it reads as is finite.
constexpr float LargestOf(DType dtype) {
  if (dtype == DType::kFp16) return 65504.0F;
  if (dtype == DType::kBf16) return 3.3895314e38F;
  if (dtype == DType::kInt4) return 2e38F;  // a fitted scale may reach beyond the largest value
  return dtype == DType::kFp32 ? 3.4028235e38F : 3.4e38F;  // products with a scale round
}

struct RowLayout {
  uint16_t chunks = 1;     // 1..kMaxChunks
  uint16_t chunk_dim = 0;  // elements of a chunk; of int4 an even number
  DType dtype = DType::kFp32;

  uint32_t dim() const { return uint32_t{chunks} * chunk_dim; }
  // Whether a row is keys, which are no numbers: it is copied, never decoded, pooled or trained.
  bool is_keys() const { return dtype == DType::kKeys; }
  uint32_t chunk_bytes() const { return chunk_dim * DTypeBits(dtype) / 8; }
  uint16_t full_mask() const { return static_cast<uint16_t>((1U << chunks) - 1U); }
  // Before the chunks of a row that has any.
  uint32_t scale_bytes() const { return IsScaled(dtype) ? 4U : 0U; }
  // Bytes of a row with these live chunks; 0 for none.
  uint32_t PayloadBytes(uint16_t live) const {
    if (live == 0) return 0;
    return static_cast<uint32_t>(std::popcount(live)) * chunk_bytes() + scale_bytes();
  }
  // kInvalidArgument naming the field when no row of this layout can exist.
  Status Validate() const;
  bool operator==(const RowLayout&) const = default;
};

// One decoded record; `payload` points into the bytes it was read from.
struct RowRecord {
  uint64_t key = 0;
  uint16_t live = 0;
  RecordKind kind = RecordKind::kRow;
  std::span<const std::byte> payload;
};

// Encodes `values` (layout.dim() floats) into `payload` (layout.PayloadBytes(live) bytes): live
// chunks only; fp16 and bf16 round to nearest even, int8 scales by max|value| / 127, int4 by a
// scale that is fitted to the squared error.
void EncodePayload(const RowLayout& layout, uint16_t live, const float* values, std::byte* payload);

// Encodes layout.dim() keys, where a chunk without a key is dead. Returns the live mask. Requires:
// the layout is_keys; `payload` has room for all chunks.
uint16_t EncodeKeys(const RowLayout& layout, const int64_t* keys, std::byte* payload);
// Copies the keys of a row, layout.dim() of them; kNoKey in a dead chunk. Requires: is_keys.
void CopyKeys(const RowLayout& layout, uint16_t live, const std::byte* payload, int64_t* keys);

// The next three require a layout that is not of keys.
// Decodes a payload into layout.dim() floats; dead chunks become zeros.
void DecodePayload(const RowLayout& layout, uint16_t live, const std::byte* payload, float* values);

// Adds a row to layout.dim() fp64 accumulators (pooled values are summed in
// fp64 and rounded once, so that any split of a bag over owners gives the same floats). Plain and
// slow; the store adds many rows at once (store/row_ops.h).
void AccumulatePayload(const RowLayout& layout, uint16_t live, const std::byte* payload,
                       double* sums);

// Appends one record to `out`.
void AppendRecord(const RowRecord& record, std::vector<std::byte>* out);

// Reads the record at the front of `bytes` and advances `bytes` past it. kCorrupt, naming the
// offending field, if the bytes are no record of this layout; `bytes` is then unspecified.
Result<RowRecord> ReadRecord(const RowLayout& layout, std::span<const std::byte>* bytes);

// Appends `records`, of layout `from`, to `out` as records of `to`: each row's values encoded anew.
// A value that `to` cannot hold becomes its largest one, and so does NaN, as in training.
// Tombstones stay as they are. kCorrupt as of ReadRecord. Requires: the layouts have the same
// chunks, and neither is of keys.
Status ConvertRecords(const RowLayout& from, const RowLayout& to,
                      std::span<const std::byte> records, std::vector<std::byte>* out);

// The initial value of dimension d of a new row: uniform in [-scale, scale), a function of its
// arguments alone, so that any rank, device or restart makes the same row.
float InitialValue(uint64_t seed, uint32_t table_id, uint64_t key, uint32_t d, float scale);

}  // namespace embertide

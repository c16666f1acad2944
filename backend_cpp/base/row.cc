// The row codec: docs/formats.md, "Row payload" and "Row record".
#include "embertide/row.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "base/float16.h"
#include "embertide/hash.h"

static_assert(std::endian::native == std::endian::little, "formats are little-endian");

namespace embertide {
namespace {

constexpr std::array<const char*, 5> kDTypeNames = {"fp32", "fp16", "bf16", "int8", "keys"};

uint16_t Bf16FromFloat(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  // A NaN keeps its top payload bits and stays a NaN; all else rounds to nearest even.
  if (std::isnan(value)) return static_cast<uint16_t>((bits >> 16) | 0x40U);
  return static_cast<uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

float FloatFromBf16(uint16_t value) { return std::bit_cast<float>(uint32_t{value} << 16); }

template <typename T>
T Load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

template <typename T>
void Save(T value, std::byte* to) {
  std::memcpy(to, &value, sizeof(T));
}

float Int8Scale(const RowLayout& layout, uint16_t live, const float* values) {
  float largest = 0.0F;
  for (uint32_t c = 0; c < layout.chunks; ++c) {
    if ((live >> c & 1U) == 0) continue;
    for (uint32_t i = 0; i < layout.chunk_dim; ++i) {
      largest = std::max(largest, std::fabs(values[c * layout.chunk_dim + i]));
    }
  }
  return largest / 127.0F;
}

void EncodeChunk(DType dtype, uint32_t n, float scale, const float* values, std::byte* out) {
  switch (dtype) {
    case DType::kFp32:
      std::memcpy(out, values, size_t{n} * 4);
      return;
    case DType::kFp16:
      for (uint32_t i = 0; i < n; ++i) Save(static_cast<Float16>(values[i]), out + 2 * i);
      return;
    case DType::kBf16:
      for (uint32_t i = 0; i < n; ++i) Save(Bf16FromFloat(values[i]), out + 2 * i);
      return;
    case DType::kInt8:
      for (uint32_t i = 0; i < n; ++i) {
        const float q = scale == 0.0F ? 0.0F : std::nearbyint(values[i] / scale);
        Save(static_cast<int8_t>(std::clamp(q, -127.0F, 127.0F)), out + i);
      }
      return;
    case DType::kKeys:
      EMBERTIDE_CHECK(!"a row of keys is made of no values");
  }
}

// Calls use(dimension, value) for the elements of one encoded chunk that starts at `first`.
template <typename Use>
void DecodeChunk(DType dtype, uint32_t n, float scale, const std::byte* in, uint32_t first,
                 Use use) {
  switch (dtype) {
    case DType::kFp32:
      for (uint32_t i = 0; i < n; ++i) use(first + i, Load<float>(in + 4 * i));
      return;
    case DType::kFp16:
      for (uint32_t i = 0; i < n; ++i) {
        use(first + i, static_cast<float>(Load<Float16>(in + 2 * i)));
      }
      return;
    case DType::kBf16:
      for (uint32_t i = 0; i < n; ++i) use(first + i, FloatFromBf16(Load<uint16_t>(in + 2 * i)));
      return;
    case DType::kInt8:
      for (uint32_t i = 0; i < n; ++i) {
        use(first + i, scale * static_cast<float>(Load<int8_t>(in + i)));
      }
      return;
    case DType::kKeys:
      EMBERTIDE_CHECK(!"a row of keys has no values");
  }
}

template <typename Use>
void DecodeLive(const RowLayout& layout, uint16_t live, const std::byte* payload, Use use) {
  float scale = 1.0F;
  if (layout.dtype == DType::kInt8 && live != 0) {
    scale = Load<float>(payload);
    payload += 4;
  }
  for (uint32_t c = 0; c < layout.chunks; ++c) {
    if ((live >> c & 1U) == 0) continue;
    DecodeChunk(layout.dtype, layout.chunk_dim, scale, payload, c * layout.chunk_dim, use);
    payload += layout.chunk_bytes();
  }
}

}  // namespace

const char* DTypeName(DType dtype) { return kDTypeNames[static_cast<size_t>(dtype)]; }

Result<DType> ParseDType(const std::string& name) {
  for (size_t i = 0; i < kDTypeNames.size(); ++i) {
    if (name == kDTypeNames[i]) return static_cast<DType>(i);
  }
  return Status(Code::kInvalidArgument,
                "dtype \"" + name + "\" is unknown; use fp32, fp16, bf16, int8 or keys");
}

Status RowLayout::Validate() const {
  if (chunks == 0 || chunks > kMaxChunks) {
    return {Code::kInvalidArgument,
            "chunks = " + std::to_string(chunks) + "; give 1 to " + std::to_string(kMaxChunks)};
  }
  if (chunk_dim == 0) return {Code::kInvalidArgument, "chunk_dim = 0; give at least 1"};
  if (static_cast<uint8_t>(dtype) > static_cast<uint8_t>(DType::kKeys)) {
    return {Code::kInvalidArgument,
            "dtype number " + std::to_string(static_cast<int>(dtype)) + " is unknown"};
  }
  if (const uint64_t bytes = uint64_t{dim()} * DTypeBytes(dtype) + 4; bytes > kMaxPayloadBytes) {
    return {Code::kInvalidArgument, "a row of " + std::to_string(bytes) + " bytes exceeds " +
                                        std::to_string(kMaxPayloadBytes)};
  }
  return Status::Ok();
}

void EncodePayload(const RowLayout& layout, uint16_t live, const float* values,
                   std::byte* payload) {
  float scale = 1.0F;
  if (layout.dtype == DType::kInt8 && live != 0) {
    scale = Int8Scale(layout, live, values);
    Save(scale, payload);
    payload += 4;
  }
  for (uint32_t c = 0; c < layout.chunks; ++c) {
    if ((live >> c & 1U) == 0) continue;
    EncodeChunk(layout.dtype, layout.chunk_dim, scale, values + size_t{c} * layout.chunk_dim,
                payload);
    payload += layout.chunk_bytes();
  }
}

uint16_t EncodeKeys(const RowLayout& layout, const int64_t* keys, std::byte* payload) {
  EMBERTIDE_CHECK(layout.is_keys());
  uint16_t live = 0;
  for (uint32_t c = 0; c < layout.chunks; ++c, keys += layout.chunk_dim) {
    const auto is_key = [](int64_t key) { return key != kNoKey; };
    if (std::none_of(keys, keys + layout.chunk_dim, is_key)) continue;
    live = static_cast<uint16_t>(live | 1U << c);
    std::memcpy(payload, keys, layout.chunk_bytes());
    payload += layout.chunk_bytes();
  }
  return live;
}

void CopyKeys(const RowLayout& layout, uint16_t live, const std::byte* payload, int64_t* keys) {
  EMBERTIDE_CHECK(layout.is_keys());
  for (uint32_t c = 0; c < layout.chunks; ++c, keys += layout.chunk_dim) {
    if ((live >> c & 1U) == 0) {
      std::fill_n(keys, layout.chunk_dim, kNoKey);
      continue;
    }
    std::memcpy(keys, payload, layout.chunk_bytes());
    payload += layout.chunk_bytes();
  }
}

void DecodePayload(const RowLayout& layout, uint16_t live, const std::byte* payload,
                   float* values) {
  if (live != layout.full_mask()) std::fill_n(values, layout.dim(), 0.0F);
  DecodeLive(layout, live, payload, [values](uint32_t d, float value) { values[d] = value; });
}

void AccumulatePayload(const RowLayout& layout, uint16_t live, const std::byte* payload,
                       double* sums) {
  DecodeLive(layout, live, payload,
             [sums](uint32_t d, float value) { sums[d] += static_cast<double>(value); });
}

void AppendRecord(const RowRecord& record, std::vector<std::byte>* out) {
  std::array<std::byte, kRecordHeaderBytes> header{};
  Save(record.key, header.data());
  Save(record.live, header.data() + 8);
  Save(record.kind, header.data() + 10);
  out->insert(out->end(), header.begin(), header.end());
  out->insert(out->end(), record.payload.begin(), record.payload.end());
}

Result<RowRecord> ReadRecord(const RowLayout& layout, std::span<const std::byte>* bytes) {
  if (bytes->size() < kRecordHeaderBytes) {
    return Status(Code::kCorrupt,
                  "a record header needs 12 bytes, " + std::to_string(bytes->size()) + " are left");
  }
  RowRecord record;
  const auto corrupt = [&](const std::string& what) {
    return Status(Code::kCorrupt, "record of key " + std::to_string(record.key) + ": " + what);
  };
  record.key = Load<uint64_t>(bytes->data());
  record.live = Load<uint16_t>(bytes->data() + 8);
  const auto kind = Load<uint8_t>(bytes->data() + 10);
  if (kind > static_cast<uint8_t>(RecordKind::kExpired)) {
    return corrupt("kind " + std::to_string(kind) + " is unknown");
  }
  record.kind = static_cast<RecordKind>(kind);
  if (Load<uint8_t>(bytes->data() + 11) != 0) return corrupt("the reserved byte is not zero");
  if ((record.live & ~layout.full_mask()) != 0) {
    return corrupt("live mask " + std::to_string(record.live) + " names chunks past " +
                   std::to_string(layout.chunks));
  }
  if (record.kind != RecordKind::kRow && record.live != 0) {
    return corrupt("a tombstone has live chunks");
  }
  const uint32_t payload = layout.PayloadBytes(record.live);
  if (bytes->size() - kRecordHeaderBytes < payload) {
    return corrupt("a payload of " + std::to_string(payload) + " bytes is cut short");
  }
  record.payload = bytes->subspan(kRecordHeaderBytes, payload);
  *bytes = bytes->subspan(kRecordHeaderBytes + payload);
  return record;
}

Status ConvertRecords(const RowLayout& from, const RowLayout& to,
                      std::span<const std::byte> records, std::vector<std::byte>* out) {
  EMBERTIDE_CHECK(!from.is_keys() && !to.is_keys());
  EMBERTIDE_CHECK(from.chunks == to.chunks && from.chunk_dim == to.chunk_dim);
  const float most = LargestOf(to.dtype);
  std::vector<float> values(from.dim());
  std::vector<std::byte> payload(to.PayloadBytes(to.full_mask()));
  while (!records.empty()) {
    Result<RowRecord> read = ReadRecord(from, &records);
    if (!read.ok()) return read.status();
    RowRecord record = read.value();
    DecodePayload(from, record.live, record.payload.data(), values.data());
    for (float& value : values) {
      value = value < most ? value : most;  // NaN, too
      value = value > -most ? value : -most;
    }
    EncodePayload(to, record.live, values.data(), payload.data());
    record.payload = {payload.data(), to.PayloadBytes(record.live)};
    AppendRecord(record, out);
  }
  return Status::Ok();
}

float InitialValue(uint64_t seed, uint32_t table_id, uint64_t key, uint32_t d, float scale) {
  const uint64_t bits = HashKey(HashKey(HashKey(seed ^ table_id) ^ key) ^ d);
  // 24 random bits: every value is an exact float in [-1, 1).
  const float unit = static_cast<float>(bits >> 40) * 0x1p-23F - 1.0F;
  return unit * scale;
}

}  // namespace embertide

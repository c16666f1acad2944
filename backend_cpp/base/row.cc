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

constexpr std::array<const char*, kDTypes> kDTypeNames = {"fp32", "fp16", "bf16",
                                                          "int8", "keys", "int4"};

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

// Calls use(value) for the values of live chunks.
template <typename Use>
void ForEachLive(const RowLayout& layout, uint16_t live, const float* values, Use use) {
  for (uint32_t c = 0; c < layout.chunks; ++c) {
    if ((live >> c & 1U) == 0) continue;
    for (uint32_t i = 0; i < layout.chunk_dim; ++i) use(values[c * layout.chunk_dim + i]);
  }
}

float Int8Scale(const RowLayout& layout, uint16_t live, const float* values) {
  float largest = 0.0F;
  ForEachLive(layout, live, values,
              [&](float value) { largest = std::max(largest, std::fabs(value)); });
  return largest / 127.0F;
}

// The nearest of the 16 steps of int4. What is no number becomes the last one.
float Int4Step(float value, float scale) {
  float step = value / scale;
  step = step >= -8.0F ? step : -8.0F;
  step = step <= 7.0F ? step : 7.0F;
  return (step + 0x1.8p23F) - 0x1.8p23F;  // to the nearest, even
}

// The squared error of a scale, and the scale of the least for the steps that it leads to.
struct Int4Fit {
  double error = 0.0;
  float better = 0.0F;
};

Int4Fit FitOf(const RowLayout& layout, uint16_t live, const float* values, float scale) {
  Int4Fit fit;
  double products = 0.0;
  double squares = 0.0;
  ForEachLive(layout, live, values, [&](float value) {
    const double step = Int4Step(value, scale);
    const double off = double{value} - step * double{scale};
    fit.error += off * off;
    products += step * double{value};
    squares += step * step;
  });
  fit.better = squares > 0.0 ? static_cast<float>(products / squares) : scale;
  return fit;
}

// The value farthest from zero is -8 steps of the first scale, so its sign is the other one's. In
// smaller steps that value is cut and all others are nearer: of some such scales, each also fitted
// to its own steps, the one of the least squared error.
float Int4Scale(const RowLayout& layout, uint16_t live, const float* values) {
  float farthest = 0.0F;
  ForEachLive(layout, live, values, [&](float value) {
    if (std::fabs(value) > std::fabs(farthest)) farthest = value;
  });
  float best = farthest / -8.0F;
  if (best == 0.0F) return 0.0F;  // none of -0, either
  double least = std::numeric_limits<double>::infinity();
  const auto take = [&](float scale, const Int4Fit& fit) {
    if (!(fit.error < least)) return;
    best = scale;
    least = fit.error;
  };
  const float whole = best;
  for (const float share : {1.0F, 0.92F, 0.84F, 0.76F}) {
    const float scale = whole * share;
    if (scale == 0.0F) break;
    const Int4Fit fit = FitOf(layout, live, values, scale);
    take(scale, fit);
    if (fit.better == 0.0F) continue;
    take(fit.better, FitOf(layout, live, values, fit.better));
  }
  return best;
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
    case DType::kInt4:
      for (uint32_t i = 0; i < n; i += 2) {
        const auto step = [&](uint32_t at) {
          const float q = scale == 0.0F ? 0.0F : Int4Step(values[at], scale);
          return static_cast<uint32_t>(static_cast<int32_t>(q)) & 15U;
        };
        Save(static_cast<uint8_t>(step(i) | step(i + 1) << 4), out + i / 2);
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
    case DType::kInt4:
      for (uint32_t i = 0; i < n; ++i) {
        // Shifted up to the sign and back.
        const int32_t step = static_cast<int32_t>(Load<uint8_t>(in + i / 2) >> i % 2 * 4 << 28);
        use(first + i, scale * static_cast<float>(step >> 28) + 0.0F);  // no -0 of a scale below 0
      }
      return;
    case DType::kKeys:
      EMBERTIDE_CHECK(!"a row of keys has no values");
  }
}

template <typename Use>
void DecodeLive(const RowLayout& layout, uint16_t live, const std::byte* payload, Use use) {
  float scale = 1.0F;
  if (IsScaled(layout.dtype) && live != 0) {
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
                "dtype \"" + name + "\" is unknown; use fp32, fp16, bf16, int8, int4 or keys");
}

Status RowLayout::Validate() const {
  if (chunks == 0 || chunks > kMaxChunks) {
    return {Code::kInvalidArgument,
            "chunks = " + std::to_string(chunks) + "; give 1 to " + std::to_string(kMaxChunks)};
  }
  if (chunk_dim == 0) return {Code::kInvalidArgument, "chunk_dim = 0; give at least 1"};
  if (static_cast<uint8_t>(dtype) >= kDTypes) {
    return {Code::kInvalidArgument,
            "dtype number " + std::to_string(static_cast<int>(dtype)) + " is unknown"};
  }
  if (dtype == DType::kInt4 && chunk_dim % 2 != 0) {
    return {Code::kInvalidArgument,
            "chunk_dim = " + std::to_string(chunk_dim) +
                ": a chunk of int4 has two values a byte; give an even number, or int8"};
  }
  const uint64_t bytes = uint64_t{chunks} * chunk_bytes() + 4;
  if (bytes > kMaxPayloadBytes) {
    return {Code::kInvalidArgument, "a row of " + std::to_string(bytes) + " bytes exceeds " +
                                        std::to_string(kMaxPayloadBytes)};
  }
  return Status::Ok();
}

void EncodePayload(const RowLayout& layout, uint16_t live, const float* values,
                   std::byte* payload) {
  float scale = 1.0F;
  if (IsScaled(layout.dtype) && live != 0) {
    scale = layout.dtype == DType::kInt8 ? Int8Scale(layout, live, values)
                                         : Int4Scale(layout, live, values);
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

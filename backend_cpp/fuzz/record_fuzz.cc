// Row records: what is read is written again byte for byte, and its payload says one thing only.
//
//   input: [u8 chunks][u8 chunk_dim][u8 dtype][records]
#include <cmath>

#include "embertide/row.h"
#include "fuzz/fuzz.h"

namespace embertide::fuzz {
namespace {

RowLayout TakeLayout(std::string_view* input) {
  RowLayout layout;
  layout.chunks = Take<uint8_t>(input);
  layout.chunk_dim = Take<uint8_t>(input);
  layout.dtype = static_cast<DType>(Take<uint8_t>(input));
  return layout;
}

// Keys are copied: put together again they are the row's bytes, but for live chunks without a key.
void CheckKeys(const RowLayout& layout, const RowRecord& record) {
  std::vector<int64_t> keys(layout.dim());
  CopyKeys(layout, record.live, record.payload.data(), keys.data());
  std::vector<std::byte> again(layout.PayloadBytes(layout.full_mask()));
  const uint16_t live = EncodeKeys(layout, keys.data(), again.data());
  EMBERTIDE_CHECK((live & ~record.live) == 0);
  EMBERTIDE_CHECK(live != record.live ||
                  std::equal(record.payload.begin(), record.payload.end(), again.begin()));
}

// A row alone in a bag is its values; written again they are its bytes, but for the scale of int8
// and int4, which follows from the values, and the bits inside a NaN.
void CheckPayload(const RowLayout& layout, const RowRecord& record) {
  std::vector<float> values(layout.dim());
  DecodePayload(layout, record.live, record.payload.data(), values.data());
  std::vector<double> sums(layout.dim(), 0.0);
  AccumulatePayload(layout, record.live, record.payload.data(), sums.data());
  bool numbers = true;
  for (uint32_t d = 0; d < layout.dim(); ++d) {
    numbers = numbers && !std::isnan(values[d]);
    const bool live = (record.live >> (d / layout.chunk_dim) & 1U) != 0;
    EMBERTIDE_CHECK(live || values[d] == 0.0F);
    EMBERTIDE_CHECK(std::isnan(values[d]) || static_cast<float>(sums[d]) == values[d]);
  }
  if (!numbers || IsScaled(layout.dtype)) return;
  std::vector<std::byte> again(layout.PayloadBytes(record.live));
  EncodePayload(layout, record.live, values.data(), again.data());
  EMBERTIDE_CHECK(std::equal(again.begin(), again.end(), record.payload.begin()));
}

}  // namespace

std::vector<std::string> Seeds() {
  std::vector<std::string> seeds;
  for (const DType dtype : {DType::kFp32, DType::kFp16, DType::kBf16, DType::kInt8, DType::kInt4}) {
    const RowLayout layout{3, 2, dtype};
    std::vector<std::byte> records;
    for (const uint16_t live : {7, 5, 0}) {
      const std::vector<float> values = {0.5F, -2, 3e-7F, 4, 1e30F, 0};
      std::vector<std::byte> payload(layout.PayloadBytes(live));
      EncodePayload(layout, live, values.data(), payload.data());
      AppendRecord({live * 1000ULL, live, RecordKind::kRow, payload}, &records);
      AppendRecord({live * 1000ULL + 1, 0, RecordKind::kPruned, {}}, &records);
    }
    seeds.push_back(Raw<uint8_t>(3) + Raw<uint8_t>(2) + Raw(dtype) +
                    std::string(reinterpret_cast<const char*>(records.data()), records.size()));
  }
  const RowLayout layout{3, 2, DType::kKeys};
  std::vector<std::byte> row(layout.PayloadBytes(layout.full_mask()));
  const int64_t keys[] = {1, kNoKey, -1, 1LL << 62, kNoKey, kNoKey};
  const uint16_t live = EncodeKeys(layout, keys, row.data());
  std::vector<std::byte> records;
  AppendRecord({9, live, RecordKind::kRow, {row.data(), layout.PayloadBytes(live)}}, &records);
  seeds.push_back(Raw<uint8_t>(3) + Raw<uint8_t>(2) + Raw(layout.dtype) +
                  std::string(reinterpret_cast<const char*>(records.data()), records.size()));
  return seeds;
}

void Run(std::string_view input) {
  const RowLayout layout = TakeLayout(&input);
  if (!layout.Validate().ok()) return;
  std::span<const std::byte> rest = std::as_bytes(std::span(input));
  while (!rest.empty()) {
    const std::span<const std::byte> before = rest;
    const Result<RowRecord> record = ReadRecord(layout, &rest);
    if (!record.ok()) {
      EMBERTIDE_CHECK(record.status().code() == Code::kCorrupt);
      return;
    }
    std::vector<std::byte> again;
    AppendRecord(record.value(), &again);
    EMBERTIDE_CHECK(again.size() == before.size() - rest.size());
    EMBERTIDE_CHECK(std::equal(again.begin(), again.end(), before.begin()));
    layout.is_keys() ? CheckKeys(layout, record.value()) : CheckPayload(layout, record.value());
  }
}

}  // namespace embertide::fuzz

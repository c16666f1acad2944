// The row codec: golden bytes, round trips, and refusal of what is no record.
#include "embertide/row.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "embertide/checksum.h"
#include "embertide/hash.h"

namespace embertide {
namespace {

std::string Hex(std::span<const std::byte> bytes) {
  std::string text;
  for (const std::byte b : bytes) {
    constexpr char kDigits[] = "0123456789abcdef";
    text += kDigits[std::to_integer<int>(b) >> 4];
    text += kDigits[std::to_integer<int>(b) & 15];
  }
  return text;
}

// The golden row: key 0x0102030405060708, two chunks of two, chunk 1 live. The same literals stand
// in tests/contract/test_golden_bytes.py, which encodes them from docs/formats.md alone.
std::string GoldenRecord(DType dtype) {
  const RowLayout layout{2, 2, dtype};
  const float values[4] = {9.0F, 9.0F, 1.5F, -0.25F};
  std::vector<std::byte> payload(layout.PayloadBytes(2));
  EncodePayload(layout, 2, values, payload.data());
  std::vector<std::byte> record;
  AppendRecord({0x0102030405060708ULL, 2, RecordKind::kRow, payload}, &record);
  return Hex(record);
}

TEST(RowTest, GoldenBytes) {
  EXPECT_EQ(GoldenRecord(DType::kFp32),
            "080706050403020102000000"
            "0000c03f000080be");
  EXPECT_EQ(GoldenRecord(DType::kFp16),
            "080706050403020102000000"
            "003e00b4");
  EXPECT_EQ(GoldenRecord(DType::kBf16),
            "080706050403020102000000"
            "c03f80be");
  EXPECT_EQ(GoldenRecord(DType::kInt8),
            "080706050403020102000000"
            "0683413c"
            "7feb");
  EXPECT_EQ(GoldenRecord(DType::kInt4),
            "080706050403020102000000"
            "10fc40be"
            "18");
}

// The bytes of a whole row of int4, and what it reads as.
std::pair<std::string, std::vector<float>> Int4Of(const std::vector<float>& values) {
  const RowLayout layout{1, static_cast<uint16_t>(values.size()), DType::kInt4};
  EXPECT_TRUE(layout.Validate().ok());
  std::vector<std::byte> payload(layout.PayloadBytes(1));
  EncodePayload(layout, 1, values.data(), payload.data());
  std::vector<float> back(values.size());
  DecodePayload(layout, 1, payload.data(), back.data());
  return {Hex(payload), back};
}

TEST(RowTest, EachOfTheSixteenStepsOfInt4IsRead) {
  std::vector<float> steps;
  for (int step = -8; step < 8; ++step) steps.push_back(static_cast<float>(step) * 0.5F);
  EXPECT_EQ(Int4Of(steps).first, std::string("0000003f") + "98badcfe10325476");
  EXPECT_EQ(Int4Of(steps).second, steps);
  // The value that is farthest from zero has the sign of -8 steps, whichever it is.
  for (float& value : steps) value = -value;
  EXPECT_EQ(Int4Of(steps).first, std::string("000000bf") + "98badcfe10325476");
  EXPECT_EQ(Int4Of(steps).second, steps);
  EXPECT_FALSE(std::signbit(Int4Of(steps).second[8])) << "zero is no -0, whatever the scale";
}

TEST(RowTest, Int4OfZerosAndOfValuesTooSmallForAStepIsZeros) {
  for (const std::vector<float>& values :
       {std::vector<float>{0.0F, 0.0F}, {-0.0F, 0.0F}, {1e-45F, -1e-45F}}) {
    EXPECT_EQ(Int4Of(values).first, "0000000000");
    EXPECT_EQ(Int4Of(values).second, (std::vector<float>{0.0F, 0.0F}));
  }
}

TEST(RowTest, AScaleOfInt4IsFittedToTheSquaredError) {
  std::mt19937 random(4);
  std::normal_distribution<float> normal;
  double fitted = 0;
  double plain = 0;
  double all = 0;
  for (int row = 0; row < 500; ++row) {
    std::vector<float> values(16);
    for (float& value : values) value = normal(random);
    const std::vector<float> back = Int4Of(values).second;
    float farthest = 0;
    for (const float value : values) {
      if (std::fabs(value) > std::fabs(farthest)) farthest = value;
    }
    const float scale = farthest / -8;
    double mine = 0;
    double simple = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      const float step = std::clamp(std::nearbyint(values[i] / scale), -8.0F, 7.0F);
      mine += std::pow(double{back[i]} - values[i], 2);
      simple += std::pow(double{scale * step} - values[i], 2);
      all += std::pow(double{values[i]}, 2);
    }
    ASSERT_LE(mine, simple * (1 + 1e-6));
    fitted += mine;
    plain += simple;
  }
  EXPECT_LT(fitted / all, 0.0054);
  EXPECT_LT(fitted, 0.96 * plain);
}

TEST(RowTest, LargeValuesOfInt4StayFinite) {
  const float most = LargestOf(DType::kInt4);
  std::mt19937 random(5);
  std::uniform_real_distribution<float> uniform(-1.0F, 1.0F);
  for (int row = 0; row < 200; ++row) {
    std::vector<float> values(8);
    for (float& value : values) value = most * uniform(random);
    for (const float value : Int4Of(values).second) ASSERT_TRUE(std::isfinite(value));
  }
  // Infinite values and NaN make a row of the same length.
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(Int4Of({inf, 1.0F, std::nanf(""), -inf}).first.size(), 12U);
}

TEST(RowTest, AChunkOfInt4HasWholeBytes) {
  EXPECT_EQ((RowLayout{2, 16, DType::kInt4}.PayloadBytes(1)), 12U);
  EXPECT_EQ((RowLayout{2, 16, DType::kInt4}.PayloadBytes(3)), 20U);
  const Status odd = RowLayout{2, 3, DType::kInt4}.Validate();
  EXPECT_NE(odd.message().find("chunk_dim = 3: a chunk of int4 has two values a byte"),
            std::string::npos)
      << odd.message();
  EXPECT_TRUE((RowLayout{1, 8120, DType::kInt4}.Validate().ok()));
  EXPECT_FALSE((RowLayout{1, 8122, DType::kInt4}.Validate().ok()));
  EXPECT_FALSE((RowLayout{1, 2, static_cast<DType>(kDTypes)}.Validate().ok()));
}

TEST(RowTest, RecordsAreConvertedRowByRow) {
  const RowLayout from{2, 2, DType::kFp32};
  const float values[4] = {0.5F, -1.0F, 7e4F, 1.0F};
  std::vector<std::byte> records;
  for (const uint16_t live : {3, 1, 2, 0}) {
    std::vector<std::byte> payload(from.PayloadBytes(live));
    EncodePayload(from, live, values, payload.data());
    AppendRecord({live, live, RecordKind::kRow, payload}, &records);
  }
  AppendRecord({9, 0, RecordKind::kExpired, {}}, &records);
  for (const DType dtype : {DType::kFp16, DType::kBf16, DType::kInt8, DType::kInt4}) {
    const RowLayout to{2, 2, dtype};
    std::vector<std::byte> converted;
    ASSERT_TRUE(ConvertRecords(from, to, records, &converted).ok());
    std::span<const std::byte> rest(converted);
    for (const uint16_t live : {3, 1, 2, 0}) {
      const auto record = ReadRecord(to, &rest);
      ASSERT_TRUE(record.ok());
      EXPECT_EQ(record.value().live, live);
      // 70,000 is more than fp16 has.
      const float kept[4] = {0.5F, -1.0F, std::min(7e4F, LargestOf(dtype)), 1.0F};
      std::vector<std::byte> payload(to.PayloadBytes(live));
      EncodePayload(to, live, kept, payload.data());
      EXPECT_TRUE(std::ranges::equal(record.value().payload, payload));
    }
    const auto gone = ReadRecord(to, &rest);
    ASSERT_TRUE(gone.ok());
    EXPECT_EQ(gone.value().kind, RecordKind::kExpired);
    EXPECT_TRUE(rest.empty());
  }
  std::vector<std::byte> none;
  EXPECT_EQ(ConvertRecords(from, {2, 2, DType::kFp16}, std::span(records).first(15), &none).code(),
            Code::kCorrupt);
}

TEST(RowTest, RowsOfKeysAreCopiedByteForByte) {
  const RowLayout layout{3, 2, DType::kKeys};
  ASSERT_TRUE(layout.Validate().ok());
  // Not one of them survives a float or a double.
  const std::vector<int64_t> keys = {0x0102030405060708, -1,    kNoKey, kNoKey,
                                     (1LL << 62) + 1,    kNoKey};
  std::vector<std::byte> payload(layout.PayloadBytes(layout.full_mask()));
  EXPECT_EQ(payload.size(), 48U);
  const uint16_t live = EncodeKeys(layout, keys.data(), payload.data());
  EXPECT_EQ(live, 5);
  payload.resize(layout.PayloadBytes(live));
  std::vector<std::byte> record;
  AppendRecord({0x0102030405060708ULL, live, RecordKind::kRow, payload}, &record);
  EXPECT_EQ(Hex(record),
            "080706050403020105000000"
            "0807060504030201ffffffffffffffff"
            "01000000000000400000000000000080");
  std::vector<int64_t> back(6);
  CopyKeys(layout, live, payload.data(), back.data());
  EXPECT_EQ(back, keys);
  CopyKeys(layout, 0, nullptr, back.data());
  EXPECT_EQ(back, std::vector<int64_t>(6, kNoKey));
}

TEST(RowTest, AMaskOfKeysThatIsTooLargeForABlockIsRefused) {
  EXPECT_TRUE((RowLayout{16, 31, DType::kKeys}.Validate().ok()));
  EXPECT_FALSE((RowLayout{16, 32, DType::kKeys}.Validate().ok()));
}

TEST(RowDeathTest, NoNumberIsMadeOfKeys) {
  const RowLayout layout{1, 1, DType::kKeys};
  const std::vector<std::byte> payload(8);
  float value = 0;
  double sum = 0;
  std::vector<std::byte> out(8);
  EXPECT_DEATH(DecodePayload(layout, 1, payload.data(), &value), "a row of keys has no values");
  EXPECT_DEATH(AccumulatePayload(layout, 1, payload.data(), &sum), "a row of keys has no values");
  EXPECT_DEATH(EncodePayload(layout, 1, &value, out.data()), "a row of keys is made of no values");
}

TEST(RowTest, GoldenHashAndInitialValues) {
  EXPECT_EQ(HashKey(0), 0xe220a8397b1dcdafULL);
  EXPECT_EQ(HashKey(1), 0x910a2dec89025cc1ULL);
  EXPECT_EQ(InitialValue(7, 1, 42, 0, 0.5F), InitialValue(7, 1, 42, 0, 0.5F));
  EXPECT_NE(InitialValue(7, 1, 42, 0, 0.5F), InitialValue(7, 1, 42, 1, 0.5F));
  EXPECT_NE(InitialValue(7, 1, 42, 0, 0.5F), InitialValue(7, 2, 42, 0, 0.5F));
  double sum = 0;
  for (uint64_t key = 0; key < 10000; ++key) {
    const float value = InitialValue(7, 1, key, 3, 0.5F);
    ASSERT_GE(value, -0.5F);
    ASSERT_LT(value, 0.5F);
    sum += value;
  }
  EXPECT_NEAR(sum / 10000, 0.0, 0.01);
}

TEST(RowTest, ChecksumIsCastagnoli) {
  // The check value of CRC-32C in RFC 3720, appendix B.4.
  const std::vector<std::byte> zeros(32, std::byte{0});
  EXPECT_EQ(Crc32c(zeros), 0x8a9136aaU);
  EXPECT_EQ(Crc32c(std::span(zeros).subspan(10), Crc32c(std::span(zeros).first(10))), 0x8a9136aaU);
}

TEST(RowTest, RoundTripOfEveryMaskAndDType) {
  for (const DType dtype : {DType::kFp32, DType::kFp16, DType::kBf16, DType::kInt8}) {
    const RowLayout layout{4, 3, dtype};
    float values[12];
    for (int i = 0; i < 12; ++i) values[i] = static_cast<float>(i - 5) * 0.25F;
    for (uint16_t live = 0; live < 16; ++live) {
      std::vector<std::byte> payload(layout.PayloadBytes(live));
      EncodePayload(layout, live, values, payload.data());
      float back[12];
      DecodePayload(layout, live, payload.data(), back);
      for (int i = 0; i < 12; ++i) {
        const float want = (live >> (i / 3) & 1) != 0 ? values[i] : 0.0F;
        // Quarters are exact but in int8, whose step is max / 127.
        EXPECT_NEAR(back[i], want, dtype == DType::kInt8 ? 1.5F / 127 : 0.0F);
      }
    }
  }
}

TEST(RowTest, EveryHalfPatternSurvives) {
  for (const DType dtype : {DType::kFp16, DType::kBf16}) {
    const RowLayout layout{1, 1, dtype};
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      std::byte payload[2];
      const auto pattern = static_cast<uint16_t>(bits);
      std::memcpy(payload, &pattern, 2);
      float value;
      DecodePayload(layout, 1, payload, &value);
      std::byte again[2];
      EncodePayload(layout, 1, &value, again);
      float twice;
      DecodePayload(layout, 1, again, &twice);
      if (std::isnan(value)) {
        EXPECT_TRUE(std::isnan(twice));
      } else {
        EXPECT_EQ(Hex(again), Hex(payload));
      }
    }
  }
}

TEST(RowTest, EveryCutOfARecordIsRefused) {
  const RowLayout layout{2, 2, DType::kFp32};
  std::vector<std::byte> record;
  const std::vector<std::byte> payload(16);
  AppendRecord({5, 3, RecordKind::kRow, payload}, &record);
  for (size_t n = 0; n < record.size(); ++n) {
    std::span<const std::byte> cut(record.data(), n);
    const auto read = ReadRecord(layout, &cut);
    ASSERT_FALSE(read.ok()) << n;
    EXPECT_EQ(read.status().code(), Code::kCorrupt);
  }
  std::span<const std::byte> whole(record);
  ASSERT_TRUE(ReadRecord(layout, &whole).ok());
  EXPECT_TRUE(whole.empty());
}

TEST(RowTest, ImpossibleRecordsNameTheField) {
  const RowLayout layout{2, 2, DType::kFp32};
  const auto error = [&](size_t at, int value) {
    std::vector<std::byte> record;
    AppendRecord({5, 3, RecordKind::kRow, std::vector<std::byte>(16)}, &record);
    record[at] = static_cast<std::byte>(value);
    std::span<const std::byte> bytes(record);
    const auto read = ReadRecord(layout, &bytes);
    return read.ok() ? std::string("accepted") : read.status().message();
  };
  EXPECT_NE(error(8, 4).find("live mask"), std::string::npos);
  EXPECT_NE(error(10, 3).find("kind 3"), std::string::npos);
  EXPECT_NE(error(10, 1).find("tombstone"), std::string::npos);
  EXPECT_NE(error(11, 1).find("reserved"), std::string::npos);
}

TEST(RowTest, ImpossibleLayoutsAreRefused) {
  EXPECT_TRUE((RowLayout{4, 16, DType::kFp32}).Validate().ok());
  EXPECT_FALSE((RowLayout{0, 16, DType::kFp32}).Validate().ok());
  EXPECT_FALSE((RowLayout{17, 1, DType::kFp32}).Validate().ok());
  EXPECT_FALSE((RowLayout{1, 0, DType::kFp32}).Validate().ok());
  EXPECT_FALSE((RowLayout{4, 256, DType::kFp32}).Validate().ok());
  EXPECT_FALSE(ParseDType("float").ok());
}

}  // namespace
}  // namespace embertide

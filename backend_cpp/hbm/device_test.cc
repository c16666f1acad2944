// A device's copies, streams and kernels, one by one: the twin's always, a GPU's where there is
// one.
#include "hbm/device.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <functional>
#include <random>
#include <vector>

#include "hbm/emulated_device.h"

namespace embertide {
namespace {

struct Kind {
  const char* name;
  std::function<Result<std::unique_ptr<HbmDevice>>()> open;
  friend std::ostream& operator<<(std::ostream& out, const Kind& kind) { return out << kind.name; }
};

class HbmDeviceTest : public ::testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    auto device = GetParam().open();
    if (!device.ok()) GTEST_SKIP() << device.status().ToString();
    device_ = std::move(*device);
    stream_ = *device_->AddStream();
  }
  template <typename T>
  T* OnDevice(const std::vector<T>& values) {
    const uint64_t bytes = values.size() * sizeof(T);
    std::byte* memory = *device_->Allocate(bytes);
    std::byte* host = *device_->AllocateHost(bytes);
    std::copy_n(reinterpret_cast<const std::byte*>(values.data()), bytes, host);
    EXPECT_TRUE(device_->Upload(stream_, memory, host, bytes).ok());
    Wait();
    return reinterpret_cast<T*>(memory);
  }
  template <typename T>
  std::vector<T> FromDevice(const T* memory, size_t count) {
    std::byte* host = *device_->AllocateHost(count * sizeof(T));
    EXPECT_TRUE(
        device_
            ->Download(stream_, host, reinterpret_cast<const std::byte*>(memory), count * sizeof(T))
            .ok());
    Wait();
    const auto* values = reinterpret_cast<const T*>(host);
    return {values, values + count};
  }
  void Wait() {
    const Status status = device_->Wait(stream_);
    ASSERT_TRUE(status.ok()) << status.ToString();
  }

  std::unique_ptr<HbmDevice> device_;
  uint32_t stream_ = 0;
  std::mt19937 random_{5};
};

TEST_P(HbmDeviceTest, RowsWhoseTagsAreAlikeAreToldApart) {
  constexpr uint32_t kRows = 20;  // of one tag, in ways of several lanes
  std::vector<uint64_t> keys;
  for (uint64_t key = 0; keys.size() < 2 * kRows; ++key) {
    if (HbmTagOf(HbmHash(0, key)) == HbmTagOf(HbmHash(0, 0))) keys.push_back(key);
  }
  HbmDirectory cache;
  cache.sets = 1;
  cache.tags = OnDevice(std::vector<uint16_t>(kHbmWays, 0));
  cache.entries = OnDevice(std::vector<HbmEntry>(kHbmWays));
  cache.pages = OnDevice(std::vector<std::byte>(kRows * kHbmSlotUnit));
  std::vector<HbmPlacement> placements;
  for (uint32_t row = 0; row < kRows; ++row) {
    HbmPlacement placement;
    placement.entry = {keys[row], 1, kHbmOpenEnd, row, HbmMeta(0, 1)};
    placement.way = row + 5;
    placement.bytes = kHbmSlotUnit;
    placements.push_back(placement);
  }
  const std::byte* payloads = OnDevice(std::vector<std::byte>(kHbmSlotUnit));
  ASSERT_TRUE(device_->Place(stream_, cache, OnDevice(placements), kRows, payloads).ok());
  const auto count = static_cast<uint32_t>(keys.size());
  HbmRef* refs = OnDevice(std::vector<HbmRef>(count));
  uint32_t* answers = OnDevice(std::vector<uint32_t>(count, 77));
  const uint16_t* tables = OnDevice(std::vector<uint16_t>(count, 0));
  ASSERT_TRUE(
      device_->Lookup(stream_, cache, {OnDevice(keys), tables, count, 1, refs, answers}).ok());
  const std::vector<uint32_t> got = FromDevice(answers, count);
  const std::vector<HbmRef> where = FromDevice(refs, count);
  for (uint32_t i = 0; i < count; ++i) {
    ASSERT_EQ(got[i], i < kRows ? 0x10001U : 0U) << "key " << keys[i];
    if (i >= kRows) continue;
    ASSERT_EQ(where[i].payload, cache.pages + uint64_t{i} * kHbmSlotUnit);
  }
}

TEST_P(HbmDeviceTest, ARowIsFoundByItsKeyAndTableForItsVersionsAlone) {
  constexpr uint32_t kSets = 7;
  constexpr uint32_t kRows = 100;
  constexpr uint32_t kRowBytes = 64;
  HbmDirectory cache;
  cache.sets = kSets;
  cache.tags = OnDevice(std::vector<uint16_t>(kSets * kHbmWays, 0));
  cache.entries = OnDevice(std::vector<HbmEntry>(kSets * kHbmWays));
  cache.pages = OnDevice(std::vector<std::byte>(kRows * kRowBytes));
  std::vector<uint32_t> next(kSets, 0);
  std::vector<HbmPlacement> placements;
  std::vector<std::byte> payloads;
  for (uint64_t key = 0; key < kRows; ++key) {
    const uint32_t table = key % 3;
    const uint32_t set = HbmSetOf(HbmHash(table, key), kSets);
    HbmPlacement placement;
    placement.entry = {key, 10, key % 2 == 0 ? 20 : kHbmOpenEnd,
                       static_cast<uint32_t>(key * kRowBytes / kHbmSlotUnit), HbmMeta(table, 3)};
    placement.from = payloads.size();
    placement.way = set * kHbmWays + next[set]++;
    ASSERT_LE(next[set], kHbmWays);
    placement.bytes = 56;
    placements.push_back(placement);
    payloads.resize(payloads.size() + kRowBytes, static_cast<std::byte>(key));
  }
  const std::byte* from = OnDevice(payloads);
  ASSERT_TRUE(device_->Place(stream_, cache, OnDevice(placements), kRows, from).ok());
  const std::vector<std::byte> pages = FromDevice(cache.pages, kRows * kRowBytes);
  for (uint32_t row = 0; row < kRows; ++row) {
    EXPECT_EQ(pages[row * kRowBytes + 55], static_cast<std::byte>(row));
  }

  // Every key in every table, and those that no table has, in a launch that fills no block.
  std::vector<uint64_t> keys;
  std::vector<uint16_t> tables;
  for (uint64_t key = 0; key < kRows + 3; ++key) {
    for (uint16_t table = 0; table < 3; ++table) {
      keys.push_back(key);
      tables.push_back(table);
    }
    keys.push_back(key);
    tables.push_back(kHbmNoTable);
  }
  keys.push_back(0);
  tables.push_back(0);
  const auto count = static_cast<uint32_t>(keys.size());
  ASSERT_NE(count % 4, 0U);
  HbmRef* refs = OnDevice(std::vector<HbmRef>(count));
  uint32_t* answers = OnDevice(std::vector<uint32_t>(count, 77));
  HbmDevice::LookupArgs args{OnDevice(keys), OnDevice(tables), count, 0, refs, answers};
  const auto expect = [&](uint64_t version, uint64_t odd_until) {
    args.version = version;
    ASSERT_TRUE(device_->Lookup(stream_, cache, args).ok());
    const std::vector<uint32_t> got = FromDevice(answers, count);
    const std::vector<HbmRef> where = FromDevice(refs, count);
    for (uint32_t i = 0; i < count; ++i) {
      const uint64_t until = keys[i] % 2 == 0 ? 20 : odd_until;
      const bool there =
          keys[i] < kRows && tables[i] == keys[i] % 3 && version >= 10 && version < until;
      ASSERT_EQ(got[i], there ? 0x10003U : 0U) << "key " << keys[i] << " at " << version;
      if (!there) continue;
      ASSERT_EQ(where[i].payload, cache.pages + keys[i] * kRowBytes);
      ASSERT_EQ(where[i].live, 3);
      ASSERT_EQ(where[i].kind, HbmRefKind::kRow);
    }
  };
  expect(9, kHbmOpenEnd);
  expect(10, kHbmOpenEnd);
  expect(19, kHbmOpenEnd);

  // All that were asked for are marked, once.
  std::vector<uint32_t> sets = {0, 1, 2, 3, 4, 5, 6};
  const uint32_t* surveyed = OnDevice(sets);
  uint32_t* used = OnDevice(std::vector<uint32_t>(kSets, 1));
  for (const bool again : {false, true}) {
    ASSERT_TRUE(device_->Survey(stream_, cache, surveyed, kSets, used).ok());
    const std::vector<uint32_t> ways = FromDevice(used, kSets);
    for (uint32_t set = 0; set < kSets; ++set) {
      EXPECT_EQ(ways[set], again ? 0 : next[set] == 32 ? ~0U : (1U << next[set]) - 1U);
    }
  }

  // The earliest of two ends of a row holds, whatever their order; an emptied way is not found.
  std::vector<HbmEnding> endings;
  for (uint64_t key = 1; key < kRows; key += 2) {
    endings.push_back({key % 4 == 1 ? 15U : 30U, placements[key].way});
    endings.push_back({key % 4 == 1 ? 30U : 15U, placements[key].way});
  }
  ASSERT_TRUE(
      device_->End(stream_, cache, OnDevice(endings), static_cast<uint32_t>(endings.size())).ok());
  expect(14, 15);
  expect(15, 15);
  for (HbmPlacement& placement : placements) {
    placement.entry = {};
    placement.bytes = 0;
  }
  ASSERT_TRUE(device_->Place(stream_, cache, OnDevice(placements), kRows, from).ok());
  args.version = 14;
  ASSERT_TRUE(device_->Lookup(stream_, cache, args).ok());
  EXPECT_EQ(FromDevice(answers, count), std::vector<uint32_t>(count, 0));
}

// The values that a bag must have, by the row codec on this host.
class Oracle {
 public:
  Oracle(const RowLayout& layout, const HbmBag& bag) : layout_(layout), bag_(bag) {
    sums.assign(layout.dim(), 0.0);
  }
  void Add(const HbmRef& ref, const std::byte* payload) {
    const uint32_t dim = layout_.dim();
    if (ref.kind == HbmRefKind::kRow) {
      AccumulatePayload(layout_, ref.live, payload, sums.data());
      row.resize(dim);
      DecodePayload(layout_, ref.live, payload, row.data());
      return;
    }
    const auto* floats = reinterpret_cast<const float*>(payload);
    const auto* doubles = reinterpret_cast<const double*>(payload);
    for (uint32_t d = 0; d < dim && ref.kind == HbmRefKind::kFloats; ++d) sums[d] += floats[d];
    for (uint32_t d = 0; d < dim && ref.kind == HbmRefKind::kSums; ++d) sums[d] += doubles[d];
    if (ref.kind == HbmRefKind::kFloats) row.assign(floats, floats + dim);
  }
  float Pooled(uint32_t d) const {
    if (bag_.count == 1 && !row.empty()) return row[d];
    return static_cast<float>(sums[d] / bag_.divisor);
  }
  std::vector<double> sums;

 private:
  RowLayout layout_;
  HbmBag bag_;
  std::vector<float> row;
};

TEST_P(HbmDeviceTest, PooledBagsAreThePassOverTheirRowsBitForBit) {
  const std::vector<RowLayout> layouts = {
      {1, 128, DType::kFp32}, {4, 4, DType::kFp32},    {16, 8, DType::kFp32}, {3, 5, DType::kFp32},
      {1, 1, DType::kFp32},   {1, 1000, DType::kFp32}, {2, 64, DType::kFp16}, {2, 7, DType::kFp16},
      {4, 32, DType::kBf16},  {1, 33, DType::kBf16},   {8, 16, DType::kInt8}, {2, 9, DType::kInt8},
      {4, 5, DType::kFp32},   {2, 6, DType::kInt8},    {8, 16, DType::kInt4}, {2, 6, DType::kInt4},
      {1, 260, DType::kInt4}};
  std::vector<HbmTable> tables;
  for (const RowLayout& layout : layouts) {
    tables.push_back({layout.dim(), layout.chunks, layout.chunk_dim, layout.dtype});
  }
  std::vector<std::byte> payloads;
  std::vector<HbmRef> refs;
  std::vector<size_t> at;  // of payloads, by ref
  std::vector<HbmBag> bags;
  uint32_t out = 0;
  uint32_t partials = 0;
  std::normal_distribution<float> normal(0, 3);
  for (int bag_number = 0; bag_number < 601; ++bag_number) {
    HbmBag bag;
    bag.table = static_cast<uint16_t>(random_() % layouts.size());
    const RowLayout& layout = layouts[bag.table];
    bag.first = static_cast<uint32_t>(refs.size());
    bag.count = bag_number % 50 == 0 ? 70 : 1 + random_() % 9;
    bag.partial = random_() % 4 == 0;
    bag.divisor = !bag.partial && random_() % 2 == 0 ? bag.count : 1;
    uint32_t& end = bag.partial ? partials : out;
    bag.out = end;
    end += (layout.dim() + 3) / 4 * 4;
    for (uint32_t k = 0; k < bag.count; ++k) {
      HbmRef ref;
      ref.kind = random_() % 3 == 0 ? static_cast<HbmRefKind>(random_() % 4) : HbmRefKind::kRow;
      ref.live = static_cast<uint16_t>(random_() % 2 == 0 ? layout.full_mask()
                                                          : random_() % (layout.full_mask() + 1));
      at.push_back(payloads.size());
      std::vector<float> values(layout.dim());
      for (float& value : values) value = random_() % 16 == 0 ? -0.0F : normal(random_);
      payloads.resize(at.back() + layout.dim() * 8 + 16);
      std::byte* payload = payloads.data() + at.back();
      if (ref.kind == HbmRefKind::kRow) {
        EncodePayload(layout, ref.live, values.data(), payload);
      } else if (ref.kind == HbmRefKind::kFloats) {
        std::copy_n(reinterpret_cast<const std::byte*>(values.data()), values.size() * 4, payload);
      } else {
        for (uint32_t d = 0; d < layout.dim(); ++d) {
          reinterpret_cast<double*>(payload)[d] = static_cast<double>(values[d]) / 3;
        }
      }
      payloads.resize((payloads.size() + 31) / 32 * 32);
      refs.push_back(ref);
    }
    bags.push_back(bag);
  }
  const std::byte* on_device = OnDevice(payloads);
  for (size_t i = 0; i < refs.size(); ++i) refs[i].payload = on_device + at[i];
  // The refs come as those of keys that missed do: scattered, in an order of their own.
  std::vector<uint32_t> order(refs.size());
  for (uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), random_);
  std::vector<HbmRef> given;
  for (const uint32_t i : order) given.push_back(refs[i]);
  HbmRef* set = OnDevice(std::vector<HbmRef>(refs.size()));
  ASSERT_TRUE(device_
                  ->SetRefs(stream_, set, OnDevice(order), OnDevice(given),
                            static_cast<uint32_t>(order.size()))
                  .ok());
  float* pooled = OnDevice(std::vector<float>(out, 99.0F));
  double* sums = OnDevice(std::vector<double>(partials, 99.0));
  ASSERT_TRUE(device_
                  ->Pool(stream_, {OnDevice(bags), static_cast<uint32_t>(bags.size()), set,
                                   OnDevice(tables), pooled, sums})
                  .ok());
  const std::vector<float> got = FromDevice(pooled, out);
  const std::vector<double> got_sums = FromDevice(sums, partials);
  for (const HbmBag& bag : bags) {
    Oracle oracle(layouts[bag.table], bag);
    for (uint32_t k = bag.first; k < bag.first + bag.count; ++k) {
      oracle.Add(refs[k], payloads.data() + at[k]);
    }
    for (uint32_t d = 0; d < tables[bag.table].dim; ++d) {
      if (bag.partial) {
        ASSERT_EQ(got_sums[bag.out + d], oracle.sums[d]);
      } else {
        ASSERT_EQ(std::bit_cast<uint32_t>(got[bag.out + d]),
                  std::bit_cast<uint32_t>(oracle.Pooled(d)))
            << "table " << bag.table << ", " << bag.count << " rows, dimension " << d;
      }
    }
    const uint32_t dim = tables[bag.table].dim;
    if (dim % 4 != 0 && !bag.partial) {
      ASSERT_EQ(got[bag.out + dim], 99.0F) << "beyond the bag";
    }
  }
}

TEST_P(HbmDeviceTest, StreamsWaitForEachOtherWhereTheyAreTold) {
  constexpr size_t kCount = 1 << 20;
  const uint32_t second = *device_->AddStream();
  auto* host = reinterpret_cast<uint32_t*>(*device_->AllocateHost(kCount * 4));
  auto* back = reinterpret_cast<uint32_t*>(*device_->AllocateHost(kCount * 4));
  std::byte* memory = *device_->Allocate(kCount * 4);
  std::byte* copy = *device_->Allocate(kCount * 4);
  for (uint32_t round = 1; round < 20; ++round) {
    std::fill_n(host, kCount, round);
    ASSERT_TRUE(
        device_->Upload(stream_, memory, reinterpret_cast<std::byte*>(host), kCount * 4).ok());
    ASSERT_TRUE(device_->After(second, device_.get(), stream_).ok());
    ASSERT_TRUE(device_->CopyFrom(second, copy, device_.get(), memory, kCount * 4).ok());
    ASSERT_TRUE(
        device_->Download(second, reinterpret_cast<std::byte*>(back), copy, kCount * 4).ok());
    ASSERT_TRUE(device_->Wait(second).ok());
    ASSERT_EQ(std::count(back, back + kCount, round), static_cast<ptrdiff_t>(kCount));
  }
}

// A test of the twin: it shows the caller who forgot to wait what he would see, early and late.
TEST(TwinDeviceTest, WorkIsDoneBeforeSomebodyWaitsOrNotByChance) {
  const auto device = OpenTwinDevice();
  const std::byte one{1};
  int early = 0;
  for (int i = 0; i < 100; ++i) {
    const uint32_t stream = *device->AddStream();
    std::byte* memory = *device->Allocate(1);
    ASSERT_TRUE(device->Upload(stream, memory, &one, 1).ok());
    early += *memory == one ? 1 : 0;
    ASSERT_TRUE(device->Wait(stream).ok());
    EXPECT_EQ(*memory, one);
  }
  EXPECT_GT(early, 20);
  EXPECT_LT(early, 80);
}

Result<std::unique_ptr<HbmDevice>> OpenTwin() { return OpenTwinDevice(); }
Result<std::unique_ptr<HbmDevice>> OpenEmulated() { return OpenEmulatedDevice(); }
Result<std::unique_ptr<HbmDevice>> OpenFirstGpu() { return OpenGpu(0); }

INSTANTIATE_TEST_SUITE_P(Twin, HbmDeviceTest, ::testing::Values(Kind{"twin", OpenTwin}));
INSTANTIATE_TEST_SUITE_P(Emulated, HbmDeviceTest,
                         ::testing::Values(Kind{"emulated", OpenEmulated}));
INSTANTIATE_TEST_SUITE_P(Gpu, HbmDeviceTest, ::testing::Values(Kind{"gpu", OpenFirstGpu}));

}  // namespace
}  // namespace embertide

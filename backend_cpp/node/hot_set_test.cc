// A copy is used at the versions it is proved for, whole, whatever the writer does meanwhile.
#include "node/hot_set.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <thread>

namespace embertide {
namespace {

using Found = HotSet::Found;
using Name = HotSet::Name;
using Row = HotSet::Row;
using Version = HotSet::Version;

constexpr uint32_t kPayload = 44;  // no multiple of a word

// A payload that says whose it is, and of which version.
std::vector<std::byte> PayloadOf(const Name& name, uint64_t version) {
  std::mt19937_64 random(name.key * 31 + version * 7 + name.table);
  std::vector<std::byte> payload(kPayload);
  for (std::byte& each : payload) each = static_cast<std::byte>(random());
  return payload;
}

Row RowOf(uint32_t bytes = kPayload) { return {bytes, 5, Source::kHot}; }

void Insert(HotSet* set, uint32_t slot, const Name& name, Version version) {
  set->Insert(slot, name, RowOf(), PayloadOf(name, version.number).data(), version);
}

// Checks that a row that is found is as it was at `of`.
Found Find(const HotSet& set, const Name& name, Version version, uint64_t of) {
  Row row;
  std::vector<std::byte> payloads(3);  // of others
  const Found found = set.Find(name, version, &row, &payloads);
  if (found != Found::kYes) {
    EXPECT_EQ(payloads.size(), 3U);
    return found;
  }
  EXPECT_EQ(row.bytes, kPayload);
  EXPECT_EQ(row.live, 5U);
  EXPECT_EQ(row.source, Source::kHot);
  const auto expected = PayloadOf(name, of);
  EXPECT_TRUE(std::equal(expected.begin(), expected.end(), payloads.begin() + 3));
  return found;
}

TEST(HotSetTest, ACopyIsOfTheVersionsItWasProvedForAlone) {
  HotSet set(8, kPayload);
  Insert(&set, 3, {2, 77}, {7, 1});
  EXPECT_EQ(Find(set, {2, 77}, {7, 1}, 7), Found::kYes);
  EXPECT_EQ(Find(set, {2, 77}, {8, 1}, 0), Found::kOtherVersion) << "nobody has said so";
  EXPECT_EQ(Find(set, {2, 77}, {6, 1}, 0), Found::kOtherVersion);
  EXPECT_EQ(Find(set, {2, 77}, {7, 2}, 0), Found::kOtherVersion) << "another publisher's 7";
  EXPECT_EQ(Find(set, {3, 77}, {7, 1}, 0), Found::kNo) << "another table";
  EXPECT_EQ(Find(set, {2, 78}, {7, 1}, 0), Found::kNo);
  set.Extend(3, {9, 2});
  EXPECT_EQ(Find(set, {2, 77}, {7, 1}, 7), Found::kYes) << "older pins live";
  EXPECT_EQ(Find(set, {2, 77}, {8, 1}, 7), Found::kYes);
  EXPECT_EQ(Find(set, {2, 77}, {9, 2}, 7), Found::kYes);
  EXPECT_EQ(Find(set, {2, 77}, {9, 1}, 0), Found::kOtherVersion);
  EXPECT_EQ(Find(set, {2, 77}, {10, 2}, 0), Found::kOtherVersion);
  set.Replace(3, RowOf(), PayloadOf({2, 77}, 10).data(), {10, 2});
  EXPECT_EQ(Find(set, {2, 77}, {10, 2}, 10), Found::kYes);
  EXPECT_EQ(Find(set, {2, 77}, {9, 2}, 0), Found::kOtherVersion) << "what it was is gone";
  EXPECT_EQ(set.VersionOf(3), (Version{10, 2}));
  set.Remove(3);
  EXPECT_EQ(Find(set, {2, 77}, {10, 2}, 0), Found::kNo);
  EXPECT_FALSE(set.SlotOf({2, 77}));
}

TEST(HotSetTest, KeysWithoutARowAreKept) {
  HotSet set(8, kPayload);
  set.Insert(0, {0, 1}, {0, 0, Source::kPruned}, nullptr, {7, 1});
  Row row;
  std::vector<std::byte> payloads;
  ASSERT_EQ(set.Find({0, 1}, {7, 1}, &row, &payloads), Found::kYes);
  EXPECT_EQ(row.source, Source::kPruned);
  EXPECT_TRUE(payloads.empty());
}

TEST(HotSetTest, ReadsAreNotedWhateverTheVersion) {
  HotSet set(8, kPayload);
  Insert(&set, 2, {0, 5}, {7, 1});
  EXPECT_TRUE(set.TakeRead(2)) << "who enters was asked for";
  EXPECT_FALSE(set.TakeRead(2));
  Find(set, {0, 5}, {8, 1}, 0);
  EXPECT_TRUE(set.TakeRead(2));
}

TEST(HotSetTest, ItsMemoryIsWhatItSays) {
  for (const uint32_t slots : {8U, 100U, 1000U, 4097U}) {
    const HotSet set(slots, kPayload);
    EXPECT_LE(set.bytes(), slots * HotSet::SlotBytes(kPayload)) << slots;
  }
}

TEST(HotSetTest, FullGroupsAreFew) {
  HotSet set(4096, 8);
  uint32_t without = 0;
  for (uint32_t slot = 0; slot < 4096; ++slot) {
    const Name name{0, slot * 7ULL};
    if (!set.HasPlace(name)) {
      ++without;
      EXPECT_EQ(set.SlotOf(set.NameOf(set.OneOfGroup(name))), set.OneOfGroup(name));
      continue;
    }
    set.Insert(slot, name, {8, 1, Source::kHot}, PayloadOf(name, 1).data(), {1, 1});
  }
  EXPECT_LT(without, 4096 / 30);
}

// Readers see a row of one version whole, or none, while one writer changes all of them.
TEST(HotSetTest, NoReaderSeesHalfARow) {
  HotSet set(16, kPayload);
  for (uint32_t slot = 0; slot < 8; ++slot) Insert(&set, slot, {0, slot}, {1, 1});
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> newest{1};
  std::atomic<uint64_t> found{0};
  std::vector<std::thread> readers;
  for (int r = 0; r < 2; ++r) {
    readers.emplace_back([&, r] {
      std::mt19937 random(r);
      while (!stop) {
        const uint64_t version = newest;
        const Name name{0, random() % 16};
        if (Find(set, name, {version, 1}, version) == Found::kYes) ++found;
      }
    });
  }
  std::mt19937 random(9);
  for (uint64_t version = 2; version < 20'000; ++version) {
    for (uint32_t slot = 0; slot < 8; ++slot) {
      if (random() % 16 == 0) {  // another key takes the slot
        const Name other{0, (set.NameOf(slot).key + 8) % 16};
        set.Remove(slot);
        Insert(&set, slot, other, {version, 1});
      } else {
        const Name name = set.NameOf(slot);
        set.Replace(slot, RowOf(), PayloadOf(name, version).data(), {version, 1});
      }
    }
    newest = version;
  }
  stop = true;
  for (std::thread& reader : readers) reader.join();
  EXPECT_GT(found, 1000U);
}

}  // namespace
}  // namespace embertide

// A row is found under its exact version alone, whole, in bounded memory.
#include "node/remote_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <thread>

namespace embertide {
namespace {

using Name = RemoteCache::Name;

// A payload that says whose it is.
std::vector<std::byte> PayloadOf(const Name& name, uint32_t bytes) {
  std::mt19937_64 random(name.key * 31 + name.version * 7 + name.lineage * 3 + name.table);
  std::vector<std::byte> payload(bytes);
  for (std::byte& each : payload) each = static_cast<std::byte>(random());
  return payload;
}

uint32_t BytesOf(const Name& name) { return static_cast<uint32_t>(name.key % 9) * 12; }

void Put(RemoteCache* cache, const Name& name) {
  const auto payload = PayloadOf(name, BytesOf(name));
  cache->Put(name, {BytesOf(name), 5, Source::kRemote}, payload.data());
}

// Found, and as it was put.
bool Has(RemoteCache* cache, const Name& name) {
  RemoteCache::Row row;
  std::vector<std::byte> payloads(3);  // of others
  if (!cache->Find(name, &row, &payloads)) return false;
  EXPECT_EQ(row.bytes, BytesOf(name));
  EXPECT_EQ(row.live, 5U);
  EXPECT_EQ(row.source, Source::kRemote);
  EXPECT_EQ(payloads.size(), 3U + row.bytes);
  const auto expected = PayloadOf(name, row.bytes);
  EXPECT_TRUE(std::equal(expected.begin(), expected.end(), payloads.begin() + 3));
  return true;
}

TEST(RemoteCacheTest, ARowIsOfItsTableVersionAndLineageAlone) {
  RemoteCache cache(1 << 20);
  Put(&cache, {8, 7, 1, 2});
  EXPECT_TRUE(Has(&cache, {8, 7, 1, 2}));
  EXPECT_FALSE(Has(&cache, {8, 8, 1, 2})) << "the next version";
  EXPECT_FALSE(Has(&cache, {8, 7, 2, 2})) << "the same number by another publisher";
  EXPECT_FALSE(Has(&cache, {8, 7, 1, 3})) << "another table";
  EXPECT_FALSE(Has(&cache, {9, 7, 1, 2}));
  Put(&cache, {8, 8, 1, 2});
  EXPECT_TRUE(Has(&cache, {8, 7, 1, 2})) << "pins of two versions may live";
  EXPECT_TRUE(Has(&cache, {8, 8, 1, 2}));
}

TEST(RemoteCacheTest, KeysWithoutARowAreKept) {
  RemoteCache cache(1 << 20);
  cache.Put({1, 7, 1, 0}, {0, 0, Source::kPruned}, nullptr);
  RemoteCache::Row row;
  std::vector<std::byte> payloads;
  ASSERT_TRUE(cache.Find({1, 7, 1, 0}, &row, &payloads));
  EXPECT_EQ(row.source, Source::kPruned);
  EXPECT_TRUE(payloads.empty());
}

TEST(RemoteCacheTest, WhatIsOldIsOverwrittenAndWhatIsFoundIsWhole) {
  constexpr uint64_t kBytes = 1 << 20;
  RemoteCache cache(kBytes);
  std::mt19937_64 random(4);
  uint64_t found = 0;
  for (uint64_t i = 0; i < 200'000; ++i) {
    const Name name{random() % 50'000, 7 + i / 50'000, 1, static_cast<uint32_t>(random() % 3)};
    if (Has(&cache, name)) {
      ++found;
    } else {
      Put(&cache, name);
    }
  }
  EXPECT_GT(found, 1000U);
  uint64_t kept = 0;
  for (uint64_t key = 0; key < 50'000; ++key) {
    for (const uint32_t table : {0U, 1U, 2U}) {
      kept += Has(&cache, {key, 10, 1, table}) ? 40 + BytesOf({key, 10, 1, table}) : 0;
      EXPECT_FALSE(Has(&cache, {key, 7, 1, table}));
    }
  }
  EXPECT_LE(kept, kBytes);
  EXPECT_GE(kept, kBytes / 2);
}

TEST(RemoteCacheTest, WithoutRoomNothingIsKept) {
  for (const uint64_t bytes : {0ULL, 1000ULL, 1ULL << 18}) {
    RemoteCache cache(bytes);
    Put(&cache, {8, 7, 1, 2});
    EXPECT_FALSE(Has(&cache, {8, 7, 1, 2})) << bytes;
  }
  RemoteCache cache(1 << 20);
  const std::vector<std::byte> payload(1 << 20);
  cache.Put({1, 7, 1, 0}, {1 << 20, 1, Source::kRemote}, payload.data());
  EXPECT_FALSE(Has(&cache, {1, 7, 1, 0})) << "larger than what it goes to";
}

TEST(RemoteCacheConcurrencyTest, ThreadsFindWholeRows) {
  RemoteCache cache(1 << 19);
  std::vector<std::thread> threads;
  std::atomic<uint64_t> found{0};
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(t);
      for (int i = 0; i < 20'000; ++i) {
        const Name name{random() % 4000, 7, 1, 0};
        if (Has(&cache, name)) {
          ++found;
        } else {
          Put(&cache, name);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(found, 1000U);
}

}  // namespace
}  // namespace embertide

// Reclaimer, which keeps what is unlinked until it is freed: see the header.
#include "store/reclaimer.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>

namespace embertide {
namespace {

constexpr std::chrono::microseconds kReadersPoll{50};
// Entries of a bucket that are freed at once, under the writer lock.
constexpr uint32_t kFreedAtOnce = 1024;

}  // namespace

Reclaimer::~Reclaimer() {
  for (auto& pool : store_.pools) {
    for (Retired& retired : pool->retired) {
      while (!Free(pool.get(), &retired)) continue;
    }
  }
  for (const Table& table : store_.tables) {
    for (const BucketSlot& slot : table.buckets) {
      for (Bucket* bucket = slot.newest; bucket != nullptr;) {
        Bucket* older = bucket->older;
        uint32_t entry = 0;
        FreeBucket(bucket, &entry, ~0U);
        bucket = older;
      }
    }
  }
}

void Reclaimer::RetirePlace(RowPool* pool, const Table& table, Location place) {
  if (place.tier() == TierId::kNowhere) return;
  if (place.tier() == TierId::kDdr) pool->ended_places.fetch_add(1, std::memory_order_release);
  store_.CountPlace(pool, table, place, /*taken=*/false);
  Retired retired;
  retired.epoch = store_.readers.Retire();
  retired.place = place;
  retired.bytes = table.config.layout.PayloadBytes(place.live()) + store_.AuxBytes(table);
  pool->retired.push_back(retired);
}

void Reclaimer::RetireNode(RowPool* pool, VersionNode* node) {
  Retired retired;
  retired.epoch = store_.readers.Retire();
  retired.node = node;
  pool->retired.push_back(retired);
}

void Reclaimer::RetireArrays(RowPool* pool, const BucketIndex::Arrays& arrays) {
  Retired retired;
  retired.epoch = store_.readers.Retire();
  retired.arrays = arrays;
  pool->retired.push_back(retired);
}

void Reclaimer::RetireBucket(Bucket* bucket) {
  Retired retired;
  retired.epoch = store_.readers.Retire();
  retired.bucket = bucket;
  bucket->pool->retired.push_back(retired);
}

bool Reclaimer::Free(RowPool* pool, Retired* retired) {
  if (retired->node != nullptr) {
    pool->nodes.Give(retired->node);
  } else if (retired->arrays.pages != nullptr) {
    pool->budget.Release(retired->arrays.bytes());
    store_.counters.index_bytes -= retired->arrays.bytes();
    BucketIndex::Free(&pool->index_pages, retired->arrays);
  } else if (retired->bucket != nullptr) {
    return FreeBucket(retired->bucket, &retired->entry, kFreedAtOnce);
  } else if (retired->place.tier() == TierId::kDdr) {
    pool->arena.Free(retired->place.slot());
  } else {
    pool->ssd->Free(retired->place.slot(), retired->bytes);
  }
  return true;
}

bool Reclaimer::Reclaim(RowPool* pool) {
  if (pool->retired.empty()) return false;
  const uint64_t safe = store_.readers.MinEpoch();
  if (pool->retired.front().epoch >= safe) return false;
  while (!pool->retired.empty() && pool->retired.front().epoch < safe &&
         Free(pool, &pool->retired.front())) {
    pool->retired.pop_front();
  }
  return true;
}

Status Reclaimer::AwaitReaders(RowPool* pool) {
  const auto begin = std::chrono::steady_clock::now();
  const std::chrono::milliseconds most(store_.options.reader_wait_ms);
  // Reads that begin from now on hold none of it. Those in flight take microseconds, or as long as
  // the SSD; they tell nobody when they end, so that they cost nothing.
  while (!pool->retired.empty()) {
    if (Reclaim(pool)) continue;
    const auto waited = std::chrono::steady_clock::now() - begin;
    if (waited > most) {
      ++store_.counters.reader_waits_given_up;
      return {Code::kResourceExhausted,
              std::to_string(pool->retired.size()) + " retired pieces wait for " +
                  store_.readers.OldestRead() + ", and did for " +
                  std::to_string(
                      std::chrono::duration_cast<std::chrono::milliseconds>(waited).count()) +
                  " ms"};
    }
    std::this_thread::sleep_for(kReadersPoll);
  }
  return Status::Ok();
}

bool Reclaimer::FreeBucket(Bucket* bucket, uint32_t* entry, uint32_t most) {
  RowPool* pool = bucket->pool;
  const Table& table = store_.tables[bucket->table];
  const auto free_place = [&](Location place) {
    if (place.tier() == TierId::kNowhere) return;
    store_.CountPlace(pool, table, place, /*taken=*/false);
    Retired retired;
    retired.place = place;
    retired.bytes = table.config.layout.PayloadBytes(place.live()) + store_.AuxBytes(table);
    Free(pool, &retired);
  };
  const auto end =
      static_cast<uint32_t>(std::min<uint64_t>(bucket->index.capacity(), uint64_t{*entry} + most));
  *entry = bucket->index.Walk(*entry, end, [&](uint32_t e, Location place) {
    bucket->index.Erase(e);
    if (!place.is_chain()) {
      free_place(place);
      return true;
    }
    for (VersionNode* node = place.chain(); node != nullptr;) {
      VersionNode* older = node->older.load();
      free_place(Location::FromWord(node->word.load()));
      Retired retired;
      retired.node = node;
      Free(pool, &retired);
      node = older;
    }
    return true;
  });
  if (end < bucket->index.capacity()) return false;
  const uint64_t bytes = kBucketBytes + bucket->index.bytes() + bucket->change_bytes();
  pool->budget.Release(bytes);
  store_.counters.index_bytes -= bytes;
  delete bucket;
  return true;
}

}  // namespace embertide

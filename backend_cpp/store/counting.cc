// Counting: events of keys, in chunks of their rows that nothing learns.
#include <algorithm>
#include <cmath>
#include <mutex>

#include "store/store_impl.h"

namespace embertide {
namespace {

// Keys of a turn of a pool's writer: well under a millisecond.
constexpr size_t kTurnKeys = 1024;

// log2(2^a + 2^b), where 0 stands for no sum at all.
float Added(float a, float b) {
  if (a == 0.0F) return b;
  if (b == 0.0F) return a;
  const double most = std::max(a, b);
  const double apart = std::abs(static_cast<double>(a) - static_cast<double>(b));
  return static_cast<float>(most + std::log1p(std::exp2(-apart)) / std::log(2.0));
}

// The counters of a row that has them.
float* CountersOf(const RowPool& pool, const Table& table, Location place) {
  const RowLayout learned = table.config.learned();
  const auto live = static_cast<uint16_t>(place.live() & learned.full_mask());
  return reinterpret_cast<float*>(pool.arena.Address(place.slot()) + learned.PayloadBytes(live));
}

}  // namespace

Result<uint64_t> TrainingStore::AddCounts(uint32_t t, std::span<const int64_t> keys,
                                          const float* logs, size_t stride) {
  EMBERTIDE_RETURN_IF_ERROR(impl_->store.CheckValues(t));
  const Table& table = impl_->store.tables[t];
  const uint32_t counters = table.config.layout.dim() - table.config.learned().dim();
  const std::vector<std::byte> empty(counters * sizeof(float));
  if (counters == 0) {
    return Status(Code::kInvalidArgument, "table " + table.config.name + " has no counters");
  }
  for (size_t k = 0; k < keys.size(); ++k) {
    for (uint32_t c = 0; c < counters; ++c) {
      if (std::isfinite(logs[k * stride + c])) continue;
      return Status(Code::kInvalidArgument, "table " + table.config.name + ", key " +
                                                std::to_string(keys[k]) + ": a log of " +
                                                std::to_string(logs[k * stride + c]));
    }
  }
  // In one batch of reads; a row that cannot be brought is asked for again below, and says why.
  const TableKeys rows{t, keys};
  static_cast<void>(BringRows({&rows, 1}));
  uint64_t counted = 0;
  for (size_t k = 0; k < keys.size();) {
    const auto bucket_of = [&](size_t at) {
      return table.BucketOf(HashKey(static_cast<uint64_t>(keys[at])));
    };
    RowPool& pool = *table.Newest(bucket_of(k))->pool;
    const std::lock_guard writer(pool.writer);
    impl_->reclaimer.Reclaim(&pool);
    for (const size_t end = std::min(keys.size(), k + kTurnKeys); k < end; ++k) {
      const uint32_t b = bucket_of(k);
      Bucket* bucket = table.Newest(b);
      if (bucket->pool != &pool) break;
      const auto key = static_cast<uint64_t>(keys[k]);
      const float* added = logs + k * stride;
      Result<Location> place = impl_->residency.ResidentRow(&pool, t, b, key);
      if (!place.ok() && place.status().code() == Code::kNotFound) {
        if (!impl_->admission.WorthCounting(table, key, added)) continue;
        place = impl_->rows.AddRow(&pool, table, bucket, key, table.cost.counters, empty);
        if (!place.ok() && place.status().code() == Code::kResourceExhausted) continue;
        if (place.ok()) AuxOf(pool, *place)->tick = impl_->store.tick;
      }
      if (!place.ok()) return place.status();
      if ((place->live() & table.cost.counters) != table.cost.counters) continue;
      float* values = CountersOf(pool, table, *place);
      for (uint32_t c = 0; c < counters; ++c) values[c] = Added(values[c], added[c]);
      MarkRowChanged(table, HashKey(key), AuxOf(pool, *place));
      ++counted;
    }
  }
  return counted;
}

}  // namespace embertide

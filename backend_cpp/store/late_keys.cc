// Keys of a step without a row in DDR: see the header.
#include "store/late_keys.h"

#include <algorithm>
#include <cmath>
#include <optional>

namespace embertide {
namespace {

// Keys that wait, before they are seen to.
constexpr size_t kMaxWaiting = 1U << 16;
// Keys of one hold of a pool's writer: a millisecond or so.
constexpr size_t kTurnKeys = 1024;
// Keys whose index groups are asked of memory before they are looked into.
constexpr size_t kAskedAhead = 16;

std::string NameOf(const Table& table, uint64_t key) {
  return std::to_string(static_cast<int64_t>(key)) + " of table " + table.config.name;
}

}  // namespace

void LateKeys::Begin(const TableStep& step, Store::Impl* impl) {
  impl_ = impl;
  step_ = step;
  step_.table = nullptr;
  keys_.clear();
  gradients_.clear();
  full_ = nullptr;
  made_ = brought_ = updated_ = 0;
  failure_ = Status::Ok();
}

void LateKeys::Add(Table* table, RowPool* pool, std::span<const PartWorker::Late* const> keys) {
  for (const PartWorker::Late* late : keys) {
    keys_.push_back({table, pool, late->group, gradients_.size()});
    gradients_.insert(gradients_.end(), late->gradients, late->gradients + late->group.count);
  }
  if (keys_.size() >= kMaxWaiting) Finish();
}

void LateKeys::Finish() {
  for (size_t first = 0; first < keys_.size();) {
    const size_t end = ReadRows(first);
    ProcessRange(first, end);
    EndBatches();
    first = end;
  }
  CountUpdates();
  keys_.clear();
  gradients_.clear();
}

void LateKeys::AskAhead(size_t k) const {
  if (k >= keys_.size()) return;
  const PartWorker::Group& group = keys_[k].group;
  AskForBytes(keys_[k].table->NewestOf(group.hash)->index.Begin(group.hash).group.address(),
              sizeof(IndexGroup));
}

void LateKeys::EndBatches() {
  for (size_t d = 0; d < pools_.size() && d < batches_.size(); ++d) {
    const std::lock_guard writer(pools_[d]->writer);
    batches_[d].End();
  }
}

void LateKeys::CountUpdates() {
  if (step_.table == nullptr) return;
  updated_ += worker_.updated();
  impl_->store.counters.clipped_gradients += worker_.clipped();
  impl_->store.counters.refused_gradients += worker_.refused();
  worker_.Begin(step_);
}

void LateKeys::BeginTable(Table* table) {
  if (step_.table == table) return;
  CountUpdates();
  step_.table = table;
  worker_.Begin(step_);
  full_ = nullptr;
}

size_t LateKeys::ReadRows(size_t first) {
  reads_.assign(keys_.size() - first, kNotRead);
  pools_.clear();
  if (step_.work == StepWork::kMake) return keys_.size();
  for (size_t k = first; k < keys_.size(); ++k) {
    RowPool* const pool = keys_[k].pool;
    const bool met = std::ranges::find(pools_, pool) != pools_.end();
    if (pool->ssd != nullptr && !met) pools_.push_back(pool);
  }
  while (batches_.size() < pools_.size()) batches_.emplace_back();
  size_t end = keys_.size();
  for (size_t d = 0; d < pools_.size(); ++d) {
    SsdBatch& batch = batches_[d];
    WriterLock writer(pools_[d]->writer);
    batch.Begin(&impl_->store, pools_[d]);
    for (size_t k = first; k < end; ++k) {
      AskAhead(k + kAskedAhead);
      const Key& key = keys_[k];
      if (key.pool != pools_[d]) continue;
      if (batch.Add({key.group.key, key.table->ordinal})) {
        reads_[k - first] = static_cast<uint32_t>(batch.size() - 1);
      }
      if (batch.full()) end = k + 1;
    }
    batch.Read(&writer);
  }
  return end;
}

void LateKeys::ProcessRange(size_t first, size_t end) {
  for (size_t k = first; k < end;) {
    RowPool* const pool = keys_[k].pool;
    const std::lock_guard writer(pool->writer);
    impl_->reclaimer.Reclaim(pool);
    for (const size_t turn = std::min(end, k + kTurnKeys); k < turn; ++k) {
      AskAhead(k + kAskedAhead);
      if (keys_[k].pool != pool) break;
      BeginTable(keys_[k].table);
      const Status done = MakeOrBring(keys_[k], reads_[k - first]);
      if (done.ok()) continue;
      ++impl_->store.counters.failed_keys;
      if (failure_.ok()) failure_ = done;
    }
  }
}

PartWorker::Late LateKeys::LateOf(const Key& key) const {
  return {0, key.group, gradients_.data() + key.gradients};
}

Status LateKeys::MakeOrBring(const Key& key, uint32_t read) {
  Store::Impl& impl = *impl_;
  Table& table = *key.table;
  RowPool* const pool = key.pool;
  const PartWorker::Group& group = key.group;
  const uint32_t b = BucketOfHash(group.hash, table.config.bucket_bits);
  Bucket* bucket = table.Newest(b);
  const bool updates = step_.work == StepWork::kUpdate;
  Result<Location> place = Location();
  if (bucket->index.Locate(group.hash, group.key) == BucketIndex::kNotFound) {
    if (step_.work == StepWork::kBring) return Status::Ok();
    bool enters = false;
    for (uint32_t n = group.occurrences; n > 0 && !enters; --n) {
      enters = impl.admission.EntersNow(pool, table, group.key);
    }
    std::optional<float> worth;
    if (enters && updates && table.pruned_with != nullptr) {
      const float earned = worker_.Earned(LateOf(key));
      if (std::isfinite(earned)) worth = impl.admission.Worth(table, group.key, earned);
      enters = worth.has_value();
      if (enters) *worth -= earned;  // which the step itself adds
    }
    if (!enters) {
      if (updates) ++impl.store.counters.dropped_gradients;
      return Status::Ok();
    }
    if (pool != full_) place = MakeRow(pool, bucket, group);
    if (place.ok() && worth.has_value() && pool != full_) Credit(*pool, *place, *worth);
  } else if (step_.work == StepWork::kMake) {
    return Status::Ok();
  } else if (pool != full_) {
    const size_t d = static_cast<size_t>(std::ranges::find(pools_, pool) - pools_.begin());
    if (updates && read != kNotRead) ++impl.store.counters.step_reads;
    place = read != kNotRead ? impl.residency.BringRow(pool, batches_[d], read)
                             : impl.residency.ResidentRow(pool, table.ordinal, b, group.key);
    brought_ += place.ok() ? 1 : 0;
  }
  if (pool == full_) {
    return {Code::kResourceExhausted, "no room for key " + NameOf(table, group.key)};
  }
  if (!place.ok()) {
    if (place.status().code() == Code::kResourceExhausted) full_ = pool;
    return {place.status().code(),
            "key " + NameOf(table, group.key) + ": " + place.status().message()};
  }
  if (updates) worker_.Update(*pool, LateOf(key), place.value());
  return Status::Ok();
}

Result<Location> LateKeys::MakeRow(RowPool* pool, Bucket* bucket, const PartWorker::Group& group) {
  const Table& table = *step_.table;
  const TableConfig& config = table.config;
  const RowLayout& layout = config.layout;
  std::vector<float> values(layout.dim());
  for (uint32_t d = 0; d < config.learned().dim(); ++d) {
    values[d] = InitialValue(config.init_seed, config.id, group.key, d, config.init_scale);
  }
  std::vector<std::byte> payload(layout.PayloadBytes(layout.full_mask()));
  EncodePayload(layout, layout.full_mask(), values.data(), payload.data());
  Result<Location> place =
      impl_->rows.AddRow(pool, table, bucket, group.key, layout.full_mask(), payload);
  made_ += place.ok() ? 1 : 0;
  return place;
}

void LateKeys::Credit(const RowPool& pool, Location place, float utility) const {
  RowAux* aux = AuxOf(pool, place);
  const uint32_t chunks = step_.table->config.learned().chunks;
  aux->tick = step_.tick;
  std::fill_n(aux->utility(), chunks, utility / static_cast<float>(chunks));
}

}  // namespace embertide

// The training profile: rows made when first seen, exact row-wise Adagrad, changes taken for a
// version. One writer; rows change in place.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "store/store_impl.h"

namespace embertide {
namespace {

Status NotTraining() {
  return {Code::kInvalidArgument, "this call needs a store of the training profile"};
}

}  // namespace

void Store::Impl::MarkChanged(Device* device, Bucket* bucket, uint64_t key, Location place) {
  RowAux* aux = AuxOf(device, place);
  if (aux->changed != 0) return;
  aux->changed = 1;
  bucket->changed.push_back(key);
}

Result<Location> Store::Impl::ResidentRow(Device* device, uint32_t t, uint32_t b, uint64_t key) {
  BucketIndex& index = Newest(tables[t], b)->index;
  const uint32_t entry = index.Locate(HashKey(key), key);
  if (entry == BucketIndex::kNotFound) {
    return Status(Code::kNotFound,
                  "key " + std::to_string(key) + " has no row in table " + tables[t].config.name);
  }
  if (index.At(entry).tier() == TierId::kSsd) {
    EMBERTIDE_RETURN_IF_ERROR(PromoteOne(device, {key, t}));
  }
  return index.At(index.Locate(HashKey(key), key));
}

Result<uint64_t> Store::EnsureRows(uint32_t t, std::span<const int64_t> keys) {
  if (!impl_->training()) return NotTraining();
  EMBERTIDE_RETURN_IF_ERROR(impl_->CheckTable(t));
  Table& table = impl_->tables[t];
  const TableConfig& config = table.config;
  const RowLayout& layout = config.layout;
  std::vector<float> values(layout.dim());
  std::vector<std::byte> payload(layout.PayloadBytes(layout.full_mask()));
  uint64_t made = 0;
  for (const int64_t raw : keys) {
    const auto key = static_cast<uint64_t>(raw);
    const uint64_t hash = HashKey(key);
    const uint32_t b = Store::Impl::BucketOf(table, hash);
    Bucket* bucket = Store::Impl::Newest(table, b);
    if (bucket->index.Locate(hash, key) != BucketIndex::kNotFound) continue;
    Device& device = *Store::Impl::Newest(impl_->tables[t], b)->device;
    const std::lock_guard writer(device.writer);
    impl_->Reclaim(&device);
    if (!impl_->EntersNow(&device, table, key)) continue;
    for (uint32_t d = 0; d < layout.dim(); ++d) {
      values[d] = InitialValue(config.init_seed, config.id, key, d, config.init_scale);
    }
    EncodePayload(layout, layout.full_mask(), values.data(), payload.data());
    EMBERTIDE_RETURN_IF_ERROR(impl_->ReserveEntry(&device, bucket));
    Result<Location> place = impl_->StoreRow(&device, table, key, layout.full_mask(), payload);
    if (!place.ok()) return place.status();
    impl_->InsertEntry(bucket, key, *place);
    bucket->removed.erase(key);
    impl_->MarkChanged(&device, bucket, key, *place);
    ++made;
  }
  return made;
}

Result<uint64_t> Store::ApplyGradients(uint32_t t, std::span<const int64_t> keys,
                                       const float* gradients, const RowwiseAdagrad& optimizer) {
  if (!impl_->training()) return NotTraining();
  EMBERTIDE_RETURN_IF_ERROR(impl_->CheckTable(t));
  Table& table = impl_->tables[t];
  const RowLayout& layout = table.config.layout;
  const uint32_t dim = layout.dim();
  // Positions grouped by key, ascending inside a group: the fixed order of the sums.
  std::vector<uint32_t> order(keys.size());
  std::iota(order.begin(), order.end(), 0U);
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return keys[a] < keys[b]; });
  std::vector<double> sums(dim);
  std::vector<float> values(dim);
  uint64_t updated = 0;
  for (size_t i = 0; i < order.size();) {
    const int64_t raw = keys[order[i]];
    std::fill(sums.begin(), sums.end(), 0.0);
    for (; i < order.size() && keys[order[i]] == raw; ++i) {
      const float* gradient = gradients + size_t{order[i]} * dim;
      for (uint32_t d = 0; d < dim; ++d) sums[d] += gradient[d];
    }
    const auto key = static_cast<uint64_t>(raw);
    const uint32_t b = Store::Impl::BucketOf(table, HashKey(key));
    Device& device = *Store::Impl::Newest(impl_->tables[t], b)->device;
    const std::lock_guard writer(device.writer);
    impl_->Reclaim(&device);
    const Result<Location> place = impl_->ResidentRow(&device, t, b, key);
    if (!place.ok()) {
      if (place.status().code() == Code::kNotFound) {
        ++impl_->dropped_gradients;
        continue;
      }
      return place.status();
    }
    double squares = 0.0;
    for (uint32_t d = 0; d < dim; ++d) squares += sums[d] * sums[d];
    RowAux* aux = impl_->AuxOf(&device, place.value());
    if (aux->accumulator == 0.0F) aux->accumulator = optimizer.initial_accumulator;
    aux->accumulator += static_cast<float>(squares / dim);
    const double step = optimizer.learning_rate / (std::sqrt(aux->accumulator) + optimizer.epsilon);
    std::byte* payload = device.arena.Address(place.value().slot());
    DecodePayload(layout, place.value().live(), payload, values.data());
    for (uint32_t d = 0; d < dim; ++d) values[d] -= static_cast<float>(step * sums[d]);
    EncodePayload(layout, place.value().live(), values.data(), payload);
    impl_->MarkChanged(&device, Store::Impl::Newest(table, b), key, place.value());
    ++updated;
  }
  return updated;
}

Status Store::SetLive(uint32_t t, uint64_t key, uint16_t live) {
  if (!impl_->training()) return NotTraining();
  EMBERTIDE_RETURN_IF_ERROR(impl_->CheckTable(t));
  Table& table = impl_->tables[t];
  const RowLayout& layout = table.config.layout;
  if ((live & ~layout.full_mask()) != 0) {
    return {Code::kInvalidArgument, "live mask " + std::to_string(live) + " names chunks past " +
                                        std::to_string(layout.chunks)};
  }
  const uint32_t b = Store::Impl::BucketOf(table, HashKey(key));
  Bucket* bucket = Store::Impl::Newest(table, b);
  Device& device = *Store::Impl::Newest(impl_->tables[t], b)->device;
  const std::lock_guard writer(device.writer);
  impl_->Reclaim(&device);
  impl_->TakeReserveBack(&device);
  const Result<Location> old = impl_->ResidentRow(&device, t, b, key);
  if (!old.ok()) return old.status();
  if (live == old.value().live()) return Status::Ok();
  Location place = Location::Removed(RecordKind::kPruned);
  if (live != 0) {
    std::vector<float> values(layout.dim());
    DecodePayload(layout, old.value().live(), device.arena.Address(old.value().slot()),
                  values.data());
    std::vector<std::byte> payload(layout.PayloadBytes(live));
    EncodePayload(layout, live, values.data(), payload.data());
    Result<Location> stored = impl_->StoreRow(&device, table, key, live, payload);
    const bool shrinks = payload.size() < layout.PayloadBytes(old.value().live());
    if (!stored.ok() && shrinks && device.reserve_bytes > 0 && !device.reserve_lent) {
      device.reserve_lent = true;
      device.budget.Release(device.reserve_bytes);
      stored = impl_->StoreRow(&device, table, key, live, payload);
    }
    if (!stored.ok()) return stored.status();
    place = *stored;
  }
  // Making room may have moved the old row to the SSD: ask the index again.
  const uint32_t entry = bucket->index.Locate(HashKey(key), key);
  const Result<Location> again = impl_->ResidentRow(&device, t, b, key);
  if (!again.ok()) {
    impl_->RetirePlace(&device, table, place);
    return again.status();
  }
  if (live == 0) {
    impl_->EraseEntry(bucket, entry);
    bucket->removed[key] = RecordKind::kPruned;
  } else {
    std::copy_n(device.arena.Aux(again.value().slot()), impl_->AuxBytes(table),
                device.arena.Aux(place.slot()));
    bucket->index.Set(entry, place);
    impl_->MarkChanged(&device, bucket, key, place);
  }
  impl_->RetirePlace(&device, table, again.value());
  return Status::Ok();
}

Status Store::TakeChanges(uint32_t t, uint32_t b, std::vector<std::byte>* records) {
  if (!impl_->training()) return NotTraining();
  EMBERTIDE_RETURN_IF_ERROR(impl_->CheckBucket(t, b));
  Table& table = impl_->tables[t];
  Bucket& bucket = *Store::Impl::Newest(table, b);
  Device& device = *Store::Impl::Newest(impl_->tables[t], b)->device;
  const std::lock_guard writer(device.writer);
  impl_->Reclaim(&device);
  std::map<uint64_t, RecordKind> changes(bucket.removed);
  for (const uint64_t key : bucket.changed) changes.emplace(key, RecordKind::kRow);
  for (const auto& [key, kind] : changes) {
    if (kind != RecordKind::kRow) {
      AppendRecord({key, 0, kind, {}}, records);
      continue;
    }
    const Result<Location> place = impl_->ResidentRow(&device, t, b, key);
    if (!place.ok()) return place.status();
    impl_->AuxOf(&device, place.value())->changed = 0;
    const uint16_t live = place.value().live();
    AppendRecord(
        {key,
         live,
         RecordKind::kRow,
         {device.arena.Address(place.value().slot()), table.config.layout.PayloadBytes(live)}},
        records);
  }
  bucket.changed.clear();
  bucket.removed.clear();
  return Status::Ok();
}

Status Store::MarkChanged(uint32_t t, uint32_t b, std::span<const uint64_t> keys) {
  if (!impl_->training()) return NotTraining();
  EMBERTIDE_RETURN_IF_ERROR(impl_->CheckBucket(t, b));
  Bucket& bucket = *Store::Impl::Newest(impl_->tables[t], b);
  Device& device = *Store::Impl::Newest(impl_->tables[t], b)->device;
  const std::lock_guard writer(device.writer);
  for (const uint64_t key : keys) {
    const Result<Location> place = impl_->ResidentRow(&device, t, b, key);
    if (place.ok()) {
      impl_->MarkChanged(&device, &bucket, key, place.value());
    } else if (place.status().code() == Code::kNotFound) {
      bucket.removed[key] = RecordKind::kExpired;
    } else {
      return place.status();
    }
  }
  return Status::Ok();
}

Result<float> Store::AdagradState(uint32_t t, uint64_t key) const {
  if (!impl_->training()) return NotTraining();
  EMBERTIDE_RETURN_IF_ERROR(impl_->CheckTable(t));
  const uint32_t b = Store::Impl::BucketOf(impl_->tables[t], HashKey(key));
  Device& device = *Store::Impl::Newest(impl_->tables[t], b)->device;
  const std::lock_guard writer(device.writer);
  const Result<Location> place = impl_->ResidentRow(&device, t, b, key);
  if (!place.ok()) return place.status();
  return impl_->AuxOf(&device, place.value())->accumulator;
}

Status Store::SetAdagradState(uint32_t t, uint64_t key, float accumulator) {
  if (!impl_->training()) return NotTraining();
  EMBERTIDE_RETURN_IF_ERROR(impl_->CheckTable(t));
  const uint32_t b = Store::Impl::BucketOf(impl_->tables[t], HashKey(key));
  Device& device = *Store::Impl::Newest(impl_->tables[t], b)->device;
  const std::lock_guard writer(device.writer);
  const Result<Location> place = impl_->ResidentRow(&device, t, b, key);
  if (!place.ok()) return place.status();
  impl_->AuxOf(&device, place.value())->accumulator = accumulator;
  return Status::Ok();
}

Status Store::ImportRecords(uint32_t t, uint32_t b, std::span<const std::byte> records) {
  if (!impl_->training()) return NotTraining();
  EMBERTIDE_RETURN_IF_ERROR(impl_->CheckBucket(t, b));
  Table& table = impl_->tables[t];
  Device& device = *Store::Impl::Newest(impl_->tables[t], b)->device;
  const std::lock_guard writer(device.writer);
  while (!records.empty()) {
    const Result<RowRecord> record = ReadRecord(table.config.layout, &records);
    if (!record.ok()) return record.status();
    if (BucketOfHash(HashKey(record.value().key), table.config.bucket_bits) != b) {
      return {Code::kCorrupt, "key " + std::to_string(record.value().key) + " is not of bucket " +
                                  std::to_string(b)};
    }
    EMBERTIDE_RETURN_IF_ERROR(
        impl_->StageBase(&device, table, Store::Impl::Newest(table, b), record.value()));
    impl_->Reclaim(&device);
  }
  return Status::Ok();
}

}  // namespace embertide

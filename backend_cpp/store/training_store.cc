// TrainingStore: opening; what its parts do for it. The step is in training_step.cc, pruning in
// pruning.cc and prune_state.cc, counters in counting.cc.
#include "embertide/training_store.h"

#include "store/store_impl.h"

namespace embertide {

TrainingStore::TrainingStore(std::unique_ptr<Impl> impl) : Store(std::move(impl)) {}

Result<std::unique_ptr<TrainingStore>> TrainingStore::Open(StoreOptions options) {
  auto impl = Impl::Open(std::move(options), Profile::kTrain);
  if (!impl.ok()) return impl.status();
  return std::unique_ptr<TrainingStore>(new TrainingStore(std::move(*impl)));
}

Status TrainingStore::SetLive(uint32_t table, uint64_t key, uint16_t live) {
  return impl_->rows.SetLive(table, key, live);
}

Status TrainingStore::TakeChanges(uint32_t table, uint32_t bucket,
                                  std::vector<std::byte>* records) {
  return impl_->rows.TakeChanges(table, bucket, records);
}

Status TrainingStore::MarkChanged(uint32_t table, uint32_t bucket, std::span<const uint64_t> keys) {
  return impl_->rows.MarkChanged(table, bucket, keys);
}

Result<RowState> TrainingStore::StateOf(uint32_t table, uint64_t key) const {
  return impl_->rows.StateOf(table, key);
}

Status TrainingStore::SetState(uint32_t table, uint64_t key, const RowState& state) {
  return impl_->rows.SetState(table, key, state);
}

Status TrainingStore::ImportRecords(uint32_t table, uint32_t bucket,
                                    std::span<const std::byte> records) {
  return impl_->rows.Import(table, bucket, records);
}

Status TrainingStore::ExportRows(uint32_t table, std::span<const uint64_t> keys,
                                 std::vector<std::byte>* records,
                                 std::vector<RowState>* states) const {
  return impl_->rows.ExportRows(table, keys, records, states);
}

Status TrainingStore::PutRows(uint32_t table, std::span<const std::byte> records,
                              std::span<const RowState> states) {
  return impl_->rows.PutRows(table, records, states);
}

float TrainingStore::UtilityNow(float utility, uint32_t age) const {
  return static_cast<float>(impl_->store.decay.Over(age % RowAux::kTicks) * utility);
}

}  // namespace embertide

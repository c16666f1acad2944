// ServingStore: opening; what its parts do for it. Shares are in shares.cc, bad blocks in
// mending.cc.
#include "embertide/serving_store.h"

#include <mutex>

#include "store/store_impl.h"

namespace embertide {

ServingStore::ServingStore(std::unique_ptr<Impl> impl) : Store(std::move(impl)) {}

Result<std::unique_ptr<ServingStore>> ServingStore::Open(StoreOptions options) {
  auto impl = Impl::Open(std::move(options), Profile::kServe);
  if (!impl.ok()) return impl.status();
  return std::unique_ptr<ServingStore>(new ServingStore(std::move(*impl)));
}

Status ServingStore::StageRecords(uint64_t version, uint32_t table, uint32_t bucket,
                                  std::span<const std::byte> records) {
  return impl_->versions.Stage(version, table, bucket, records);
}

void ServingStore::DropStaged() { impl_->versions.DropStaged(); }

Status ServingStore::Commit(uint64_t version) { return impl_->versions.Commit(version); }

void ServingStore::Forget(uint64_t version) { impl_->versions.Forget(version); }

Status ServingStore::AddBucket(uint32_t table, uint32_t bucket, uint32_t device,
                               std::span<const std::byte> records, uint64_t leave_bytes) {
  return impl_->versions.AddBucket(table, bucket, device, records, leave_bytes);
}

Status ServingStore::DropBucket(uint32_t table, uint32_t bucket) {
  return impl_->versions.DropBucket(table, bucket);
}

uint64_t ServingStore::SupersededUntil() const { return impl_->versions.superseded_until(); }

Status ServingStore::Seal(const SealOptions& options) { return impl_->seals.Write(options); }

void ServingStore::FillAtOnce(bool fill) {
  for (const auto& pool : impl_->store.pools) {
    const std::lock_guard writer(pool->writer);
    pool->arena.pool()->FillAtOnce(fill);
    pool->index_pages.FillAtOnce(fill);
  }
}

}  // namespace embertide

// Which seal counts: see the header.
#include "store/seal_manifest.h"

#include "store/seal_file.h"

namespace embertide {

bool SealManifest::Drop(RowPool* pool) {
  if (pool->ssd->kept_bytes() == 0) return false;
  const std::lock_guard manifest(mutex_);
  // A manifest that stays names segments that are written over: they must be kept then.
  if (!RemoveSeal(directory_).ok()) return false;
  ++dropped_;
  version_ = 0;
  pool->ssd->DropSeals();
  return true;
}

Status SealManifest::Publish(const SealInfo& info, uint64_t dropped) {
  const std::lock_guard manifest(mutex_);
  if (dropped_ != dropped) {
    return {Code::kRejected, "the seal was given up: rows needed its room on the SSD"};
  }
  Status status = WriteSealInfo(directory_, info);
  if (status.ok()) {
    version_ = info.last.number;
  } else {
    // Either one may lie there now, and only the older one's segments stay.
    ++dropped_;
    version_ = 0;
    if (const Status removed = RemoveSeal(directory_); !removed.ok()) status = removed;
  }
  return status;
}

}  // namespace embertide

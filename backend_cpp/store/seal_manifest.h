// SealManifest: which seal of the SSD tier counts, if any: who writes one publishes it here, and
// whoever needs the room that seals keep on the SSD takes it away.
//
// Threads: any. Its mutex is taken after a pool's writer, never before one.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>

#include "embertide/seal.h"
#include "store/row_pool.h"

namespace embertide {

class SealManifest {
 public:
  // `directory` outlives it.
  explicit SealManifest(const std::string& directory) : directory_(directory) {}

  // Rows need the room that seals keep in this pool; the newest is gone, one being written ends
  // without success. False: they keep none. Requires: the pool's writer.
  bool Drop(RowPool* pool);
  // `dropped`: dropped() when the seal was begun; kRejected when that has changed. kDeviceError:
  // there is no seal any more.
  Status Publish(const SealInfo& info, uint64_t dropped);
  // The store was opened from the seal of this version.
  void Opened(uint64_t version) { version_ = version; }

  uint64_t dropped() const { return dropped_.load(); }
  // That is sealed; 0: none.
  uint64_t version() const { return version_.load(); }

 private:
  const std::string& directory_;
  std::mutex mutex_;  // of the file
  std::atomic<uint64_t> dropped_{0};
  std::atomic<uint64_t> version_{0};
};

}  // namespace embertide

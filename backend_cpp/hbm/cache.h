// HbmCache: rows in the memory of one or more devices, for the versions at which they are valid.
//
//   readers   batch.Begin -> Add bags -> Probe -> WaitForAnswers -> Give what missed -> Pool
//             -> Collect                                                     (HbmBatch, batch.h)
//   writers   End (a row was changed) -> Flush (before that version is committed)
//             Survey -> Place, as often as one likes                         (rows that enter)
//
// A key belongs to one device, by its bucket. There is nothing here that is not below as well: a
// row is a copy of one in DDR or on the SSD, and what is not found here is read there.
//
// Bytes. Each device's budget is taken in one allocation when the cache is opened and never grows:
// directory (34 bytes a way), pages, default rows, and what batches and fills are copied through.
// host_bytes() is what the host holds for it: the places, and the host's side of the copies.
//
// Order. Directory and slots are changed and probed by work of one stream a device, so a probe sees
// all that was given before it; slots are read by the streams of batches, and not reused before
// their readers have left (places.h). A device that failed once is not trusted again: healthy() is
// false from then on, and the caller answers from below.
//
// Threads: batches run side by side, each used by one thread. End and Flush may be called by any
// thread; Survey and Place by one at a time.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "embertide/hbm.h"
#include "embertide/table.h"
#include "hbm/device.h"
#include "hbm/places.h"

namespace embertide {

struct HbmOptions {
  std::vector<TableConfig> tables;
  uint64_t budget_bytes = 0;  // of each device
};

// A row that is to enter.
struct HbmRow {
  uint32_t table = 0;
  uint64_t key = 0;
  uint64_t since = 0;  // versions [since, until)
  uint64_t until = kHbmOpenEnd;
  uint16_t live = 0;
  uint32_t used = 0;  // its set's survey
  std::span<const std::byte> payload;
};

// Why 6: two executions at once with three batches each: one probed, one pooled, one copied out.
inline constexpr uint32_t kHbmLanes = 6;
// Rows that one fill may bring to a device, and rows ended before a writer waits for the device.
inline constexpr uint32_t kHbmFillRows = 4096;

class HbmCache {
 public:
  // kInvalidArgument naming the option and what it must be at least.
  static Result<std::unique_ptr<HbmCache>> Open(const HbmOptions& options,
                                                std::vector<std::unique_ptr<HbmDevice>> devices);
  ~HbmCache();
  HbmCache(const HbmCache&) = delete;
  HbmCache& operator=(const HbmCache&) = delete;

  uint32_t devices() const { return static_cast<uint32_t>(shards_.size()); }
  uint32_t DeviceOf(uint32_t table, uint64_t key) const {
    const uint32_t bits = tables_[table].bucket_bits;
    return (table + BucketOfHash(HashKey(key), bits)) % devices();
  }
  const TableConfig& TableOf(uint32_t table) const { return tables_[table]; }
  bool healthy() const { return !failed_.load(); }
  // Whether a row is there that no version up to this one has ended.
  bool Has(uint32_t table, uint64_t key, uint64_t version) const;
  // Keys that one batch takes.
  uint32_t batch_keys() const { return batch_keys_; }
  // Rows of one device that one fill takes at most.
  uint32_t fill_rows() const { return fill_rows_; }
  uint64_t host_bytes() const { return host_bytes_; }
  // By device.
  std::vector<HbmDeviceStats> Stats() const;
  // By table, of all devices.
  std::vector<HbmTableStats> TableStats() const;
  // The places of every device hold their invariants. Requires: no writer.
  Status CheckIntegrity() const;

  // --- writers
  // A version changes the row: pins from `until` on find it no more once Flush was called.
  void End(uint32_t table, uint64_t key, uint64_t until);
  // To be called between the End calls of a version and the first pin on it.
  void Flush();
  // Begins a fill of a device: fills HbmRow::used of rows that belong to it. Waits for the device.
  void Survey(uint32_t device, std::span<HbmRow> rows);
  // Brings rows of that survey in; payloads are copied before it returns. Those for which there is
  // no place are counted and left. Requires: nobody may change them meanwhile, and whoever changes
  // them later calls End. `oldest`: no pin is below it; `safe`: ReaderRegistry::MinEpoch since the
  // survey or before; `retire`: ReaderRegistry::Retire.
  void Place(uint32_t device, std::span<const HbmRow> rows, uint64_t oldest, uint64_t safe,
             const std::function<uint64_t()>& retire);

 private:
  friend class HbmBatch;
  friend class HbmLanes;
  // Memory that one batch goes through on one device: there, and on the host for the copies.
  struct Lane {
    uint32_t stream = 0;
    struct Side {
      uint64_t* keys = nullptr;
      uint16_t* tables = nullptr;
      uint32_t* answers = nullptr;
      HbmBag* bags = nullptr;
      uint32_t* at = nullptr;
      HbmRef* given = nullptr;
      std::byte* items = nullptr;  // payloads that were given
      float* out = nullptr;
    };
    Side device;
    Side host;
    HbmRef* refs = nullptr;
    double* partials = nullptr;     // of bags whose home is elsewhere; with several devices
    std::byte* incoming = nullptr;  // partials of others
  };
  struct Shard {
    std::unique_ptr<HbmDevice> device;
    uint32_t stream = 0;  // of all that probes or changes the directory
    HbmDirectory directory;
    HbmTable* tables = nullptr;
    std::vector<const std::byte*> default_rows;  // by table, on the device
    std::vector<Lane> lanes;
    std::unique_ptr<HbmPlaces> places;
    uint64_t fixed_bytes = 0;  // of the budget, all but pages
    std::atomic<uint64_t> hits{0};
    std::atomic<uint64_t> misses{0};
    // Guarded by mutex: places and what follows.
    std::mutex mutex;
    HbmEnding* endings = nullptr;
    HbmEnding* endings_host = nullptr;
    uint32_t endings_count = 0;  // not given to the device yet
    uint32_t endings_given = 0;  // being copied
    HbmPlacement* placements = nullptr;
    HbmPlacement* placements_host = nullptr;
    std::byte* payloads = nullptr;
    std::byte* payloads_host = nullptr;
    uint32_t fill_rows = 0;  // placements since the survey
    uint64_t fill_bytes = 0;
    uint32_t* survey = nullptr;  // sets, then masks
    uint32_t* survey_host = nullptr;
    uint64_t placed = 0;
    uint64_t ended = 0;
    uint64_t in_use = 0;
    uint64_t deferred = 0;
  };
  HbmCache() = default;
  Status OpenShard(const HbmOptions& options, Shard* shard);
  // Requires: shard->mutex.
  void FlushLocked(Shard* shard);
  // Whether it is ok; the first that is not closes the cache.
  bool Check(const Status& status);

  std::vector<TableConfig> tables_;
  std::vector<std::unique_ptr<Shard>> shards_;
  bool several_ = false;  // devices
  uint32_t batch_keys_ = 0;
  uint32_t fill_rows_ = 0;   // of one fill, and endings between two waits
  uint32_t item_bytes_ = 0;  // of the largest payload or sum
  uint32_t max_dim_ = 0;
  uint64_t host_bytes_ = 0;
  uint64_t budget_bytes_ = 0;
  std::atomic<bool> failed_{false};
  // Lanes that no batch uses; the same numbers on every device.
  std::mutex lanes_mutex_;
  std::condition_variable lane_free_;
  std::vector<uint32_t> free_lanes_;
};

}  // namespace embertide

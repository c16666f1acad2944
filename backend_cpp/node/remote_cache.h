// RemoteCache: rows that peers answered lately, so that hot ones are not asked for again.
//
// A row is kept for the exact version, number and lineage, that it was read at, where it never
// changes: what a key reads as at the next version is asked for anew, for only the owner knows
// whether it changed. A shard is a ring of entries, written one after another over the oldest ones,
// and an index of places in it, four for each group of keys, the newest of which stay:
//
//   ring   | .. older | key 9 v7 | key 4 v7 | -> head |  key 5 v6 | ..
//   index  group of 4:  tag | position of the entry's begin, counted since the start; 0: none
//
// An entry is whole while its position is at most a ring's length below the head. Rows of versions
// that are gone are overwritten in time.
//
// Thread-safe: a mutex for each shard, held for one row.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "embertide/store.h"

namespace embertide {

class RemoteCache {
 public:
  // A row's name. The same number of another lineage is another version.
  struct Name {
    uint64_t key = 0;
    uint64_t version = 0;
    uint64_t lineage = 0;
    uint32_t table = 0;
    bool operator==(const Name&) const = default;
  };
  struct Row {
    uint32_t bytes = 0;  // of payload; 0 unless the source is kRemote
    uint16_t live = 0;
    Source source = Source::kDefault;
  };

  // Takes at most `bytes` of memory; 0, or too few for a row in each shard: it keeps nothing.
  explicit RemoteCache(uint64_t bytes);

  // Appends the row's payload to `payloads`; false if it is not here.
  bool Find(const Name& name, Row* row, std::vector<std::byte>* payloads);
  // `payload` has row.bytes. What is larger than an eighth of a shard is not kept.
  void Put(const Name& name, const Row& row, const std::byte* payload);

 private:
  static constexpr size_t kShards = 64;
  static constexpr size_t kWays = 4;
  static constexpr size_t kPositionBits = 48;  // 256 TiB written to a shard
  struct Entry {
    Name name;
    Row row;
  };
  struct alignas(64) Shard {
    std::mutex mutex;
    uint64_t head = 0;
    std::vector<std::array<uint64_t, kWays>> groups;  // a power of two long
    std::unique_ptr<std::byte[]> ring;
  };
  Shard* ShardOf(uint64_t hash) { return &shards_[hash % kShards]; }
  std::array<uint64_t, kWays>* GroupOf(Shard* shard, uint64_t hash) const;

  size_t ring_bytes_ = 0;  // of a shard
  std::array<Shard, kShards> shards_;
};

}  // namespace embertide

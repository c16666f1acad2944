// Keeping and finding rows.
#include "node/remote_cache.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "embertide/hash.h"

namespace embertide {
namespace {

constexpr uint64_t kLeastRing = 4096;

// Versions of a key share a group: the newest takes the place of the oldest.
uint64_t HashOf(const RemoteCache::Name& name) { return HashKey(name.key ^ HashKey(name.table)); }

}  // namespace

RemoteCache::RemoteCache(uint64_t bytes) {
  // An entry of 16 floats takes 104 bytes. With as many of them the index is half full, or less; it
  // is a quarter of the whole at most.
  const uint64_t each = bytes / kShards;
  const uint64_t groups = std::bit_ceil(std::max<uint64_t>(each / 256, 1));
  const uint64_t index = groups * sizeof(uint64_t) * kWays;
  if (each < index + kLeastRing) return;
  ring_bytes_ = (each - index) & ~(alignof(Entry) - 1);
  for (Shard& shard : shards_) {
    shard.groups.resize(groups);
    shard.ring.reset(new std::byte[ring_bytes_]);
  }
}

std::array<uint64_t, RemoteCache::kWays>* RemoteCache::GroupOf(Shard* shard, uint64_t hash) const {
  return &shard->groups[(hash / kShards) & (shard->groups.size() - 1)];
}

bool RemoteCache::Find(const Name& name, Row* row, std::vector<std::byte>* payloads) {
  if (ring_bytes_ == 0) return false;
  const uint64_t hash = HashOf(name);
  const uint64_t tag = hash >> kPositionBits;
  Shard* shard = ShardOf(hash);
  const std::lock_guard lock(shard->mutex);
  for (const uint64_t slot : *GroupOf(shard, hash)) {
    if (slot == 0 || slot >> kPositionBits != tag) continue;
    const uint64_t position = (slot & ((uint64_t{1} << kPositionBits) - 1)) - 1;
    if (shard->head - position > ring_bytes_) continue;
    const std::byte* at = shard->ring.get() + position % ring_bytes_;
    Entry entry;
    std::memcpy(&entry, at, sizeof(entry));
    if (entry.name != name) continue;
    *row = entry.row;
    payloads->insert(payloads->end(), at + sizeof(entry), at + sizeof(entry) + row->bytes);
    return true;
  }
  return false;
}

void RemoteCache::Put(const Name& name, const Row& row, const std::byte* payload) {
  const size_t size = (sizeof(Entry) + row.bytes + alignof(Entry) - 1) & ~(alignof(Entry) - 1);
  if (size > ring_bytes_ / 8) return;
  const uint64_t hash = HashOf(name);
  Shard* shard = ShardOf(hash);
  const std::lock_guard lock(shard->mutex);
  // An entry lies in one piece.
  const uint64_t to_end = ring_bytes_ - shard->head % ring_bytes_;
  const uint64_t position = to_end < size ? shard->head + to_end : shard->head;
  std::byte* at = shard->ring.get() + position % ring_bytes_;
  const Entry entry{name, row};
  std::memcpy(at, &entry, sizeof(entry));
  std::copy_n(payload, row.bytes, at + sizeof(entry));
  shard->head = position + size;
  const uint64_t slot = hash >> kPositionBits << kPositionBits | (position + 1);
  *std::ranges::min_element(*GroupOf(shard, hash), {}, [](uint64_t each) {
    return each & ((uint64_t{1} << kPositionBits) - 1);
  }) = slot;
}

}  // namespace embertide

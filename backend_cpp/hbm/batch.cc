// HbmBatch: routing, probing, giving, pooling, combining.
#include "hbm/batch.h"

#include <algorithm>
#include <cstring>

namespace embertide {
namespace {

template <typename T>
std::byte* Bytes(T* pointer) {
  return reinterpret_cast<std::byte*>(pointer);
}

constexpr uint64_t RoundUp(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }
// Sums and rows are read 16 bytes at a time.
constexpr uint64_t kItemAlignment = 16;

}  // namespace

HbmLanes::HbmLanes(HbmCache* cache, uint32_t count) : cache_(cache) {
  std::unique_lock lock(cache->lanes_mutex_);
  cache->lane_free_.wait(lock, [&] { return cache->free_lanes_.size() >= count; });
  for (; count > 0; --count) {
    numbers_.push_back(cache->free_lanes_.back());
    cache->free_lanes_.pop_back();
  }
}

HbmLanes::~HbmLanes() {
  {
    const std::lock_guard lock(cache_->lanes_mutex_);
    for (const uint32_t number : numbers_) cache_->free_lanes_.push_back(number);
  }
  cache_->lane_free_.notify_all();
}

HbmBatch::HbmBatch(HbmCache* cache, uint32_t lane)
    : cache_(cache), lane_(lane), parts_(cache->devices()) {}

HbmBatch::~HbmBatch() {
  // The batch was given up half way; an error has been told or does not matter any more.
  if (under_way_) static_cast<void>(Collect());
}

Status HbmBatch::Check(Status status) {
  cache_->Check(status);
  return status;
}

void HbmBatch::Begin(uint64_t version) {
  version_ = version;
  for (Part& part : parts_) {
    part.positions = part.floats = part.given = 0;
    part.items = 0;
    part.bags.clear();
    part.sums.clear();
    part.partials.clear();
  }
  places_.clear();
  bags_.clear();
}

uint32_t HbmBatch::AddPosition(uint32_t device, uint32_t table, uint64_t key) {
  const uint32_t position = parts_[device].positions++;
  HbmCache::Lane::Side& host = LaneOf(device).host;
  host.keys[position] = key;
  host.tables[position] = static_cast<uint16_t>(table);
  return position;
}

void HbmBatch::Add(uint32_t table, bool mean, std::span<const int64_t> keys,
                   const uint32_t* remote_of) {
  Bag bag;
  bag.empty = keys.empty();
  if (bag.empty) {
    bags_.push_back(bag);
    return;
  }
  const size_t first_key = places_.size();
  uint64_t held = 0;  // a bit for each device that has keys of the bag
  for (const int64_t key : keys) {
    const uint32_t device =
        parts_.size() == 1 ? 0 : cache_->DeviceOf(table, static_cast<uint64_t>(key));
    places_.push_back({device, 0, table});
    held |= 1ULL << device;
  }
  const auto add_keys = [&](uint32_t device) {
    const uint32_t first = parts_[device].positions;
    for (size_t k = 0; k < keys.size(); ++k) {
      Place& place = places_[first_key + k];
      if (place.device != device) continue;
      const bool given = remote_of != nullptr && remote_of[k] != 0;
      place.position =
          AddPosition(device, given ? kHbmNoTable : table, static_cast<uint64_t>(keys[k]));
    }
    return first;
  };
  const uint32_t dim = cache_->tables_[table].layout.dim();
  bag.device = places_[first_key].device;
  Part& home = parts_[bag.device];
  HbmBag work;
  work.table = static_cast<uint16_t>(table);
  work.first = add_keys(bag.device);
  for (uint32_t d = 0; d < parts_.size() && std::popcount(held) > 1; ++d) {
    if (d == bag.device || (held >> d & 1U) == 0) continue;
    HbmBag sum;
    sum.table = work.table;
    sum.partial = true;
    sum.first = add_keys(d);
    sum.count = parts_[d].positions - sum.first;
    parts_[d].partials.push_back({static_cast<uint32_t>(parts_[d].sums.size()), bag.device,
                                  AddPosition(bag.device, kHbmNoTable, 0),
                                  static_cast<uint32_t>(dim * sizeof(double))});
    parts_[d].sums.push_back(sum);
  }
  work.count = home.positions - work.first;
  work.divisor = mean ? static_cast<uint32_t>(keys.size()) : 1;
  work.out = bag.out = home.floats;
  home.floats += static_cast<uint32_t>(RoundUp(dim, kItemAlignment / sizeof(float)));
  home.bags.push_back(work);
  bags_.push_back(bag);
}

Status HbmBatch::Probe() {
  under_way_ = true;
  for (uint32_t d = 0; d < parts_.size(); ++d) {
    const uint32_t count = parts_[d].positions;
    if (count == 0) continue;
    HbmCache::Shard& shard = *cache_->shards_[d];
    HbmCache::Lane& lane = LaneOf(d);
    HbmDevice* device = shard.device.get();
    const auto give = [&]() -> Status {
      EMBERTIDE_RETURN_IF_ERROR(device->Upload(lane.stream, Bytes(lane.device.keys),
                                               Bytes(lane.host.keys), count * sizeof(uint64_t)));
      EMBERTIDE_RETURN_IF_ERROR(device->Upload(lane.stream, Bytes(lane.device.tables),
                                               Bytes(lane.host.tables), count * sizeof(uint16_t)));
      EMBERTIDE_RETURN_IF_ERROR(device->After(shard.stream, device, lane.stream));
      EMBERTIDE_RETURN_IF_ERROR(device->Lookup(
          shard.stream, shard.directory,
          {lane.device.keys, lane.device.tables, count, version_, lane.refs, lane.device.answers}));
      EMBERTIDE_RETURN_IF_ERROR(device->After(lane.stream, device, shard.stream));
      return device->Download(lane.stream, Bytes(lane.host.answers), Bytes(lane.device.answers),
                              count * sizeof(uint32_t));
    };
    EMBERTIDE_RETURN_IF_ERROR(Check(give()));
  }
  return Status::Ok();
}

Status HbmBatch::Wait() {
  for (uint32_t d = 0; d < parts_.size(); ++d) {
    if (parts_[d].positions == 0) continue;
    EMBERTIDE_RETURN_IF_ERROR(Check(cache_->shards_[d]->device->Wait(LaneOf(d).stream)));
  }
  return Status::Ok();
}

Status HbmBatch::WaitForAnswers() {
  EMBERTIDE_RETURN_IF_ERROR(Wait());
  for (uint32_t d = 0; d < parts_.size(); ++d) {
    HbmCache::Shard& shard = *cache_->shards_[d];
    const HbmCache::Lane::Side& host = LaneOf(d).host;
    uint64_t hits = 0;
    uint64_t asked = 0;
    for (uint32_t p = 0; p < parts_[d].positions; ++p) {
      asked += host.tables[p] != kHbmNoTable ? 1 : 0;
      hits += (host.answers[p] & kHit) != 0 ? 1 : 0;
    }
    shard.hits.fetch_add(hits, std::memory_order_relaxed);
    shard.misses.fetch_add(asked - hits, std::memory_order_relaxed);
  }
  return Status::Ok();
}

uint32_t HbmBatch::AnswerOf(size_t k) const {
  return LaneOf(places_[k].device).host.answers[places_[k].position];
}

void HbmBatch::SetRef(uint32_t device, uint32_t position, const HbmRef& ref) {
  HbmCache::Lane::Side& host = LaneOf(device).host;
  const uint32_t n = parts_[device].given++;
  host.at[n] = position;
  host.given[n] = ref;
}

void HbmBatch::Give(size_t k, HbmRefKind kind, uint16_t live, const std::byte* payload) {
  const Place& place = places_[k];
  HbmCache::Lane& lane = LaneOf(place.device);
  const RowLayout& layout = cache_->tables_[place.table].layout;
  HbmRef ref;
  ref.kind = kind;
  ref.live = live;
  if (kind == HbmRefKind::kFloats) {
    ref.payload = cache_->shards_[place.device]->default_rows[place.table];
  } else if (kind != HbmRefKind::kNothing) {
    const uint64_t bytes =
        kind == HbmRefKind::kRow ? layout.PayloadBytes(live) : layout.dim() * sizeof(double);
    uint64_t& items = parts_[place.device].items;
    std::copy_n(payload, bytes, lane.host.items + items);
    ref.payload = lane.device.items + items;
    items += RoundUp(bytes, kItemAlignment);
  }
  SetRef(place.device, place.position, ref);
}

void HbmBatch::PlacePartials(std::vector<uint64_t>* sent) {
  const size_t n = parts_.size();
  sent->assign(n * n, 0);
  for (size_t d = 0; d < n; ++d) {
    for (const Partial& partial : parts_[d].partials) {
      (*sent)[d * n + partial.home] += RoundUp(partial.bytes, kItemAlignment);
    }
  }
  for (uint32_t d = 0; d < n; ++d) {
    std::vector<uint64_t> from(n, 0);  // where the sums for each home begin here,
    std::vector<uint64_t> to(n, 0);    // and there
    for (size_t h = 0; h < n; ++h) {
      for (size_t other = 0; other < h; ++other) from[h] += (*sent)[d * n + other];
      for (size_t other = 0; other < d; ++other) to[h] += (*sent)[other * n + h];
    }
    for (const Partial& partial : parts_[d].partials) {
      const uint32_t h = partial.home;
      parts_[d].sums[partial.bag].out = static_cast<uint32_t>(from[h] / sizeof(double));
      SetRef(h, partial.at, {LaneOf(h).incoming + to[h], 0, HbmRefKind::kSums});
      from[h] += RoundUp(partial.bytes, kItemAlignment);
      to[h] += RoundUp(partial.bytes, kItemAlignment);
    }
  }
}

Status HbmBatch::PoolOn(uint32_t d, const std::vector<HbmBag>& bags, uint32_t first) {
  if (bags.empty()) return Status::Ok();
  HbmCache::Shard& shard = *cache_->shards_[d];
  HbmCache::Lane& lane = LaneOf(d);
  std::copy(bags.begin(), bags.end(), lane.host.bags + first);
  EMBERTIDE_RETURN_IF_ERROR(shard.device->Upload(lane.stream, Bytes(lane.device.bags + first),
                                                 Bytes(lane.host.bags + first),
                                                 bags.size() * sizeof(HbmBag)));
  return shard.device->Pool(
      lane.stream, {lane.device.bags + first, static_cast<uint32_t>(bags.size()), lane.refs,
                    shard.tables, lane.device.out, lane.partials});
}

Status HbmBatch::PoolSums(uint32_t d) {
  const Part& part = parts_[d];
  HbmDevice* device = cache_->shards_[d]->device.get();
  HbmCache::Lane& lane = LaneOf(d);
  if (part.items > 0) {
    EMBERTIDE_RETURN_IF_ERROR(
        device->Upload(lane.stream, lane.device.items, lane.host.items, part.items));
  }
  if (part.given > 0) {
    EMBERTIDE_RETURN_IF_ERROR(device->Upload(lane.stream, Bytes(lane.device.at),
                                             Bytes(lane.host.at), part.given * sizeof(uint32_t)));
    EMBERTIDE_RETURN_IF_ERROR(device->Upload(lane.stream, Bytes(lane.device.given),
                                             Bytes(lane.host.given), part.given * sizeof(HbmRef)));
    EMBERTIDE_RETURN_IF_ERROR(
        device->SetRefs(lane.stream, lane.refs, lane.device.at, lane.device.given, part.given));
  }
  return PoolOn(d, part.sums, 0);
}

Status HbmBatch::PoolBags(uint32_t h, const std::vector<uint64_t>& sent) {
  const size_t n = parts_.size();
  HbmDevice* device = cache_->shards_[h]->device.get();
  HbmCache::Lane& lane = LaneOf(h);
  uint64_t to = 0;
  for (uint32_t d = 0; d < n; ++d) {
    const uint64_t bytes = sent[d * n + h];
    if (bytes == 0) continue;
    uint64_t from = 0;
    for (uint32_t other = 0; other < h; ++other) from += sent[d * n + other];
    HbmDevice* sender = cache_->shards_[d]->device.get();
    EMBERTIDE_RETURN_IF_ERROR(device->After(lane.stream, sender, LaneOf(d).stream));
    EMBERTIDE_RETURN_IF_ERROR(device->CopyFrom(lane.stream, lane.incoming + to, sender,
                                               Bytes(LaneOf(d).partials) + from, bytes));
    to += bytes;
  }
  const Part& part = parts_[h];
  EMBERTIDE_RETURN_IF_ERROR(PoolOn(h, part.bags, static_cast<uint32_t>(part.sums.size())));
  if (part.floats == 0) return Status::Ok();
  return device->Download(lane.stream, Bytes(lane.host.out), Bytes(lane.device.out),
                          part.floats * sizeof(float));
}

Status HbmBatch::Pool() {
  std::vector<uint64_t> sent;
  PlacePartials(&sent);
  for (uint32_t d = 0; d < parts_.size(); ++d) {
    if (parts_[d].positions > 0) EMBERTIDE_RETURN_IF_ERROR(Check(PoolSums(d)));
  }
  for (uint32_t h = 0; h < parts_.size(); ++h) {
    if (parts_[h].positions > 0) EMBERTIDE_RETURN_IF_ERROR(Check(PoolBags(h, sent)));
  }
  return Status::Ok();
}

Status HbmBatch::Collect() {
  const Status status = Wait();
  under_way_ = false;
  return status;
}

const float* HbmBatch::Out(size_t bag) const {
  return bags_[bag].empty ? nullptr : LaneOf(bags_[bag].device).host.out + bags_[bag].out;
}

}  // namespace embertide

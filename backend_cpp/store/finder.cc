// Finder: see the header.
#include "store/finder.h"

#include <algorithm>
#include <bit>
#include <string>

namespace embertide {
namespace {

// Counting an access is a locked write, so a chunk's come together at its end, where no other key
// waits for them. Where rows are moved by the counts every access counts; else one in so many.
constexpr uint32_t kCountEvery = 64;
// Keys of one table that are placed together, at least.
constexpr size_t kMinAlike = 4;

// Grows only: elements beyond the chunk are left over from larger ones.
template <typename T>
void Cover(std::vector<T>* items, size_t n) {
  if (items->size() < n) items->resize(n);
}

}  // namespace

void Finder::Begin(const StoreState* store, uint64_t version) {
  store_ = store;
  version_ = version;
  lean_ = store->options.index == IndexKind::kLean;
  size_ = run_ = begun_ = met_run_ = met_ = second_ = settled_ = ready_ = 0;
  late_count_ = last_count_ = 0;
  waits_ = false;
  only_ddr_ = true;
  note_changes_ = false;
  not_held_ = kHeld;
  runs_.clear();
  remote_.clear();
  ssd_keys_.clear();
}

void Finder::Grow(const KeyBags& request) {
  const size_t first = size_;
  size_ += request.bag_keys().size();
  Cover(&keys_, size_);
  if (lean_) Cover(&wanted_, size_);
  Cover(&groups_, size_ + RowOps::kPlacedAtOnce);
  Cover(&buckets_, size_);
  Cover(&found_, size_ + RowOps::kPlacedAtOnce);
  if (note_changes_) {
    Cover(&changed_, size_);
    std::fill(changed_.begin() + static_cast<ptrdiff_t>(first), changed_.end(), 0);
  }
  if (request.remote_of != nullptr || !remote_.empty()) remote_.resize(size_, nullptr);
}

void Finder::Put(const KeyBags& request, size_t first, size_t end, size_t at) {
  const int64_t* keys = request.keys.data();
  if (end - first == 1) {
    keys_[at] = static_cast<uint64_t>(keys[first]);
  } else {
    std::copy(keys + first, keys + end, keys_.data() + at);
  }
  for (size_t k = first; request.remote_of != nullptr && k < end; ++k) {
    const uint32_t which = request.remote_of[k];
    if (which != 0) remote_[at + k - first] = &request.remote[which - 1];
  }
}

void Finder::AddRun(const BagFeature& feature, size_t end) {
  runs_.push_back({&store_->tables[feature.table], end});
}

void Finder::Add(std::span<const BagFeature> features, const KeyBags& request) {
  const size_t first = size_;
  const size_t skipped = request.begin_of(0);
  const size_t bags = request.bags();
  Grow(request);
  Put(request, skipped, request.begin_of(bags), first);
  if (features.size() == 1) return AddRun(features[0], size_);
  for (size_t bag = 0; bag < bags; ++bag) {
    AddRun(features[bag % features.size()], first + request.begin_of(bag + 1) - skipped);
  }
}

void Finder::AddByFeature(std::span<const BagFeature> features, std::span<const KeyBags> requests) {
  const size_t step = features.size();
  size_t at = size_;
  for (const KeyBags& request : requests) Grow(request);
  for (size_t f = 0; f < step; ++f) {
    for (const KeyBags& request : requests) {
      const size_t bags = request.bags();
      // The bags of a lone feature stand together as they are.
      const size_t together = step == 1 ? bags : 1;
      for (size_t bag = f; bag < bags; bag += step * together) {
        const size_t first = request.begin_of(bag);
        const size_t end = request.begin_of(bag + together);
        Put(request, first, end, at);
        at += end - first;
      }
    }
    AddRun(features[f], at);
  }
}

// Notes the first groups of the next keys and asks for them.
template <bool kLean>
void Finder::Aim(size_t first, size_t end) {
  std::array<uint64_t, kMaxKeysAStep> hashes;
  kRowOps->hashes(keys_.data() + first, end - first, hashes.data());
  const uint64_t* hash = hashes.data();
  for (size_t i = first; i < end;) {
    const Run& run = runs_[run_];
    const size_t until = std::min(run.end, end);
    AimAt<kLean>(*run.table, i, until - i, hash);
    if (store_->options.observer != nullptr) Watch(*run.table, i, until - i, hash);
    hash += until - i;
    i = until;
    if (until == run.end) ++run_;
  }
  for (size_t i = first; !remote_.empty() && i < end; ++i) {
    // Keys that came from elsewhere are not looked for here, where a superseded copy may still be.
    if (!remote(i)) continue;
    groups_[i] = BucketIndex::EmptyGroup();
    buckets_[i] = nullptr;
  }
  const GroupRef* groups = groups_.data();
  for (size_t i = first; i < end; ++i) AskFor(groups[i].address());
}

template <bool kLean>
void Finder::AimAt(const Table& table, size_t first, size_t n, const uint64_t* hashes) {
  const uint32_t bits = table.config.bucket_bits;
  const BucketSlot* slots = table.buckets.data();
  const uint64_t version = version_;
  const Bucket** buckets = buckets_.data() + first;
  GroupRef* groups = groups_.data() + first;
  // In plain groups, the key itself is looked for instead.
  if (kLean) kRowOps->turn(hashes, n, bits, wanted_.data() + first);
  for (size_t i = 0; i < n; ++i) {
    const uint64_t hash = hashes[i];
    const Bucket* bucket = slots[BucketOfHash(hash, bits)].At(version);
    buckets[i] = bucket;
    GroupRef group = BucketIndex::EmptyGroup();
    if (bucket != nullptr) [[likely]] {
      group = bucket->index.Begin<kLean>(hash).group;
      if (kLean && !group.lean()) wanted_[first + i] = keys_[first + i];
    } else {
      NoteNotHeld(table, first + i);
    }
    groups[i] = group;
  }
}

void Finder::Watch(const Table& table, size_t first, size_t n, const uint64_t* hashes) {
  for (size_t i = 0; i < n; ++i) {
    if (IsWatched(hashes[i]) && !remote(first + i)) [[unlikely]] {
      watched_.push_back({hashes[i], table.ordinal, table.BucketOf(hashes[i])});
    }
  }
}

void Finder::NoteNotHeld(const Table& table, size_t i) {
  if (not_held_ != kHeld || remote(i)) return;
  not_held_ = i;
  not_held_table_ = table.ordinal;
  waits_ = true;
}

void Finder::Step() {
  if (lean_) {
    StepOf</*kLean=*/true>();
  } else {
    StepOf</*kLean=*/false>();
  }
}

template <bool kLean>
void Finder::StepOf() {
  const size_t begun = begun_;
  const size_t met = met_;
  begun_ = std::min(begun + kKeysAStep, size_);
  Aim<kLean>(begun, begun_);
  SettleLast();
  ready_ = settled_;
  settled_ = second_;
  Settle<kLean>();
  second_ = met;
  met_ = std::min(met + kKeysAStep, begun);
  Place<kLean>(met, met_);
  AskForRows();
}

// Looks for keys in their first groups, and places what it finds there.
template <bool kLean>
void Finder::Place(size_t first, size_t end) {
  std::array<uint64_t, kMaxKeysAStep + RowOps::kPlacedAtOnce> words;
  const std::vector<uint64_t>& wanted = kLean ? wanted_ : keys_;
  FindOf(store_->options.index)(groups_.data() + first, wanted.data() + first, end - first,
                                words.data());
  late_count_ = 0;
  for (size_t i = first; i < end;) {
    const Run& run = runs_[met_run_];
    const size_t n = std::min(run.end, end) - i;
    const uint64_t* const found = words.data() + (i - first);
    if (const RowShape* shape = ShapeOf<kLean>(*run.table, i, n)) {
      PlaceAlike(*shape, i, n, found);
    } else {
      PlaceEach(i, n, found);
    }
    i += n;
    if (i == run.end) ++met_run_;
  }
}

template <bool kLean>
const RowShape* Finder::ShapeOf(const Table& table, size_t first, size_t n) const {
  if (store_->options.devices > 1 || n < kMinAlike) return nullptr;
  if (!kLean) return &table.plain_shape;
  size_t lean = 0;
  for (size_t i = first; i < first + n; ++i) lean += static_cast<size_t>(groups_[i].lean());
  return lean == 0 ? &table.plain_shape : lean == n ? &table.lean_shape : nullptr;
}

void Finder::PlaceAlike(const RowShape& shape, size_t first, size_t n, const uint64_t* words) {
  Lines* const lines = lines_.data() + lines_count_;
  lines_count_ += n;
  const RowOps::Placed placed =
      kRowOps->place(shape, words, groups_.data() + first, n, found_.data() + first, lines);
  for (uint64_t late = placed.go_on; late != 0; late &= late - 1) {
    late_[late_count_++] = first + static_cast<size_t>(std::countr_zero(late));
  }
  for (uint64_t other = placed.other; other != 0; other &= other - 1) [[unlikely]] {
    const auto k = static_cast<size_t>(std::countr_zero(other));
    lines[k] = {reinterpret_cast<uintptr_t>(groups_[first + k].address()), 1};
    PlaceOne(first + k, IndexedAt(first + k, words[k]));
  }
}

// The same as PlaceAlike, whatever their tables, pools and groups.
void Finder::PlaceEach(size_t first, size_t n, const uint64_t* words) {
  FoundRow* found = found_.data();
  for (size_t i = first; i < first + n; ++i) {
    const uint64_t word = words[i - first];
    const Location place = Location::FromWord(word);
    if (!place.is_ddr_row()) [[unlikely]] {
      PlaceOne(i, IndexedAt(i, word));
      continue;
    }
    const Bucket& bucket = *buckets_[i];
    uint64_t slot = place.slot();
    uint16_t live = place.live();
    if (groups_[i].lean()) {
      slot = bucket.index.lean().SlotOf(word);
      live = static_cast<uint16_t>(word & bucket.full_mask);
    }
    // One in six goes on, too few and too many for a branch: its next group is asked for as if it
    // were a row.
    const bool goes_on = word == kContinueProbe;
    late_[late_count_] = i;
    late_count_ += static_cast<size_t>(goes_on);
    const uint64_t other = -static_cast<uint64_t>(goes_on);
    const std::byte* payload = SlabArena::AddressOf(bucket.rows, slot);
    found[i] = {payload, live, Source::kDdr, FoundKind::kRow};
    const uintptr_t row = reinterpret_cast<uintptr_t>(payload) & ~other;
    const uintptr_t next = reinterpret_cast<uintptr_t>(groups_[i].Behind(1)) & other;
    lines_[lines_count_++] = LinesAt(row | next, goes_on ? 1 : bucket.PayloadBytes(live));
  }
}

void Finder::AskForRows() {
  for (size_t k = 0; k < lines_count_; ++k) AskForLines(lines_[k]);
  lines_count_ = 0;
}

// Places any key, wherever its row lies.
void Finder::PlaceOne(size_t i, Location indexed) {
  if (remote(i)) return TakeRemote(i);
  uint64_t* changed = note_changes_ ? &changed_[i] : nullptr;
  const Location place = Resolve(indexed, version_, changed);
  FoundRow& found = found_[i];
  found = {nullptr, place.live(), Source::kDdr, FoundKind::kRow};
  switch (place.tier()) {
    case TierId::kDdr:
      found.payload = SlabArena::AddressOf(buckets_[i]->rows, place.slot());
      lines_[lines_count_++] = LinesAt(reinterpret_cast<uintptr_t>(found.payload),
                                       buckets_[i]->PayloadBytes(found.live));
      return;
    case TierId::kSsd: {
      const Bucket& bucket = *buckets_[i];
      found.source = Source::kSsd;
      ssd_keys_.push_back(
          {i,
           bucket.pool,
           {place.slot(), keys_[i], bucket.table, bucket.PayloadBytes(found.live), nullptr}});
      waits_ = true;
      break;
    }
    case TierId::kHbm:  // no entry names it
    case TierId::kNowhere: {
      const bool pruned = place.slot() == static_cast<uint64_t>(RecordKind::kPruned);
      found = {nullptr, 0, pruned ? Source::kPruned : Source::kDefault, FoundKind::kDefault};
    }
  }
  only_ddr_ = false;
}

void Finder::TakeRemote(size_t i) {
  const RemoteRow& row = *remote_[i];
  const auto* sums = reinterpret_cast<const std::byte*>(row.sums);
  found_[i] = {sums != nullptr ? sums : row.payload, row.live, row.source,
               row.summed               ? FoundKind::kNothing
               : sums != nullptr        ? FoundKind::kSums
               : row.payload != nullptr ? FoundKind::kRow
                                        : FoundKind::kDefault};
  only_ddr_ = false;
}

// Looks into the second group of each key that is late. One in twenty is not there, either: the
// next ones are asked for, and looked into by SettleLast a step later.
template <bool kLean>
void Finder::Settle() {
  std::array<GroupRef, kMaxKeysAStep> groups;
  std::array<uint64_t, kMaxKeysAStep> wanted;
  std::array<uint64_t, kMaxKeysAStep> words;
  for (size_t l = 0; l < late_count_; ++l) {
    const size_t i = late_[l];
    const uint64_t hash = HashKey(keys_[i]);
    const BucketIndex& index = buckets_[i]->index;
    BucketIndex::Cursor at = index.Begin<kLean>(hash);
    // If the arrays have grown since, its first group may hold the key now.
    if (at.group == groups_[i]) at.Advance();
    groups[l] = groups_[i] = at.group;
    wanted[l] = kLean ? index.Wanted(hash, keys_[i], at.group) : keys_[i];
  }
  FindOf(store_->options.index)(groups.data(), wanted.data(), late_count_, words.data());
  last_count_ = 0;
  for (size_t l = 0; l < late_count_; ++l) {
    const size_t i = late_[l];
    if (words[l] == kContinueProbe) {
      for (size_t ahead = 1; ahead <= kGroupsAhead; ++ahead) AskFor(groups[l].Behind(ahead));
      last_[last_count_++] = i;
    } else {
      PlaceOne(i, IndexedAt(i, words[l]));
    }
  }
}

// Looks wherever else the keys may be that Settle did not find.
void Finder::SettleLast() {
  for (size_t l = 0; l < last_count_; ++l) {
    const size_t i = last_[l];
    const uint64_t hash = HashKey(keys_[i]);
    const BucketIndex& index = buckets_[i]->index;
    PlaceOne(i, index.Find(hash, keys_[i], &groups_[i]));
  }
}

Status Finder::FindAll() {
  while (ready_ < size_) Step();
  waits_ = false;
  if (not_held_ != kHeld) {
    const Table& table = store_->tables[not_held_table_];
    return {Code::kNotOwner, "bucket " + std::to_string(table.BucketOf(HashKey(keys_[not_held_]))) +
                                 " of table " + table.config.name +
                                 " is not held here at the pinned version"};
  }
  return ssd_keys_.empty() ? Status::Ok() : ReadSsdRows();
}

// Brings the noted SSD rows, each pool's in one batch.
Status Finder::ReadSsdRows() {
  uint64_t bytes = 0;
  for (const SsdKey& key : ssd_keys_) bytes += key.read.bytes;
  ssd_rows_.resize(bytes + 1);  // a row without bytes has an address, too
  std::byte* row = ssd_rows_.data();
  for (const auto& pool : store_->pools) {
    ssd_reads_.clear();
    for (SsdKey& key : ssd_keys_) {
      if (key.pool != pool.get()) continue;
      key.read.to = row;
      found_[key.at].payload = row;
      row += key.read.bytes;
      ssd_reads_.push_back(key.read);
    }
    if (ssd_reads_.empty()) continue;
    EMBERTIDE_RETURN_IF_ERROR(pool->ssd->Read(ssd_reads_));
    for (const LogRead& read : ssd_reads_) {
      accesses_.push_back({pool.get(), {read.key, read.table}});
    }
  }
  ssd_keys_.clear();
  return Status::Ok();
}

void Finder::TellPlaces(const Table& table, size_t first, size_t n, uint64_t* words) const {
  const uint64_t rows = table.plain_shape.rows;
  const FoundRow* found = found_.data() + first;
  const auto word = [rows](const FoundRow& row) {
    const uint64_t slot = (reinterpret_cast<uintptr_t>(row.payload) - rows) / kSlotUnitBytes;
    return Location(TierId::kDdr, row.live, slot).word();
  };
  for (size_t i = 0; i < n; ++i) {
    const bool known =
        only_ddr_ || (found[i].kind == FoundKind::kRow && found[i].source == Source::kDdr);
    words[i] = known ? word(found[i]) : 0;
  }
}

size_t Finder::memory_bytes() const {
  const auto bytes = []<typename Item>(const std::vector<Item>& items) {
    return items.capacity() * sizeof(Item);
  };
  return bytes(runs_) + bytes(keys_) + bytes(wanted_) + bytes(groups_) + bytes(buckets_) +
         bytes(found_) + bytes(changed_) + bytes(watched_) + bytes(remote_) + bytes(ssd_keys_) +
         bytes(ssd_reads_) + bytes(ssd_rows_);
}

void Finder::Count() {
  const bool rows_move =
      store_->hbm != nullptr ||
      std::ranges::any_of(store_->pools, [](const auto& pool) { return pool->ssd != nullptr; });
  if (!rows_move) {
    size_t i = until_counted_;
    for (; i < size_; i += 1 + gaps_.Gap(kCountEvery)) BucketIndex::Count(groups_[i], keys_[i]);
    until_counted_ = i - size_;
    return;
  }
  for (size_t i = 0; i < size_; ++i) {
    if (buckets_[i] == nullptr) continue;
    BucketIndex::Count(groups_[i], keys_[i]);
    RowPool* pool = buckets_[i]->pool;
    if (pool->policy != nullptr && found_[i].source == Source::kDdr) {
      accesses_.push_back({pool, {keys_[i], buckets_[i]->table}});
    }
  }
}

}  // namespace embertide

// The training step: new rows for keys that lack one, and exact row-wise Adagrad for all of a
// batch, a table after the other.
//
// The occurrences of a table's keys are dealt out to parts, each of a range of hashes and of one
// device, in the order of the batch. A part fits the first caches; its keys are grouped by a small
// hash table, and then taken in steps of eight, so that no key waits alone for memory:
//
//   step s + 6: ask for the keys' index groups        step s + 4: find them there
//   step s + 2: or in the groups after them; ask for the rows and what stands beside them
//   step s:     add the rows' gradients and take the step
//
// The distances are twice those of lookup.cc, for a row is several lines. Keys without a row in DDR
// come last, one by one: theirs is made, or brought from the SSD. A device's writer is held for
// some parts at a time, so that others get a turn.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "store/prefetch.h"
#include "store/row_ops.h"
#include "store/store_impl.h"
#include "store/train_ops.h"

namespace embertide {
namespace {

constexpr size_t kStep = 8;  // keys
constexpr size_t kFind = 2 * kStep;
constexpr size_t kPlace = 4 * kStep;
constexpr size_t kTake = 6 * kStep;
constexpr size_t kPending = 8 * kStep;  // more than kTake + kStep
constexpr size_t kLineSums = kLine / sizeof(double);
// Occurrences of a part, on average: with what is noted of them they fill a second-level cache.
constexpr size_t kPartKeys = 1024;
// Occurrences brought in while a device's writer is held: about half a millisecond.
constexpr size_t kTurnKeys = 16384;
// Keys of a call: occurrences, and the slots that they are grouped in, are numbered by 32 bits.
constexpr size_t kMostKeys = 1U << 28;
// So that few slots of a part's hash table are asked for by two keys.
constexpr uint32_t kSlotsOverKeys = 4;
// Gradients of one key that are asked for ahead; more than these keep the core busy.
constexpr uint32_t kGradientsAhead = 4;

// A key of the batch, and its gradient there; null where rows are made alone.
struct Occurrence {
  uint64_t key;
  const float* gradient;
};

// A key of a part and its occurrences, a chain in the order of the batch.
struct Group {
  uint64_t key;
  uint64_t hash;
  uint32_t first;
  uint32_t last;
  uint32_t count;
};

// A row in DDR and what is brought into it.
struct Row {
  const Group* group;
  Bucket* bucket;
  std::byte* payload;  // null: there is no row in DDR
  RowAux* aux;
  uint16_t live;
};

// What a key's place in the pipeline holds of it.
struct Pending {
  const BucketIndex::Group* index_group;  // null: the word is known
  uint64_t word;
  Row row;
};

// A batch's working memory, kept by each thread; bounded by the largest table's batch it saw.
struct Scratch {
  std::vector<uint64_t> hashes;
  std::vector<Occurrence> dealt;
  std::vector<uint32_t> ends;  // of the parts, in `dealt`
  std::vector<uint32_t> slots;
  std::vector<uint32_t> next;  // occurrence of the same key
  std::vector<Group> groups;
  std::vector<uint32_t> late;  // groups without a row in DDR
  std::vector<const float*> gradients;
  std::vector<double> sums;
};

Scratch& ThreadScratch() {
  thread_local Scratch scratch;
  return scratch;
}

// Keys [first, end) that are in a bag.
std::pair<size_t, size_t> KeysIn(const BagGradients& bags) {
  if (bags.offsets.empty()) return {0, bags.keys.size()};
  return {bags.offsets.front(), bags.offsets.back()};
}

// Calls use(gradient, keys) for the bags in order, a bag of one key each where there are no
// offsets.
template <typename Use>
void ForEachBag(const BagGradients& bags, const Use& use) {
  const float* gradient = bags.gradients;
  const size_t stride = gradient == nullptr ? 0 : bags.stride;
  if (bags.offsets.empty()) {
    for (size_t k = 0; k < bags.keys.size(); ++k, gradient += stride) use(gradient, 1);
    return;
  }
  for (size_t bag = 0; bag + 1 < bags.offsets.size(); ++bag, gradient += stride) {
    use(gradient, bags.offsets[bag + 1] - bags.offsets[bag]);
  }
}

// One table's part of a call.
class TableStep {
 public:
  // `optimizer` null: rows are made and not updated.
  TableStep(Store::Impl* impl, uint32_t table, const RowwiseAdagrad* optimizer, Scratch* scratch)
      : impl_(*impl),
        table_(impl->tables[table]),
        optimizer_(optimizer),
        scratch_(*scratch),
        bucket_bits_(table_.config.bucket_bits) {}

  void Run(std::span<const BagGradients* const> bags) {
    Deal(bags);
    const size_t parts = scratch_.ends.size();
    uint32_t begin = 0;
    for (size_t part = 0; part < parts;) {
      Device& device = *impl_.DeviceOf(table_, static_cast<uint32_t>(part >> part_bits_));
      const std::lock_guard writer(device.writer);
      impl_.Reclaim(&device);
      const size_t until = (part >> part_bits_ << part_bits_) + (size_t{1} << part_bits_);
      const uint32_t turn = begin;
      for (; part < until && begin - turn < kTurnKeys; ++part) {
        RunPart(&device, begin, scratch_.ends[part]);
        begin = scratch_.ends[part];
      }
    }
  }

  uint64_t made() const { return made_; }
  uint64_t updated() const { return updated_; }
  // Of the first key that failed.
  const Status& failure() const { return failure_; }

 private:
  // Parts are numbered by device, then by the top bits of the hash, as buckets are.
  uint32_t PartOf(uint64_t hash) const {
    const uint32_t part = BucketOfHash(hash, part_bits_);
    if (impl_.options.devices == 1) return part;
    const BucketSlot& bucket = table_.buckets[BucketOfHash(hash, bucket_bits_)];
    return (bucket.device.load(std::memory_order_relaxed) << part_bits_) + part;
  }

  void Deal(std::span<const BagGradients* const> bags) {
    size_t keys = 0;
    for (const BagGradients* each : bags) keys += KeysIn(*each).second - KeysIn(*each).first;
    part_bits_ = static_cast<uint32_t>(std::bit_width(keys / kPartKeys));
    std::vector<uint32_t>& ends = scratch_.ends;
    ends.assign(size_t{impl_.options.devices} << part_bits_, 0);
    scratch_.hashes.resize(keys);
    scratch_.dealt.resize(keys);
    uint64_t* hash = scratch_.hashes.data();
    for (const BagGradients* each : bags) {
      const auto [first, end] = KeysIn(*each);
      for (size_t k = first; k < end; ++k, ++hash) {
        *hash = HashKey(static_cast<uint64_t>(each->keys[k]));
        ++ends[PartOf(*hash)];
      }
    }
    uint32_t begin = 0;
    for (uint32_t& each : ends) {
      const uint32_t count = each;
      each = begin;
      begin += count;
    }
    // Now the parts' beginnings, which become their ends.
    hash = scratch_.hashes.data();
    for (const BagGradients* each : bags) {
      const int64_t* key = each->keys.data() + KeysIn(*each).first;
      ForEachBag(*each, [&](const float* gradient, size_t n) {
        for (size_t k = 0; k < n; ++k) {
          scratch_.dealt[ends[PartOf(*hash++)]++] = {static_cast<uint64_t>(*key++), gradient};
        }
      });
    }
  }

  void RunPart(Device* device, uint32_t begin, uint32_t end) {
    if (begin == end) return;
    dealt_ = &scratch_.dealt[begin];
    GroupKeys(end - begin);
    const size_t n = groups_;
    scratch_.late.clear();
    scratch_.sums.resize(kStep * sums_ + kLineSums);
    for (size_t s = 0; s < n + kTake; s += kStep) {
      if (s >= kTake) Take(s - kTake, std::min(s - kTake + kStep, n));
      if (s >= kFind && s - kFind < n) Find(s - kFind, std::min(s - kFind + kStep, n));
      for (size_t i = s; i < s + kStep; ++i) {
        if (i < n) Begin(i);
        if (i >= kPlace && i - kPlace < n) Place(*device, i - kPlace);
      }
    }
    for (const uint32_t group : scratch_.late) {
      const Status done = MakeOrBring(device, scratch_.groups[group]);
      if (done.ok()) continue;
      ++impl_.failed_keys;
      if (failure_.ok()) failure_ = done;
    }
  }

  void GroupKeys(uint32_t n) {
    const uint32_t slots = std::bit_ceil(kSlotsOverKeys * n);
    scratch_.slots.assign(slots, 0);
    if (scratch_.next.size() < n) scratch_.next.resize(n);
    if (scratch_.groups.size() < n) scratch_.groups.resize(n);
    uint32_t* const slot_of = scratch_.slots.data();
    uint32_t* const next = scratch_.next.data();
    Group* const groups = scratch_.groups.data();
    uint32_t count = 0;
    for (uint32_t i = 0; i < n; ++i) {
      const uint64_t key = dealt_[i].key;
      const uint64_t hash = HashKey(key);
      // Bits that the part does not depend on.
      auto slot = static_cast<uint32_t>(hash >> 8) & (slots - 1);
      while (slot_of[slot] != 0 && groups[slot_of[slot] - 1].key != key) {
        slot = (slot + 1) & (slots - 1);
      }
      if (slot_of[slot] == 0) {
        groups[count] = {key, hash, i, i, 1};
        slot_of[slot] = ++count;
        continue;
      }
      Group& group = groups[slot_of[slot] - 1];
      next[group.last] = i;
      group.last = i;
      ++group.count;
    }
    groups_ = count;
  }

  Pending& At(size_t i) { return pending_[i % kPending]; }

  void Begin(size_t i) {
    const uint64_t hash = scratch_.groups[i].hash;
    Pending& key = At(i);
    key.row.bucket = Store::Impl::Newest(table_, BucketOfHash(hash, bucket_bits_));
    key.index_group = key.row.bucket->index.Begin(hash).group;
    AskFor(key.index_group);
  }

  void Find(size_t first, size_t end) {
    std::array<const BucketIndex::Group*, kStep> groups;
    std::array<uint64_t, kStep> keys;
    std::array<uint64_t, kStep> words;
    for (size_t i = first; i < end; ++i) {
      groups[i - first] = At(i).index_group;
      keys[i - first] = scratch_.groups[i].key;
    }
    kRowOps->words(groups.data(), keys.data(), end - first, words.data());
    for (size_t i = first; i < end; ++i) {
      Pending& key = At(i);
      key.word = words[i - first];
      if (key.word != BucketIndex::kGoesOn) {
        key.index_group = nullptr;
        continue;
      }
      BucketIndex::Cursor at = key.row.bucket->index.Begin(scratch_.groups[i].hash);
      at.Advance();
      AskFor(at.group);
    }
  }

  // Where the row lies; asks for it and for the gradients.
  void Place(const Device& device, size_t i) {
    const Group& group = scratch_.groups[i];
    Pending& key = At(i);
    Row& row = key.row;
    const Location place = key.index_group != nullptr
                               ? row.bucket->index.Peek(group.hash, group.key)
                               : BucketIndex::LocationOf(key.word);
    row.payload = nullptr;
    if (place.tier() != TierId::kDdr) return;
    row = RowAt(device, &group, row.bucket, place);
    if (optimizer_ == nullptr) return;
    AskFor(row.aux);
    const RowLayout& layout = table_.config.layout;
    AskForLines(row.payload, layout.PayloadBytes(row.live));
    uint32_t occurrence = group.first;
    for (uint32_t n = std::min(group.count, kGradientsAhead); n > 0; --n) {
      AskForLines(dealt_[occurrence].gradient, layout.dim() * sizeof(float));
      occurrence = scratch_.next[occurrence];
    }
  }

  static Row RowAt(const Device& device, const Group* group, Bucket* bucket, Location place) {
    return {group, bucket, device.arena.Address(place.slot()), Store::Impl::AuxOf(&device, place),
            place.live()};
  }

  void Take(size_t first, size_t end) {
    std::array<Row, kStep> rows;
    size_t n = 0;
    for (size_t i = first; i < end; ++i) {
      const Row& row = At(i).row;
      if (row.payload == nullptr) {
        scratch_.late.push_back(static_cast<uint32_t>(i));
      } else {
        rows[n++] = row;
      }
    }
    if (optimizer_ != nullptr) Update(rows.data(), n);
  }

  // Up to kStep rows: each waits for a division and a root, but not one for another's.
  void Update(const Row* rows, size_t n) {
    const RowLayout& layout = table_.config.layout;
    std::array<double, kStep> squares;
    for (size_t r = 0; r < n; ++r) squares[r] = SumGradients(*rows[r].group, SumsOf(r));
    std::array<double, kStep> rates;
    std::array<bool, kStep> finite;
    for (size_t r = 0; r < n; ++r) {
      float& h = rows[r].aux->accumulator;
      const float before = h == 0.0F ? optimizer_->initial_accumulator : h;
      const float after = before + static_cast<float>(squares[r] / layout.dim());
      // Not so if a gradient or a sum is not.
      finite[r] = after <= std::numeric_limits<float>::max();
      h = finite[r] ? after : h;
      rates[r] = optimizer_->learning_rate / (std::sqrt(after) + optimizer_->epsilon);
    }
    for (size_t r = 0; r < n; ++r) {
      const Row& row = rows[r];
      if (!finite[r]) {
        ++impl_.refused_gradients;
        continue;
      }
      descend_(layout, row.live, SumsOf(r), rates[r], row.payload);
      Store::Impl::MarkChanged(row.bucket, row.group->hash, row.aux);
      ++updated_;
    }
  }
  // Returns the sum of the squares of the sums.
  double SumGradients(const Group& group, double* sums) {
    if (scratch_.gradients.size() < group.count) scratch_.gradients.resize(group.count);
    const float** gradients = scratch_.gradients.data();
    uint32_t occurrence = group.first;
    for (uint32_t i = 0; i < group.count; ++i) {
      gradients[i] = dealt_[occurrence].gradient;
      occurrence = scratch_.next[occurrence];
    }
    return ops_.sum(gradients, group.count, table_.config.layout.dim(), sums);
  }
  // At the beginning of a line.
  double* SumsOf(size_t row) {
    const auto base = reinterpret_cast<uintptr_t>(scratch_.sums.data()) + kLine - 1;
    return reinterpret_cast<double*>(base / kLine * kLine) + row * sums_;
  }

  // A key whose row is not in DDR. kResourceExhausted, kDeviceError, kCorrupt naming the key.
  Status MakeOrBring(Device* device, const Group& group);
  Result<Location> MakeRow(Device* device, Bucket* bucket, const Group& group);
  std::string Name(const Group& group) const {
    return std::to_string(static_cast<int64_t>(group.key)) + " of table " + table_.config.name;
  }

  Store::Impl& impl_;
  Table& table_;
  const RowwiseAdagrad* const optimizer_;
  Scratch& scratch_;
  const uint32_t bucket_bits_;
  const TrainOps& ops_ = ChosenTrainOps();
  const TrainOps::Descend descend_ = ops_.descend[static_cast<size_t>(table_.config.layout.dtype)];
  // Whole lines of sums, a row's.
  const size_t sums_ = (table_.config.layout.dim() + kLineSums - 1) / kLineSums * kLineSums;
  uint32_t part_bits_ = 0;
  const Occurrence* dealt_ = nullptr;  // the part's
  size_t groups_ = 0;                  // of the part
  std::array<Pending, kPending> pending_;
  const Device* full_ = nullptr;  // had no room for a row: it is asked for no more
  uint64_t made_ = 0;
  uint64_t updated_ = 0;
  Status failure_;
};

Status TableStep::MakeOrBring(Device* device, const Group& group) {
  const uint32_t b = BucketOfHash(group.hash, bucket_bits_);
  Bucket* bucket = Store::Impl::Newest(table_, b);
  Result<Location> place = Location();
  if (bucket->index.Locate(group.hash, group.key) == BucketIndex::kNotFound) {
    bool enters = false;
    for (uint32_t n = group.count; n > 0 && !enters; --n) {
      enters = impl_.EntersNow(device, table_, group.key);
    }
    if (!enters) {
      if (optimizer_ != nullptr) ++impl_.dropped_gradients;
      return Status::Ok();
    }
    if (device != full_) place = MakeRow(device, bucket, group);
  } else if (optimizer_ == nullptr) {
    return Status::Ok();
  } else if (device != full_) {
    place = impl_.ResidentRow(device, table_.ordinal, b, group.key);
  }
  if (device == full_) return {Code::kResourceExhausted, "no room for key " + Name(group)};
  if (!place.ok()) {
    if (place.status().code() == Code::kResourceExhausted) full_ = device;
    return {place.status().code(), "key " + Name(group) + ": " + place.status().message()};
  }
  if (optimizer_ == nullptr) return Status::Ok();
  const Row row = RowAt(*device, &group, bucket, place.value());
  Update(&row, 1);
  return Status::Ok();
}

Result<Location> TableStep::MakeRow(Device* device, Bucket* bucket, const Group& group) {
  const TableConfig& config = table_.config;
  const RowLayout& layout = config.layout;
  std::vector<float> values(layout.dim());
  for (uint32_t d = 0; d < layout.dim(); ++d) {
    values[d] = InitialValue(config.init_seed, config.id, group.key, d, config.init_scale);
  }
  std::vector<std::byte> payload(layout.PayloadBytes(layout.full_mask()));
  EncodePayload(layout, layout.full_mask(), values.data(), payload.data());
  EMBERTIDE_RETURN_IF_ERROR(impl_.ReserveEntry(device, bucket));
  Result<Location> place = impl_.StoreRow(device, table_, group.key, layout.full_mask(), payload);
  if (!place.ok()) return place;
  impl_.InsertEntry(bucket, group.key, *place);
  bucket->removed.erase(group.key);
  Store::Impl::MarkChanged(bucket, group.hash, Store::Impl::AuxOf(device, *place));
  ++made_;
  return place;
}

Status ValidateBags(const Store::Impl& impl, const BagGradients& bags) {
  EMBERTIDE_RETURN_IF_ERROR(impl.CheckTable(bags.table));
  const TableConfig& table = impl.tables[bags.table].config;
  if (bags.gradients != nullptr && bags.stride < table.layout.dim()) {
    return {Code::kInvalidArgument,
            "table " + table.name + ": gradients " + std::to_string(bags.stride) +
                " floats apart are less than dim " + std::to_string(table.layout.dim())};
  }
  const auto& offsets = bags.offsets;
  if (!offsets.empty() &&
      (!std::is_sorted(offsets.begin(), offsets.end()) || offsets.back() > bags.keys.size())) {
    return {Code::kInvalidArgument, "table " + table.name +
                                        ": offsets must ascend to the number of keys (" +
                                        std::to_string(bags.keys.size()) + ") at most"};
  }
  return Status::Ok();
}

// Runs the tables in their order, each with its bags in the order of the call.
Result<uint64_t> RunTables(Store::Impl* impl, std::span<const BagGradients> bags,
                           const RowwiseAdagrad* optimizer) {
  if (!impl->training()) {
    return Status(Code::kInvalidArgument, "this call needs a store of the training profile");
  }
  std::vector<const BagGradients*> by_table;
  size_t keys = 0;
  for (const BagGradients& each : bags) {
    EMBERTIDE_RETURN_IF_ERROR(ValidateBags(*impl, each));
    by_table.push_back(&each);
    keys += each.keys.size();
  }
  if (keys > kMostKeys) {
    return Status(Code::kInvalidArgument,
                  std::to_string(keys) + " keys in a call, more than " + std::to_string(kMostKeys));
  }
  std::stable_sort(by_table.begin(), by_table.end(),
                   [](const auto* a, const auto* b) { return a->table < b->table; });
  Status failure;
  uint64_t done = 0;
  for (auto first = by_table.begin(); first != by_table.end();) {
    const uint32_t table = (*first)->table;
    const auto end = std::find_if(first, by_table.end(),
                                  [table](const auto* each) { return each->table != table; });
    TableStep step(impl, table, optimizer, &ThreadScratch());
    step.Run({first, end});
    done += optimizer == nullptr ? step.made() : step.updated();
    if (failure.ok()) failure = step.failure();
    first = end;
  }
  if (!failure.ok()) return failure;
  return done;
}

}  // namespace

Result<uint64_t> Store::EnsureRows(uint32_t t, std::span<const int64_t> keys) {
  const BagGradients bags{t, keys, {}, nullptr, 0};
  return RunTables(impl_.get(), {&bags, 1}, nullptr);
}

Result<uint64_t> Store::ApplyGradients(std::span<const BagGradients> bags,
                                       const RowwiseAdagrad& optimizer) {
  for (const BagGradients& each : bags) {
    if (each.gradients == nullptr && !each.keys.empty()) {
      return Status(Code::kInvalidArgument, "bags without gradients");
    }
  }
  return RunTables(impl_.get(), bags, &optimizer);
}

}  // namespace embertide

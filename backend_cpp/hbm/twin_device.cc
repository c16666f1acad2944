// The twin of a GPU: the same work in host memory, done as soon as it is given or only when
// somebody waits for it, by chance: what is ordered by luck alone shows.
#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <new>
#include <vector>

#include "embertide/row.h"
#include "hbm/device.h"

namespace embertide {
namespace {

constexpr std::align_val_t kAlignment{256};

// All twins of the process work one at a time: streams of several wait for each other in any order.
std::recursive_mutex& Working() {
  static std::recursive_mutex mutex;
  return mutex;
}

struct Stream {
  std::deque<std::function<void()>> tasks;
  uint64_t given = 0;
  uint64_t done = 0;

  // Requires: Working() is held.
  void RunUntil(uint64_t count) {
    while (done < count) {
      const auto task = std::move(tasks.front());
      tasks.pop_front();
      task();
      ++done;
    }
  }
};

// One row's payload as the kernel sees it: RowLayout from the fields of HbmTable.
RowLayout LayoutOf(const HbmTable& table) { return {table.chunks, table.chunk_dim, table.dtype}; }

class TwinDevice : public HbmDevice {
 public:
  ~TwinDevice() override {
    for (std::byte* memory : memory_) ::operator delete[](memory, kAlignment);
  }

  std::string name() const override { return "twin"; }

  Result<std::byte*> Allocate(uint64_t bytes) override {
    auto* memory = static_cast<std::byte*>(::operator new[](bytes, kAlignment, std::nothrow));
    if (memory == nullptr) {
      return Status(Code::kResourceExhausted,
                    "no memory for " + std::to_string(bytes) + " bytes of a twin");
    }
    std::memset(memory, 0, bytes);
    memory_.push_back(memory);
    return memory;
  }
  Result<std::byte*> AllocateHost(uint64_t bytes) override { return Allocate(bytes); }

  Result<uint32_t> AddStream() override {
    streams_.emplace_back();
    return static_cast<uint32_t>(streams_.size() - 1);
  }

  Status After(uint32_t stream, HbmDevice* other, uint32_t before) override {
    Stream* first = &static_cast<TwinDevice*>(other)->streams_[before];
    const std::lock_guard lock(Working());
    return Give(stream, [first, until = first->given] { first->RunUntil(until); });
  }

  Status Wait(uint32_t stream) override {
    const std::lock_guard lock(Working());
    streams_[stream].RunUntil(streams_[stream].given);
    return Status::Ok();
  }

  Status Upload(uint32_t stream, std::byte* to, const std::byte* from, uint64_t bytes) override {
    return Give(stream, [=] { std::memcpy(to, from, bytes); });
  }
  Status Download(uint32_t stream, std::byte* to, const std::byte* from, uint64_t bytes) override {
    return Give(stream, [=] { std::memcpy(to, from, bytes); });
  }
  Status CopyFrom(uint32_t stream, std::byte* to, HbmDevice* /*other*/, const std::byte* from,
                  uint64_t bytes) override {
    return Give(stream, [=] { std::memcpy(to, from, bytes); });
  }

  Status Lookup(uint32_t stream, const HbmDirectory& cache, const LookupArgs& args) override {
    return Give(stream, [=] {
      for (uint32_t i = 0; i < args.count; ++i) LookupOne(cache, args, i);
    });
  }

  Status Place(uint32_t stream, const HbmDirectory& cache, const HbmPlacement* placements,
               uint32_t count, const std::byte* payloads) override {
    return Give(stream, [=] {
      for (uint32_t i = 0; i < count; ++i) {
        const HbmPlacement& p = placements[i];
        const HbmEntry& entry = p.entry;
        std::memcpy(cache.pages + uint64_t{entry.slot} * kHbmSlotUnit, payloads + p.from, p.bytes);
        cache.entries[p.way] = entry;
        const uint64_t hash = HbmHash(HbmTableOf(entry.meta), entry.key);
        cache.tags[p.way] = entry.until == 0 ? uint16_t{0} : HbmTagOf(hash);
      }
    });
  }

  Status End(uint32_t stream, const HbmDirectory& cache, const HbmEnding* endings,
             uint32_t count) override {
    return Give(stream, [=] {
      for (uint32_t i = 0; i < count; ++i) {
        uint64_t& until = cache.entries[endings[i].way].until;
        until = std::min(until, endings[i].until);
      }
    });
  }

  Status Survey(uint32_t stream, const HbmDirectory& cache, const uint32_t* sets, uint32_t count,
                uint32_t* used) override {
    return Give(stream, [=] {
      for (uint32_t i = 0; i < count; ++i) {
        used[i] = 0;
        for (uint32_t way = 0; way < kHbmWays; ++way) {
          HbmEntry& entry = cache.entries[uint64_t{sets[i]} * kHbmWays + way];
          if ((entry.meta & kHbmUsed) != 0) used[i] |= 1U << way;
          entry.meta &= ~kHbmUsed;
        }
      }
    });
  }

  Status SetRefs(uint32_t stream, HbmRef* refs, const uint32_t* at, const HbmRef* given,
                 uint32_t count) override {
    return Give(stream, [=] {
      for (uint32_t i = 0; i < count; ++i) refs[at[i]] = given[i];
    });
  }

  Status Pool(uint32_t stream, const PoolArgs& args) override {
    return Give(stream, [=] {
      for (uint32_t i = 0; i < args.count; ++i) PoolOne(args, args.bags[i]);
    });
  }

 private:
  Status Give(uint32_t stream, std::function<void()> task) {
    const std::lock_guard lock(Working());
    Stream& to = streams_[stream];
    to.tasks.push_back(std::move(task));
    ++to.given;
    dice_ = dice_ * 1664525 + 1013904223;  // Numerical Recipes, 2nd edition, 7.1
    if (dice_ >> 31 == 0) to.RunUntil(to.given);
    return Status::Ok();
  }

  static void LookupOne(const HbmDirectory& cache, const LookupArgs& args, uint32_t i) {
    args.answers[i] = 0;
    const uint32_t table = args.tables[i];
    if (table == kHbmNoTable) return;
    const uint64_t hash = HbmHash(table, args.keys[i]);
    const uint64_t first = uint64_t{HbmSetOf(hash, cache.sets)} * kHbmWays;
    for (uint64_t way = first; way < first + kHbmWays; ++way) {
      if (cache.tags[way] != HbmTagOf(hash)) continue;
      HbmEntry& entry = cache.entries[way];
      if (entry.key != args.keys[i] || HbmTableOf(entry.meta) != table ||
          args.version < entry.since || args.version >= entry.until) {
        continue;
      }
      entry.meta |= kHbmUsed;
      args.refs[i] = {cache.pages + uint64_t{entry.slot} * kHbmSlotUnit, HbmLiveOf(entry.meta),
                      HbmRefKind::kRow};
      args.answers[i] = 0x10000U | HbmLiveOf(entry.meta);
      return;
    }
  }

  static void PoolOne(const PoolArgs& args, const HbmBag& bag) {
    const HbmTable& table = args.tables[bag.table];
    const HbmRef* refs = args.refs + bag.first;
    const bool copied = refs->kind == HbmRefKind::kRow || refs->kind == HbmRefKind::kFloats;
    if (bag.count == 1 && !bag.partial && copied) {
      float* out = args.out + bag.out;
      if (refs->kind == HbmRefKind::kRow) {
        DecodePayload(LayoutOf(table), refs->live, refs->payload, out);
      } else {
        std::memcpy(out, refs->payload, table.dim * sizeof(float));
      }
      return;
    }
    std::vector<double> sums(table.dim, 0.0);
    for (uint32_t k = 0; k < bag.count; ++k) Add(table, refs[k], sums.data());
    for (uint32_t d = 0; d < table.dim; ++d) {
      if (bag.partial) {
        args.partials[bag.out + d] = sums[d];
      } else {
        args.out[bag.out + d] = static_cast<float>(sums[d] / bag.divisor);
      }
    }
  }

  static void Add(const HbmTable& table, const HbmRef& ref, double* sums) {
    const auto* floats = reinterpret_cast<const float*>(ref.payload);
    const auto* doubles = reinterpret_cast<const double*>(ref.payload);
    switch (ref.kind) {
      case HbmRefKind::kRow:
        AccumulatePayload(LayoutOf(table), ref.live, ref.payload, sums);
        return;
      case HbmRefKind::kFloats:
        for (uint32_t d = 0; d < table.dim; ++d) sums[d] += static_cast<double>(floats[d]);
        return;
      case HbmRefKind::kSums:
        for (uint32_t d = 0; d < table.dim; ++d) sums[d] += doubles[d];
        return;
      case HbmRefKind::kNothing:
        return;
    }
  }

  std::vector<std::byte*> memory_;
  uint32_t dice_ = 1;
  std::deque<Stream> streams_;  // stays where it is while it grows
};

}  // namespace

std::unique_ptr<HbmDevice> OpenTwinDevice() { return std::make_unique<TwinDevice>(); }

}  // namespace embertide

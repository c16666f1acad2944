// HbmTier: lookups through the devices, and the rows that they miss.
#include "store/hbm_tier.h"

#include <algorithm>
#include <set>
#include <sstream>

#include "policy/policy.h"

namespace embertide {
namespace {

// Batches of one lookup under way: probed, pooled, copied out.
constexpr size_t kDepth = 3;
// Wishes kept for each row that one fill may bring to a device: many name a row twice, or one that
// was asked for once.
constexpr size_t kWishesPerRow = 4;

// HbmTier::AccessesToEnter as hbm_policy says.
Result<std::vector<uint32_t>> AccessesByTable(const StoreOptions& options) {
  const auto wrong = [&](const std::string& why) {
    return Status(Code::kInvalidArgument, "hbm_policy = " + options.hbm_policy + ": " + why);
  };
  std::vector<uint32_t> accesses(options.tables.size());
  std::set<std::string> named;
  std::istringstream all(options.hbm_policy);
  for (std::string part; std::getline(all, part, ',');) {
    // The part for all tables is the first, and has no name before it.
    const size_t equals = part.find('=');
    const std::string table = equals == std::string::npos ? "" : part.substr(0, equals);
    if (table.empty() != named.empty()) return wrong("give POLICY[,TABLE=POLICY...]");
    if (!named.insert(table).second) return wrong("table " + table + " is named twice");
    const std::string text = equals == std::string::npos ? part : part.substr(equals + 1);
    uint32_t enters = 0;
    if (text != "none") {
      const Result<PolicyName> policy = ParsePolicyName(text);
      if (!policy.ok()) return wrong(policy.status().message());
      if (policy.value().name != "clock") {
        return wrong(text +
                     " chooses among all rows of a tier, and a row of HBM leaves for one of "
                     "its set and size; give clock, clock:2 to clock:15, or none");
      }
      enters = policy.value().accesses;
    }
    bool exists = table.empty();
    for (size_t t = 0; t < accesses.size(); ++t) {
      if (!table.empty() && options.tables[t].name != table) continue;
      accesses[t] = enters;
      exists = true;
    }
    if (!exists) return wrong("there is no table " + table);
  }
  if (named.empty()) return wrong("give POLICY[,TABLE=POLICY...]");
  return accesses;
}

}  // namespace

Result<std::unique_ptr<HbmTier>> HbmTier::Open(const StoreOptions& options) {
  if (options.hbm_devices == 0 || options.hbm_devices > 64) {
    return Status(Code::kInvalidArgument,
                  "hbm_devices = " + std::to_string(options.hbm_devices) + "; give 1 to 64");
  }
  std::vector<std::unique_ptr<HbmDevice>> devices;
  for (uint32_t d = 0; d < options.hbm_devices; ++d) {
    if (options.hbm_kind == HbmKind::kTwin) {
      devices.push_back(OpenTwinDevice());
      continue;
    }
    Result<std::unique_ptr<HbmDevice>> gpu = OpenGpu(d);
    if (!gpu.ok()) return gpu.status();
    devices.push_back(std::move(*gpu));
  }
  std::unique_ptr<HbmTier> tier(new HbmTier);
  Result<std::vector<uint32_t>> accesses = AccessesByTable(options);
  if (!accesses.ok()) return accesses.status();
  tier->accesses_to_enter_ = std::move(*accesses);
  Result<std::unique_ptr<HbmCache>> cache =
      HbmCache::Open({options.tables, options.hbm_budget_bytes}, std::move(devices));
  if (!cache.ok()) return cache.status();
  tier->cache_ = std::move(*cache);
  tier->arena_bytes_ =
      (tier->cache_->host_bytes() + options.devices - 1) / uint64_t{options.devices};
  return tier;
}

bool HbmTier::Cut(size_t features, std::span<const KeyBags> requests,
                  std::vector<Pieces>* batches) const {
  size_t room = 0;
  for (size_t r = 0; r < requests.size(); ++r) {
    const KeyBags& request = requests[r];
    if (request.weights != nullptr) return false;
    for (size_t first = 0; first < request.bags(); first += features) {
      const size_t keys = request.begin_of(first + features) - request.begin_of(first);
      if (keys > cache_->batch_keys()) return false;
      const bool fits = keys <= room && !batches->empty();
      if (!fits) {
        batches->emplace_back();
        room = cache_->batch_keys();
      }
      room -= keys;
      Pieces& pieces = batches->back();
      if (fits && !pieces.empty() && pieces.back().request == r) {
        pieces.back().end += features;
      } else {
        pieces.push_back({r, first, first + features});
      }
    }
  }
  return true;
}

// One lookup's batches, a ring of them under way.
struct HbmTier::Flight {
  HbmTier* tier;
  uint64_t version;
  std::span<const BagFeature> features;
  std::span<const KeyBags> requests;
  BelowHbm* below;
  std::vector<std::unique_ptr<HbmBatch>> ring{};
  // The keys that a batch missed, as a request to the tiers below.
  std::vector<int64_t> keys{};
  std::vector<uint32_t> offsets{};
  std::vector<uint32_t> remote_of{};
  std::vector<RemoteRow> remote{};
  std::vector<uint8_t*> sources{};  // null: nobody asks
  std::vector<size_t> at{};         // in the batch
  std::vector<std::pair<uint32_t, uint64_t>> missed{};

  // Calls use(request, bag, feature) for the bags of a batch in order.
  template <typename Use>
  void ForEachBag(const Pieces& pieces, const Use& use) const {
    for (const Piece& piece : pieces) {
      for (size_t bag = piece.first; bag < piece.end; ++bag) {
        use(requests[piece.request], bag, features[bag % features.size()]);
      }
    }
  }

  Status Probe(HbmBatch* batch, const Pieces& pieces) const {
    batch->Begin(version);
    ForEachBag(pieces, [&](const KeyBags& request, size_t bag, const BagFeature& feature) {
      const size_t first = request.begin_of(bag);
      const size_t end = request.begin_of(bag + 1);
      batch->Add(feature.table, feature.pooling == Pooling::kMean,
                 request.keys.subspan(first, end - first),
                 request.remote_of == nullptr ? nullptr : request.remote_of + first);
    });
    return batch->Probe();
  }

  void CollectMisses(const HbmBatch& batch, const Pieces& pieces) {
    keys.clear();
    offsets.assign(1, 0);
    remote_of.clear();
    remote.clear();
    sources.clear();
    at.clear();
    size_t next = 0;
    ForEachBag(pieces, [&](const KeyBags& request, size_t bag, const BagFeature& feature) {
      const size_t first = request.begin_of(bag);
      const size_t end = request.begin_of(bag + 1);
      for (size_t k = first; k < end; ++k, ++next) {
        uint8_t* source = request.source == nullptr ? nullptr : request.source + k;
        if (batch.Hit(next)) {
          below->CountHit(feature.table, static_cast<uint64_t>(request.keys[k]), batch.Live(next));
          if (source != nullptr) *source = static_cast<uint8_t>(Source::kHbm);
          continue;
        }
        const uint32_t from = request.remote_of == nullptr ? 0 : request.remote_of[k];
        if (from != 0) remote.push_back(request.remote[from - 1]);
        remote_of.push_back(from == 0 ? 0 : static_cast<uint32_t>(remote.size()));
        keys.push_back(request.keys[k]);
        sources.push_back(source);
        at.push_back(next);
      }
      offsets.push_back(static_cast<uint32_t>(keys.size()));
    });
  }

  // Waits for the answers, brings what is missing, and has the bags pooled.
  Status Resolve(HbmBatch* batch, const Pieces& pieces) {
    EMBERTIDE_RETURN_IF_ERROR(batch->WaitForAnswers());
    CollectMisses(*batch, pieces);
    KeyBags request;
    request.keys = keys;
    request.offsets = offsets;
    request.remote_of = remote_of.data();
    request.remote = remote.data();
    Status found = below->Find(features, request);
    if (!found.ok()) {
      failed_below = true;
      return found;
    }
    missed.clear();
    size_t bag = 0;
    for (size_t i = 0; i < keys.size(); ++i) {
      while (offsets[bag + 1] <= i) ++bag;
      const BelowHbm::Row row = below->At(i);
      batch->Give(at[i], row.kind, row.live, row.payload);
      if (sources[i] != nullptr) *sources[i] = static_cast<uint8_t>(row.source);
      const uint32_t table = features[bag % features.size()].table;
      const bool may_enter = row.source == Source::kDdr && remote_of[i] == 0 && row.live != 0 &&
                             tier->AccessesToEnter(table) != 0;
      if (may_enter) missed.emplace_back(table, static_cast<uint64_t>(keys[i]));
    }
    tier->RequestAdmission(missed);
    return batch->Pool();
  }

  Status Collect(HbmBatch* batch, const Pieces& pieces) const {
    EMBERTIDE_RETURN_IF_ERROR(batch->Collect());
    size_t b = 0;
    ForEachBag(pieces, [&](const KeyBags& request, size_t bag, const BagFeature& feature) {
      const uint32_t dim = tier->cache_->TableOf(feature.table).layout.dim();
      float* out = request.out + bag / features.size() * request.out_stride + feature.column;
      const float* pooled = batch->Out(b++);
      if (pooled == nullptr) {
        std::fill_n(out, dim, 0.0F);
      } else {
        std::copy_n(pooled, dim, out);
      }
    });
    return Status::Ok();
  }

  bool failed_below = false;
};

Status HbmTier::AnswerAll(std::span<const Pieces> batches, Flight* flight) {
  const auto of = [&](size_t i) { return flight->ring[i % flight->ring.size()].get(); };
  // Batch i is probed while the rows that batch i - 1 lacks are found and batch i - 2 is pooled.
  for (size_t i = 0; i < batches.size() + kDepth - 1; ++i) {
    if (i < batches.size()) EMBERTIDE_RETURN_IF_ERROR(flight->Probe(of(i), batches[i]));
    if (i >= 1 && i - 1 < batches.size()) {
      EMBERTIDE_RETURN_IF_ERROR(flight->Resolve(of(i - 1), batches[i - 1]));
    }
    if (i >= 2) EMBERTIDE_RETURN_IF_ERROR(flight->Collect(of(i - 2), batches[i - 2]));
  }
  return Status::Ok();
}

Status HbmTier::Lookup(uint64_t version, std::span<const BagFeature> features,
                       std::span<const KeyBags> requests, BelowHbm* below) {
  const auto without = [&](const std::string& why) {
    fallbacks_.fetch_add(1, std::memory_order_relaxed);
    return Status(Code::kUnavailable, why);
  };
  if (!cache_->healthy()) return without("a device of the HBM tier has failed");
  std::vector<Pieces> batches;
  if (!Cut(features.size(), requests, &batches)) {
    return without("a sample has more keys than a batch of the HBM tier");
  }
  if (batches.empty()) return Status::Ok();
  const HbmLanes lanes(cache_.get(), static_cast<uint32_t>(std::min(batches.size(), kDepth)));
  Flight flight{this, version, features, requests, below};
  for (const uint32_t lane : lanes.numbers()) {
    flight.ring.push_back(std::make_unique<HbmBatch>(cache_.get(), lane));
  }
  Status status = AnswerAll(batches, &flight);
  if (status.ok() || flight.failed_below) return status;
  return without(status.message());
}

void HbmTier::RequestAdmission(const std::vector<std::pair<uint32_t, uint64_t>>& missed) {
  if (missed.empty()) return;
  // A reader never waits: what finds no room wishes again at its next miss.
  const std::unique_lock lock(wishes_mutex_, std::try_to_lock);
  const size_t most = size_t{cache_->fill_rows()} * cache_->devices() * kWishesPerRow;
  const size_t room = lock.owns_lock() ? most - std::min(most, wishes_.size()) : 0;
  const size_t take = std::min(room, missed.size());
  wishes_dropped_.fetch_add(missed.size() - take, std::memory_order_relaxed);
  wishes_.insert(wishes_.end(), missed.begin(), missed.begin() + static_cast<ptrdiff_t>(take));
}

std::vector<std::vector<HbmRow>> HbmTier::TakeWishes() {
  std::vector<std::pair<uint32_t, uint64_t>> wishes;
  {
    const std::lock_guard lock(wishes_mutex_);
    wishes.swap(wishes_);
  }
  std::set<std::pair<uint32_t, uint64_t>> met;
  std::vector<std::vector<HbmRow>> rows(cache_->devices());
  for (const auto& [table, key] : wishes) {
    std::vector<HbmRow>& of = rows[cache_->DeviceOf(table, key)];
    if (of.size() == cache_->fill_rows() || !met.emplace(table, key).second) continue;
    HbmRow row;
    row.table = table;
    row.key = key;
    of.push_back(row);
  }
  return rows;
}

}  // namespace embertide

// "reuse-density": the row leaves whose place earns the fewest hits from now on.
//
// A row is described by how often it was asked for of late, in two counts, of which one halves
// every 8 accesses a slot and the other every 64, and by its age, the accesses since the last one.
// For each class of counts, an octave wide, and each bin of ages, half an octave wide, the policy
// learns the hazard that a row of that class is asked for in that bin, from what really happened to
// resident rows and ghosts. A place that is kept for T more accesses at most, or until the row is
// asked for, then earns
//
//   density(class, age) = max over T of  P(asked for within T) / E[accesses until then, at most T]
//
// hits for each access that it is held: the Gittins index of the row, which is the rate of a row
// asked for at random times, and falls with the age of one that comes in bursts. Like LHD (Beckmann
// et al., "LHD", 2018) it learns densities; unlike it, it does not ask for how long rows happened
// to be kept. A row enters if its density is above the least of a sample of 32, which leaves.
//
//   slot   [ last 32 ][ long 12 ][ recent 8 ][ class 12 ] bits                      8 bytes
//   ghost  [ last 32 ][ long 12 ][ recent 8 ][ tag 12 ], three a slot, sets of eight  24 bytes
//
// The ghost of the least density in its set makes room for a new one: what is remembered is what
// may come back. Ghosts are also what hazards are learned from beyond the age of eviction: a ghost
// that makes room counts as a row seen up to its age (a censored observation, as in Kaplan &
// Meier's estimate).
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "embertide/hash.h"
#include "policy/policies.h"
#include "policy/sampler.h"

namespace embertide {
namespace {

// --- ages and counts
constexpr uint32_t kBins = 56;  // up to 2^28 accesses; an older row is in the last bin

// Counts are in fixed point; both are at most what their bits hold, and their classes end there.
// Two half-lives, since one does not suit both a hot set that stays and one that cools within
// hours: docs/results/store.md.
struct CountForm {
  uint32_t one;  // a count of 1
  uint32_t most;
  uint32_t classes;  // octaves
  double half_life_per_slot;
};
constexpr CountForm kLong{16, 4095, 8, 64};
constexpr CountForm kRecent{8, 255, 5, 8};
constexpr uint32_t kClasses = 1 + kLong.classes * kRecent.classes;
// A free slot is in a class of its own, whose density is infinite: it never leaves.
constexpr uint32_t kFree = kClasses;

// 0 and 1, 2, 3, 4 and 5, 6 and 7, 8 to 11, ...: exponent and first bit of the mantissa as a float.
uint32_t BinOf(uint32_t age) {
  const auto halves = static_cast<int32_t>(std::bit_cast<uint32_t>(static_cast<float>(age)) >> 22);
  constexpr int32_t kOfOne = 127 << 1;
  return static_cast<uint32_t>(std::clamp(halves - kOfOne - 1, 0, static_cast<int32_t>(kBins) - 1));
}

double BinBegin(uint32_t bin) {
  if (bin == 0) return 0;
  const double octave = static_cast<double>(uint64_t{1} << ((bin + 1) / 2));
  return bin % 2 == 0 ? 1.5 * octave : octave;
}

// A row or a ghost; one that is not there has counts of 0.
struct Row {
  uint32_t last = 0;  // clock of the last access
  uint32_t long_count : 12 = 0;
  uint32_t recent_count : 8 = 0;
  uint32_t mark : 12 = kFree;  // of a row its class; of a ghost some bits of its key's hash
};
static_assert(sizeof(Row) == 8);

// Class 0 has been asked for once, as far as is known.
uint32_t ClassOf(const Row& row) {
  if (row.long_count == kLong.one) return 0;
  const auto octave = [](uint32_t count, const CountForm& form) {
    return static_cast<uint32_t>(std::bit_width(count / form.one)) - 1;
  };
  return 1 + octave(row.long_count, kLong) * kRecent.classes + octave(row.recent_count, kRecent);
}

// --- what is learned
class Densities {
 public:
  explicit Densities(uint32_t capacity)
      : period_(std::max(kMinPeriod, uint64_t{kPeriodPerSlot} * capacity)) {
    // Until something is known, the youngest are the best: LRU.
    for (uint32_t cell = 0; cell < kCells; ++cell) {
      density_[cell] = static_cast<float>(1 / (1 + BinBegin(cell % kBins)));
    }
    std::fill(density_.begin() + kCells, density_.end(), std::numeric_limits<float>::infinity());
  }
  float Of(uint32_t of_class, uint32_t age) const { return density_[CellOf(of_class, age)]; }
  void SeeAskedFor(uint32_t of_class, uint32_t age) { ++asked_[CellOf(of_class, age)]; }
  void SeeForgotten(uint32_t of_class, uint32_t age) { ++forgotten_[CellOf(of_class, age)]; }

  // Counts an access; true when densities were learned anew, which is at most 2^31 accesses after
  // the time before.
  bool Tick() {
    if (++accesses_ < interval_) return false;
    Learn();
    accesses_ = 0;
    // Often at first, so that a large tier need not wait for a whole period; nothing fades before.
    if (interval_ == period_) {
      for (double& seen : asked_) seen *= kFade;
      for (double& seen : forgotten_) seen *= kFade;
    }
    interval_ = std::min(period_, 2 * interval_);
    return true;
  }

 private:
  static constexpr uint32_t kCells = kClasses * kBins;
  static constexpr uint64_t kMinPeriod = 8192;
  static constexpr uint32_t kPeriodPerSlot = 8;
  static constexpr double kFade = 0.9;
  // A hazard counts as if so many rows had been seen with that of all classes at this age.
  static constexpr double kPrior = 4;

  static uint32_t CellOf(uint32_t of_class, uint32_t age) { return of_class * kBins + BinOf(age); }
  void Learn() {
    // Rows that reached each bin, and those asked for in it, over all classes.
    std::array<double, kBins> all_reached{};
    std::array<double, kBins> all_asked{};
    for (uint32_t c = 0; c < kClasses; ++c) {
      double reached = 0;
      for (uint32_t b = kBins; b-- > 0;) {
        reached += asked_[c * kBins + b] + forgotten_[c * kBins + b];
        all_reached[b] += reached;
        all_asked[b] += asked_[c * kBins + b];
      }
    }
    for (uint32_t c = 0; c < kClasses; ++c) {
      std::array<double, kBins> hazard{};
      double reached = 0;
      for (uint32_t b = kBins; b-- > 0;) {
        const uint32_t cell = c * kBins + b;
        reached += asked_[cell] + forgotten_[cell];
        const double prior = (all_asked[b] + 1e-6) / (all_reached[b] + 1e-3);
        // One that was forgotten in this bin was at risk for half of it.
        hazard[b] = (asked_[cell] + kPrior * prior) / (reached - forgotten_[cell] / 2 + kPrior);
      }
      for (uint32_t b = 0; b < kBins; ++b) density_[c * kBins + b] = Index(hazard, b);
    }
  }
  // The density at the beginning of a bin. The last bin has no end and earns nothing.
  static float Index(const std::array<double, kBins>& hazard, uint32_t from) {
    double stays = 1;  // P(not asked for yet)
    double hits = 0;
    double held = 0;
    double best_hits = 0;
    double best_held = 1;
    // Bins after all rows were asked for add nothing.
    constexpr double kAllAskedFor = 1e-9;
    for (uint32_t b = from; b + 1 < kBins && stays > kAllAskedFor; ++b) {
      const double asked = stays * hazard[b];
      hits += asked;
      held += (BinBegin(b + 1) - BinBegin(b)) * (stays - asked / 2);
      stays -= asked;
      if (hits * best_held > best_hits * held) {
        best_hits = hits;
        best_held = held;
      }
    }
    return static_cast<float>(best_hits / best_held);
  }

  const uint64_t period_;
  uint64_t interval_ = kMinPeriod;
  uint64_t accesses_ = 0;
  std::array<double, kCells> asked_{};
  std::array<double, kCells> forgotten_{};
  std::array<float, kCells + kBins> density_{};  // the free slots' class last
};

// --- the policy
class ReuseDensity final : public Policy {
 public:
  ReuseDensity(uint32_t capacity, KeyOf key_of, uint32_t now)
      : long_decay_(static_cast<float>(-1 / (kLong.half_life_per_slot * capacity))),
        recent_decay_(static_cast<float>(-1 / (kRecent.half_life_per_slot * capacity))),
        now_(now),
        densities_(capacity),
        sampler_(capacity),
        rows_(capacity),
        key_of_(std::move(key_of)),
        ghosts_(std::max(kMinSets, uint64_t{kGhostsPerSlot} * capacity / kWays)) {}
  void Touch(uint32_t slot) override {
    Row& row = rows_[slot];
    densities_.SeeAskedFor(row.mark, Age(row));
    row = Counted(row);
    Advance();
  }
  bool Admit(uint64_t key, bool full) override {
    const Row row = Recall(key);
    victim_ = full ? sampler_.Least(densities_.Of(row.mark, 0), Rank{*this}) : SlotSampler::kNone;
    const bool admitted = !full || victim_ != SlotSampler::kNone;
    if (admitted) {
      admitted_ = {key, row};
    } else {
      Remember(key, row);
    }
    Advance();
    return admitted;
  }
  uint32_t Evict() override {
    uint32_t slot = std::exchange(victim_, SlotSampler::kNone);
    if (slot == SlotSampler::kNone) slot = sampler_.LeastOfAny(Rank{*this});
    Remember(key_of_(slot), rows_[slot]);
    rows_[slot] = {};
    return slot;
  }
  void Insert(uint32_t slot, uint64_t key) override {
    const auto admitted = std::exchange(admitted_, std::nullopt);
    rows_[slot] = admitted && admitted->first == key ? admitted->second : First();
  }
  void Erase(uint32_t slot) override {
    rows_[slot] = {};
    if (victim_ == slot) victim_ = SlotSampler::kNone;
  }
  uint64_t bytes() const override {
    return sizeof(Densities) + rows_.size() * sizeof(Row) + ghosts_.size() * sizeof(Set);
  }

 private:
  static constexpr uint32_t kGhostsPerSlot = 3;
  static constexpr uint32_t kWays = 8;  // a set fills a line of the CPU's caches
  static constexpr uint64_t kMinSets = 8;
  struct alignas(64) Set {
    std::array<Row, kWays> ghosts;
  };

  uint32_t Age(const Row& row) const { return now_ - row.last; }
  // For the sampler.
  struct Rank {
    const ReuseDensity& policy;
    float operator()(uint32_t slot) const {
      const Row& row = policy.rows_[slot];
      return policy.densities_.Of(row.mark, policy.Age(row));
    }
  };
  Row First() const { return {now_, kLong.one, kRecent.one, 0}; }
  // A row or a ghost after one more access, now.
  Row Counted(const Row& row) const {
    const auto age = static_cast<float>(Age(row));
    const auto more = [&](uint32_t count, float decay, const CountForm& form) {
      const float left = static_cast<float>(count) * std::exp2(age * decay) + 0.5F;
      return std::min(static_cast<uint32_t>(left) + form.one, form.most);
    };
    Row counted{now_, more(row.long_count, long_decay_, kLong),
                more(row.recent_count, recent_decay_, kRecent), 0};
    // Above that of a first access, whose class is another.
    counted.long_count = std::max<uint32_t>(counted.long_count, kLong.one + 1);
    counted.mark = ClassOf(counted);
    return counted;
  }
  static uint32_t TagOf(uint64_t hash) { return hash & 0xfff; }
  Set& SetOf(uint64_t hash) { return ghosts_[(hash >> 32) * ghosts_.size() >> 32]; }
  // The row of a key that is asked for, as of now. Its ghost, if there is one, ends.
  Row Recall(uint64_t key) {
    const uint64_t hash = HashKey(key);
    for (Row& ghost : SetOf(hash).ghosts) {
      if (ghost.long_count == 0 || ghost.mark != TagOf(hash)) continue;
      densities_.SeeAskedFor(ClassOf(ghost), Age(ghost));
      return Counted(std::exchange(ghost, {}));
    }
    return First();
  }
  void Remember(uint64_t key, const Row& row) {
    const uint64_t hash = HashKey(key);
    std::array<Row, kWays>& ghosts = SetOf(hash).ghosts;
    LeastRank least(std::numeric_limits<float>::infinity());
    for (uint32_t way = 0; way < kWays; ++way) {
      const Row& ghost = ghosts[way];
      least.Add(ghost.long_count == 0 ? -1 : densities_.Of(ClassOf(ghost), Age(ghost)), way);
    }
    Row& place = ghosts[least.place()];
    if (place.long_count != 0) densities_.SeeForgotten(ClassOf(place), Age(place));
    place = row;
    place.mark = TagOf(hash);
  }
  void Advance() {
    ++now_;
    if (!densities_.Tick()) return;
    // The clock has 32 bits: what is older than half of them stays that old, and is never young.
    constexpr uint32_t kOldest = 1U << 31;
    const auto bound = [&](Row& row) {
      if (Age(row) > kOldest) row.last = now_ - kOldest;
    };
    for (Row& row : rows_) bound(row);
    for (Set& set : ghosts_) {
      for (Row& ghost : set.ghosts) bound(ghost);
    }
  }

  const float long_decay_;  // log2 of what is left after one access
  const float recent_decay_;
  uint32_t now_;  // accesses so far
  Densities densities_;
  SlotSampler sampler_;
  std::vector<Row> rows_;
  const KeyOf key_of_;
  std::vector<Set> ghosts_;
  uint32_t victim_ = SlotSampler::kNone;              // for which the last key was admitted
  std::optional<std::pair<uint64_t, Row>> admitted_;  // the last key, until it is inserted
};

}  // namespace

std::unique_ptr<Policy> MakeReuseDensityAt(uint32_t capacity, KeyOf key_of, uint32_t now) {
  return std::make_unique<ReuseDensity>(capacity, std::move(key_of), now);
}

std::unique_ptr<Policy> MakeReuseDensity(uint32_t capacity, KeyOf key_of) {
  return MakeReuseDensityAt(capacity, std::move(key_of), 0);
}

}  // namespace embertide

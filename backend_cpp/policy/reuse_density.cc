// "reuse-density": the row leaves whose place earns the fewest hits from now on.
//
// A row is described by two numbers: how often it was asked for of late (a count that halves every
// 64 accesses a slot) and its age, the accesses since the last one. For each class of counts and
// each bin of ages, half an octave wide, the policy learns the hazard h that a row of that class is
// asked for in that bin, from what really happened to resident rows and ghosts. A place that is
// kept for T more accesses at most, or until the row is asked for, then earns
//
//   density(class, age) = max over T of  P(asked for within T) / E[accesses until then, at most T]
//
// hits for each access that it is held: the Gittins index of the row, which is the rate of a row
// asked for at random times, and falls with the age of one that comes in bursts. Like LHD (Beckmann
// et al., "LHD", 2018) it learns densities; unlike it, it does not ask for how long rows happened
// to be kept. A row enters if its density is above the least of a sample of 32, which leaves.
//
//   slot   [ last 4 ][ count 2 ][ class 2 ]   and the key, 8                  16 bytes
//   ghost  [ last 4 ][ count 2 ][ tag 2 ]     three a slot, in sets of eight  24 bytes
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
constexpr uint32_t kClasses = 17;
// Why 64: between 32 and 128 hit rates on the two traces of docs/results/store.md differ by at most
// half a point either way.
constexpr double kHalfLifePerSlot = 64;
constexpr uint32_t kOne = 256;  // a count is in 1/256
constexpr uint32_t kMostCount = 65535;

uint32_t BinOf(uint32_t age) {
  if (age < 2) return 0;
  const auto octave = static_cast<uint32_t>(std::bit_width(age) - 1);
  return std::min(kBins - 1, 2 * octave + (age >> (octave - 1) & 1) - 1);
}

double BinBegin(uint32_t bin) {
  if (bin == 0) return 0;
  const double octave = static_cast<double>(uint64_t{1} << ((bin + 1) / 2));
  return bin % 2 == 0 ? 1.5 * octave : octave;
}

// Class 0 has been asked for once; of the others, each is half an octave of counts wide.
std::array<uint8_t, (kMostCount + 1) / 16> MakeClasses() noexcept {
  std::array<uint8_t, (kMostCount + 1) / 16> classes{};
  for (uint32_t i = kOne / 16; i < classes.size(); ++i) {
    const auto halves = static_cast<uint32_t>(2 * std::log2(i * 16.0 / kOne));
    classes[i] = static_cast<uint8_t>(std::min(kClasses - 1, 1 + halves));
  }
  return classes;
}
const std::array<uint8_t, (kMostCount + 1) / 16> kClassOfCount = MakeClasses();

// A free slot is in a class of its own, whose density is infinite: it never leaves.
constexpr uint32_t kFree = kClasses;

uint16_t ClassOf(uint16_t count) { return count == kOne ? 0 : kClassOfCount[count / 16]; }

// --- what is learned
class Densities {
 public:
  explicit Densities(uint32_t capacity)
      : period_(std::max(kLeastPeriod, uint64_t{kPeriodPerSlot} * capacity)) {
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
  static constexpr uint64_t kLeastPeriod = 8192;
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
    double best = 0;
    for (uint32_t b = from; b + 1 < kBins; ++b) {
      const double asked = stays * hazard[b];
      hits += asked;
      held += (BinBegin(b + 1) - BinBegin(b)) * (stays - asked / 2);
      stays -= asked;
      best = std::max(best, hits / held);
    }
    return static_cast<float>(best);
  }

  const uint64_t period_;
  uint64_t interval_ = kLeastPeriod;
  uint64_t accesses_ = 0;
  std::array<double, kCells> asked_{};
  std::array<double, kCells> forgotten_{};
  std::array<float, kCells + kBins> density_{};  // the free slots' class last
};

// --- the policy
class ReuseDensity final : public Policy {
 public:
  ReuseDensity(uint32_t capacity, uint32_t now)
      : decay_(static_cast<float>(-1 / (kHalfLifePerSlot * capacity))),
        now_(now),
        densities_(capacity),
        sampler_(capacity),
        rows_(capacity),
        keys_(capacity),
        ghosts_(std::max(kLeastSets, uint64_t{kGhostsPerSlot} * capacity / kWays)) {}
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
    Remember(keys_[slot], rows_[slot]);
    rows_[slot] = {};
    return slot;
  }
  void Insert(uint32_t slot, uint64_t key) override {
    keys_[slot] = key;
    const auto admitted = std::exchange(admitted_, std::nullopt);
    rows_[slot] = admitted && admitted->first == key ? admitted->second : Row{now_, kOne, 0};
  }
  void Erase(uint32_t slot) override {
    rows_[slot] = {};
    if (victim_ == slot) victim_ = SlotSampler::kNone;
  }
  uint64_t bytes() const override {
    return sizeof(Densities) + rows_.size() * sizeof(Row) + keys_.size() * sizeof(uint64_t) +
           ghosts_.size() * sizeof(Set);
  }

 private:
  static constexpr uint32_t kGhostsPerSlot = 3;
  static constexpr uint32_t kWays = 8;  // a set fills a line of the CPU's caches
  static constexpr uint64_t kLeastSets = 8;
  // A row or a ghost; one that is not there has the count 0.
  struct Row {
    uint32_t last = 0;      // clock of the last access
    uint16_t count = 0;     // in 1/256
    uint16_t mark = kFree;  // of a row its class; of a ghost some bits of its key's hash
  };
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
  // What a row or a ghost is after one more access, now.
  Row Counted(const Row& row) const {
    const float left =
        static_cast<float>(row.count) * std::exp2(static_cast<float>(Age(row)) * decay_);
    // Above the count of a first access, so that the classes tell them apart.
    const auto count =
        static_cast<uint16_t>(std::clamp(static_cast<uint32_t>(left) + kOne, kOne + 1, kMostCount));
    return {now_, count, ClassOf(count)};
  }
  Set& SetOf(uint64_t hash) { return ghosts_[(hash >> 32) * ghosts_.size() >> 32]; }
  // What a key that is asked for is by now. Its ghost, if there is one, ends.
  Row Recall(uint64_t key) {
    const uint64_t hash = HashKey(key);
    for (Row& ghost : SetOf(hash).ghosts) {
      if (ghost.count == 0 || ghost.mark != static_cast<uint16_t>(hash)) continue;
      densities_.SeeAskedFor(ClassOf(ghost.count), Age(ghost));
      return Counted(std::exchange(ghost, {}));
    }
    return {now_, kOne, 0};
  }
  void Remember(uint64_t key, const Row& row) {
    const uint64_t hash = HashKey(key);
    Row* place = nullptr;
    float least = std::numeric_limits<float>::infinity();
    for (Row& ghost : SetOf(hash).ghosts) {
      const float its = ghost.count == 0 ? -1 : densities_.Of(ClassOf(ghost.count), Age(ghost));
      if (its >= least) continue;
      least = its;
      place = &ghost;
    }
    if (place->count != 0) densities_.SeeForgotten(ClassOf(place->count), Age(*place));
    *place = {row.last, row.count, static_cast<uint16_t>(hash)};
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

  const float decay_;
  uint32_t now_;  // accesses so far
  Densities densities_;
  SlotSampler sampler_;
  std::vector<Row> rows_;
  std::vector<uint64_t> keys_;
  std::vector<Set> ghosts_;
  uint32_t victim_ = SlotSampler::kNone;              // for which the last key was admitted
  std::optional<std::pair<uint64_t, Row>> admitted_;  // the last key, until it is inserted
};

}  // namespace

std::unique_ptr<Policy> MakeReuseDensityAt(uint32_t capacity, uint32_t now) {
  return std::make_unique<ReuseDensity>(capacity, now);
}

std::unique_ptr<Policy> MakeReuseDensity(uint32_t capacity) {
  return MakeReuseDensityAt(capacity, 0);
}

}  // namespace embertide

// A part of a training step: see the header for the order in which its keys are taken.
#include "store/part_worker.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "store/row_ops.h"
#include "store/training_rows.h"

namespace embertide {
namespace {

// So that few slots of a part's hash table are asked for by two keys.
constexpr uint32_t kSlotsOverKeys = 4;
// Gradients of one key that are asked for ahead; more than these keep the core busy.
constexpr uint32_t kGradientsAhead = 4;

}  // namespace

void PartWorker::Begin(const TableStep& step) {
  step_ = step;
  layout_ = step.table->config.learned();
  row_layout_ = layout_;
  if (step.part.chunks > 0) row_layout_.chunks = step.part.chunks;
  use_ = ops_.use[static_cast<size_t>(step.store->options.utility)];
  descend_ = ops_.descend[static_cast<size_t>(layout_.dtype)];
  sums_ = (layout_.dim() + kLineSums - 1) / kLineSums * kLineSums;
  sum_lines_.resize(kStep * sums_ + kLineSums);
  aux_bytes_ = step.store->AuxBytes(*step.table);
  gradient_bytes_ = layout_.dim() * sizeof(float);
  updated_ = clipped_ = refused_ = 0;
  ForgetLate();
}

void PartWorker::Run(const RowPool& pool, uint32_t part, std::span<const Occurrence> occurrences,
                     const uint32_t* counts, bool placed) {
  if (occurrences.empty()) return;
  dealt_ = occurrences.data();
  const auto dealt = static_cast<uint32_t>(occurrences.size());
  if (counts != nullptr) {
    GroupKeys<true>(dealt, counts);
  } else {
    GroupKeys<false>(dealt, nullptr);
  }
  const size_t n = groups_count_;
  if (placed) {
    for (size_t s = 0; s < n + kTakePlaced; s += kStep) {
      if (s >= kTakePlaced) Take(part, s - kTakePlaced, std::min(s - kTakePlaced + kStep, n));
      for (size_t i = s; i < std::min(s + kStep, n); ++i) PlaceKnown(pool, i);
    }
    return;
  }
  for (size_t s = 0; s < n + kTake; s += kStep) {
    if (s >= kTake) Take(part, s - kTake, std::min(s - kTake + kStep, n));
    if (s >= kFind && s - kFind < n) Find(s - kFind, std::min(s - kFind + kStep, n));
    for (size_t i = s; i < s + kStep; ++i) {
      if (i < n) AskForGroup(i);
      if (i >= kPlace && i - kPlace < n) Place(pool, i - kPlace);
    }
  }
}

template <bool kCounted>
void PartWorker::GroupKeys(uint32_t n, const uint32_t* counts) {
  const uint32_t slots = std::bit_ceil(kSlotsOverKeys * n);
  slots_.assign(slots, 0);
  if (next_.size() < n) next_.resize(n);
  if (groups_.size() < n) groups_.resize(n);
  uint32_t* const slot_of = slots_.data();
  uint32_t* const next = next_.data();
  Group* const groups = groups_.data();
  uint32_t count = 0;
  for (uint32_t i = 0; i < n; ++i) {
    const auto& [key, gradient, place] = dealt_[i];
    const uint64_t hash = HashKey(key);
    // Bits that the part does not depend on.
    auto slot = static_cast<uint32_t>(hash >> 8) & (slots - 1);
    while (slot_of[slot] != 0 && groups[slot_of[slot] - 1].key != key) {
      slot = (slot + 1) & (slots - 1);
    }
    const uint32_t stands_for = kCounted ? counts[i] : 1;
    if (slot_of[slot] == 0) {
      groups[count] = {key, hash, place, i, i, 1, stands_for};
      slot_of[slot] = ++count;
      continue;
    }
    Group& group = groups[slot_of[slot] - 1];
    next[group.last] = i;
    group.last = i;
    ++group.count;
    const uint64_t occurrences = uint64_t{group.occurrences} + stands_for;
    group.occurrences = static_cast<uint32_t>(std::min<uint64_t>(occurrences, UINT32_MAX));
  }
  groups_count_ = count;
}

void PartWorker::AskForGroup(size_t i) {
  const uint64_t hash = groups_[i].hash;
  Pending& key = At(i);
  key.bucket = step_.table->NewestOf(hash);
  key.index_group = key.bucket->index.Begin(hash).group;
  AskFor(key.index_group.address());
}

void PartWorker::Find(size_t first, size_t end) {
  std::array<GroupRef, kStep> groups{};
  std::array<uint64_t, kStep> wanted{};
  std::array<uint64_t, kStep> found;
  for (size_t i = first; i < end; ++i) {
    const Pending& key = At(i);
    groups[i - first] = key.index_group;
    wanted[i - first] = key.bucket->index.Wanted(groups_[i].hash, groups_[i].key, key.index_group);
  }
  FindOf(step_.store->options.index)(groups.data(), wanted.data(), end - first, found.data());
  for (size_t i = first; i < end; ++i) {
    Pending& key = At(i);
    key.found = found[i - first];
    if (key.found != kContinueProbe) continue;
    BucketIndex::Cursor at = key.bucket->index.Begin(groups_[i].hash);
    at.Advance();
    AskFor(at.group.address());
  }
}

void PartWorker::Place(const RowPool& pool, size_t i) {
  const Group& group = groups_[i];
  const Pending& key = At(i);
  const BucketIndex& index = key.bucket->index;
  AskForRow(pool, i,
            key.found == kContinueProbe
                ? index.Peek(group.hash, group.key)
                : index.FoundBy(group.hash, group.key, key.index_group, key.found));
}

void PartWorker::PlaceKnown(const RowPool& pool, size_t i) {
  const Group& group = groups_[i];
  if (group.place != 0) [[likely]] {
    AskForRow(pool, i, Location::FromWord(group.place));
  } else {
    // It had none a moment ago.
    AskForRow(pool, i, step_.table->NewestOf(group.hash)->index.Peek(group.hash, group.key));
  }
}

void PartWorker::AskForRow(const RowPool& pool, size_t i, Location place) {
  const Group& group = groups_[i];
  Row& row = At(i).row;
  row.payload = nullptr;
  if (place.tier() != TierId::kDdr) return;
  row = RowAt(pool, &group, place);
  if (step_.work != StepWork::kUpdate) return;
  AskForBytes(row.aux, aux_bytes_);
  AskForBytes(row.payload, layout_.PayloadBytes(row.live));
  uint32_t occurrence = group.first;
  for (uint32_t n = std::min(group.count, kGradientsAhead); n > 1; --n) {
    AskForBytes(dealt_[occurrence].gradient, gradient_bytes_);
    occurrence = next_[occurrence];
  }
  AskForBytes(dealt_[occurrence].gradient, gradient_bytes_);
}

PartWorker::Row PartWorker::RowAt(const RowPool& pool, const Group* group, Location place) const {
  const auto live = static_cast<uint16_t>(place.live() & layout_.full_mask());
  return {group, pool.arena.Address(place.slot()), AuxOf(pool, place), live};
}

void PartWorker::Take(uint32_t part, size_t first, size_t end) {
  std::array<Row, kStep> rows;
  size_t n = 0;
  for (size_t i = first; i < end; ++i) {
    const Row& row = At(i).row;
    if (row.payload == nullptr) {
      Leave(part, groups_[i]);
    } else if (step_.work == StepWork::kUpdate) {
      Sum(n, GradientsOf(groups_[i]), groups_[i].count);
      rows[n++] = row;
    }
  }
  if (n > 0) Descend(rows.data(), n);
}

const float* const* PartWorker::GradientsOf(const Group& group) {
  if (group.count == 1) return &dealt_[group.first].gradient;
  if (gradients_.size() < group.count) gradients_.resize(group.count);
  uint32_t occurrence = group.first;
  for (uint32_t i = 0; i < group.count; ++i) {
    gradients_[i] = dealt_[occurrence].gradient;
    occurrence = next_[occurrence];
  }
  return gradients_.data();
}

void PartWorker::Leave(uint32_t part, const Group& group) {
  late_.push_back({part, group, nullptr});
  const float* const* gradients = GradientsOf(group);
  late_gradients_.insert(late_gradients_.end(), gradients, gradients + group.count);
}

const std::vector<PartWorker::Late>& PartWorker::late() {
  const float* const* gradients = late_gradients_.data();
  for (Late& each : late_) {
    each.gradients = gradients;
    gradients += each.group.count;
  }
  return late_;
}

void PartWorker::ForgetLate() {
  late_.clear();
  late_gradients_.clear();
}

void PartWorker::Update(const RowPool& pool, const Late& late, Location place) {
  const Row row = RowAt(pool, &late.group, place);
  Sum(0, late.gradients, late.group.count);
  Descend(&row, 1);
}

float PartWorker::Earned(const Late& late) {
  Sum(0, late.gradients, late.group.count);
  if (step_.options->max_gradient_norm > 0.0F) Clip(0, step_.options->max_gradient_norm);
  std::array<float, kMaxChunks> utility{};
  use_(layout_.chunks, squares_[0], late.group.occurrences, 0.0, utility.data());
  return std::accumulate(utility.begin(), utility.begin() + layout_.chunks, 0.0F);
}

void PartWorker::Sum(size_t row, const float* const* gradients, size_t n) {
  ops_.sum(layout_, gradients, n, SumsOf(row), &squares_[row]);
  if (step_.part.chunks == 0) return;
  std::memcpy(squares_[row].data(), gradients[0] + layout_.dim(),
              step_.part.chunks * sizeof(double));
}

double PartWorker::Clip(size_t row, double most) {
  const double squares = TotalOf(squares_[row]);
  if (!(squares > most * most)) return 1.0;
  // Squares that are infinite become no numbers, which RateOf refuses.
  const double scale = most / std::sqrt(squares);
  for (uint32_t c = 0; c < row_layout_.chunks; ++c) squares_[row][c] *= scale * scale;
  return scale;
}

template <Optimizer kOptimizer>
bool PartWorker::RateOf(RowAux* aux, const ChunkSquares& squares, double* rate) const {
  constexpr float kMost = std::numeric_limits<float>::max();
  const StepOptions& options = *step_.options;
  const double total = TotalOf(squares);
  const auto mean = static_cast<float>(total / row_layout_.dim());
  float& kept = aux->accumulator;
  *rate = options.learning_rate;
  if constexpr (kOptimizer == Optimizer::kRowwiseAdagrad) {
    const float before = kept == 0.0F ? options.initial_accumulator : kept;
    const float after = before + mean;
    const bool finite = after <= kMost;
    kept = finite ? after : kept;
    *rate = options.learning_rate / (std::sqrt(after) + options.epsilon);
    return finite;
  } else if constexpr (kOptimizer == Optimizer::kAdagrad) {
    return static_cast<float>(total) <= kMost;  // so each square by itself is a number
  } else if constexpr (kOptimizer == Optimizer::kSgd) {
    return mean <= kMost;
  } else {
    if (!(mean <= kMost)) return false;
    uint32_t& steps = *aux->steps(layout_);
    if (steps < std::numeric_limits<uint32_t>::max()) ++steps;
    kept = static_cast<float>(options.beta2 * kept + (1.0 - options.beta2) * mean);
    const double second = kept / (1.0 - step_.decay->second.Over(steps));
    *rate /= (1.0 - step_.decay->first.Over(steps)) * (std::sqrt(second) + options.epsilon);
    return true;
  }
}

// Up to kStep rows: each waits for a division and a root, but not one for another's.
template <Optimizer kOptimizer>
void PartWorker::DescendBy(const Row* rows, size_t n) {
  const StepOptions& options = *step_.options;
  const double most = options.max_gradient_norm;
  std::array<double, kStep> scales;
  std::array<double, kStep> rates;
  std::array<bool, kStep> finite;
  scales.fill(1.0);
  for (size_t r = 0; most > 0.0 && r < n; ++r) scales[r] = Clip(r, most);
  for (size_t r = 0; r < n; ++r) {
    finite[r] = RateOf<kOptimizer>(rows[r].aux, squares_[r], &rates[r]);
  }
  for (size_t r = 0; r < n; ++r) {
    const Row& row = rows[r];
    if (!finite[r]) {
      ++refused_;
      continue;
    }
    if (scales[r] != 1.0) ++clipped_;
    const double kept = step_.store->decay.Over(RowAux::Steps(row.aux->tick, step_.tick));
    row.aux->tick = step_.tick;
    use_(layout_.chunks, step_.part.chunks == 0 ? squares_[r] : SquaresHere(squares_[r]),
         row.group->occurrences, kept, row.aux->utility());
    double* const sums = SumsOf(r);
    if constexpr (kOptimizer == Optimizer::kAdagrad) {
      ops_.adagrad(layout_, row.live, scales[r], options.initial_accumulator, options.epsilon,
                   row.aux->elements(kOptimizer, layout_), sums);
    } else if constexpr (kOptimizer == Optimizer::kRowwiseAdam) {
      ops_.momentum(layout_, row.live, options.beta1, (1.0 - options.beta1) * scales[r],
                    row.aux->elements(kOptimizer, layout_), sums);
    } else {
      rates[r] *= scales[r];
    }
    descend_(layout_, row.live, sums, rates[r], row.payload);
    MarkRowChanged(*step_.table, row.group->hash, row.aux);
    ++updated_;
  }
}

void PartWorker::Descend(const Row* rows, size_t n) {
  switch (step_.store->options.optimizer) {
    case Optimizer::kRowwiseAdagrad:
      return DescendBy<Optimizer::kRowwiseAdagrad>(rows, n);
    case Optimizer::kAdagrad:
      return DescendBy<Optimizer::kAdagrad>(rows, n);
    case Optimizer::kSgd:
      return DescendBy<Optimizer::kSgd>(rows, n);
    case Optimizer::kRowwiseAdam:
      return DescendBy<Optimizer::kRowwiseAdam>(rows, n);
  }
}

double PartWorker::TotalOf(const ChunkSquares& squares) const {
  double total = 0.0;
  for (uint32_t c = 0; c < row_layout_.chunks; ++c) total += squares[c];
  return total;
}

ChunkSquares PartWorker::SquaresHere(const ChunkSquares& squares) const {
  ChunkSquares here{};
  const auto first = squares.begin() + step_.part.first;
  std::copy(first, first + std::min<ptrdiff_t>(layout_.chunks, squares.end() - first),
            here.begin());
  return here;
}

double* PartWorker::SumsOf(size_t row) {
  const auto base = reinterpret_cast<uintptr_t>(sum_lines_.data()) + kLine - 1;
  return reinterpret_cast<double*>(base / kLine * kLine) + row * sums_;
}

}  // namespace embertide

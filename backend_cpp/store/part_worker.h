// PartWorker: one thread's part of a training step. Brings the gradients of a part of a table's
// batch into the rows that lie in DDR; keys that have none there are left to the pool's writer.
//
// A part fits the first caches; its keys are grouped by a small hash table, and then taken in steps
// of eight, so that no key waits alone for memory:
//
//   step s + 6: ask for the keys' index groups        step s + 4: find them there
//   step s + 2: or in the groups after them; ask for the rows and what stands beside them
//   step s:     add the rows' gradients and take the step
//
// The distances are twice those of lookup.cc, for a row is several lines. Where it is known where
// rows lie, the first two fall away.
//
// Used by one thread at a time; several may be at work in a pool at once, as long as none of
// their parts have a key in common. Its memory is kept, and bounded by the largest part it saw.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "embertide/training_store.h"
#include "store/prefetch.h"
#include "store/store_state.h"
#include "store/train_ops.h"

namespace embertide {

// A key of the batch, its gradient there (null where rows are made alone), and where its row lies,
// as RowPlaces has it; 0 if that is not known.
struct Occurrence {
  uint64_t key;
  const float* gradient;
  uint64_t place;
};

// The decay of moments over a row's steps.
struct MomentDecay {
  Decay first;
  Decay second;
};

enum class StepWork : uint8_t {
  kMake,    // keys without a row get one
  kBring,   // rows on the SSD come to DDR
  kUpdate,  // both, and rows take a step of the optimizer
};

// The state that the threads of a step share.
struct TableStep {
  const StoreState* store = nullptr;
  Table* table = nullptr;
  StepWork work = StepWork::kMake;
  const StepOptions* options = nullptr;  // of kUpdate
  uint32_t tick = 0;                     // of the step
  const MomentDecay* decay = nullptr;    // of a step that counts steps
  RowPart part = {};                     // that the table's rows are
};

class PartWorker {
 public:
  // A key of a part and its occurrences, a chain in the order of the batch.
  struct Group {
    uint64_t key;
    uint64_t hash;
    uint64_t place;  // as of its occurrences
    uint32_t first;
    uint32_t last;
    uint32_t count;        // of the chain
    uint32_t occurrences;  // that the chain stands for; the largest number if that does not fit
  };
  // A key without a row in DDR.
  struct Late {
    uint32_t part;
    Group group;
    const float* const* gradients;  // of its occurrences, in their order
  };

  // Forgets what it did for another table.
  void Begin(const TableStep& step);
  // Requires: the caller, or who waits for it, is the pool's writer, and all keys' buckets lie
  // there. `counts`: what each of `occurrences` stands for; null: one each. `placed`: the rows
  // whose places are known lie there.
  void Run(const RowPool& pool, uint32_t part, std::span<const Occurrence> occurrences,
           const uint32_t* counts, bool placed);
  // One row, which lies in DDR by now. Requires: kUpdate, and the pool's writer.
  void Update(const RowPool& pool, const Late& late, Location place);
  // The utility that a key's gradients add to all its chunks together; not finite if they are not.
  float Earned(const Late& late);

  // Late keys of the parts since ForgetLate; those of a part in the order of their occurrences.
  const std::vector<Late>& late();
  void ForgetLate();
  // Rows since Begin, those of them whose gradients were clipped, and those whose gradients are not
  // finite.
  uint64_t updated() const { return updated_; }
  uint64_t clipped() const { return clipped_; }
  uint64_t refused() const { return refused_; }

 private:
  static constexpr size_t kStep = 8;  // keys
  static constexpr size_t kFind = 2 * kStep;
  static constexpr size_t kPlace = 4 * kStep;
  static constexpr size_t kTake = 6 * kStep;
  static constexpr size_t kTakePlaced = 2 * kStep;
  static constexpr size_t kPending = 8 * kStep;  // more than kTake + kStep
  static constexpr size_t kLineSums = kLine / sizeof(double);

  // A row in DDR and what is brought into it.
  struct Row {
    const Group* group;
    std::byte* payload;  // null: there is no row in DDR
    RowAux* aux;
    uint16_t live;
  };
  // The state of a key at its place in the pipeline.
  struct Pending {
    const Bucket* bucket;
    GroupRef index_group;
    uint64_t found;  // of its key in it
    Row row;
  };

  // `counts` as in Run; null unless kCounted.
  template <bool kCounted>
  void GroupKeys(uint32_t n, const uint32_t* counts);
  Pending& At(size_t i) { return pending_[i % kPending]; }
  void AskForGroup(size_t i);
  void Find(size_t first, size_t end);
  void Place(const RowPool& pool, size_t i);
  void PlaceKnown(const RowPool& pool, size_t i);
  // Notes the row; asks for it and for the gradients.
  void AskForRow(const RowPool& pool, size_t i, Location place);
  Row RowAt(const RowPool& pool, const Group* group, Location place) const;
  void Take(uint32_t part, size_t first, size_t end);
  // The gradients of a key, in order.
  const float* const* GradientsOf(const Group& group);
  void Leave(uint32_t part, const Group& group);
  // Brings what was summed for rows [0, n) into them.
  void Descend(const Row* rows, size_t n);
  template <Optimizer kOptimizer>
  void DescendBy(const Row* rows, size_t n);
  // The factor that shortens a row's sums to a norm of `most`; 1 where they are within it.
  double Clip(size_t row, double most);
  // Takes the squares of a row's gradient into what is kept of the row, and gives the rate of its
  // step. False: the gradient is not finite, or its squares are not; nothing is changed.
  template <Optimizer kOptimizer>
  bool RateOf(RowAux* aux, const ChunkSquares& squares, double* rate) const;
  double TotalOf(const ChunkSquares& squares) const;
  // The squares of this table's chunks, of those of the whole row.
  ChunkSquares SquaresHere(const ChunkSquares& squares) const;
  void Sum(size_t row, const float* const* gradients, size_t n);
  // At the beginning of a line.
  double* SumsOf(size_t row);

  TableStep step_;
  RowLayout layout_;      // of what gradients teach
  RowLayout row_layout_;  // the same of whole rows
  const TrainOps& ops_ = ChosenTrainOps();
  TrainOps::Use use_ = nullptr;
  TrainOps::Descend descend_ = nullptr;
  uint32_t aux_bytes_ = 0;  // of a row, as the next one
  uint32_t gradient_bytes_ = 0;
  size_t sums_ = 0;  // whole lines of them, a row's
  const Occurrence* dealt_ = nullptr;
  size_t groups_count_ = 0;
  std::vector<uint32_t> slots_;
  std::vector<uint32_t> next_;  // occurrence of the same key
  std::vector<Group> groups_;
  std::array<Pending, kPending> pending_;
  std::vector<const float*> gradients_;
  std::vector<double> sum_lines_;
  std::array<ChunkSquares, kStep> squares_;
  std::vector<Late> late_;
  std::vector<const float*> late_gradients_;
  uint64_t updated_ = 0;
  uint64_t clipped_ = 0;
  uint64_t refused_ = 0;
};

}  // namespace embertide

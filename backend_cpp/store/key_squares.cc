// The squares of the gradients of keys, for parts of rows that lie in several stores.
#include <algorithm>
#include <bit>

#include "embertide/hash.h"
#include "embertide/training_store.h"
#include "store/train_ops.h"

namespace embertide {
namespace {

// So that few slots are asked for by two keys.
constexpr size_t kSlotsOverKeys = 4;

// Numbers keys as they first come; returns how many there are.
uint32_t NumberKeys(std::span<const int64_t> keys, std::vector<uint32_t>* places) {
  const size_t slots = std::bit_ceil(std::max<size_t>(kSlotsOverKeys * keys.size(), 16));
  std::vector<uint32_t> slot_of(slots, 0);  // the number of a slot's key, and 1
  std::vector<int64_t> found;
  places->resize(keys.size());
  for (size_t k = 0; k < keys.size(); ++k) {
    size_t slot = HashKey(static_cast<uint64_t>(keys[k])) & (slots - 1);
    while (slot_of[slot] != 0 && found[slot_of[slot] - 1] != keys[k]) {
      slot = (slot + 1) & (slots - 1);
    }
    if (slot_of[slot] == 0) {
      found.push_back(keys[k]);
      slot_of[slot] = static_cast<uint32_t>(found.size());
    }
    (*places)[k] = slot_of[slot] - 1;
  }
  return static_cast<uint32_t>(found.size());
}

}  // namespace

KeySquares SquaresOfKeys(const RowLayout& layout, std::span<const int64_t> keys,
                         const float* gradients, size_t stride) {
  KeySquares result;
  const uint32_t distinct = NumberKeys(keys, &result.places);
  std::vector<uint32_t> ends(distinct + 1, 0);
  for (const uint32_t place : result.places) ++ends[place + 1];
  for (uint32_t k = 0; k < distinct; ++k) ends[k + 1] += ends[k];
  std::vector<const float*> of_keys(keys.size());
  std::vector<uint32_t> next(ends.begin(), ends.end() - 1);
  for (size_t k = 0; k < keys.size(); ++k) {
    of_keys[next[result.places[k]]++] = gradients + k * stride;
  }
  const TrainOps& ops = ChosenTrainOps();
  std::vector<double> sums(layout.dim());
  result.squares.resize(size_t{distinct} * layout.chunks);
  ChunkSquares squares;
  for (uint32_t k = 0; k < distinct; ++k) {
    ops.sum(layout, of_keys.data() + ends[k], ends[k + 1] - ends[k], sums.data(), &squares);
    std::copy_n(squares.begin(), layout.chunks, result.squares.data() + size_t{k} * layout.chunks);
  }
  return result;
}

}  // namespace embertide

// ChangedCells: where in a bucket's index rows changed since they were last taken, in two bits a
// row, so that noting a change needs no memory and cannot fail.
//
// A hash's low 32 bits, which choose its place in the index, are cut into cells; a cell's bit says
// that a row in it may have changed. The row's own mark (RowAux) says whether. The cells are made
// finer as the index grows: each becomes two, both as it was.
//
// One writer, but for Set, which its threads may call at once.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <cstring>
#include <memory>

namespace embertide {

class ChangedCells {
 public:
  // Bytes for an index of so many entries.
  static uint64_t BytesFor(uint32_t entries) { return WordsFor(entries) * sizeof(uint64_t); }
  uint64_t bytes() const { return words_ == nullptr ? 0 : BytesOf(shift_); }
  // Makes the cells as fine as such an index asks, never coarser. Requires: the caller has charged
  // the bytes, and releases those before.
  void Fit(uint32_t entries) {
    const uint64_t words = WordsFor(entries);
    auto finer = std::make_unique<uint64_t[]>(words);
    const auto shift = static_cast<uint32_t>(std::countl_zero(words) - kShiftOver);
    if (words_ != nullptr) {
      const uint32_t apart = shift_ - shift;
      for (uint64_t cell = 0; cell < words * 64; ++cell) {
        const uint64_t before = cell >> apart;
        finer[cell / 64] |= (words_[before / 64] >> before % 64 & 1U) << cell % 64;
      }
    }
    words_ = std::move(finer);
    shift_ = shift;
  }

  // Requires for the following: Fit.
  void Set(uint64_t hash) {
    const uint32_t cell = CellOf(hash);
    std::atomic_ref(words_[cell / 64])
        .fetch_or(uint64_t{1} << cell % 64, std::memory_order_relaxed);
    any_.store(true, std::memory_order_relaxed);
  }
  bool Has(uint64_t hash) const {
    const uint32_t cell = CellOf(hash);
    return (words_[cell / 64] >> cell % 64 & 1U) != 0;
  }
  // Calls use(first, last) for each cell that is set, the low 32 bits of the hashes it is for.
  template <typename Use>
  void ForEach(const Use& use) const {
    const uint32_t width = (uint32_t{1} << shift_) - 1U;
    for (uint64_t w = 0; any_.load(std::memory_order_relaxed) && w < bytes() / sizeof(uint64_t);
         ++w) {
      for (uint64_t word = words_[w]; word != 0; word &= word - 1) {
        const auto first = static_cast<uint32_t>((w * 64 + std::countr_zero(word)) << shift_);
        use(first, first + width);
      }
    }
  }
  void Clear() {
    if (words_ != nullptr) std::memset(words_.get(), 0, bytes());
    any_.store(false, std::memory_order_relaxed);
  }

 private:
  // The offset of the shift of a 32-bit number that is cut into 64 x words parts.
  static constexpr int kShiftOver = 63 - (32 - 6);
  static uint64_t WordsFor(uint32_t entries) {
    return std::bit_ceil(std::max<uint64_t>(uint64_t{2} * entries, 64)) / 64;
  }
  static uint64_t BytesOf(uint32_t shift) { return (uint64_t{1} << (32 - shift)) / 8; }
  uint32_t CellOf(uint64_t hash) const { return static_cast<uint32_t>(hash) >> shift_; }

  std::unique_ptr<uint64_t[]> words_;
  uint32_t shift_ = 0;  // of the low 32 bits of a hash, to its cell
  std::atomic<bool> any_{false};
};

}  // namespace embertide

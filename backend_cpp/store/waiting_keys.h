// WaitingKeys: what keys without a row earned of late, so that those that are worth a row get one.
// A pruned key goes on earning here, at 4 bytes for each of so many keys.
//
//   set   [ 8 marks of 16 bits ][ 8 utilities as bf16 ]      32 bytes; a key's hash chooses its set
//
// A key that finds no place takes that of the least worth in its set, if that is worth less, so a
// stream of keys that never come again does not drive out those that do. Two keys of a set that
// share a mark are taken for one: 1 in 8,000 keys. Utilities decay with the steps as those of rows
// do; all are kept as they would be in one step, and made anew before that grows too large.
//
// Deterministic: the same calls in the same order give the same bytes. One thread at a time.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "store/decay.h"

namespace embertide {

class WaitingKeys {
 public:
  static constexpr uint32_t kWays = 8;
  static constexpr uint64_t kSetBytes = kWays * 2 * sizeof(uint16_t);

  // As many sets as fit the bytes, a power of two, one at least. `decay` outlives it.
  WaitingKeys(uint64_t bytes, const Decay* decay)
      : decay_(*decay), sets_(std::bit_floor(std::max<uint64_t>(bytes / kSetBytes, 1))) {}

  // Adds to what a key earned and returns it, the new part included. `step` counts the steps of
  // training; it never goes back.
  float Add(uint64_t hash, float utility, uint64_t step) {
    Advance(step);
    Set& set = SetOf(hash);
    const uint16_t mark = MarkOf(hash);
    const double scale = 1.0 / decay_.Over(static_cast<uint32_t>(step_ - base_));
    uint32_t least = 0;
    for (uint32_t way = 0; way < kWays; ++way) {
      if (set.marks[way] == mark) {
        const double sum = Value(set.utilities[way]) + utility * scale;
        set.utilities[way] = Rounded(sum);
        return static_cast<float>(sum / scale);
      }
      if (set.utilities[way] < set.utilities[least]) least = way;  // in the order of their values
    }
    const uint16_t its = Rounded(utility * scale);
    if (its > set.utilities[least]) {
      set.marks[least] = mark;
      set.utilities[least] = its;
    }
    return utility;
  }
  // The key has a row.
  void Remove(uint64_t hash) {
    Set& set = SetOf(hash);
    for (uint32_t way = 0; way < kWays; ++way) {
      if (set.marks[way] == MarkOf(hash)) set.marks[way] = set.utilities[way] = 0;
    }
  }
  uint64_t bytes() const { return sets_.size() * sizeof(Set); }

  // Its state as bytes of this machine's order, for checkpoints.
  std::string Save() const {
    std::string state(sizeof(base_) + sizeof(step_), '\0');
    std::memcpy(state.data(), &base_, sizeof(base_));
    std::memcpy(state.data() + sizeof(base_), &step_, sizeof(step_));
    return state.append(reinterpret_cast<const char*>(sets_.data()), bytes());
  }
  // The number of bytes() of the keys whose state this is; nullopt: it is none.
  static std::optional<uint64_t> BytesOf(std::string_view state) {
    constexpr uint64_t kHead = 2 * sizeof(uint64_t);
    const uint64_t sets = (state.size() - std::min(state.size(), kHead)) / kSetBytes;
    if (state.size() != kHead + sets * kSetBytes || !std::has_single_bit(sets)) return std::nullopt;
    return sets * kSetBytes;
  }
  // Takes what several keep, of any number of bytes, in place of all there is: of each set those
  // that are worth most, in the newest of their steps. With one state of as many bytes it becomes
  // what was saved. A state of fewer sets does not say to which of these a key belongs, so the key
  // is put in each of them; those that it never comes to are forgotten as others are worth more.
  // Requires: BytesOf(each), and at least one.
  void Load(std::span<const std::string_view> states) {
    std::vector<WaitingKeys> saved;
    for (const std::string_view state : states) saved.push_back(Saved(state));
    base_ = std::ranges::max_element(saved, {}, &WaitingKeys::base_)->base_;
    step_ = std::ranges::max_element(saved, {}, &WaitingKeys::step_)->step_;
    for (WaitingKeys& each : saved) each.MoveBase(base_);
    for (size_t s = 0; s < sets_.size(); ++s) {
      sets_[s] = saved.front().sets_[s % saved.front().sets_.size()];
      for (const WaitingKeys& each : saved) {
        for (size_t from = s % each.sets_.size(); from < each.sets_.size(); from += sets_.size()) {
          Merge(each.sets_[from], &sets_[s]);
        }
      }
    }
  }

 private:
  struct Set {
    std::array<uint16_t, kWays> marks{};
    std::array<uint16_t, kWays> utilities{};
  };
  // The decay since base_ below which all utilities are made anew, and the largest that is kept.
  static constexpr double kMinKept = 0x1p-40;
  static constexpr double kMost = 0x1p126;

  Set& SetOf(uint64_t hash) { return sets_[(hash >> 16) & (sets_.size() - 1)]; }
  // Never that of an empty way.
  static uint16_t MarkOf(uint64_t hash) {
    return static_cast<uint16_t>(std::max<uint64_t>(hash & 0xffff, 1));
  }
  static double Value(uint16_t bf16) { return std::bit_cast<float>(uint32_t{bf16} << 16); }
  static uint16_t Rounded(double value) {
    const auto bits = std::bit_cast<uint32_t>(static_cast<float>(std::min(value, kMost)));
    return static_cast<uint16_t>((bits + 0x8000U) >> 16);
  }
  void Advance(uint64_t step) {
    step_ = std::max(step_, step);
    const uint64_t apart = step_ - base_;
    if (apart > UINT32_MAX || decay_.Over(static_cast<uint32_t>(apart)) < kMinKept) {
      MoveBase(step_);
    }
  }
  // Keeps all utilities as they are in a later step.
  void MoveBase(uint64_t step) {
    const uint64_t apart = step - base_;
    if (apart == 0) return;
    base_ = step;
    if (apart > UINT32_MAX) {
      sets_.assign(sets_.size(), Set{});
      return;
    }
    const double kept = decay_.Over(static_cast<uint32_t>(apart));
    for (Set& set : sets_) {
      for (uint32_t way = 0; way < kWays; ++way) {
        set.utilities[way] = Rounded(Value(set.utilities[way]) * kept);
        if (set.utilities[way] == 0) set.marks[way] = 0;
      }
    }
  }
  WaitingKeys Saved(std::string_view state) const {
    WaitingKeys saved(BytesOf(state).value_or(0), &decay_);
    std::memcpy(&saved.base_, state.data(), sizeof(base_));
    std::memcpy(&saved.step_, state.data() + sizeof(base_), sizeof(step_));
    std::memcpy(saved.sets_.data(), state.data() + sizeof(base_) + sizeof(step_), saved.bytes());
    return saved;
  }
  // Keeps, of the keys of both, those that are worth most. A key that both have is one that other
  // ranks put there, too, so it counts once.
  static void Merge(const Set& from, Set* to) {
    for (uint32_t way = 0; way < kWays; ++way) {
      const uint16_t mark = from.marks[way];
      if (mark == 0) continue;
      const auto same = std::ranges::find(to->marks, mark);
      const auto place = same != to->marks.end()
                             ? static_cast<size_t>(same - to->marks.begin())
                             : static_cast<size_t>(std::ranges::min_element(to->utilities) -
                                                   to->utilities.begin());
      if (from.utilities[way] <= to->utilities[place]) continue;
      to->marks[place] = mark;
      to->utilities[place] = from.utilities[way];
    }
  }

  const Decay& decay_;
  std::vector<Set> sets_;
  uint64_t base_ = 0;  // the step in which utilities are as they are kept
  uint64_t step_ = 0;
};

}  // namespace embertide

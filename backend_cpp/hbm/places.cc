// HbmPlaces: ways, slots and pages of one device's cache.
#include "hbm/places.h"

#include <algorithm>
#include <string>

namespace embertide {
namespace {

// A slot's largest size, in units.
constexpr uint32_t kMaxUnits = (kMaxPayloadBytes + kHbmSlotUnit - 1) / kHbmSlotUnit;

}  // namespace

HbmPlaces::HbmPlaces(uint32_t sets, uint32_t pages)
    : sets_(sets),
      ways_(size_t{sets} * kHbmWays),
      pages_(pages),
      free_slots_(kMaxUnits + 1),
      pages_of_(kMaxUnits + 1, 0) {
  for (uint32_t page = pages; page > 0; --page) free_pages_.push_back(page - 1);
}

uint32_t HbmPlaces::Find(uint32_t table, uint64_t key) const {
  const uint32_t first = HbmSetOf(HbmHash(table, key), sets_) * kHbmWays;
  for (uint32_t way = first; way < first + kHbmWays; ++way) {
    const Way& at = ways_[way];
    if (at.until != 0 && at.key == key && at.table == table) return way;
  }
  return kNoWay;
}

uint64_t HbmPlaces::EndOf(uint32_t table, uint64_t key) const {
  const uint32_t way = Find(table, key);
  return way == kNoWay ? 0 : ways_[way].until;
}

uint32_t HbmPlaces::End(uint32_t table, uint64_t key, uint64_t until) {
  const uint32_t way = Find(table, key);
  if (way == kNoWay || ways_[way].until <= until) return kNoWay;
  ways_[way].until = until;
  return way;
}

uint32_t* HbmPlaces::OwnerOf(uint32_t slot) {
  Page& page = PageOf(slot);
  return &page.owners[slot % kPageUnits / page.units];
}

bool HbmPlaces::AddPage(uint32_t units) {
  if (free_pages_.empty()) {
    // One that its class has left meanwhile.
    while (!empty_pages_.empty()) {
      const uint32_t number = empty_pages_.back();
      empty_pages_.pop_back();
      Page& page = pages_[number];
      page.listed = false;
      if (page.units == 0 || page.out != 0 || page.units == units) continue;
      std::erase_if(free_slots_[page.units],
                    [number](uint32_t slot) { return slot / kPageUnits == number; });
      --pages_of_[page.units];
      page.units = 0;
      free_pages_.push_back(number);
      break;
    }
    if (free_pages_.empty()) return false;
  }
  const uint32_t number = free_pages_.back();
  free_pages_.pop_back();
  Page& page = pages_[number];
  page.units = units;
  page.owners.assign(kPageUnits / units, kNoWay);
  page.owners.shrink_to_fit();
  ++pages_of_[units];
  for (uint32_t ordinal = kPageUnits / units; ordinal > 0; --ordinal) {
    free_slots_[units].push_back(number * kPageUnits + (ordinal - 1) * units);
  }
  return true;
}

std::optional<uint32_t> HbmPlaces::TakeSlot(uint32_t units) {
  if (free_slots_[units].empty() && !AddPage(units)) return std::nullopt;
  const uint32_t slot = free_slots_[units].back();
  free_slots_[units].pop_back();
  ++PageOf(slot).out;
  return slot;
}

void HbmPlaces::FreeSlot(uint32_t slot) {
  Page& page = PageOf(slot);
  free_slots_[page.units].push_back(slot);
  if (--page.out == 0) ListEmptyPage(slot / kPageUnits);
}

void HbmPlaces::ListEmptyPage(uint32_t number) {
  if (pages_[number].listed) return;
  pages_[number].listed = true;
  empty_pages_.push_back(number);
}

void HbmPlaces::CountRow(const Way& way, bool comes) {
  if (by_table_.size() <= way.table) by_table_.resize(way.table + 1U);
  HbmTableStats& of = by_table_[way.table];
  const uint64_t bytes = uint64_t{UnitsAt(way.slot)} * kHbmSlotUnit;
  if (comes) {
    ++rows_;
    ++of.rows;
    of.bytes += bytes;
  } else {
    --rows_;
    --of.rows;
    of.bytes -= bytes;
  }
}

void HbmPlaces::Empty(uint32_t way) {
  Way& at = ways_[way];
  CountRow(at, /*comes=*/false);
  *OwnerOf(at.slot) = kNoWay;
  given_up_.push_back(at.slot);
  at.until = 0;
  at.batch = batch_;
  ++evictions_;
}

void HbmPlaces::BeginBatch(uint64_t safe, std::vector<uint32_t>* emptied) {
  // A stamp that comes round again may keep a way out of one batch: it is let pass.
  ++batch_;
  while (!waiting_.empty() && waiting_.front().epoch < safe) {
    FreeSlot(waiting_.front().slot);
    waiting_.pop_front();
  }
  if (short_of_ == 0) return;
  const uint32_t units = short_of_;
  short_of_ = 0;
  if (free_slots_[units].empty() && free_pages_.empty() && empty_pages_.empty()) {
    TakePageFor(units, emptied);
  }
}

void HbmPlaces::TakePageFor(uint32_t units, std::vector<uint32_t>* emptied) {
  const auto most = std::max_element(pages_of_.begin(), pages_of_.end());
  if (*most <= pages_of_[units]) return;
  const auto rich = static_cast<uint32_t>(most - pages_of_.begin());
  while (pages_[page_hand_].units != rich) {
    page_hand_ = (page_hand_ + 1) % static_cast<uint32_t>(pages_.size());
  }
  for (const uint32_t way : pages_[page_hand_].owners) {
    if (way == kNoWay) continue;
    emptied->push_back(way);
  }
  for (const uint32_t way : *emptied) Empty(way);
  if (pages_[page_hand_].out == 0) ListEmptyPage(page_hand_);
  page_hand_ = (page_hand_ + 1) % static_cast<uint32_t>(pages_.size());
}

uint32_t HbmPlaces::RankOf(uint32_t way, uint32_t used, uint64_t oldest) const {
  const Way& at = ways_[way];
  if (at.batch == batch_) return kStays;
  if (at.until == 0) return 1;
  if (at.until <= oldest) return 0;
  return (used >> (way % kHbmWays) & 1U) == 0 ? 2 : kStays;
}

HbmPlaces::Place HbmPlaces::Put(uint32_t table, uint64_t key, uint32_t bytes, uint64_t until,
                                uint32_t used, uint64_t oldest, std::vector<uint32_t>* emptied) {
  uint32_t best = Find(table, key);
  uint32_t rank = kStays;
  const uint32_t units = UnitsOf(bytes);
  const uint32_t first = HbmSetOf(HbmHash(table, key), sets_) * kHbmWays;
  if (best != kNoWay) {
    if (ways_[best].until == kHbmOpenEnd) return {Answer::kThere};
    if (ways_[best].batch != batch_) rank = 0;  // it ended: the newer row takes its way
  } else {
    ++hand_;
    for (uint32_t i = 0; i < kHbmWays; ++i) {
      const uint32_t way = first + (hand_ + i) % kHbmWays;
      const uint32_t its = RankOf(way, used, oldest);
      if (its >= rank) continue;
      rank = its;
      best = way;
    }
  }
  if (rank == kStays) return {Answer::kInUse};
  const std::optional<uint32_t> slot = TakeSlot(units);
  if (!slot.has_value()) {
    for (uint32_t i = 0; i < kHbmWays; ++i) {
      const uint32_t way = first + (hand_ + i) % kHbmWays;
      const uint32_t its = RankOf(way, used, oldest);
      if (its == kStays || its == 1 || UnitsAt(ways_[way].slot) != units) continue;
      Empty(way);
      emptied->push_back(way);
      return {Answer::kDeferred};
    }
    short_of_ = units;
    return {Answer::kDeferred};
  }
  if (ways_[best].until != 0) Empty(best);
  ways_[best] = {key, until, *slot, static_cast<uint16_t>(table), batch_};
  *OwnerOf(*slot) = best;
  CountRow(ways_[best], /*comes=*/true);
  return {Answer::kPlaced, best, *slot};
}

void HbmPlaces::EndBatch(uint64_t epoch) {
  for (const uint32_t slot : given_up_) waiting_.push_back({epoch, slot});
  given_up_.clear();
}

uint64_t HbmPlaces::page_bytes() const {
  return (pages_.size() - free_pages_.size()) * uint64_t{kHbmPageBytes};
}

Status HbmPlaces::CheckIntegrity() const {
  const auto corrupt = [](const std::string& what) { return Status(Code::kCorrupt, what); };
  std::vector<uint32_t> out(pages_.size(), 0);
  uint64_t rows = 0;
  std::vector<HbmTableStats> by_table(by_table_.size());
  for (uint32_t way = 0; way < ways_.size(); ++way) {
    const Way& at = ways_[way];
    if (at.until == 0) continue;
    ++rows;
    ++by_table[at.table].rows;
    by_table[at.table].bytes += uint64_t{UnitsAt(at.slot)} * kHbmSlotUnit;
    const Page& page = pages_[at.slot / kPageUnits];
    if (page.units == 0 || at.slot % kPageUnits % page.units != 0 ||
        page.owners[at.slot % kPageUnits / page.units] != way) {
      return corrupt("way " + std::to_string(way) + " has a slot that is not its own");
    }
    if (Find(at.table, at.key) != way) {
      return corrupt("key " + std::to_string(at.key) + " stands twice, or not in its set");
    }
    ++out[at.slot / kPageUnits];
  }
  for (const Waiting& wait : waiting_) ++out[wait.slot / kPageUnits];
  for (const uint32_t slot : given_up_) ++out[slot / kPageUnits];
  std::vector<uint32_t> free(pages_.size(), 0);
  for (uint32_t units = 1; units <= kMaxUnits; ++units) {
    for (const uint32_t slot : free_slots_[units]) {
      ++free[slot / kPageUnits];
      if (pages_[slot / kPageUnits].units != units) return corrupt("a free slot has changed class");
    }
  }
  for (uint32_t p = 0; p < pages_.size(); ++p) {
    const uint32_t slots = pages_[p].units == 0 ? 0 : kPageUnits / pages_[p].units;
    if (out[p] != pages_[p].out || out[p] + free[p] != slots) {
      return corrupt("page " + std::to_string(p) + ": " + std::to_string(out[p]) + " out and " +
                     std::to_string(free[p]) + " free of " + std::to_string(slots));
    }
  }
  if (rows != rows_ || by_table != by_table_) return corrupt("rows are not counted right");
  return Status::Ok();
}

}  // namespace embertide

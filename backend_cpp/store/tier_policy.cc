// TierPolicy: see the header for the layout and the invariants.
#include "store/tier_policy.h"

#include <algorithm>
#include <utility>

#include "embertide/hash.h"

namespace embertide {
namespace {

// Below it, slots are too few to be worth giving back.
constexpr uint32_t kMinCapacity = 256;

// Places for `capacity` slots, at most 7/8 of them in use; probes are short up to there.
uint64_t PlacesFor(uint32_t capacity) { return uint64_t{capacity} * 8 / 7 + 8; }

}  // namespace

uint32_t TierPolicy::Slots::HomeOf(uint64_t key) const {
  // The high bits say the bucket, and a pool has but some of the buckets.
  return static_cast<uint32_t>((HashKey(key) & 0xffffffffU) * table.size() >> 32);
}

uint32_t TierPolicy::Slots::Find(uint64_t key) const {
  for (uint32_t place = HomeOf(key); table[place] != 0; place = Next(place)) {
    if (keys[table[place] - 1] == key) return table[place] - 1;
  }
  return kNone;
}

void TierPolicy::Slots::Link(uint64_t key) {
  const uint32_t slot = free;
  free = static_cast<uint32_t>(keys[slot]);
  keys[slot] = key;
  uint32_t place = HomeOf(key);
  while (table[place] != 0) place = Next(place);
  table[place] = slot + 1;
  ++used;
}

void TierPolicy::Slots::Unlink(uint64_t key) {
  uint32_t place = HomeOf(key);
  while (keys[table[place] - 1] != key) place = Next(place);
  const uint32_t slot = table[place] - 1;
  // The places after it close up, so that every row is still found from its home.
  const auto size = static_cast<uint32_t>(table.size());
  for (uint32_t next = Next(place); table[next] != 0; next = Next(next)) {
    const uint32_t home = HomeOf(keys[table[next] - 1]);
    const uint32_t from_home = (next + size - home) % size;
    if (from_home < (next + size - place) % size) continue;
    table[place] = table[next];
    place = next;
  }
  table[place] = 0;
  keys[slot] = free;
  free = slot;
  --used;
}

Result<std::unique_ptr<TierPolicy>> TierPolicy::Make(const std::string& name, ByteBudget* budget) {
  std::unique_ptr<TierPolicy> made(new TierPolicy(name, budget));
  // A policy that does not exist is not for want of room.
  Slots slots;
  EMBERTIDE_RETURN_IF_ERROR(made->Make(kMinCapacity, &slots));
  if (!budget->TryCharge(made->BytesFor(kMinCapacity))) {
    return Status(Code::kResourceExhausted, "policy '" + name + "' does not fit the DDR budget");
  }
  made->bytes_ = made->BytesFor(kMinCapacity);
  made->slots_ = std::move(slots);
  return made;
}

TierPolicy::~TierPolicy() { budget_->Release(bytes()); }

uint64_t TierPolicy::BytesFor(uint32_t capacity) const {
  return MostPolicyBytes(name_, capacity) + uint64_t{capacity} * sizeof(uint64_t) +
         PlacesFor(capacity) * sizeof(uint32_t);
}

Status TierPolicy::Make(uint32_t capacity, Slots* slots) const {
  slots->keys.resize(capacity);
  for (uint32_t slot = 0; slot < capacity; ++slot) slots->keys[slot] = slot + 1;
  slots->keys[capacity - 1] = kNone;
  slots->free = 0;
  slots->table.resize(PlacesFor(capacity));
  PolicyOptions options;
  options.name = name_;
  options.capacity = capacity;
  options.key_of = [keys = slots->keys.data()](uint32_t slot) { return keys[slot]; };
  Result<std::unique_ptr<Policy>> policy = MakePolicy(options);
  if (!policy.ok()) return policy.status();
  slots->policy = std::move(*policy);
  return Status::Ok();
}

bool TierPolicy::Touch(uint64_t key) {
  const uint32_t slot = slots_.Find(key);
  if (slot == kNone) return false;
  slots_.policy->Touch(slot);
  return true;
}

bool TierPolicy::Reserve() {
  if (slots_.used + leaving_ < slots_.capacity()) return true;
  return Resize(slots_.capacity() + std::max(kMinCapacity, slots_.capacity() / 4));
}

void TierPolicy::Fit() {
  const uint32_t rows = slots_.used + leaving_;
  const uint32_t wanted = std::max(kMinCapacity, rows + rows / 4);
  if (rows < slots_.capacity() / 2 && wanted < slots_.capacity()) Resize(wanted);
}

bool TierPolicy::Resize(uint32_t capacity) {
  if (!budget_->TryCharge(BytesFor(capacity))) return false;
  Slots slots;
  if (!Make(capacity, &slots).ok()) {  // more slots than a policy can have
    budget_->Release(BytesFor(capacity));
    return false;
  }
  while (const std::optional<uint64_t> key = Pop()) {
    const uint32_t slot = slots.free;
    slots.Link(*key);
    slots.policy->Insert(slot, *key);
  }
  budget_->Release(bytes_.exchange(BytesFor(capacity)));
  slots_ = std::move(slots);
  return true;
}

void TierPolicy::Enter(uint64_t key) {
  if (Holds(key)) return;
  EMBERTIDE_CHECK(slots_.free != kNone);
  const uint32_t slot = slots_.free;
  slots_.Link(key);
  slots_.policy->Insert(slot, key);
}

void TierPolicy::Leave(uint64_t key) {
  const uint32_t slot = slots_.Find(key);
  if (slot == kNone) return;
  slots_.policy->Erase(slot);
  slots_.Unlink(key);
}

std::optional<uint64_t> TierPolicy::Evict() {
  const std::optional<uint64_t> key = Pop();
  if (key.has_value()) ++leaving_;
  return key;
}

std::optional<uint64_t> TierPolicy::Pop() {
  if (slots_.used == 0) return std::nullopt;
  const uint64_t key = slots_.keys[slots_.policy->Evict()];
  slots_.Unlink(key);
  return key;
}

}  // namespace embertide

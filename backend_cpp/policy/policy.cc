// The list of policies, and admission by frequency before any of them.
#include "policy/policy.h"

#include <array>
#include <charconv>
#include <string_view>
#include <utility>

#include "policy/frequency_sketch.h"
#include "policy/policies.h"

namespace embertide {
namespace {

constexpr uint32_t kMaxCapacity = 1U << 28;
constexpr uint32_t kMaxAccesses = FrequencySketch::kMost;

// In the order of `MakeNamed`.
constexpr std::array<PolicyInfo, 6> kPolicies = {{
    {"reuse-density", "keeps what earns the most hits for its place, as learned", 8, 24, 49152},
    {"lru", "the row asked for longest ago leaves", 8, 0, 64},
    {"lfu", "the row asked for least often leaves; counts halve", 9, 0, 4096},
    {"clock", "a hand halves counts; what was at most 1 leaves", 2, 0, 64},
    {"s3-fifo", "a small queue before a main one, with ghosts", 9, 12, 256},
    {"w-tinylfu", "a window and a segmented LRU behind a frequency sketch", 9, 16, 1024},
}};

std::unique_ptr<Policy> MakeNamed(std::string_view name, const PolicyOptions& options) {
  if (name == "reuse-density") return MakeReuseDensity(options.capacity, options.key_of);
  if (name == "lru") return MakeLru(options.capacity);
  if (name == "lfu") return MakeLfu(options.capacity);
  if (name == "clock") return MakeClock(options.capacity);
  if (name == "s3-fifo") return MakeS3Fifo(options.capacity, options.key_of);
  if (name == "w-tinylfu") return MakeTinyLfu(options.capacity, options.key_of);
  return nullptr;
}

class FrequencyAdmission final : public Policy {
 public:
  FrequencyAdmission(std::unique_ptr<Policy> inner, uint32_t capacity, uint32_t accesses)
      : inner_(std::move(inner)), accesses_(accesses), sketch_(capacity) {}
  void Touch(uint32_t slot) override { inner_->Touch(slot); }
  bool Admit(uint64_t key, bool full) override {
    return sketch_.Add(key) >= accesses_ && inner_->Admit(key, full);
  }
  uint32_t Evict() override { return inner_->Evict(); }
  void Insert(uint32_t slot, uint64_t key) override { inner_->Insert(slot, key); }
  void Erase(uint32_t slot) override { inner_->Erase(slot); }
  uint64_t bytes() const override { return inner_->bytes() + sketch_.bytes(); }

 private:
  const std::unique_ptr<Policy> inner_;
  const uint32_t accesses_;
  FrequencySketch sketch_;
};

}  // namespace

std::unique_ptr<Policy> MakeFrequencyAdmission(std::unique_ptr<Policy> inner, uint32_t capacity,
                                               uint32_t accesses) {
  return std::make_unique<FrequencyAdmission>(std::move(inner), capacity, accesses);
}

std::span<const PolicyInfo> Policies() { return kPolicies; }

Result<PolicyName> ParsePolicyName(const std::string& text, std::span<const PolicyInfo> known) {
  const auto invalid = [&](const std::string& what) {
    return Status(Code::kInvalidArgument, "policy '" + text + "': " + what);
  };
  PolicyName parsed;
  const size_t colon = text.find(':');
  parsed.name = text.substr(0, colon);
  if (colon != std::string::npos) {
    const std::string_view number = std::string_view(text).substr(colon + 1);
    const auto [end, error] = std::from_chars(number.begin(), number.end(), parsed.accesses);
    if (error != std::errc() || end != number.end() || parsed.accesses < 2 ||
        parsed.accesses > kMaxAccesses) {
      return invalid("after the colon stands the access at which a key enters, 2 to 15");
    }
  }
  std::string names;
  for (const PolicyInfo& info : known) {
    if (parsed.name == info.name) return parsed;
    names += std::string(names.empty() ? "" : ", ") + info.name;
  }
  return invalid("does not exist; there are " + names);
}

uint64_t MostPolicyBytes(const std::string& name, uint32_t capacity) {
  const Result<PolicyName> parsed = ParsePolicyName(name);
  EMBERTIDE_CHECK(parsed.ok());
  uint64_t bytes = 0;
  for (const PolicyInfo& info : kPolicies) {
    if (parsed.value().name != info.name) continue;
    bytes = uint64_t{info.slot_bytes + info.history_bytes} * capacity + info.fixed_bytes;
  }
  return bytes + (parsed.value().accesses > 1 ? FrequencySketch::BytesFor(capacity) : 0);
}

Status CheckCapacity(const std::string& name, uint32_t capacity) {
  if (capacity > 0 && capacity <= kMaxCapacity) return Status::Ok();
  return {Code::kInvalidArgument, "policy '" + name + "': a capacity of " +
                                      std::to_string(capacity) + " slots is not in 1 to " +
                                      std::to_string(kMaxCapacity)};
}

Result<std::unique_ptr<Policy>> MakePolicy(const PolicyOptions& options) {
  const auto invalid = [&](const std::string& what) {
    return Status(Code::kInvalidArgument, "policy '" + options.name + "': " + what);
  };
  EMBERTIDE_RETURN_IF_ERROR(CheckCapacity(options.name, options.capacity));
  if (options.key_of == nullptr) return invalid("nothing says which key is in a slot");
  const Result<PolicyName> parsed = ParsePolicyName(options.name);
  if (!parsed.ok()) return parsed.status();
  const auto& [name, accesses] = parsed.value();
  std::unique_ptr<Policy> policy = MakeNamed(name, options);
  if (accesses == 1) return policy;
  return MakeFrequencyAdmission(std::move(policy), options.capacity, accesses);
}

}  // namespace embertide

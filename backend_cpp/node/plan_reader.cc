// Reading heads and parts, and joining them.
#include "node/plan_reader.h"

#include <algorithm>
#include <charconv>
#include <set>
#include <span>

namespace embertide {
namespace {

constexpr int kAgain = 3;          // times that a plan is read which moves on meanwhile
constexpr size_t kAtOnce = 64;     // parts asked for in one round trip
constexpr uint32_t kMaxBits = 17;  // as in plan.proto
const char* const kMachines = "machines";

Status Corrupt(uint64_t epoch, const std::string& why) {
  return {Code::kCorrupt, "plan of epoch " + std::to_string(epoch) + ": " + why};
}

uint64_t ChunksOf(const v1::PlannedTable& table, uint64_t chunk_buckets) {
  return ((uint64_t{1} << table.bucket_bits()) + chunk_buckets - 1) / chunk_buckets;
}

// Appends the runs of a chunk, whose buckets are `begin` to `end`.
Status AppendChunk(const v1::PlanChunk& chunk, uint32_t table, uint64_t begin, uint64_t end,
                   v1::Plan* plan) {
  const auto refuse = [&] {
    return Corrupt(plan->epoch(), "a chunk does not lay out buckets " + std::to_string(begin) +
                                      " to " + std::to_string(end - 1) + " of table " +
                                      std::to_string(table));
  };
  if (chunk.counts_size() != chunk.which_size()) return refuse();
  uint64_t at = begin;
  for (int run = 0; run < chunk.counts_size(); ++run) {
    const uint32_t count = chunk.counts(run);
    const uint32_t which = chunk.which(run);
    if (count == 0 || count > end - at || which >= static_cast<uint32_t>(chunk.holders_size())) {
      return refuse();
    }
    const v1::Holders& holders = chunk.holders(static_cast<int>(which));
    v1::Assignment* assignment = plan->add_assignments();
    assignment->set_table_id(table);
    assignment->set_bucket_begin(static_cast<uint32_t>(at));
    assignment->set_bucket_count(count);
    *assignment->mutable_owners() = holders.owners();
    *assignment->mutable_joining() = holders.joining();
    *assignment->mutable_leaving() = holders.leaving();
    at += count;
  }
  return at == end ? Status::Ok() : refuse();
}

}  // namespace

Result<std::optional<v1::Plan>> PlanReader::Read(RedisConnection* redis, uint64_t have) {
  std::string digits;
  for (int attempt = 0; attempt < kAgain; ++attempt) {
    const auto text = redis->Get(prefix_ + "epoch");
    if (!text.ok()) return text.status();
    if (!text.value()) return std::optional<v1::Plan>();  // no plan has been made
    digits = *text.value();
    uint64_t epoch = 0;
    std::from_chars(digits.data(), digits.data() + digits.size(), epoch);
    if (epoch <= have) return std::optional<v1::Plan>();
    auto plan = ReadEpoch(redis, digits);
    if (!plan.ok() || plan.value()) return plan;
  }
  return Status{Code::kNotFound, "plan of epoch " + digits + " is missing in state"};
}

Result<std::optional<v1::Plan>> PlanReader::ReadEpoch(RedisConnection* redis,
                                                      const std::string& epoch) {
  const auto bytes = redis->Get(prefix_ + "plan:" + epoch);
  if (!bytes.ok()) return bytes.status();
  if (!bytes.value()) return std::optional<v1::Plan>();
  v1::Plan plan;
  if (!plan.ParseFromString(*bytes.value())) {
    return Status{Code::kCorrupt, "the plan of epoch " + epoch + " is no Plan"};
  }
  if (!plan.has_chunks()) {
    parts_.clear();
    return std::optional<v1::Plan>(std::move(plan));
  }
  const auto names = NamesOf(plan);
  if (!names.ok()) return names.status();
  const auto fetched = Fetch(redis, names.value());
  if (!fetched.ok()) return fetched.status();
  if (!fetched.value()) return std::optional<v1::Plan>();
  EMBERTIDE_RETURN_IF_ERROR(Join(names.value(), &plan));
  return std::optional<v1::Plan>(std::move(plan));
}

Result<std::vector<PlanReader::Name>> PlanReader::NamesOf(const v1::Plan& head) {
  const v1::PlanChunks& chunks = head.chunks();
  if (chunks.chunk_buckets() == 0) return Corrupt(head.epoch(), "its chunks have no buckets");
  std::vector<Name> names;
  names.push_back({kMachines, chunks.machines_epoch()});
  for (const v1::PlannedTable& table : head.tables()) {
    if (table.bucket_bits() > kMaxBits) {
      return Corrupt(head.epoch(), "bucket_bits of table " + table.name() + " is " +
                                       std::to_string(table.bucket_bits()));
    }
    for (uint64_t chunk = 0; chunk < ChunksOf(table, chunks.chunk_buckets()); ++chunk) {
      const size_t at = names.size() - 1;
      if (at >= static_cast<size_t>(chunks.epochs_size())) break;
      names.push_back({std::to_string(table.id()) + "." + std::to_string(chunk),
                       chunks.epochs(static_cast<int>(at))});
    }
  }
  uint64_t wanted = 1;
  for (const v1::PlannedTable& table : head.tables()) {
    wanted += ChunksOf(table, chunks.chunk_buckets());
  }
  if (names.size() != wanted || chunks.epochs_size() + 1 != static_cast<int64_t>(wanted)) {
    return Corrupt(head.epoch(), "it names " + std::to_string(chunks.epochs_size() + 1) +
                                     " parts; its tables have " + std::to_string(wanted));
  }
  return names;
}

Result<bool> PlanReader::Fetch(RedisConnection* redis, const std::vector<Name>& names) {
  std::vector<const Name*> missing;
  std::set<std::string> places;
  for (const Name& name : names) {
    places.insert(name.place);
    const auto part = parts_.find(name.place);
    if (part == parts_.end() || part->second.epoch != name.epoch) missing.push_back(&name);
  }
  std::erase_if(parts_, [&](const auto& part) { return !places.contains(part.first); });
  for (size_t begin = 0; begin < missing.size(); begin += kAtOnce) {
    const auto some = std::span(missing).subspan(begin, std::min(kAtOnce, missing.size() - begin));
    std::vector<std::string> keys;
    for (const Name* name : some) {
      keys.push_back(prefix_ + "chunk:" + name->place + ":" + std::to_string(name->epoch));
    }
    auto found = redis->GetMany(keys);
    if (!found.ok()) return found.status();
    for (size_t i = 0; i < some.size(); ++i) {
      std::optional<std::string>& bytes = found.value()[i];
      if (!bytes) return false;
      parts_[some[i]->place] = {some[i]->epoch, std::move(*bytes)};
      ++parts_read_;
    }
  }
  return true;
}

Status PlanReader::Join(const std::vector<Name>& names, v1::Plan* plan) const {
  const uint64_t chunk_buckets = plan->chunks().chunk_buckets();
  plan->clear_chunks();
  if (!plan->MergeFromString(parts_.at(kMachines).bytes)) {
    return Corrupt(plan->epoch(), "its machines are no Plan");
  }
  size_t at = 1;
  v1::PlanChunk chunk;
  for (int t = 0; t < plan->tables_size(); ++t) {
    const uint32_t table = plan->tables(t).id();
    const uint64_t buckets = uint64_t{1} << plan->tables(t).bucket_bits();
    for (uint64_t begin = 0; begin < buckets; begin += chunk_buckets) {
      const Name& name = names[at++];
      if (!chunk.ParseFromString(parts_.at(name.place).bytes)) {
        return Corrupt(plan->epoch(), "part " + name.place + " is no PlanChunk");
      }
      EMBERTIDE_RETURN_IF_ERROR(
          AppendChunk(chunk, table, begin, std::min(begin + chunk_buckets, buckets), plan));
    }
  }
  return Status::Ok();
}

}  // namespace embertide

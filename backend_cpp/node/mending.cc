// Mending: the thread, and a bucket's rows out of files.
#include "node/mending.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <utility>

#include "base/sleep.h"
#include "bus/chain.h"

namespace embertide {
namespace {

// How often it looks whether a block was found bad: one load a device.
constexpr std::chrono::milliseconds kLookAtBlocks{100};
// After a bucket that could not be mended; twice as long each time, up to the second. Files of the
// newest version may be a moment behind its commit; what is full may be given room.
constexpr std::chrono::milliseconds kTryAgain{200};
constexpr std::chrono::milliseconds kTryAgainMost{60'000};

std::string NameOf(const BadBlock& block) {
  return "the SSD block at byte " + std::to_string(block.offset) + " of " + block.file;
}

// The records of a bucket at exactly a version of the node.
Result<std::vector<std::byte>> ReadBucket(const NodeOptions& options, const Manifest& manifest,
                                          const VersionInfo& at, uint32_t table, uint32_t bucket) {
  const TableConfig& config = manifest.tables[table];
  if (at.number != manifest.version || at.lineage != manifest.lineage) {
    const BucketId id{config.id, bucket};
    auto rows = ReadBucketsAt(options.publication, {at.number, at.lineage}, manifest, {&id, 1});
    if (!rows.ok()) return rows.status();
    return std::move(rows->at(id));
  }
  std::vector<std::byte> records;
  for (const BucketFileInfo& info : manifest.buckets) {
    if (info.table != config.name || info.bucket != bucket) continue;
    EMBERTIDE_RETURN_IF_ERROR(
        ReadBucketFile(options.snapshot, config, info, [&](std::span<const std::byte> some) {
          records.insert(records.end(), some.begin(), some.end());
          return Status::Ok();
        }));
  }
  return records;
}

}  // namespace

Mender::Mender(NodeState* state)
    : state_(state),
      wait_(kLookAtBlocks),
      again_(kTryAgain),
      task_({.name = "mending", .board = &state->tasks(), .own_pace = true},
            [this](const std::stop_token& stop) { return Look(stop); }) {}

void Mender::Say(const std::string& line) const {
  if (state_->options().log) state_->options().log(line);
}

void Mender::Tell(const std::vector<BadBlock>& blocks) {
  std::set<std::string> bad;
  for (const BadBlock& block : blocks) {
    const std::string name = NameOf(block);
    bad.insert(name);
    if (told_.contains(name)) continue;
    const BadBlock::Row& first = block.rows.front();
    Say(name + " is not what was written: " + std::to_string(block.rows.size()) +
        " rows are brought again, the first is key " + std::to_string(first.key) + " of table " +
        state_->manifest().tables[first.table].name);
  }
  for (const std::string& name : told_) {
    if (!bad.contains(name)) Say(name + " has no row any more");
  }
  told_ = std::move(bad);
}

Status Mender::MendBucket(uint32_t table, uint32_t bucket) const {
  const Result<ReadView> view = state_->store().PinNewest();
  if (!view.ok()) return view.status();
  const auto at = state_->InfoOf(view.value().version());
  if (at == nullptr) return {Code::kVersionGone, "the version left while it was pinned"};
  const auto records = ReadBucket(state_->options(), state_->manifest(), *at, table, bucket);
  if (!records.ok()) return records.status();
  return state_->store().Mend(view.value(), table, bucket, records.value());
}

Status Mender::Look(const std::stop_token& stop) {
  if (!SleepFor(stop, std::exchange(wait_, kLookAtBlocks))) return Status::Ok();
  const std::vector<BadBlock> blocks = state_->store().FindBadBlocks();
  Tell(blocks);
  std::set<std::pair<uint32_t, uint32_t>> buckets;
  for (const BadBlock& block : blocks) {
    for (const BadBlock::Row& row : block.rows) buckets.emplace(row.table, row.bucket);
  }
  std::string error;
  Status last = Status::Ok();
  for (const auto& [table, bucket] : buckets) {
    if (stop.stop_requested()) return Status::Ok();
    const Status mended = MendBucket(table, bucket);
    if (mended.ok()) continue;
    state_->NoteFailedMend();
    error = "rows of bucket " + std::to_string(bucket) + " of table " +
            state_->manifest().tables[table].name +
            " are not mended, and tried again: " + mended.ToString();
    last = {mended.code(), error};
  }
  if (!error.empty() && error != error_) Say(error);
  if (error.empty()) {
    again_ = kTryAgain;
  } else {
    wait_ = again_;
    again_ = std::min(2 * again_, kTryAgainMost);
  }
  error_ = std::move(error);
  return last;
}

}  // namespace embertide

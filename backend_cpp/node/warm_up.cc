// Lookups that are made again, and the file: see the header.
#include "node/warm_up.h"

#include <mutex>
#include <vector>

#include "base/file.h"
#include "base/sleep.h"
#include "embertide/hash.h"

namespace embertide {
namespace {

using std::chrono::steady_clock;

// The share of keys read from the SSD in a pass that makes another one worth its while.
constexpr double kWorthAPass = 0.01;
// Lookups after which rows that were read are brought to DDR: the notes of reads are bounded.
constexpr size_t kMaintainEvery = 16;

// A reloaded model has two for a while, which write one file.
std::mutex writing;  // NOLINT(cppcoreguidelines-avoid-non-const-global-variables)

// A message takes some more than its keys.
constexpr uint64_t MaxFileBytes(uint64_t max_bytes) { return 2 * max_bytes + (1U << 16); }

}  // namespace

WarmUp::WarmUp(const NodeState* state, const std::stop_token& stop)
    : state_(state),
      task_({.name = "key-sample", .board = &state->tasks(), .own_pace = true},
            [this](const std::stop_token& ends) {
              return SleepFor(ends, kWriteEvery) ? Write() : Status::Ok();
            }) {
  LookUpAgain(stop);
}

WarmUp::~WarmUp() {
  if (const Status status = Write(); !status.ok() && state_->options().log) {
    state_->options().log(status.ToString());
  }
}

WarmUpStats WarmUp::stats() const {
  WarmUpStats stats = stats_;
  stats.failed_files = failed_files_;
  const KeySample::Figures sample = state_->sample()->figures();
  stats.sampled_lookups = sample.lookups;
  stats.sampled_bytes = sample.bytes;
  stats.too_large = sample.too_large;
  return stats;
}

void WarmUp::LookUpAgain(const std::stop_token& stop) {
  const NodeOptions& options = state_->options();
  const Result<std::string> text =
      ReadWholeFile(options.warm_up_file, MaxFileBytes(options.warm_up_bytes));
  if (!text.ok() && text.status().code() == Code::kNotFound) return;  // the first start
  const Result<std::vector<KeySample::Lookup>> sample =
      text.ok() ? KeySample::Parse(text.value(), state_->manifest().tables, options.warm_up_bytes)
                : text.status();
  if (!sample.ok()) {
    ++failed_files_;
    if (options.log) {
      options.log(options.warm_up_file +
                  " is passed over, and written anew: " + sample.status().message());
    }
    return;
  }
  // A node that is hardly asked shall not forget what it was asked before.
  for (const KeySample::Lookup& lookup : sample.value()) state_->sample()->Add(lookup);
  const auto began = steady_clock::now();
  const auto is_over = [&] { return stop.stop_requested() || steady_clock::now() - began > kFor; };
  for (int pass = 0; pass < kMaxPasses && !is_over(); ++pass) {
    uint64_t keys = 0;
    uint64_t from_ssd = 0;
    for (size_t n = 0; n < sample.value().size() && !is_over(); ++n) {
      const Status status = LookUp(sample.value()[n], &from_ssd);
      if (!status.ok()) {  // requests meet the same, and say so
        if (options.log) options.log("warming up: " + status.ToString());
        return;
      }
      for (const KeySample::Keys& of : sample.value()[n]) keys += of.keys.size();
      if (pass == 0) ++stats_.lookups;
      if (n % kMaintainEvery == 0) state_->store().Maintain();
    }
    state_->store().Maintain();
    if (pass == 0) stats_.first_from_ssd = from_ssd;
    stats_.keys += keys;
    stats_.last_from_ssd = from_ssd;
    if (static_cast<double>(from_ssd) <= kWorthAPass * static_cast<double>(keys)) break;
  }
  const auto took = steady_clock::now() - began;
  stats_.took_ms =
      static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(took).count());
}

Status WarmUp::LookUp(const KeySample::Lookup& lookup, uint64_t* from_ssd) {
  Result<ReadView> view = state_->PinServed();
  if (!view.ok()) return view.status();
  const BagReader rows(view.value());
  std::vector<SourceCounts> counts(state_->manifest().tables.size());
  std::vector<float> sum;
  std::vector<int64_t> of_rows;
  for (const KeySample::Keys& of : lookup) {
    const TableConfig& table = state_->manifest().tables[of.table];
    std::vector<int64_t> here;
    for (const int64_t key : of.keys) {
      const uint64_t hash = HashKey(static_cast<uint64_t>(key));
      if (state_->store().BucketSizeOf(view.value(), of.table,
                                       BucketOfHash(hash, table.bucket_bits))) {
        here.push_back(key);
      }
    }
    Status status;
    if (table.layout.is_keys()) {
      of_rows.resize(here.size() * table.layout.dim());
      status =
          rows.CopyKeys(of.table, {.keys = here, .offsets = {}}, of_rows.data(), nullptr, counts);
    } else {
      sum.resize(table.layout.dim());
      const uint32_t ends[] = {0, static_cast<uint32_t>(here.size())};
      const BagFeature feature{of.table, Pooling::kSum, 0};
      const KeyBags bag{.keys = here, .offsets = ends, .out = sum.data(), .out_stride = sum.size()};
      status = rows.Lookup({&feature, 1}, {&bag, 1}, counts);
    }
    // A bucket may leave between the two looks.
    if (!status.ok() && status.code() != Code::kNotOwner) return status;
  }
  for (const SourceCounts& of : counts) *from_ssd += of[static_cast<size_t>(Source::kSsd)];
  return Status::Ok();
}

Status WarmUp::Write() {
  const std::lock_guard lock(writing);
  const uint64_t taken = state_->sample()->figures().taken;
  if (taken == written_) return Status::Ok();
  const std::string text = state_->sample()->Serialized(state_->manifest().tables);
  const Status status =
      WriteFileAtomically(state_->options().warm_up_file, std::as_bytes(std::span(text)), 0600);
  if (status.ok()) {
    written_ = taken;
  } else {
    ++failed_files_;
  }
  return status;
}

}  // namespace embertide

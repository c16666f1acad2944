// Tables of keys: their rows are copied through versions, tiers and training as they are, and no
// call makes numbers of them.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <numeric>
#include <random>

#include "embertide/serving_store.h"
#include "store/test_rows.h"

namespace embertide {
namespace {

constexpr uint32_t kItems = 10;
constexpr uint32_t kHistories = 1;  // the table of keys

using Items = std::vector<int64_t>;
using Histories = std::map<uint64_t, Items>;  // by user; without padding

std::vector<TableConfig> Tables() {
  TableConfig values;
  values.name = "item";
  values.layout = {2, 4, DType::kFp32};
  TableConfig keys;
  keys.name = "histories";
  keys.id = 5;
  keys.layout = {kItems, 1, DType::kKeys};
  keys.bucket_bits = 2;
  return {values, keys};
}

Items Padded(const Items& items) {
  Items padded = items;
  padded.resize(kItems, kNoKey);
  return padded;
}

void AppendHistory(const RowLayout& layout, uint64_t user, const Items& items,
                   std::vector<std::byte>* records) {
  std::vector<std::byte> payload(layout.PayloadBytes(layout.full_mask()));
  const uint16_t live = EncodeKeys(layout, Padded(items).data(), payload.data());
  const auto kind = live == 0 ? RecordKind::kExpired : RecordKind::kRow;
  AppendRecord({user, live, kind, {payload.data(), layout.PayloadBytes(live)}}, records);
}

// Keys that no float holds; a user has 1 to kItems of them.
Items RandomItems(std::mt19937_64* random) {
  Items items(1 + (*random)() % kItems);
  for (int64_t& item : items) item = static_cast<int64_t>((*random)()) | 1;
  return items;
}

// The keys of users at a view, without padding.
Histories Read(const ReadView& view, const std::vector<int64_t>& users,
               std::vector<Source>* sources = nullptr) {
  Items out(users.size() * kItems);
  std::vector<uint8_t> bytes(users.size());
  const KeyBags request{users, {}, nullptr, 0};
  const Status read = BagReader(view).CopyKeys(kHistories, request, out.data(), bytes.data(), {});
  EXPECT_TRUE(read.ok()) << read.ToString();
  Histories found;
  for (size_t u = 0; u < users.size(); ++u) {
    const auto first = out.begin() + static_cast<ptrdiff_t>(u * kItems);
    Items items(first, std::find(first, first + kItems, kNoKey));
    EXPECT_TRUE(std::all_of(first + static_cast<ptrdiff_t>(items.size()), first + kItems,
                            [](int64_t key) { return key == kNoKey; }));
    if (!items.empty()) found[static_cast<uint64_t>(users[u])] = items;
    if (sources != nullptr) sources->push_back(static_cast<Source>(bytes[u]));
  }
  return found;
}

// More than a chunk of a lookup, whose rows fit neither a tier alone.
TEST(KeysTest, EveryVersionOfTheWindowGivesItsKeysFromEveryTier) {
  const std::string directory =
      std::filesystem::temp_directory_path() / ("embertide-keys-" + std::to_string(::getpid()));
  StoreOptions options;
  options.tables = Tables();
  options.devices = 2;
  options.ddr_budget_bytes = 2ULL << 21;
  options.ssd_budget_bytes = 64ULL << 20;
  options.ssd_directory = directory;
  options.window_versions = 3;
  auto opened = ServingStore::Open(options);
  ASSERT_TRUE(opened.ok()) << opened.status().ToString();
  ServingStore& store = **opened;
  const TableConfig& table = options.tables[kHistories];
  std::mt19937_64 random(7);
  std::vector<int64_t> users(54'000);
  std::iota(users.begin(), users.end(), -5);
  std::map<uint64_t, Histories> versions;
  for (uint64_t version = 1; version <= 4; ++version) {
    Histories now = versions.empty() ? Histories() : versions.rbegin()->second;
    std::map<uint32_t, std::vector<std::byte>> records;
    for (const int64_t key : users) {
      const auto user = static_cast<uint64_t>(key);
      if (version > 1 && random() % 8 != 0) continue;
      const Items items = random() % 10 == 0 ? Items() : RandomItems(&random);
      AppendHistory(table.layout, user, items, &records[BucketOfKey(table, user)]);
      if (items.empty()) {
        now.erase(user);
      } else {
        now[user] = items;
      }
    }
    for (const auto& [bucket, bytes] : records) {
      const Status staged = store.StageRecords(version, kHistories, bucket, bytes);
      ASSERT_TRUE(staged.ok()) << staged.ToString();
    }
    ASSERT_TRUE(store.Commit(version).ok());
    store.Maintain();
    versions[version] = std::move(now);
    for (uint64_t pinned = version > 2 ? version - 2 : 1; pinned <= version; ++pinned) {
      const Result<ReadView> view = store.Pin(pinned);
      ASSERT_TRUE(view.ok());
      std::vector<Source> sources;
      ASSERT_EQ(Read(view.value(), users, &sources), versions[pinned]) << pinned;
      EXPECT_GT(std::ranges::count(sources, Source::kSsd), 0);
      EXPECT_GT(std::ranges::count(sources, Source::kDdr), 0);
    }
    const Status whole = store.CheckIntegrity();
    ASSERT_TRUE(whole.ok()) << whole.ToString();
  }
  opened->reset();
  std::filesystem::remove_all(directory);
}

TEST(KeysTest, RowsThatCameFromElsewhereStandInTheirPlaces) {
  StoreOptions options;
  options.tables = Tables();
  auto store = std::move(*ServingStore::Open(options));
  std::vector<std::byte> records;
  const TableConfig& table = options.tables[kHistories];
  AppendHistory(table.layout, 3, {30, 31}, &records);
  ASSERT_TRUE(store->StageRecords(1, kHistories, BucketOfKey(table, 3), records).ok());
  ASSERT_TRUE(store->Commit(1).ok());
  const std::vector<int64_t> theirs = {70, 71, 72};
  RemoteRow row;
  row.payload = reinterpret_cast<const std::byte*>(theirs.data());
  row.live = 7;
  RemoteRow unanswered;
  unanswered.source = Source::kUnanswered;
  const std::array<RemoteRow, 2> remote = {row, unanswered};
  const std::vector<int64_t> users = {7, 3, 9, 4};
  const std::vector<uint32_t> remote_of = {1, 0, 2, 0};
  KeyBags request{users, {}, nullptr, 0};
  request.remote_of = remote_of.data();
  request.remote = remote.data();
  const auto view = store->PinNewest();
  Items out(4 * kItems);
  std::vector<uint8_t> sources(4);
  std::vector<SourceCounts> counts(2);
  ASSERT_TRUE(BagReader(view.value())
                  .CopyKeys(kHistories, request, out.data(), sources.data(), counts)
                  .ok());
  Items wanted = Padded(theirs);
  for (const Items& items : {Items{30, 31}, Items(), Items()}) {
    const Items padded = Padded(items);
    wanted.insert(wanted.end(), padded.begin(), padded.end());
  }
  EXPECT_EQ(out, wanted);
  const std::vector<Source> from = {Source::kRemote, Source::kDdr, Source::kUnanswered,
                                    Source::kDefault};
  for (size_t u = 0; u < from.size(); ++u) {
    EXPECT_EQ(static_cast<Source>(sources[u]), from[u]);
    EXPECT_EQ(counts[kHistories][static_cast<size_t>(from[u])], 1U);
  }
}

// A trainer imports rows again and again, takes them as changes, and loses them.
TEST(KeysTest, ATrainingStorePublishesTheRowsThatWereImported) {
  StoreOptions options;
  options.tables = Tables();
  options.optimizer = Optimizer::kAdagrad;
  auto store = std::move(*TrainingStore::Open(options));
  const TableConfig& table = options.tables[kHistories];
  const uint64_t user = 42;
  const uint32_t bucket = BucketOfKey(table, user);
  const auto put = [&](const Items& items) {
    std::vector<std::byte> records;
    AppendHistory(table.layout, user, items, &records);
    EXPECT_TRUE(store->ImportRecords(kHistories, bucket, records).ok());
    EXPECT_TRUE(store->MarkChanged(kHistories, bucket, {&user, 1}).ok());
    std::vector<std::byte> changes;
    EXPECT_TRUE(store->TakeChanges(kHistories, bucket, &changes).ok());
    EXPECT_EQ(changes, records);
    const Status whole = store->CheckIntegrity();
    EXPECT_TRUE(whole.ok()) << whole.ToString();
    EXPECT_EQ(Read(store->PinNewest().value(), {static_cast<int64_t>(user)}),
              items.empty() ? Histories() : (Histories{{user, items}}));
  };
  put({1});
  put({3, 2, 1});
  put({9, 3, 2, 1});
  std::vector<std::byte> nothing;
  ASSERT_TRUE(store->TakeChanges(kHistories, bucket, &nothing).ok());
  EXPECT_TRUE(nothing.empty());
  // Nothing is learned of it, so nothing is kept beside it.
  const Result<RowState> state = store->StateOf(kHistories, user);
  ASSERT_TRUE(state.ok());
  EXPECT_TRUE(state.value().elements.empty());
  EXPECT_TRUE(store->SetState(kHistories, user, state.value()).ok());
  put({});
}

TEST(KeysTest, NoCallMakesNumbersOfKeys) {
  StoreOptions options;
  options.tables = Tables();
  auto store = std::move(*ServingStore::Open(options));
  ASSERT_TRUE(store->Commit(1).ok());
  const std::vector<int64_t> keys = {1, 2};
  std::vector<float> out(2 * kItems);
  std::vector<double> sums(2 * kItems);
  std::vector<uint8_t> sources(2);
  Items items(2 * kItems);
  const auto view = store->PinNewest();
  const auto refused = [](const Status& status) {
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_NE(status.message().find("table histories has rows of keys"), std::string::npos)
        << status.message();
  };
  refused(view.value().Lookup({kHistories, keys, Pooling::kNone, {}, out.data(), kItems, nullptr}));
  const BagFeature feature{kHistories, Pooling::kSum, 0};
  const KeyBags bags{keys, {}, out.data(), kItems};
  refused(BagReader(view.value()).Lookup({&feature, 1}, {&bags, 1}, {}));
  const std::vector<uint32_t> offsets = {0, 2};
  const std::vector<uint32_t> places = {0, 1};
  refused(BagReader(view.value())
              .SumBags(kHistories, keys, offsets, places, {}, sums.data(), sources.data()));
  const Status values = BagReader(view.value()).CopyKeys(0, bags, items.data(), nullptr, {});
  EXPECT_NE(values.message().find("table item has rows of values"), std::string::npos);

  auto training = std::move(*TrainingStore::Open(options));
  refused(training->EnsureRows(kHistories, keys).status());
  const BagGradients gradients{kHistories, keys, {}, out.data(), kItems};
  refused(training->ApplyGradients({&gradients, 1}, StepOptions{}).status());
  refused(training->AddCounts(kHistories, keys, out.data(), kItems).status());
  refused(training->SetLive(kHistories, 1, 1));
  options.prune_groups = {{{kHistories}}};
  EXPECT_NE(TrainingStore::Open(options).status().message().find("has rows of keys"),
            std::string::npos);
  options.prune_groups.clear();
  options.tables[kHistories].default_row.assign(kItems, 0.0F);
  EXPECT_NE(TrainingStore::Open(options).status().message().find("rows of keys have none"),
            std::string::npos);
}

}  // namespace
}  // namespace embertide

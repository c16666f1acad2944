// Steps that are told where a lookup found rows, beside the same steps of a twin that looks for
// every key: the same bytes, whatever happens between the lookup and the step (run under TSan too).
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>

#include "store/test_rows.h"

namespace embertide {
namespace {

constexpr uint32_t kTables = 2;
constexpr uint32_t kChunks = 4;
constexpr uint32_t kDim = 16;
constexpr uint16_t kWhole = (1U << kChunks) - 1;
constexpr StepOptions kAdagrad{0.1F, 1e-6F, 0.0F};

StoreOptions Options() {
  StoreOptions options;
  options.ddr_budget_bytes = 64ULL << 20;
  for (uint32_t t = 0; t < kTables; ++t) {
    TableConfig table;
    table.name = "t" + std::to_string(t);
    table.id = t;
    table.layout = {kChunks, kDim / kChunks, DType::kFp32};
    table.bucket_bits = 3;
    options.tables.push_back(table);
  }
  return options;
}

// Bags of a table and their gradients.
struct Piece {
  uint32_t table = 0;
  std::vector<int64_t> keys;
  std::vector<uint32_t> offsets;
  std::vector<float> gradients;
  RowPlaces places;
};

class RowPlacesTest : public ::testing::Test {
 protected:
  RowPlacesTest() : told_(Open()), twin_(Open()) {}
  static std::unique_ptr<TrainingStore> Open() {
    return std::move(*TrainingStore::Open(Options()));
  }

  // Rows of table 1.
  static Status Make(TrainingStore* store, std::span<const int64_t> keys) {
    const auto made = store->EnsureRows(1, keys);
    return made.ok() ? Status::Ok() : made.status();
  }
  // Bags of up to five keys below `keys`, of table 1, of 0, and of 1 again.
  std::vector<Piece> Draw(size_t bags, uint32_t keys) {
    std::vector<Piece> pieces(3);
    for (size_t p = 0; p < pieces.size(); ++p) {
      Piece& piece = pieces[p];
      piece.table = (p + 1) % kTables;
      piece.offsets = {0};
      for (size_t bag = 0; bag < bags; ++bag) {
        for (uint32_t n = random_() % 6; n > 0; --n) {
          piece.keys.push_back(static_cast<int64_t>(random_() % keys));
        }
        piece.offsets.push_back(static_cast<uint32_t>(piece.keys.size()));
        for (uint32_t d = 0; d < kDim; ++d) piece.gradients.push_back(normal_(random_));
      }
    }
    return pieces;
  }
  // Notes where the rows are.
  static void LookUp(const TrainingStore& store, std::span<Piece> pieces, uint32_t threads = 1) {
    std::vector<LookupRequest> requests;
    std::vector<std::vector<float>> out;
    for (Piece& piece : pieces) {
      LookupRequest request;
      request.table = piece.table;
      request.keys = piece.keys;
      request.pooling = Pooling::kSum;
      request.offsets = piece.offsets;
      request.out = out.emplace_back((piece.offsets.size() - 1) * kDim).data();
      request.out_stride = kDim;
      request.places = &piece.places;
      requests.push_back(request);
    }
    ASSERT_TRUE(store.PinNewest()->Lookup(requests, threads).ok());
  }
  static Result<uint64_t> Step(TrainingStore* store, std::vector<Piece>* pieces, bool told,
                               uint32_t threads = 1) {
    std::vector<BagGradients> bags;
    for (Piece& piece : *pieces) {
      bags.push_back({piece.table, piece.keys, piece.offsets, piece.gradients.data(), kDim});
      if (told) bags.back().places = &piece.places;
    }
    return store->ApplyGradients(bags, kAdagrad, threads);
  }
  void StepBoth(std::vector<Piece>* pieces, uint32_t threads = 1) {
    const auto one = Step(told_.get(), pieces, /*told=*/true, threads);
    const auto other = Step(twin_.get(), pieces, /*told=*/false, threads);
    ASSERT_TRUE(one.ok()) << one.status().ToString();
    ASSERT_EQ(one.value(), other.value());
  }
  // Rows, and what training keeps of them.
  static std::pair<std::vector<std::byte>, std::vector<RowState>> Everything(
      const TrainingStore& store) {
    std::pair<std::vector<std::byte>, std::vector<RowState>> all;
    for (uint32_t t = 0; t < kTables; ++t) {
      for (uint32_t b = 0; b < Options().tables[t].buckets(); ++b) {
        std::vector<RowState> states;
        EXPECT_TRUE(
            store.ExportBucketWithStates(*store.PinNewest(), t, b, &all.first, &states).ok());
        all.second.insert(all.second.end(), states.begin(), states.end());
      }
    }
    return all;
  }
  void ExpectTheSame() const {
    EXPECT_TRUE(Everything(*told_) == Everything(*twin_));
    const Status whole = told_->CheckIntegrity();
    EXPECT_TRUE(whole.ok()) << whole.ToString();
  }
  void Both(const std::function<Status(TrainingStore*)>& change) {
    for (TrainingStore* store : {told_.get(), twin_.get()}) {
      const Status status = change(store);
      ASSERT_TRUE(status.ok()) << status.ToString();
    }
  }

  std::mt19937 random_{17};
  std::normal_distribution<float> normal_;
  std::unique_ptr<TrainingStore> told_;
  std::unique_ptr<TrainingStore> twin_;
};

// Most keys have rows, some get theirs in the step, some rows are pruned between steps.
TEST_F(RowPlacesTest, TheSameBytesWithThemAsWithout) {
  for (int step = 0; step < 60; ++step) {
    auto pieces = Draw(step % 3 == 0 ? 4000 : 50, 2000 + 20 * static_cast<uint32_t>(step));
    const auto threads = static_cast<uint32_t>(1 + step % 3);
    LookUp(*told_, pieces, threads);
    StepBoth(&pieces, threads);
    const auto key = static_cast<uint64_t>(pieces[0].keys[0]);
    Both([&](TrainingStore* store) { return store->SetLive(1, key, 1 + step % kWhole); });
  }
  ExpectTheSame();
  EXPECT_GT(told_->Stats().placed_keys, 300'000U);
  EXPECT_EQ(told_->Stats().stale_places, 0U);
  EXPECT_EQ(twin_->Stats().placed_keys, 0U);
}

// Between lookup and step, rows become smaller, end, and leave their places to others.
TEST_F(RowPlacesTest, RowsThatMovedSinceAreFoundWhereTheyAre) {
  auto first = Draw(3000, 1500);
  LookUp(*told_, first);
  StepBoth(&first);
  for (int step = 0; step < 12; ++step) {
    auto pieces = Draw(3000, 1500);
    LookUp(*told_, pieces);
    const uint64_t before = told_->Stats().stale_places;
    Both([&](TrainingStore* store) {
      for (uint64_t key = 0; key < 200; ++key) {
        const auto live = static_cast<uint16_t>((key + static_cast<uint64_t>(step)) % (kWhole + 1));
        const Status status = store->SetLive(1, key, live);
        if (!status.ok() && status.code() != Code::kNotFound) return status;
      }
      std::vector<int64_t> born;
      for (int64_t key = 0; key < 300; ++key) born.push_back(100'000 * (step + 1) + key);
      store->Maintain();
      return Make(store, born);
    });
    StepBoth(&pieces);
    // Table 1's occurrences; both tables' rows lie in one pool, so table 0's as well.
    size_t keys = 0;
    for (const Piece& piece : pieces) keys += piece.keys.size();
    EXPECT_EQ(told_->Stats().stale_places - before, keys);
    ExpectTheSame();
  }
}

// One lookup finds no row of a key, a later one of the same step does: one step of the optimizer.
TEST_F(RowPlacesTest, AKeyThatGetsARowBetweenTwoLookupsTakesOneStep) {
  auto known = Draw(2000, 1000);
  LookUp(*told_, known);
  StepBoth(&known);
  auto pieces = Draw(500, 1000);
  for (const size_t p : {0U, 2U}) pieces[p].keys[0] = pieces[p].keys[7] = 5'000'000;
  LookUp(*told_, std::span(pieces).first(1));
  Both([](TrainingStore* store) {
    const int64_t key = 5'000'000;
    return Make(store, {&key, 1});
  });
  LookUp(*told_, std::span(pieces).subspan(1));
  StepBoth(&pieces);
  ExpectTheSame();
  EXPECT_EQ(told_->Stats().stale_places, 0U);
  EXPECT_GT(told_->Stats().placed_keys, 1000U);
}

TEST_F(RowPlacesTest, PlacesOfOtherKeysAreRefused) {
  auto pieces = Draw(1000, 500);
  LookUp(*told_, pieces);
  StepBoth(&pieces);
  LookUp(*told_, pieces);
  const auto before = Everything(*told_);
  std::swap(pieces[0].keys[3], pieces[0].keys[4]);
  ASSERT_NE(pieces[0].keys[3], pieces[0].keys[4]);
  const auto swapped = Step(told_.get(), &pieces, /*told=*/true);
  EXPECT_EQ(swapped.status().code(), Code::kInvalidArgument);
  EXPECT_NE(swapped.status().message().find("places that a lookup of other keys has found"),
            std::string::npos);
  std::swap(pieces[0].keys[3], pieces[0].keys[4]);
  std::swap(pieces[0].places.table, pieces[1].places.table);
  EXPECT_EQ(Step(told_.get(), &pieces, /*told=*/true).status().code(), Code::kInvalidArgument);
  EXPECT_TRUE(Everything(*told_) == before);
}

// Places say nothing of another store: its rows lie elsewhere.
TEST_F(RowPlacesTest, PlacesOfAnotherStoreAreNotUsed) {
  auto pieces = Draw(1000, 500);
  LookUp(*told_, pieces);
  StepBoth(&pieces);
  LookUp(*twin_, pieces);
  StepBoth(&pieces);
  ExpectTheSame();
  EXPECT_EQ(told_->Stats().placed_keys, 0U);
  EXPECT_GT(told_->Stats().stale_places, 0U);
}

// A thread prunes rows and lets others be made while steps are taken: of what it does not touch,
// every gradient arrives once. Steps of SGD add 1 to each value of a key's first chunk.
TEST(RowPlacesConcurrencyTest, EveryGradientArrivesOnceWhileRowsMove) {
  constexpr int64_t kKeys = 6000;
  constexpr int kSteps = 60;
  StoreOptions options = Options();
  options.optimizer = Optimizer::kSgd;
  for (TableConfig& table : options.tables) table.init_scale = 0.0F;
  const auto store = std::move(*TrainingStore::Open(options));
  std::vector<int64_t> all(kKeys);
  for (int64_t key = 0; key < kKeys; ++key) all[static_cast<size_t>(key)] = key;
  ASSERT_TRUE(store->EnsureRows(0, all).ok());
  std::atomic<bool> done{false};
  std::thread other([&] {
    std::mt19937 random(3);
    for (int64_t born = kKeys; !done; ++born) {
      EXPECT_TRUE(store->EnsureRows(0, {&born, 1}).ok());
      for (int n = 0; n < 20; ++n) {
        const uint64_t key = random() % kKeys;
        EXPECT_TRUE(store->SetLive(0, key, static_cast<uint16_t>(1 | random() % kWhole)).ok());
      }
      store->Maintain();
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
    }
  });
  std::vector<uint32_t> want(kKeys);
  std::mt19937 random(5);
  for (int step = 0; step < kSteps; ++step) {
    std::vector<int64_t> keys(20'000);
    for (int64_t& key : keys) ++want[static_cast<size_t>(key = random() % kKeys)];
    const std::vector<float> gradients(keys.size() * kDim, -1.0F);
    std::vector<float> out(gradients.size());
    RowPlaces places;
    LookupRequest request;
    request.keys = keys;
    request.out = out.data();
    request.out_stride = kDim;
    request.places = &places;
    ASSERT_TRUE(store->PinNewest()->Lookup({&request, 1}, 2).ok());
    BagGradients bags{0, keys, {}, gradients.data(), kDim};
    bags.places = &places;
    ASSERT_TRUE(store->ApplyGradients({&bags, 1}, {1.0F}, 2).ok());
  }
  done = true;
  other.join();
  std::vector<float> out(kKeys * kDim);
  LookupRequest request;
  request.keys = all;
  request.out = out.data();
  request.out_stride = kDim;
  ASSERT_TRUE(store->PinNewest()->Lookup(request).ok());
  for (size_t key = 0; key < kKeys; ++key) {
    ASSERT_EQ(out[key * kDim], static_cast<float>(want[key])) << "key " << key;
  }
  const StoreStats stats = store->Stats();
  EXPECT_GT(stats.placed_keys + stats.stale_places, 0U);
  EXPECT_TRUE(store->CheckIntegrity().ok());
}

}  // namespace
}  // namespace embertide

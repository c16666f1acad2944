// DESIGN section 9, "equal": what is answered does not depend on where rows lie. Rows and bags of
// one key are equal bit for bit, pooled values within 1 ulp, whatever the tier, the number of
// devices, the order of requests in an execution, and keys that stand twice.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <numeric>
#include <thread>

#include "embertide/serving_store.h"
#include "store/lookup_scratch.h"
#include "store/test_rows.h"

namespace embertide {
namespace {

constexpr uint64_t kKeys = 7000;
constexpr size_t kSamples = 60;

struct Place {
  uint32_t devices;
  bool on_ssd;  // nearly all rows; else all in DDR
};

class EqualityTest : public ::testing::TestWithParam<Place> {
 protected:
  EqualityTest()
      : directory_(std::filesystem::temp_directory_path() /
                   ("embertide-equal-" + std::to_string(::getpid()))) {
    std::mt19937 random(4);
    for (uint32_t t = 0; t < tables_.size(); ++t) {
      for (uint64_t key = 0; key < kKeys; ++key) {
        if (key % 11 != 0) rows_[{t, key}] = RandomRow(tables_[t], &random);
      }
    }
    for (uint32_t t = 0; t < tables_.size(); ++t) {
      for (const Pooling pooling : {Pooling::kSum, Pooling::kMean}) {
        features_.push_back({t, pooling, stride_});
        stride_ += tables_[t].layout.dim();
      }
    }
    // Bags of none, one and several keys; in every third the first key stands again at its end.
    for (size_t bag = 0; bag < kSamples * features_.size(); ++bag) {
      const size_t begin = keys_.size();
      for (size_t n = random() % 6; n > 0; --n) {
        keys_.push_back(static_cast<int64_t>(random() % (kKeys + 100)));
      }
      if (bag % 3 == 0 && keys_.size() > begin) keys_.push_back(keys_[begin]);
      offsets_.push_back(static_cast<uint32_t>(keys_.size()));
    }
  }
  ~EqualityTest() override { std::filesystem::remove_all(directory_); }

  std::unique_ptr<ServingStore> Open(Place place) const {
    StoreOptions options;
    options.tables = tables_;
    options.devices = place.devices;
    options.ddr_budget_bytes = place.on_ssd ? place.devices * (5ULL << 18) : 64ULL << 20;
    options.ssd_budget_bytes = place.on_ssd ? 64ULL << 20 : 0;
    options.ssd_directory = directory_;
    auto store = std::move(*ServingStore::Open(options));
    for (uint32_t t = 0; t < tables_.size(); ++t) {
      for (uint32_t b = 0; b < tables_[t].buckets(); ++b) {
        const Status staged = store->StageRecords(1, t, b, BucketRecords(tables_, rows_, t, b));
        EXPECT_TRUE(staged.ok()) << staged.ToString();
      }
    }
    EXPECT_TRUE(store->Commit(1).ok());
    return store;
  }
  // The samples in this order, cut into requests of an execution.
  std::vector<float> Answer(const ServingStore& store, const std::vector<size_t>& order,
                            size_t requests) {
    std::vector<std::vector<int64_t>> keys(requests);
    std::vector<std::vector<uint32_t>> offsets(requests, {0});
    std::vector<std::vector<float>> weights(requests);
    std::vector<std::vector<float>> out(requests);
    std::vector<std::vector<uint8_t>> known(requests);  // of each key, whether it has a row
    const size_t bags = features_.size();
    for (size_t i = 0; i < order.size(); ++i) {
      const size_t r = i * requests / order.size();
      for (size_t bag = order[i] * bags; bag < (order[i] + 1) * bags; ++bag) {
        keys[r].insert(keys[r].end(), keys_.begin() + offsets_[bag],
                       keys_.begin() + offsets_[bag + 1]);
        if (!weights_.empty()) {
          weights[r].insert(weights[r].end(), weights_.begin() + offsets_[bag],
                            weights_.begin() + offsets_[bag + 1]);
        }
        offsets[r].push_back(static_cast<uint32_t>(keys[r].size()));
        for (size_t k = known[r].size(); k < keys[r].size(); ++k) {
          const uint64_t key = static_cast<uint64_t>(keys[r][k]);
          known[r].push_back(rows_.contains({features_[bag % bags].table, key}) ? 1 : 0);
        }
      }
      out[r].resize(out[r].size() + stride_, -7.0F);
    }
    std::vector<KeyBags> asked;
    std::vector<std::vector<uint8_t>> sources(requests);
    for (size_t r = 0; r < requests; ++r) {
      asked.push_back({keys[r], {}, out[r].data(), stride_});
      if (!keys_alone_) asked.back().offsets = offsets[r];
      if (!weights_.empty()) asked.back().weights = weights[r].data();
      sources[r].resize(keys[r].size());
      asked.back().source = sources[r].data();
    }
    const auto view = store.PinNewest();
    EXPECT_TRUE(BagReader(view.value()).Lookup(features_, asked, {}).ok());
    for (size_t r = 0; r < requests; ++r) {
      for (uint8_t& each : sources[r]) each = each != static_cast<uint8_t>(Source::kDefault);
      EXPECT_EQ(sources[r], known[r]) << "of request " << r;
    }
    std::vector<float> answer(order.size() * stride_);
    size_t i = 0;
    for (const std::vector<float>& part : out) {
      for (size_t at = 0; at < part.size(); at += stride_, ++i) {
        std::copy_n(&part[at], stride_, &answer[order[i] * stride_]);
      }
    }
    return answer;
  }
  // A lookup for each feature and copy of the samples, all asked for at once.
  std::vector<std::vector<float>> AnswerShared(const ServingStore& store, uint32_t threads,
                                               size_t copies) {
    const size_t bags = features_.size();
    std::vector<std::vector<int64_t>> keys(bags);
    std::vector<std::vector<uint32_t>> offsets(bags, {0});
    for (size_t bag = 0; bag + 1 < offsets_.size(); ++bag) {
      auto& mine = keys[bag % bags];
      mine.insert(mine.end(), keys_.begin() + offsets_[bag], keys_.begin() + offsets_[bag + 1]);
      offsets[bag % bags].push_back(static_cast<uint32_t>(mine.size()));
    }
    std::vector<std::vector<float>> answers(copies, std::vector<float>(kSamples * stride_, -7.0F));
    std::vector<LookupRequest> asked;
    for (std::vector<float>& answer : answers) {
      for (size_t f = 0; f < bags; ++f) {
        const auto& [table, pooling, column] = features_[f];
        asked.push_back(
            {table, keys[f], pooling, offsets[f], answer.data() + column, stride_, nullptr});
      }
    }
    const ReadView view = std::move(*store.PinNewest());
    EXPECT_TRUE(view.Lookup(asked, threads).ok());
    return answers;
  }
  // Bits for bags of one key or none, 1 ulp for the others.
  void ExpectEqual(const std::vector<float>& got, const std::vector<float>& want) const {
    for (size_t bag = 0; bag + 1 < offsets_.size(); ++bag) {
      const BagFeature& feature = features_[bag % features_.size()];
      const size_t at = bag / features_.size() * stride_ + feature.column;
      for (uint32_t d = 0; d < tables_[feature.table].layout.dim(); ++d) {
        const float g = got[at + d];
        const float w = want[at + d];
        if (offsets_[bag + 1] - offsets_[bag] < 2) {
          ASSERT_EQ(std::bit_cast<uint32_t>(g), std::bit_cast<uint32_t>(w)) << "bag " << bag;
        } else {
          ASSERT_TRUE(g == w || g == std::nextafter(w, g))
              << "bag " << bag << ": " << g << ", " << w;
        }
      }
    }
  }
  // From the rows alone, in fp64.
  std::vector<float> Reference() const {
    std::vector<float> answer((offsets_.size() - 1) / features_.size() * stride_);
    for (size_t bag = 0; bag + 1 < offsets_.size(); ++bag) {
      const BagFeature& feature = features_[bag % features_.size()];
      const TableConfig& table = tables_[feature.table];
      std::vector<double> sums(table.layout.dim(), 0.0);
      for (uint32_t k = offsets_[bag]; k < offsets_[bag + 1]; ++k) {
        const auto row = rows_.find({feature.table, static_cast<uint64_t>(keys_[k])});
        const auto values = ValuesOf(table, row == rows_.end() ? nullptr : &row->second);
        const double weight = weights_.empty() ? 1.0 : double{weights_[k]};
        for (size_t d = 0; d < sums.size(); ++d) sums[d] += weight * values[d];
      }
      const uint32_t n = offsets_[bag + 1] - offsets_[bag];
      const double divisor = feature.pooling == Pooling::kMean && n > 0 ? n : 1;
      for (size_t d = 0; d < sums.size(); ++d) {
        answer[bag / features_.size() * stride_ + feature.column + d] =
            static_cast<float>(sums[d] / divisor);
      }
    }
    return answer;
  }

  const std::vector<TableConfig> tables_ = ServedTables();
  std::filesystem::path directory_;
  TestRows rows_;
  std::vector<BagFeature> features_;
  uint32_t stride_ = 0;
  std::vector<int64_t> keys_;
  std::vector<uint32_t> offsets_ = {0};
  std::vector<float> weights_;  // of keys_; empty: none
  bool keys_alone_ = false;     // a key a bag: offsets are left out
};

// A client may send one bag with all the keys of a request.
TEST_P(EqualityTest, OfLargeBagsInBoundedMemory) {
  const auto store = Open(GetParam());
  std::mt19937 random(8);
  keys_.clear();
  offsets_ = {0};
  for (size_t bag = 0; bag < 3 * features_.size(); ++bag) {
    // The second sample is too large for a chunk, those beside it are not.
    for (size_t n = bag / features_.size() == 1 ? 9000 + bag : bag % 4; n > 0; --n) {
      keys_.push_back(static_cast<int64_t>(random() % (kKeys + 100)));
      weights_.push_back(static_cast<float>(random() % 16) / 8);
    }
    offsets_.push_back(static_cast<uint32_t>(keys_.size()));
  }
  std::vector<size_t> order(3);
  std::iota(order.begin(), order.end(), 0);
  // A thread of its own: what it keeps is of these lookups alone.
  std::thread([&] {
    ASSERT_NO_FATAL_FAILURE(ExpectEqual(Answer(*store, order, 1), Reference())) << "weighed";
    weights_.clear();
    ASSERT_NO_FATAL_FAILURE(ExpectEqual(Answer(*store, order, 1), Reference()));
    // 4,096 keys, each with a row of up to 2 KiB where rows lie on the SSD.
    EXPECT_LT(LookupScratchBytes(), 10U << 20);
  }).join();
}

// Requests without offsets are answered in this way.
TEST_P(EqualityTest, OfBagsOfAKeyEach) {
  const auto store = Open(GetParam());
  std::mt19937 random(9);
  std::vector<float> weights;
  keys_.clear();
  offsets_ = {0};
  for (size_t bag = 0; bag < kSamples * features_.size(); ++bag) {
    keys_.push_back(static_cast<int64_t>(random() % (kKeys + 100)));
    weights.push_back(static_cast<float>(random() % 16) / 8);
    offsets_.push_back(static_cast<uint32_t>(keys_.size()));
  }
  std::vector<size_t> order(kSamples);
  std::iota(order.begin(), order.end(), 0);
  for (const bool alone : {true, false}) {
    keys_alone_ = alone;
    for (const size_t requests : {size_t{1}, size_t{7}, kSamples}) {
      weights_ = weights;
      ASSERT_NO_FATAL_FAILURE(ExpectEqual(Answer(*store, order, requests), Reference()));
      weights_.clear();
      ASSERT_NO_FATAL_FAILURE(ExpectEqual(Answer(*store, order, requests), Reference()));
    }
  }
}

// The first request of a thread has no key at all.
TEST_P(EqualityTest, OfEmptyBagsAlone) {
  const auto store = Open(GetParam());
  keys_.clear();
  weights_.clear();
  offsets_.assign(2 * features_.size() + 1, 0);
  std::thread([&] {
    ASSERT_NO_FATAL_FAILURE(ExpectEqual(Answer(*store, {0, 1}, 1), Reference()));
  }).join();
}

TEST_P(EqualityTest, OfAnswersWhateverThePlaceAndTheOrder) {
  const auto store = Open(GetParam());
  const std::vector<float> want = Reference();
  std::vector<size_t> order(kSamples);
  std::iota(order.begin(), order.end(), 0);
  std::mt19937 random(6);
  for (const size_t requests : {size_t{1}, size_t{7}, kSamples}) {
    ASSERT_NO_FATAL_FAILURE(ExpectEqual(Answer(*store, order, requests), want)) << requests;
    std::shuffle(order.begin(), order.end(), random);
    store->Maintain();  // rows that were read come into DDR, others go
  }
  const StoreStats stats = store->Stats();
  const uint64_t ssd = stats.hits[static_cast<size_t>(Source::kSsd)];
  const uint64_t ddr = stats.hits[static_cast<size_t>(Source::kDdr)];
  if (GetParam().on_ssd) {
    EXPECT_GT(2 * ssd, ddr);  // what was read once may have come into DDR
  } else {
    EXPECT_EQ(ssd, 0U);
  }
}

TEST_P(EqualityTest, OfWeighedAnswersWhateverThePlaceAndTheForm) {
  // One more sample, of bags that are pooled in several goes.
  std::mt19937 random(8);
  for (size_t bag = 0; bag < features_.size(); ++bag) {
    for (int n = 0; n < 150; ++n) keys_.push_back(static_cast<int64_t>(random() % (kKeys + 100)));
    offsets_.push_back(static_cast<uint32_t>(keys_.size()));
  }
  std::normal_distribution<float> normal;
  for (size_t k = 0; k < keys_.size(); ++k) weights_.push_back(normal(random));
  const auto store = Open(GetParam());
  std::vector<size_t> order(kSamples + 1);
  std::iota(order.begin(), order.end(), 0);
  for (const size_t requests : {size_t{1}, size_t{7}}) {
    ASSERT_NO_FATAL_FAILURE(ExpectEqual(Answer(*store, order, requests), Reference()));
  }
  // One key a bag, by places and without; more than are looked up at once.
  const size_t samples = 4000 / features_.size();
  const size_t bags = samples * features_.size();
  std::vector<uint32_t> offsets(bags + 1);
  std::iota(offsets.begin(), offsets.end(), 0);
  while (keys_.size() < bags) {
    keys_.push_back(keys_[random() % keys_.size()]);
    weights_.push_back(normal(random));
  }
  std::array<std::vector<float>, 2> out;
  const auto view = store->PinNewest();
  for (const bool jagged : {false, true}) {
    out[jagged].resize(samples * stride_, -7.0F);
    KeyBags asked{std::span(keys_).first(bags), {}, out[jagged].data(), stride_};
    if (jagged) asked.offsets = offsets;
    asked.weights = weights_.data();
    ASSERT_TRUE(BagReader(view.value()).Lookup(features_, {&asked, 1}, {}).ok());
  }
  EXPECT_EQ(out[0], out[1]);
}

TEST_P(EqualityTest, OfLookupsSharedByThreads) {
  const auto store = Open(GetParam());
  const std::vector<float> want = Reference();
  for (const uint32_t threads : {1U, 3U}) {
    for (const std::vector<float>& answer : AnswerShared(*store, threads, 20)) {
      ASSERT_NO_FATAL_FAILURE(ExpectEqual(answer, want)) << threads << " threads";
    }
  }
  const ReadView view = std::move(*store->PinNewest());
  LookupRequest wrong;
  wrong.table = static_cast<uint32_t>(tables_.size());
  EXPECT_EQ(view.Lookup({&wrong, 1}, 1).code(), Code::kInvalidArgument);
  EXPECT_EQ(view.Lookup({}, 0).code(), Code::kInvalidArgument);
  EXPECT_EQ(view.Lookup({}, kMaxStepThreads + 1).code(), Code::kInvalidArgument);
}

// How far a row may be from what was encoded follows from the format: half of its last place (10, 7
// bits behind the point), and of int8's 127 steps to the row's largest value.
TEST(DTypeToleranceTest, RowsAreWithinHalfAStepOfWhatWasEncoded) {
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  for (const TableConfig& table : TestTables()) {
    const RowLayout& layout = table.layout;
    std::vector<float> values(layout.dim());
    float largest = 0;
    for (float& value : values) largest = std::max(largest, std::fabs(value = normal(random)));
    TestRow row{layout.full_mask(),
                std::vector<std::byte>(layout.PayloadBytes(layout.full_mask()))};
    EncodePayload(layout, row.live, values.data(), row.payload.data());
    const std::vector<float> got = ValuesOf(table, &row);
    double worst = 0;  // of the half steps
    for (uint32_t d = 0; d < layout.dim(); ++d) {
      const int exponent = std::ilogb(values[d]);
      double half = 0;
      if (layout.dtype == DType::kFp16) half = std::ldexp(1.0, std::max(exponent, -14) - 11);
      if (layout.dtype == DType::kBf16) half = std::ldexp(1.0, exponent - 8);
      // The scale is itself rounded to fp32.
      if (layout.dtype == DType::kInt8) half = largest / 127 / 2 * (1 + 1e-5);
      const double error = std::fabs(double{got[d]} - values[d]);
      ASSERT_LE(error, half) << table.name << ": " << values[d];
      if (half > 0) worst = std::max(worst, error / half);
    }
    // The bound is one that is nearly reached.
    EXPECT_GT(worst, layout.dtype == DType::kFp32 ? -1 : 0.9) << table.name;
  }
}

INSTANTIATE_TEST_SUITE_P(Places, EqualityTest,
                         ::testing::Values(Place{1, false}, Place{1, true}, Place{2, true},
                                           Place{3, true}, Place{5, true}, Place{5, false}),
                         [](const auto& info) {
                           return std::to_string(info.param.devices) +
                                  (info.param.on_ssd ? "Ssd" : "Ddr");
                         });

}  // namespace
}  // namespace embertide

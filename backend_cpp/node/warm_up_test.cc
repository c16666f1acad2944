// A node that starts again finds the rows that it was asked for in DDR.
#include "node/warm_up.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <mutex>

#include "node/test_ssd_node.h"

namespace embertide {
namespace {

class WarmUpTest : public SsdNodeTest {
 protected:
  static constexpr size_t kAsked = 2000;
  static constexpr size_t kARequest = 50;

  WarmUpTest() : SsdNodeTest(std::chrono::seconds(120)) {
    options_.ssd_seal_interval = {};
    options_.warm_up_file = directory_ / "sample.keys";
    options_.log = [this](const std::string& line) {
      const std::lock_guard lock(log_mutex_);
      log_.push_back(line);
    };
    model_.WriteSnapshot({1, 1}, All());
    // Spread over all of them, so that a node which starts has many of them on the SSD.
    for (size_t n = 0; n < kAsked; ++n) keys_.push_back(static_cast<int64_t>(n * 29 % kKeys));
  }
  // The node goes first: it logs to members of this.
  ~WarmUpTest() override { node_.reset(); }

  // Asks for the keys as requests do; returns how many were read from the SSD.
  uint64_t Ask() {
    const std::array features = {BagFeature{0, Pooling::kSum, 0}};
    uint64_t from_ssd = 0;
    for (size_t first = 0; first < kAsked; first += kARequest) {
      const auto pinned = node_->Pin();
      EXPECT_TRUE(pinned.ok());
      std::vector<float> out(kARequest * kDim);
      std::vector<SourceCounts> counts(1);
      const KeyBags bags{.keys = std::span(keys_).subspan(first, kARequest),
                         .offsets = {},
                         .out = out.data(),
                         .out_stride = kDim};
      EXPECT_TRUE(BagReader(pinned.value().rows).Lookup(features, {&bags, 1}, counts).ok());
      for (size_t k = 0; k < kARequest; ++k) {
        EXPECT_EQ(out[k * kDim], static_cast<float>(bags.keys[k] % 100));
      }
      from_ssd += counts[0][static_cast<size_t>(Source::kSsd)];
      // One in sixteen is taken.
      for (uint64_t n = 0; n < KeySample::kOneIn; ++n) node_->NoteLookups(features, {&bags, 1});
    }
    return from_ssd;
  }
  bool IsLogged(const std::string& text) const {
    const std::lock_guard lock(log_mutex_);
    return std::ranges::any_of(
        log_, [&](const std::string& line) { return line.find(text) != std::string::npos; });
  }

  std::vector<int64_t> keys_;
  mutable std::mutex log_mutex_;
  std::vector<std::string> log_;
};

TEST_F(WarmUpTest, RowsThatWereAskedForAreInDdrAfterAStart) {
  Open();
  const uint64_t cold = Ask();
  ASSERT_GT(cold, kAsked / 4) << "the test means nothing where DDR has them by chance";
  Open();  // nothing was kept: 0 bytes is the default
  EXPECT_GT(Ask(), kAsked / 4);
  EXPECT_FALSE(std::filesystem::exists(options_.warm_up_file));
  EXPECT_EQ(node_->warm_up_stats().sampled_bytes, 0U);

  options_.warm_up_bytes = 1 << 20;
  Open();
  EXPECT_EQ(node_->warm_up_stats().lookups, 0U) << "there is no file yet";
  Ask();
  EXPECT_EQ(node_->warm_up_stats().sampled_lookups, kAsked / kARequest);
  Open();
  const WarmUpStats stats = node_->warm_up_stats();
  EXPECT_EQ(stats.lookups, kAsked / kARequest);
  EXPECT_GT(stats.first_from_ssd, kAsked / 4);
  EXPECT_LE(stats.last_from_ssd, kAsked / 100);
  EXPECT_LE(Ask(), kAsked / 100);
}

TEST_F(WarmUpTest, TheSampleIsForItsOwnerAlone) {
  options_.warm_up_bytes = 1 << 20;
  Open();
  Ask();
  node_.reset();
  struct stat found{};
  ASSERT_EQ(::stat(options_.warm_up_file.c_str(), &found), 0);
  EXPECT_EQ(found.st_mode & 0777, 0600U);
}

TEST_F(WarmUpTest, ANodeThatIsHardlyAskedKeepsTheSampleOfBefore) {
  options_.warm_up_bytes = 1 << 20;
  Open();
  Ask();
  for (int start = 0; start < 3; ++start) {
    Open();
    EXPECT_EQ(node_->warm_up_stats().lookups, kAsked / kARequest);
  }
}

TEST_F(WarmUpTest, AFileThatIsDamagedIsSaidAndPassedOver) {
  options_.warm_up_bytes = 1 << 20;
  std::filesystem::create_directories(directory_);
  std::ofstream(options_.warm_up_file) << "not a sample of keys";
  Open();
  EXPECT_EQ(node_->warm_up_stats().failed_files, 1U);
  EXPECT_EQ(node_->warm_up_stats().lookups, 0U);
  EXPECT_TRUE(IsLogged("sample.keys is passed over"));
  Ask();
  Open();
  EXPECT_EQ(node_->warm_up_stats().failed_files, 0U);
  EXPECT_EQ(node_->warm_up_stats().lookups, kAsked / kARequest);
}

TEST_F(WarmUpTest, AFolderThatCannotBeWrittenIsSaidAndTheNodeAnswers) {
  options_.warm_up_bytes = 1 << 20;
  std::filesystem::create_directories(directory_);
  std::ofstream(directory_ / "file") << "no folder";
  options_.warm_up_file = directory_ / "file" / "sample.keys";
  Open();
  Ask();
  node_.reset();
  EXPECT_TRUE(IsLogged("file"));
}

}  // namespace
}  // namespace embertide

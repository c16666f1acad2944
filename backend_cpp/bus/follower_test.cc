// Follower: whole versions, in order, whatever is missing, harmed, repeated or of an old publisher.
#include "embertide/follower.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <new>

#include "base/background_task.h"
#include "base/task_faults.h"
#include "bus/fake_redis.h"
#include "bus/promotion.h"
#include "bus/test_publication.h"

namespace embertide {
namespace {

using Log = std::vector<std::string>;

// A node that keeps the last records of each bucket and notes what it is told.
class FakeSink : public VersionSink {
 public:
  explicit FakeSink(VersionId newest) : newest_(newest) {}

  uint64_t newest_number() const override { return newest().number; }
  uint64_t newest_lineage() const override { return newest().lineage; }
  uint64_t schema_id() const override { return 1; }
  Status Stage(uint64_t version, uint32_t table_id, uint32_t bucket,
               const std::string& records) override {
    const std::lock_guard lock(mutex_);
    if (full_) return {Code::kResourceExhausted, "no room"};
    log_.push_back("stage " + std::to_string(version) + " " + std::to_string(table_id) + ":" +
                   std::to_string(bucket) + " " + records);
    return Status::Ok();
  }
  Status Commit(const v1::GlobalCommit& commit, const std::string& tensors) override {
    return Reach(IdOf(commit.version()), "commit " + FolderName(IdOf(commit.version())) +
                                             (tensors.empty() ? "" : " " + tensors));
  }
  void DropStaged() override {
    const std::lock_guard lock(mutex_);
    while (!log_.empty() && log_.back().starts_with("stage")) log_.pop_back();
  }
  Status Load(const std::string& snapshot, const std::stop_token& stop) override {
    {
      std::unique_lock lock(mutex_);
      ++loads_;
      reached_.notify_all();
      if (lacks_) return {Code::kResourceExhausted, "no room for a snapshot"};
      if (slow_) {  // as one that takes a minute to read
        while (!stop.stop_requested()) reached_.wait_for(lock, std::chrono::milliseconds(1));
        return {Code::kUnavailable, "the node is ending"};
      }
    }
    const std::string name = std::filesystem::path(snapshot).filename().string();
    return Reach({std::stoull(name.substr(0, 12)), std::stoull(name.substr(13))}, "load " + name);
  }

  VersionId newest() const {
    const std::lock_guard lock(mutex_);
    return newest_;
  }
  bool WaitFor(VersionId id) {
    std::unique_lock lock(mutex_);
    return reached_.wait_for(lock, std::chrono::seconds(20), [&] { return newest_ == id; });
  }
  Log log() const {
    const std::lock_guard lock(mutex_);
    return log_;
  }
  bool MayFit() const override {
    const std::lock_guard lock(mutex_);
    return may_fit_;
  }
  size_t loads() const {
    const std::lock_guard lock(mutex_);
    return loads_;
  }
  void set_lacks(bool lacks, bool may_fit) {
    const std::lock_guard lock(mutex_);
    lacks_ = lacks;
    may_fit_ = may_fit;
  }
  void set_slow() {
    const std::lock_guard lock(mutex_);
    slow_ = true;
  }
  void set_full(bool full) {
    const std::lock_guard lock(mutex_);
    full_ = full;
  }

 private:
  Status Reach(VersionId id, const std::string& how) {
    const std::lock_guard lock(mutex_);
    EXPECT_GT(id.number, newest_.number) << "a version goes back";
    newest_ = id;
    log_.push_back(how);
    reached_.notify_all();
    return Status::Ok();
  }
  mutable std::mutex mutex_;
  std::condition_variable reached_;
  VersionId newest_;
  Log log_;
  bool full_ = false;
  bool lacks_ = false;
  bool may_fit_ = false;
  bool slow_ = false;
  size_t loads_ = 0;
};

std::string Commit(VersionId id) { return "commit " + FolderName(id); }

class FollowerTest : public ::testing::Test {
 protected:
  void Start(VersionId newest, const std::string& bus = "",
             std::chrono::milliseconds look_every = std::chrono::hours(1)) {
    sink_ = std::make_unique<FakeSink>(newest);
    StartOn(bus, look_every);
  }
  // With the sink that is there.
  void StartOn(const std::string& bus = "",
               std::chrono::milliseconds look_every = std::chrono::hours(1)) {
    FollowerOptions options{bus, publication_.path(),           "news",
                            "n", std::chrono::milliseconds(20), look_every};
    options.tasks = &board_;
    auto follower = Follower::Start(options, sink_.get());
    ASSERT_TRUE(follower.ok()) << follower.status().ToString();
    follower_ = std::move(*follower);
  }
  const FollowerStats& stats() const { return follower_->stats(); }
  // Versions `first` to `last` of a lineage, one bucket each, a chain from `first` - 1.
  void WriteChain(uint64_t first, uint64_t last, uint64_t lineage = 1) {
    for (uint64_t n = first; n <= last; ++n) {
      publication_.Write({n, lineage}, {n - 1, lineage}, {{0, 0, {"v" + std::to_string(n)}}});
    }
  }
  void Flip(const std::filesystem::path& path) {
    std::string bytes = TestPublication::Get(path);
    bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 1);
    TestPublication::Put(path, bytes);
  }
  static bool Eventually(const std::function<bool()>& condition) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!condition()) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::yield();
    }
    return true;
  }

  TestPublication publication_;
  TaskBoard board_;
  std::unique_ptr<FakeSink> sink_;
  std::unique_ptr<Follower> follower_;  // ends before what it feeds
};

// --- files ---------------------------------------------------------------------------------------

TEST_F(FollowerTest, CatchesUpFromFilesInOrder) {
  WriteChain(2, 4);
  Start({1, 1});
  ASSERT_TRUE(sink_->WaitFor({4, 1}));
  EXPECT_EQ(sink_->log(), Log({"stage 2 0:0 v2", Commit({2, 1}), "stage 3 0:0 v3", Commit({3, 1}),
                               "stage 4 0:0 v4", Commit({4, 1})}));
  WriteChain(5, 5);  // it looks again by itself
  ASSERT_TRUE(sink_->WaitFor({5, 1}));
  EXPECT_TRUE(Eventually([&] { return stats().catch_ups == 4; }));
  EXPECT_EQ(stats().versions, 4U);
  EXPECT_EQ(stats().rows, 4U);
}

TEST_F(FollowerTest, TakesASnapshotWhereTheDeltasArePruned) {
  publication_.WriteSnapshot({5, 1});
  publication_.WriteSnapshot({8, 1});
  WriteChain(9, 10);
  Start({1, 1});
  ASSERT_TRUE(sink_->WaitFor({10, 1}));
  EXPECT_EQ(sink_->log(), Log({"load " + FolderName({8, 1}), "stage 9 0:0 v9", Commit({9, 1}),
                               "stage 10 0:0 v10", Commit({10, 1})}));
}

TEST_F(FollowerTest, TakesASnapshotThatIsNewerThanAllDeltas) {
  WriteChain(2, 3);
  publication_.WriteSnapshot({6, 1});
  Start({1, 1});
  ASSERT_TRUE(sink_->WaitFor({6, 1}));
  EXPECT_EQ(sink_->log(), Log({"load " + FolderName({6, 1})}));
}

TEST_F(FollowerTest, LeavesASnapshotAloneThatTheDeltasReach) {
  WriteChain(2, 5);
  publication_.WriteSnapshot({3, 1});
  publication_.WriteSnapshot({5, 1});
  Start({1, 1});
  ASSERT_TRUE(sink_->WaitFor({5, 1}));
  EXPECT_EQ(sink_->log().size(), 8U);
}

TEST_F(FollowerTest, SaysThatNothingLeadsToTheNewestUntilSomethingDoes) {
  WriteChain(5, 6);
  Start({1, 1});
  ASSERT_TRUE(Eventually([&] { return !follower_->last_error().empty(); }));
  EXPECT_NE(follower_->last_error().find("no chain of delta files leads from version 1 of lineage 1"
                                         " to version 6 of lineage 1"),
            std::string::npos);
  publication_.WriteSnapshot({5, 1});
  ASSERT_TRUE(sink_->WaitFor({6, 1}));
  ASSERT_TRUE(Eventually([&] { return follower_->last_error().empty(); }));
}

TEST_F(FollowerTest, TakesNothingOfAVersionWhoseCommitIsNotThere) {
  WriteChain(2, 3);
  std::filesystem::remove(publication_.Delta({3, 1}) / "commit.pb");
  Start({1, 1});
  ASSERT_TRUE(sink_->WaitFor({2, 1}));
  WriteChain(3, 3);
  ASSERT_TRUE(sink_->WaitFor({3, 1}));
  EXPECT_EQ(stats().corrupt, 0U);
}

TEST_F(FollowerTest, GoesFromOneLineageToTheNext) {
  WriteChain(2, 3);
  publication_.Write({4, 2}, {3, 1}, {{0, 0, {"new"}}});
  Start({1, 1});
  ASSERT_TRUE(sink_->WaitFor({4, 2}));
}

TEST_F(FollowerTest, FilesOfASupersededPublisherLeadNowhere) {
  WriteChain(2, 2);
  publication_.Write({3, 2}, {2, 1}, {{0, 0, {"new"}}});
  WriteChain(3, 5);  // of lineage 1, after the takeover: larger numbers, and a snapshot
  publication_.WriteSnapshot({5, 1});
  publication_.WriteSnapshot({3, 2});
  Start({2, 1});
  ASSERT_TRUE(sink_->WaitFor({3, 2}));
  publication_.Write({4, 2}, {3, 2}, {{0, 0, {"newer"}}});
  ASSERT_TRUE(sink_->WaitFor({4, 2}));
  EXPECT_EQ(sink_->log(),
            Log({"stage 3 0:0 new", Commit({3, 2}), "stage 4 0:0 newer", Commit({4, 2})}));
  const auto snapshots = SnapshotsToTry(publication_.path(), Promotion());
  ASSERT_TRUE(snapshots.ok());
  EXPECT_EQ(snapshots.value().front(), publication_.path() + "/snapshots/" + FolderName({3, 2}));
}

TEST_F(FollowerTest, SnapshotsBeforeTheFirstVersionAreLeftAlone) {
  for (const uint64_t number : {2, 5, 9}) publication_.WriteSnapshot({number, 1});
  const auto path = [&](uint64_t number) {
    return publication_.path() + "/snapshots/" + FolderName({number, 1});
  };
  const auto tried = [&](uint64_t first) {
    return SnapshotsToTry(publication_.path(), Promotion(), first);
  };
  EXPECT_EQ(tried(0).value(), (std::vector{path(9), path(5), path(2)}));
  EXPECT_EQ(tried(5).value(), (std::vector{path(9), path(5)}));
  EXPECT_EQ(tried(10).status().code(), Code::kNotFound);
}

TEST_F(FollowerTest, AHarmedDeltaFileIsPassedByTheNextSnapshot) {
  WriteChain(2, 7);
  publication_.Write({4, 1}, {3, 1}, {{0, 0, {"v4"}}, {0, 1, {"harmed"}}});
  Flip(publication_.Delta({4, 1}) / "p-1.delta");
  Start({1, 1});
  ASSERT_TRUE(sink_->WaitFor({3, 1}));
  ASSERT_TRUE(Eventually([&] { return stats().corrupt >= 1; }));
  EXPECT_EQ(sink_->newest(), VersionId({3, 1}));
  publication_.WriteSnapshot({6, 1});
  ASSERT_TRUE(sink_->WaitFor({7, 1}));
  // Nothing of version 4 was staged, not even the file that is whole.
  EXPECT_EQ(sink_->log(), Log({"stage 2 0:0 v2", Commit({2, 1}), "stage 3 0:0 v3", Commit({3, 1}),
                               "load " + FolderName({6, 1}), "stage 7 0:0 v7", Commit({7, 1})}));
}

TEST_F(FollowerTest, AHarmedCommitHidesNothingBelowIt) {
  WriteChain(2, 5);
  Flip(publication_.Delta({4, 1}) / "commit.pb");
  Start({1, 1});
  ASSERT_TRUE(sink_->WaitFor({3, 1}));
  ASSERT_TRUE(Eventually([&] { return stats().corrupt >= 1; }));
  publication_.WriteSnapshot({4, 1});
  ASSERT_TRUE(sink_->WaitFor({5, 1}));
}

TEST_F(FollowerTest, HarmedTensorsAreFoundBeforeAnythingIsStaged) {
  TestVersion version = TestPublication::Make({2, 1}, {1, 1}, {{0, 0, {"v2"}}});
  v1::GlobalCommit* commit = version.file.mutable_commit();
  commit->set_dense_path("dense.safetensors");
  commit->set_dense_bytes(7);
  commit->set_dense_crc32c(CrcOf("tensors"));
  TestPublication::Put(publication_.Delta({2, 1}) / "dense.safetensors", "tensorz");
  publication_.Write(&version);
  Start({1, 1});
  ASSERT_TRUE(Eventually([&] { return stats().corrupt >= 1; }));
  EXPECT_EQ(sink_->log(), Log());
  TestPublication::Put(publication_.Delta({2, 1}) / "dense.safetensors", "tensors");
  ASSERT_TRUE(sink_->WaitFor({2, 1}));
  EXPECT_EQ(sink_->log().back(), Commit({2, 1}) + " tensors");
}

TEST_F(FollowerTest, AnotherSchemaIsNotTaken) {
  TestVersion version = TestPublication::Make({2, 1}, {1, 1}, {{0, 0, {"v2"}}});
  version.file.mutable_commit()->set_schema_id(2);
  publication_.Write(&version);
  Start({1, 1});
  ASSERT_TRUE(Eventually([&] { return stats().other_schema >= 1; }));
  EXPECT_EQ(sink_->log(), Log());
}

TEST_F(FollowerTest, AVersionThatFindsNoRoomIsCountedAndTriedAgain) {
  Start({1, 1});
  sink_->set_full(true);
  WriteChain(2, 2);
  ASSERT_TRUE(Eventually([&] { return stats().refused >= 1; }));
  EXPECT_EQ(sink_->newest(), VersionId({1, 1}));
  sink_->set_full(false);
  ASSERT_TRUE(sink_->WaitFor({2, 1}));
}

// A snapshot that does not fit is read once, and then again after ever longer times, until there is
// more room or another one.
TEST_F(FollowerTest, ASnapshotThatDoesNotFitIsNotReadOverAndOver) {
  publication_.WriteSnapshot({5, 1});
  sink_ = std::make_unique<FakeSink>(VersionId{1, 1});
  sink_->set_lacks(true, false);
  StartOn();
  ASSERT_TRUE(Eventually([&] { return stats().backed_off >= 20; }));
  EXPECT_LE(sink_->loads(), 8U);  // 20 ms, 40 ms, ...; looks are 20 ms apart
  EXPECT_NE(follower_->last_error().find("no room for a snapshot"), std::string::npos);
  sink_->set_lacks(false, true);
  ASSERT_TRUE(sink_->WaitFor({5, 1}));
  sink_->set_lacks(true, false);
  publication_.WriteSnapshot({7, 1});
  const size_t loads = sink_->loads();
  ASSERT_TRUE(Eventually([&] { return sink_->loads() > loads; }));
  sink_->set_lacks(false, false);
  publication_.WriteSnapshot({9, 1});  // another one waits for nothing
  ASSERT_TRUE(sink_->WaitFor({9, 1}));
}

TEST_F(FollowerTest, ACatchUpEndsWhenTheNodeDoes) {
  publication_.WriteSnapshot({5, 1});
  sink_ = std::make_unique<FakeSink>(VersionId{1, 1});
  sink_->set_slow();
  StartOn();
  ASSERT_TRUE(Eventually([&] { return sink_->loads() == 1; }));
  const auto begun = std::chrono::steady_clock::now();
  follower_.reset();
  EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(2));
}

// Whatever a round throws, versions go on once it is over.
TEST_F(FollowerTest, AnExceptionIsReportedAndTheFollowerGoesOn) {
  sink_ = std::make_unique<FakeSink>(VersionId{1, 1});
  static std::atomic<bool> fails{true};
  SetFaultHook([](const char* task, FaultPoint point) {
    if (fails && point == FaultPoint::kRound && std::string(task) == "follower") {
      throw std::bad_alloc();
    }
  });
  StartOn();
  const auto health = [&] { return board_.Tasks().at(0); };
  ASSERT_TRUE(Eventually([&] { return health().failures >= 2; }));
  EXPECT_EQ(health().last_error, "out of memory");
  WriteChain(2, 3);
  fails = false;
  ASSERT_TRUE(sink_->WaitFor({3, 1}));
  ASSERT_TRUE(Eventually([&] { return !health().failing; }));
  SetFaultHook(nullptr);
}

TEST_F(FollowerTest, ABadUrlIsRefused) {
  FakeSink sink({1, 1});
  const auto follower =
      Follower::Start({"redis://host:0", publication_.path(), "news", "n"}, &sink);
  ASSERT_FALSE(follower.ok());
  EXPECT_EQ(follower.status().code(), Code::kInvalidArgument);
}

// --- the bus -------------------------------------------------------------------------------------

class FollowerBusTest : public FollowerTest {
 protected:
  static std::string Stream(const std::string& part, const std::string& model = "news") {
    return "e:{" + model + ":" + part + "}:";
  }
  // As the entry number `place` of its version.
  void SendBatch(const v1::RowBatch& batch, uint64_t place) {
    redis_.Append(Stream(std::to_string(batch.bucket() % 64)) + std::to_string(batch.table_id()) +
                      ":" + std::to_string(batch.bucket()),
                  {batch.version(), (batch.lineage() << 32) + place}, batch.SerializeAsString());
  }
  void SendRows(const TestVersion& version) {
    for (const auto& batches : version.batches) {
      for (size_t i = 0; i < batches.size(); ++i) SendBatch(batches[i], i);
    }
  }
  void SendPartitions(const TestVersion& version) {
    for (const v1::PartitionCommit& partition : version.file.partitions()) {
      redis_.Append(Stream(std::to_string(partition.partition())) + "commit",
                    {partition.version(), partition.lineage()}, partition.SerializeAsString());
    }
  }
  void SendCommit(const TestVersion& version, const std::string& model = "news") {
    const VersionId id = IdOf(version.file.commit().version());
    redis_.Append(Stream("commit", model) + "log", {id.number, id.lineage},
                  version.file.commit().SerializeAsString());
  }
  void Send(const TestVersion& version) {
    SendRows(version);
    SendPartitions(version);
    SendCommit(version);
  }
  // Version `n` after `n` - 1, three batches of one bucket and one of another.
  TestVersion Write(uint64_t n, VersionId previous = {}, uint64_t lineage = 1) {
    if (previous.number == 0) previous = {n - 1, lineage};
    const std::string v = "v" + std::to_string(n);
    TestVersion version = TestPublication::Make(
        {n, lineage}, previous, {{0, 0, {v + "a", v + "b", v + "c"}}, {1, 65, {v + "d"}}}, 3 * n);
    version.file.mutable_commit()->set_committed_ms(committed_ms_);
    publication_.Write(&version);
    return version;
  }
  void RemoveFiles() { std::filesystem::remove_all(publication_.path()); }
  static Log Whole(uint64_t n, uint64_t lineage = 1) {
    const std::string v = std::to_string(n);
    return {"stage " + v + " 0:0 v" + v + "a", "stage " + v + " 0:0 v" + v + "b",
            "stage " + v + " 0:0 v" + v + "c", "stage " + v + " 1:65 v" + v + "d",
            Commit({n, lineage})};
  }
  static Log Whole(const std::vector<uint64_t>& numbers) {
    Log log;
    for (const uint64_t n : numbers) {
      for (const std::string& line : Whole(n)) log.push_back(line);
    }
    return log;
  }
  int64_t committed_ms_ = int64_t{1} << 50;  // to come: on time
  FakeRedis redis_;  // outlives the follower, which the base ends last: see TearDown
  void TearDown() override { follower_.reset(); }
};

TEST_F(FollowerBusTest, TakesVersionsFromTheBusAlone) {
  TestVersion second = Write(2);
  second.file.mutable_commit()->set_dense("tensors");
  second.file.mutable_commit()->set_dense_crc32c(CrcOf("tensors"));
  const TestVersion third = Write(3);
  RemoveFiles();
  Send(second);
  Start({1, 1}, redis_.url());
  Send(third);
  ASSERT_TRUE(sink_->WaitFor({3, 1}));
  Log wanted = Whole({2, 3});
  wanted[4] += " tensors";
  EXPECT_EQ(sink_->log(), wanted);
  EXPECT_EQ(stats().gaps + stats().repeats + stats().corrupt + stats().catch_ups, 0U);
  EXPECT_TRUE(Eventually([&] { return stats().versions == 2; }));
}

// A node that was killed and whose files end early was ready, and answered at a version before the
// one that it had answered at.
TEST_F(FollowerBusTest, ANodeHasCaughtUpWhenItHasWhatTheBusHad) {
  WriteChain(2, 3);
  Send(Write(4));
  Send(Write(5));
  Flip(publication_.Delta({4, 1}) / "commit.pb");
  Start({1, 1}, redis_.url());
  ASSERT_TRUE(Eventually([&] { return stats().caught_up.load(); }));
  EXPECT_EQ(sink_->newest(), (VersionId{5, 1}));
}

TEST_F(FollowerBusTest, ANodeHasCaughtUpWithTheFilesWhereTheBusIsAway) {
  WriteChain(2, 3);
  Start({1, 1}, "redis://127.0.0.1:1/0");
  ASSERT_TRUE(Eventually([&] { return stats().caught_up.load(); }));
  EXPECT_EQ(sink_->newest(), (VersionId{3, 1}));
}

// Behind a link on which a version takes longer than the next one needs to come, a node fell back
// until it had no version in common with its peers.
TEST_F(FollowerBusTest, AVersionThatIsLateIsTakenFromItsFile) {
  Start({1, 1}, redis_.url());
  ASSERT_TRUE(Eventually([&] { return stats().caught_up.load(); }));
  std::this_thread::sleep_for(std::chrono::milliseconds(40));  // past `retry_every`
  committed_ms_ = 1;
  Send(Write(2));
  ASSERT_TRUE(sink_->WaitFor({2, 1}));
  EXPECT_TRUE(Eventually([&] { return stats().catch_ups == 1; }));
}

// Before keys carried the model's name, every model on a Redis read every other's commits.
TEST_F(FollowerBusTest, AnotherModelOnTheSameRedisIsNotRead) {
  TestVersion other = TestPublication::Make({2, 1}, {1, 1}, {});
  other.file.mutable_commit()->set_schema_id(2);
  SendCommit(other, "shop");
  const TestVersion second = Write(2);
  RemoveFiles();
  Send(second);
  Start({1, 1}, redis_.url());
  ASSERT_TRUE(sink_->WaitFor({2, 1}));
  EXPECT_EQ(sink_->log(), Whole({2}));
  EXPECT_EQ(stats().other_schema, 0U);
}

// Before ids named versions, a node read all that a stream still held, 64 entries a time, to find
// what it wanted: XRANGE asked for 64 entries of each stream.
TEST_F(FollowerBusTest, OnlyWhatACommitNamesIsRead) {
  for (uint64_t n = 2; n <= 40; ++n) Send(Write(n));
  RemoveFiles();
  Start({38, 1}, redis_.url());
  ASSERT_TRUE(sink_->WaitFor({40, 1}));
  EXPECT_EQ(sink_->log(), Whole({39, 40}));
  EXPECT_EQ(stats().gaps + stats().repeats, 0U);
  Log ranges;
  for (const std::string& command : redis_.commands()) {
    if (command.starts_with("XRANGE")) ranges.push_back(command);
  }
  const std::string low = std::to_string(uint64_t{1} << 32);
  EXPECT_EQ(ranges.size(), 8U);  // of each version two partition commits, two buckets
  EXPECT_EQ(ranges[0], "XRANGE e:{news:0}:commit 39-1 39-1 COUNT 1");
  EXPECT_EQ(ranges[2], "XRANGE e:{news:0}:0:0 39-" + low + " 39-" +
                           std::to_string((uint64_t{1} << 32) + 2) + " COUNT 3");
  EXPECT_EQ(ranges[3], "XRANGE e:{news:1}:1:65 39-" + low + " 39-" + low + " COUNT 1");
}

TEST_F(FollowerBusTest, ABucketOfManyBatchesIsReadInPieces) {
  std::vector<std::string> records;
  for (int i = 0; i < 20; ++i) records.push_back("r" + std::to_string(i));
  const TestVersion version = publication_.Write({2, 1}, {1, 1}, {{0, 0, records}}, 7);
  RemoveFiles();
  Send(version);
  Start({1, 1}, redis_.url());
  ASSERT_TRUE(sink_->WaitFor({2, 1}));
  ASSERT_EQ(sink_->log().size(), 21U);
  for (size_t i = 0; i < 20; ++i) {
    EXPECT_EQ(sink_->log()[i], "stage 2 0:0 r" + std::to_string(i));
  }
}

// A commit that claims 2^32 - 1 batches asks Redis for a bounded number of them.
TEST_F(FollowerBusTest, BatchesThatAreNotThereAreNotAskedForWithoutEnd) {
  Start({1, 1}, redis_.url());
  ASSERT_TRUE(Eventually([&] { return stats().connected.load(); }));
  TestVersion version = TestPublication::Make({2, 1}, {1, 1}, {{0, 0, {"a"}}});
  v1::BucketSequence* bucket = version.file.mutable_partitions(0)->mutable_buckets(0);
  bucket->set_batches(UINT32_MAX);
  bucket->set_sequence(UINT32_MAX);
  v1::PartitionCommitRef* ref = version.file.mutable_commit()->add_partitions();
  ref->set_crc32c(CrcOf(version.file.partitions(0).SerializeAsString()));
  Send(version);
  ASSERT_TRUE(Eventually([&] { return stats().gaps >= 1; }));
  EXPECT_LT(redis_.commands().size(), 10'000U);
  Write(2);
  ASSERT_TRUE(sink_->WaitFor({2, 1}));
}

TEST_F(FollowerBusTest, OfAVersionThatFailsHalfwayNothingIsStaged) {
  Start({1, 1}, redis_.url());
  ASSERT_TRUE(Eventually([&] { return stats().connected.load(); }));
  const TestVersion version = Write(2);
  RemoveFiles();
  SendBatch(version.batches[0][0], 0);
  SendBatch(version.batches[0][2], 2);
  SendPartitions(version);
  SendCommit(version);
  ASSERT_TRUE(Eventually([&] { return stats().gaps >= 1; }));
  EXPECT_EQ(sink_->log(), Log());
  EXPECT_EQ(stats().rows, 0U);
  Send(version);
  ASSERT_TRUE(sink_->WaitFor({2, 1}));
  EXPECT_EQ(sink_->log(), Whole({2}));
}

// Before, the pause of an earlier shortage held up the first attempt of the next one: up to 5 s.
TEST_F(FollowerBusTest, AShortageOfRoomThatIsOverDoesNotSlowTheNextOne) {
  Start({1, 1}, redis_.url());
  sink_->set_full(true);
  Send(Write(2));
  ASSERT_TRUE(Eventually([&] { return stats().refused >= 6; }));  // 20 ms, 40 ms, ... apart
  sink_->set_full(false);
  ASSERT_TRUE(sink_->WaitFor({2, 1}));
  sink_->set_full(true);
  const uint64_t before = stats().refused;
  Send(Write(3));
  ASSERT_TRUE(Eventually([&] { return stats().refused > before; }));
  const auto begun = std::chrono::steady_clock::now();
  ASSERT_TRUE(Eventually([&] { return stats().refused >= before + 3; }));
  EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(1));  // 60 ms, not 4 s
  sink_->set_full(false);
  ASSERT_TRUE(sink_->WaitFor({3, 1}));
}

TEST_F(FollowerBusTest, RedisIsToldWhatIsApplied) {
  Start({1, 1}, redis_.url());
  Send(Write(2));
  const auto noted = [&] {
    const auto strings = redis_.strings();
    return strings.size() == 1 ? *strings.begin() : std::pair<const std::string, std::string>();
  };
  ASSERT_TRUE(Eventually([&] { return noted().second == "2"; }));
  EXPECT_TRUE(noted().first.starts_with("e:{news:commit}:node:n."));
  EXPECT_EQ(stats().unnoted, 0U);
  redis_.Refuse("NOPERM no");
  Send(Write(3));
  ASSERT_TRUE(Eventually([&] { return stats().unnoted >= 1; }));
  Send(Write(4));
  ASSERT_TRUE(sink_->WaitFor({4, 1}));
  EXPECT_EQ(stats().reconnects, 1U);
  EXPECT_EQ(sink_->log(), Whole({2, 3, 4}));
}

TEST_F(FollowerBusTest, RepeatedCommitsAreDroppedAndCounted) {
  const TestVersion second = Write(2);
  const TestVersion third = Write(3);
  RemoveFiles();
  Send(second);
  Send(third);
  Start({1, 1}, redis_.url());
  ASSERT_TRUE(sink_->WaitFor({3, 1}));
  redis_.Append(Stream("commit") + "log", {3, 9}, second.file.commit().SerializeAsString());
  ASSERT_TRUE(Eventually([&] { return stats().repeats == 1; }));
  EXPECT_EQ(sink_->log(), Whole({2, 3}));
  EXPECT_EQ(stats().gaps, 0U);
}

TEST_F(FollowerBusTest, WhatASupersededPublisherSendsIsDroppedAndCounted) {
  const TestVersion second = Write(2, {1, 1}, 2);
  const TestVersion late = Write(7, {1, 1});
  const TestVersion third = Write(8, {2, 2}, 2);
  RemoveFiles();
  Start({1, 1}, redis_.url());
  Send(second);
  ASSERT_TRUE(sink_->WaitFor({2, 2}));
  Send(late);
  Send(third);
  ASSERT_TRUE(sink_->WaitFor({8, 2}));
  Log wanted = Whole(2, 2);
  for (const std::string& line : Whole(8, 2)) wanted.push_back(line);
  EXPECT_EQ(sink_->log(), wanted);
  EXPECT_EQ(stats().stale_lineage, 1U);  // its rows are not even read
  EXPECT_EQ(stats().gaps, 0U);
}

TEST_F(FollowerBusTest, AGapIsClosedFromFiles) {
  const TestVersion second = Write(2);  // never sent
  Start({1, 1}, redis_.url());
  ASSERT_TRUE(sink_->WaitFor({2, 1}));
  const TestVersion third = Write(3);
  const TestVersion fourth = Write(4);
  Send(fourth);
  ASSERT_TRUE(sink_->WaitFor({4, 1}));
  Send(Write(5));
  ASSERT_TRUE(sink_->WaitFor({5, 1}));
  EXPECT_EQ(sink_->log(), Whole({2, 3, 4, 5}));
  EXPECT_EQ(stats().gaps, 1U);
  EXPECT_EQ(stats().catch_ups, 3U);
}

TEST_F(FollowerBusTest, AStreamThatLacksBatchesIsAGap) {
  Start({1, 1}, redis_.url());
  ASSERT_TRUE(Eventually([&] { return stats().connected.load(); }));
  // Nothing of a bucket; the first batch, one in the middle, the last; the partition's commit.
  for (uint64_t n = 2; n <= 6; ++n) {
    const TestVersion version = Write(n);
    for (uint64_t i = 0; i < 3; ++i) {
      if (n == 2 || i != n - 3) SendBatch(version.batches[0][i], i);
    }
    if (n != 2) SendBatch(version.batches[1][0], 0);
    if (n != 6) SendPartitions(version);
    SendCommit(version);
    ASSERT_TRUE(sink_->WaitFor({n, 1})) << n;
    ASSERT_TRUE(Eventually([&] { return stats().gaps == n - 1; })) << n;
  }
  EXPECT_EQ(sink_->log(), Whole({2, 3, 4, 5, 6}));
  Send(Write(7));
  ASSERT_TRUE(sink_->WaitFor({7, 1}));
  EXPECT_EQ(stats().gaps, 5U);
}

TEST_F(FollowerBusTest, WhatFailsItsProofIsFetchedFromFiles) {
  Start({1, 1}, redis_.url());
  ASSERT_TRUE(Eventually([&] { return stats().connected.load(); }));
  for (uint64_t n = 2; n <= 5; ++n) {
    TestVersion version = Write(n);
    if (n == 2) version.batches[0][1].set_records("v2B");
    if (n == 3) version.file.mutable_partitions(0)->set_delta_path("p-1.delta");
    if (n == 4) version.file.mutable_commit()->set_dense("tensors that no checksum is of");
    SendRows(version);
    SendPartitions(version);
    if (n == 5) redis_.Append(Stream("commit") + "log", {5, 0}, "no message at all");
    SendCommit(version);
    ASSERT_TRUE(sink_->WaitFor({n, 1})) << n;
    EXPECT_EQ(stats().corrupt, n - 1) << n;
  }
  EXPECT_EQ(sink_->log(), Whole({2, 3, 4, 5}));
}

TEST_F(FollowerBusTest, ASilentBusIsNotBelieved) {
  Start({1, 1}, redis_.url(), std::chrono::milliseconds(50));
  ASSERT_TRUE(Eventually([&] { return stats().connected.load(); }));
  Write(2);  // the publisher cannot reach Redis; we can
  ASSERT_TRUE(sink_->WaitFor({2, 1}));
  Send(Write(3));
  ASSERT_TRUE(sink_->WaitFor({3, 1}));
  EXPECT_EQ(stats().reconnects, 1U);
}

TEST_F(FollowerBusTest, ALostConnectionIsMadeAgainAndNothingIsTakenTwice) {
  Start({1, 1}, redis_.url(), std::chrono::milliseconds(50));
  ASSERT_TRUE(Eventually([&] { return stats().connected.load(); }));
  Send(Write(2));
  ASSERT_TRUE(sink_->WaitFor({2, 1}));
  Write(3);  // files alone
  redis_.DropConnections();
  redis_.LoseEverything();
  ASSERT_TRUE(sink_->WaitFor({3, 1}));
  ASSERT_TRUE(Eventually([&] { return stats().reconnects == 2; }));
  Send(Write(4));
  ASSERT_TRUE(sink_->WaitFor({4, 1}));
  EXPECT_EQ(sink_->log(), Whole({2, 3, 4}));
  EXPECT_EQ(stats().reconnects, 2U);
}

TEST_F(FollowerBusTest, VersionsGoOnWhileTheBusIsReadAndTheFollowerEnds) {
  Start({1, 1}, redis_.url());
  std::thread publisher([&] {
    for (uint64_t n = 2; n < 40; ++n) Send(Write(n));
  });
  ASSERT_TRUE(Eventually([&] { return sink_->newest().number > 10; }));
  follower_.reset();
  const VersionId end = sink_->newest();
  publisher.join();
  EXPECT_EQ(sink_->newest(), end);
  Start(end, redis_.url());
  ASSERT_TRUE(sink_->WaitFor({39, 1}));
}

}  // namespace
}  // namespace embertide

// Tasks whose rounds throw, whose threads cannot be started, and what is told of them.
#include "base/background_task.h"

#include <gtest/gtest.h>

#include <atomic>
#include <new>
#include <stdexcept>
#include <system_error>

#include "base/crew.h"
#include "base/sleep.h"
#include "base/task_faults.h"

namespace embertide {
namespace {

using std::chrono::milliseconds;

// So many of the next rounds throw, and so many of the next starts are refused.
std::atomic<int> throws{0};
std::atomic<int> refuses{0};

void Fault(const char* /*task*/, FaultPoint point) {
  if (point == FaultPoint::kStart) {
    if (refuses.load() > 0) {
      --refuses;
      throw std::system_error(EAGAIN, std::generic_category());
    }
    return;
  }
  switch (throws.load()) {
    case 1:
      throw std::runtime_error("the index is out of range");
    case 2:
      throw std::bad_alloc();
    case 3:
      throw 7;
    default:
      return;
  }
}

class BackgroundTaskTest : public testing::Test {
 protected:
  BackgroundTaskTest() { SetFaultHook(Fault); }
  ~BackgroundTaskTest() override {
    SetFaultHook(nullptr);
    throws = refuses = 0;
  }

  BackgroundTask::Round Counting() {
    return [this](const std::stop_token& stop) {
      ++rounds_;
      rounds_.notify_all();
      SleepFor(stop, milliseconds(1));
      return Status::Ok();
    };
  }
  void AwaitRounds(int more) {
    const int wanted = rounds_ + more;
    for (int now = rounds_; now < wanted; now = rounds_) rounds_.wait(now);
  }
  TaskHealth Health() const { return board_.Tasks().at(0); }
  void AwaitFailures(uint64_t wanted) const {
    while (Health().failures < wanted) std::this_thread::yield();
  }

  std::mutex mutex_;
  std::vector<std::string> lines_;
  TaskBoard board_{[this](const std::string& line) {
    const std::lock_guard lock(mutex_);
    lines_.push_back(line);
  }};
  std::atomic<int> rounds_{0};
  TaskOptions options_{.name = "counting",
                       .board = &board_,
                       .first_back_off = milliseconds(1),
                       .longest_back_off = milliseconds(4)};
};

TEST_F(BackgroundTaskTest, AnExceptionOfAnyKindIsReportedAndTheTaskContinueProbe) {
  const std::array<const char*, 3> texts = {"the index is out of range", "out of memory",
                                            "an exception that says nothing"};
  BackgroundTask task(options_, Counting());
  AwaitRounds(1);
  EXPECT_FALSE(Health().failing);
  uint64_t failures = 0;
  for (int kind = 1; kind <= 3; ++kind) {
    throws = kind;
    AwaitFailures(failures + 2);
    EXPECT_TRUE(Health().failing);
    EXPECT_GT(Health().failing_since_ms, 0);
    throws = 0;
    AwaitRounds(2);
    EXPECT_FALSE(Health().failing);
    EXPECT_EQ(Health().failing_since_ms, 0);
    EXPECT_EQ(Health().last_error, texts[static_cast<size_t>(kind - 1)]);
    failures = Health().failures;
  }
}

TEST_F(BackgroundTaskTest, ItsThreadBearsItsName) {
  char name[16] = {};
  std::atomic<bool> read{false};
  options_.name = "upkeep-of-device-7";
  BackgroundTask task(options_, [&](const std::stop_token& stop) {
    if (!read) pthread_getname_np(pthread_self(), name, sizeof(name));
    read = true;
    read.notify_all();
    SleepFor(stop, milliseconds(1));
    return Status::Ok();
  });
  read.wait(false);
  EXPECT_STREQ(name, "upkeep-of-devic");
}

TEST_F(BackgroundTaskTest, ThatItFailsIsLoggedOnceAndThatItWorksAgain) {
  throws = 1;
  BackgroundTask task(options_, Counting());
  AwaitFailures(20);
  throws = 0;
  AwaitRounds(2);
  const std::lock_guard lock(mutex_);
  ASSERT_EQ(lines_.size(), 2U);
  EXPECT_EQ(lines_[0], "task counting fails, and is tried again: the index is out of range");
  EXPECT_NE(lines_[1].find("task counting works again, after "), std::string::npos) << lines_[1];
}

TEST_F(BackgroundTaskTest, AThreadThatCannotBeStartedIsTriedAgain) {
  refuses = 1;
  BackgroundTask task(options_, Counting());
  EXPECT_FALSE(task.running());
  EXPECT_TRUE(Health().failing);
  EXPECT_EQ(Health().failed_starts, 1U);
  EXPECT_NE(Health().last_error.find("thread cannot be started"), std::string::npos);
  while (!task.running()) board_.StartMissing();
  AwaitRounds(2);
  EXPECT_FALSE(Health().failing);
}

TEST_F(BackgroundTaskTest, AnotherTaskOfTheBoardStartsTheMissingThread) {
  refuses = 1;
  std::atomic<bool> ran{false};
  BackgroundTask missing(options_, [&](const std::stop_token& stop) {
    ran = true;
    SleepFor(stop, milliseconds(1));
    return Status::Ok();
  });
  TaskOptions other = options_;
  other.name = "other";
  BackgroundTask task(other, Counting());
  while (!ran) std::this_thread::yield();
  EXPECT_EQ(board_.Tasks().size(), 2U);
}

// Before, such a task was in no log, and nobody started its thread.
TEST_F(BackgroundTaskTest, ATaskOfTheProcessIsLoggedAndStartedByTheTasksOfANode) {
  testing::internal::CaptureStderr();
  refuses = 1;
  std::atomic<bool> ran{false};
  TaskOptions of_process = options_;
  of_process.name = "signals";
  of_process.board = nullptr;
  BackgroundTask missing(of_process, [&](const std::stop_token& stop) {
    ran = true;
    SleepFor(stop, milliseconds(1));
    return Status::Ok();
  });
  EXPECT_FALSE(missing.running());
  BackgroundTask task(options_, Counting());
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!ran && std::chrono::steady_clock::now() < until) std::this_thread::yield();
  EXPECT_TRUE(ran);
  const std::string logged = testing::internal::GetCapturedStderr();
  EXPECT_NE(logged.find("task signals fails, and is tried again: its thread cannot be started"),
            std::string::npos)
      << logged;
}

TEST_F(BackgroundTaskTest, OneMissingThreadOfSeveralIsNotHiddenByTheOthers) {
  refuses = 1;
  {
    BackgroundTask missing(options_, Counting());
    TaskOptions elsewhere = options_;
    TaskBoard other_board;  // so that nobody starts it
    elsewhere.board = &other_board;
    BackgroundTask runs(elsewhere, Counting());
    board_.Of("counting")->Good();
    EXPECT_TRUE(Health().failing);
  }
  EXPECT_FALSE(Health().failing);  // it is wanted no longer
}

TEST_F(BackgroundTaskTest, AnErrorIsFollowedByABackOffThatItsStopEnds) {
  options_.first_back_off = options_.longest_back_off = std::chrono::hours(1);
  std::atomic<int> rounds{0};
  {
    BackgroundTask task(options_, [&](const std::stop_token&) {
      ++rounds;
      return Status(Code::kDeviceError, "the folder is full");
    });
    AwaitFailures(1);
  }
  EXPECT_EQ(rounds, 1);
  EXPECT_NE(Health().last_error.find("the folder is full"), std::string::npos);
}

TEST_F(BackgroundTaskTest, ACrewWithoutThreadsDoesItsWorkOnTheCallersThread) {
  refuses = 3;
  Crew crew(4, &board_);
  EXPECT_TRUE(Health().failing);
  std::atomic<uint32_t> done{0};
  crew.Run(4, [&](uint32_t part) { done |= 1U << part; });
  EXPECT_EQ(done, 15U);
  refuses = 0;
  while (Health().failing) crew.Run(4, [&](uint32_t part) { done |= 16U << part; });
  crew.Run(4, [&](uint32_t part) { done |= 256U << part; });
  EXPECT_EQ(done, 0xfffU);
}

TEST_F(BackgroundTaskTest, WhatACrewsThreadThrowsReachesTheCallerOnceAllAreDone) {
  Crew crew(3, &board_);
  for (uint32_t thrower = 0; thrower < 3; ++thrower) {
    std::atomic<uint32_t> done{0};
    EXPECT_THROW(crew.Run(3,
                          [&](uint32_t part) {
                            if (part == thrower) throw std::bad_alloc();
                            ++done;
                          }),
                 std::bad_alloc);
    EXPECT_EQ(done, 2U);
  }
}

}  // namespace
}  // namespace embertide

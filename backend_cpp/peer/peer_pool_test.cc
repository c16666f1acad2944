// Who lives and what is told, by real calls.
#include "peer/peer_pool.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <new>
#include <thread>
#include <vector>

#include "peer/test_peer.h"

namespace embertide {
namespace {

TEST(PeerPoolNodeTest, ABeatThatIsAskedForWhileOneIsUnderWayFollowsIt) {
  std::atomic<uint64_t> told{0};  // the newest version that the peer was told of
  std::atomic<uint32_t> beats{0};
  std::atomic<bool> hold{true};
  TestPeer peer(1, [&](const v1::LookupRequest& request, v1::LookupResponse*) {
    told = request.asker_versions().newest().number();
    ++beats;
    hold.wait(true);
    return grpc::Status::OK;
  });
  std::atomic<uint64_t> told_other{0};
  TestPeer other(1, [&](const v1::LookupRequest& request, v1::LookupResponse*) {
    told_other = request.asker_versions().newest().number();
    return grpc::Status::OK;
  });
  std::atomic<uint64_t> newest{1};
  PeerPoolOptions options;
  options.name = "asker";
  options.beat_every = std::chrono::seconds(60);  // none but those asked for
  const auto versions = [&] {
    v1::VersionRange range;
    range.mutable_newest()->set_number(newest);
    return range;
  };
  PeerPool pool(options, versions, [] { return 1; });
  const std::vector<PeerPool::Address> peers = {{"a", peer.address()}, {"b", other.address()}};
  pool.SetPeers(peers);
  ASSERT_TRUE(Await([&] {
    pool.BeatNow();  // a first one may find no connection in time
    return beats == 1 && told_other == 1;
  }));
  newest = 2;
  pool.BeatNow();
  ASSERT_TRUE(Await([&] { return told_other == 2; })) << "b comes after a, whose beat is under way";
  hold = false;
  hold.notify_all();
  EXPECT_TRUE(Await([&] { return told == 2; })) << "version 2 is told with the next beat";
  EXPECT_TRUE(Await([&] { return pool.Alive() == 2; }));
  EXPECT_TRUE(pool.HaveReached(1));
  EXPECT_FALSE(pool.HaveReached(2));
}

// One of another group counts only while one of the own does not answer.
TEST(PeerPoolNodeTest, ASparePeerIsWaitedForWhileAnotherDoesNotAnswer) {
  const auto ok = [](const v1::LookupRequest&, v1::LookupResponse*) { return grpc::Status::OK; };
  auto own = std::make_unique<TestPeer>(5, ok);
  TestPeer spare(3, ok);
  PeerPoolOptions options;
  options.name = "asker";
  options.beat_every = std::chrono::milliseconds(20);
  PeerPool pool(options, [] { return v1::VersionRange(); }, [] { return 1; });
  const std::vector<PeerPool::Address> peers = {{"a", own->address()},
                                                {"s", spare.address(), /*spare=*/true}};
  pool.SetPeers(peers);
  const auto newest = [&] {
    std::vector<uint64_t> found;
    for (const PeerPool::Range& range : pool.LiveRanges()) found.push_back(range.newest);
    return found;
  };
  ASSERT_TRUE(Await([&] { return pool.Alive() == 1 && !pool.WhyNot("s", 3, 1); }));
  ASSERT_TRUE(Await([&] { return newest() == std::vector<uint64_t>{5}; }));
  EXPECT_TRUE(Await([&] { return pool.HaveReached(5); }));
  EXPECT_TRUE(Await([&] { return pool.IsJustBehind("s", 4); }));
  EXPECT_FALSE(pool.IsJustBehind("s", 5));
  own.reset();
  ASSERT_TRUE(Await([&] { return newest() == std::vector<uint64_t>{3}; }));
  EXPECT_EQ(pool.Alive(), 0U);
  EXPECT_FALSE(pool.HaveReached(5));
}

// A pool of one node that knows one peer, and beats when it is told to.
struct OnePeer {
  explicit OnePeer(const std::string& address, std::chrono::milliseconds beat_every)
      : pool(OptionsOf(beat_every), [] { return v1::VersionRange(); }, [] { return 1; }) {
    const std::vector<PeerPool::Address> peers = {{"a", address}};
    pool.SetPeers(peers);
  }
  static PeerPoolOptions OptionsOf(std::chrono::milliseconds beat_every) {
    PeerPoolOptions options;
    options.name = "asker";
    options.beat_every = beat_every;
    options.max_bytes_a_peer = 1000;
    return options;
  }
  bool Alive() {
    return Await([this] {
      pool.BeatNow();
      return pool.Alive() == 1;
    });
  }
  PeerPool pool;
};

// Its channel must not end on the thread of gRPC that brings the answer: gRPC would wait there for
// that very thread, and go on with a queue that it has freed.
TEST(PeerPoolNodeTest, APeerIsForgottenWhileItIsAsked) {
  for (int round = 0; round < 5; ++round) {
    std::atomic<bool> asked{false};
    std::atomic<bool> hold{true};
    TestPeer peer(1, [&](const v1::LookupRequest&, v1::LookupResponse*) {
      asked = true;
      hold.wait(true);
      return grpc::Status::OK;
    });
    OnePeer one(peer.address(), std::chrono::milliseconds(20));
    ASSERT_TRUE(Await([&] { return asked.load(); }));
    one.pool.SetPeers({});
    hold = false;
    hold.notify_all();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
}

TEST(PeerPoolNodeTest, APoolEndsWhileAPeerIsAsked) {
  for (int round = 0; round < 5; ++round) {
    std::atomic<bool> asked{false};
    TestPeer peer(1, [&](const v1::LookupRequest&, v1::LookupResponse*) {
      asked = true;
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      return grpc::Status::OK;
    });
    const OnePeer one(peer.address(), std::chrono::milliseconds(20));
    ASSERT_TRUE(Await([&] { return asked.load(); }));
  }
}

// One part on its way, which may take so many bytes of an answer.
struct Question {
  Question(PeerPool* pool, size_t answer_bytes, std::chrono::milliseconds timeout) {
    calls[0].answer_bytes = answer_bytes;
    begun = std::chrono::steady_clock::now();
    pool->Lookup("a", calls, 1, begun + timeout, [this] {
      took = std::chrono::steady_clock::now() - begun;
      done = true;
    });
  }
  std::vector<PartCall> calls = std::vector<PartCall>(1);
  std::chrono::steady_clock::time_point begun;
  std::atomic<std::chrono::steady_clock::duration> took{};
  std::atomic<bool> done{false};
};

v1::VersionRange RangeOf(uint64_t oldest, uint64_t newest) {
  v1::VersionRange range;
  range.mutable_oldest()->set_number(oldest);
  range.mutable_newest()->set_number(newest);
  range.mutable_newest()->set_lineage(1);
  return range;
}

TEST(PeerPoolNodeTest, WhatACallerClaimsOfAPeerIsAskedOfThePeer) {
  std::atomic<uint32_t> beats{0};
  TestPeer peer(3, [&](const v1::LookupRequest&, v1::LookupResponse*) {
    ++beats;
    return grpc::Status::OK;
  });
  OnePeer one(peer.address(), std::chrono::seconds(60));  // no beats but those asked for
  ASSERT_TRUE(one.Alive());
  const auto known = [&] {
    const auto ranges = one.pool.LiveRanges();
    return ranges.size() == 1 ? ranges[0].newest : 0;
  };
  ASSERT_EQ(known(), 3U);
  const uint32_t before = beats;
  one.pool.OnVersionHint("a", RangeOf(3, 3));
  one.pool.OnVersionHint("stranger", RangeOf(9, 9));
  constexpr uint64_t kMadeUp = 1'000'000'000'000'000'000;
  const auto begun = std::chrono::steady_clock::now();
  one.pool.OnVersionHint("a", RangeOf(kMadeUp, kMadeUp));
  ASSERT_TRUE(Await([&] { return beats > before; })) << "news of a peer are fetched at once";
  for (int i = 0; i < 10'000; ++i) {
    one.pool.OnVersionHint("a", RangeOf(kMadeUp, kMadeUp));
    EXPECT_EQ(known(), 3U);
  }
  const auto time = std::chrono::steady_clock::now() - begun;
  EXPECT_LE(beats - before, 2 + time / std::chrono::milliseconds(1)) << "one a millisecond at most";
  // It is the peer itself that says so.
  peer.SetVersions(4, 5);
  one.pool.OnVersionHint("a", RangeOf(4, 5));
  EXPECT_TRUE(Await([&] { return known() == 5; }));
}

TEST(PeerPoolNodeTest, WhatWaitsForAPeerIsBoundedInBytes) {
  std::atomic<bool> hold{true};
  TestPeer peer(1, [&](const v1::LookupRequest& request, v1::LookupResponse* response) {
    if (request.parts().empty()) return grpc::Status::OK;
    hold.wait(true);
    for (int p = 0; p < request.parts_size(); ++p) response->add_results();
    return grpc::Status::OK;
  });
  OnePeer one(peer.address(), std::chrono::milliseconds(100));
  ASSERT_TRUE(one.Alive());
  constexpr std::chrono::seconds kLong(20);
  // The first is taken however large it is.
  Question first(&one.pool, 5000, kLong);
  Question second(&one.pool, 1, kLong);
  EXPECT_TRUE(second.done);
  EXPECT_EQ(second.calls[0].status.code(), Code::kUnavailable);
  EXPECT_EQ(second.calls[0].why, NoAnswer::kOverload);
  hold = false;
  hold.notify_all();
  ASSERT_TRUE(Await([&] { return first.done.load(); }));
  EXPECT_TRUE(first.calls[0].status.ok()) << first.calls[0].status.ToString();
  Question third(&one.pool, 400, kLong);
  Question fourth(&one.pool, 400, kLong);
  ASSERT_TRUE(Await([&] { return third.done && fourth.done; }));
  EXPECT_TRUE(third.calls[0].status.ok() && fourth.calls[0].status.ok()) << "bytes are given back";
}

// Sends of this thread that are left until one throws.
thread_local int sends_left = 1'000'000;

// Calls on their way point into memory of who asks. Before, what was thrown while one was sent left
// them behind.
TEST(PeerPoolNodeTest, WhatIsThrownWhileACallIsSentWaitsForThoseOnTheirWay) {
  std::atomic<int> held{0};
  std::atomic<bool> hold{true};
  const auto answer = [&](const v1::LookupRequest& request, v1::LookupResponse* response) {
    if (request.parts().empty()) return grpc::Status::OK;
    ++held;
    hold.wait(true);
    for (int p = 0; p < request.parts_size(); ++p) response->add_results();
    return grpc::Status::OK;
  };
  TestPeer first(1, answer);
  TestPeer second(1, answer);
  PeerPoolOptions options;
  options.name = "asker";
  options.beat_every = std::chrono::seconds(60);
  PeerPool pool(
      options,
      [] {
        if (--sends_left < 0) throw std::bad_alloc();
        return RangeOf(1, 1);
      },
      [] { return 1; });
  const std::vector<PeerPool::Address> peers = {{"a", first.address()}, {"b", second.address()}};
  pool.SetPeers(peers);
  ASSERT_TRUE(Await([&] {
    pool.BeatNow();
    return pool.Alive() == 2;
  }));
  std::vector<PartCall> calls(2);
  const std::vector<PeerPool::Ask> asks = {{"a", {&calls[0], 1}}, {"b", {&calls[1], 1}}};
  std::atomic<bool> is_back{false};
  std::thread asker([&] {
    sends_left = 1;
    pool.LookupAll(asks, 1, std::chrono::steady_clock::now() + std::chrono::seconds(20));
    is_back = true;
  });
  EXPECT_TRUE(Await([&] { return held == 1; }));
  EXPECT_FALSE(is_back) << "the first call is on its way";
  hold = false;
  hold.notify_all();
  asker.join();
  EXPECT_TRUE(calls[0].status.ok()) << calls[0].status.ToString();
  EXPECT_EQ(calls[1].status.code(), Code::kUnavailable);
  EXPECT_EQ(calls[1].why, NoAnswer::kOverload);
  pool.LookupAll(asks, 1, std::chrono::steady_clock::now() + std::chrono::seconds(20));
  EXPECT_TRUE(calls[0].status.ok() && calls[1].status.ok()) << "the next time all is well";
}

TEST(PeerPoolNodeTest, APartWaitsNoLongerThanItsOwnDeadline) {
  std::atomic<bool> hold{true};
  TestPeer peer(1, [&](const v1::LookupRequest& request, v1::LookupResponse*) {
    if (!request.parts().empty()) hold.wait(true);
    return grpc::Status::OK;
  });
  {
    OnePeer one(peer.address(), std::chrono::milliseconds(100));
    ASSERT_TRUE(one.Alive());
    constexpr std::chrono::seconds kLong(20);
    // Two calls are under way: what comes now waits, and is put together.
    Question first(&one.pool, 1, kLong);
    Question second(&one.pool, 1, kLong);
    Question slow(&one.pool, 1, kLong);
    Question quick(&one.pool, 1, std::chrono::milliseconds(300));
    EXPECT_TRUE(Await([&] { return quick.done.load(); }));
    EXPECT_LT(quick.took.load(), kLong / 2);
    EXPECT_EQ(quick.calls[0].why, NoAnswer::kDeadline);
    EXPECT_FALSE(slow.done);
    hold = false;
    hold.notify_all();
    EXPECT_TRUE(Await([&] { return first.done && second.done && slow.done; }));
  }
}

// Names of hosts for this process alone: a file over /etc/hosts in a mount namespace of its own.
class OwnHosts {
 public:
  OwnHosts() : file_(::testing::TempDir() + "hosts-" + std::to_string(::getpid())) {
    Write("127.0.0.1");
    made_ = (::unshare(CLONE_NEWNS) == 0 || ::unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0) &&
            ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
            ::mount(file_.c_str(), "/etc/hosts", nullptr, MS_BIND, nullptr) == 0;
  }
  ~OwnHosts() { std::filesystem::remove(file_); }
  OwnHosts(const OwnHosts&) = delete;
  OwnHosts& operator=(const OwnHosts&) = delete;

  bool made() const { return made_; }
  // Where "peer.test" is from now on.
  void Write(const std::string& ip) const {
    std::ofstream(file_) << "127.0.0.1 localhost\n" << ip << " peer.test\n";
  }

 private:
  const std::string file_;
  bool made_ = false;
};

// Takes connections and says nothing, as an address does that nobody has any more.
class SilentAddress {
 public:
  SilentAddress(const char* ip, int port) : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    const int on = 1;
    ::setsockopt(socket_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    ::inet_pton(AF_INET, ip, &address.sin_addr);
    works_ = ::bind(socket_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0 &&
             ::listen(socket_, 100) == 0;
  }
  ~SilentAddress() { ::close(socket_); }
  SilentAddress(const SilentAddress&) = delete;
  SilentAddress& operator=(const SilentAddress&) = delete;
  bool works() const { return works_; }

 private:
  const int socket_;
  bool works_ = false;
};

// A pod that comes back has its name and another address.
void FindsAMovedPeer(bool old_address_is_silent) {
  const OwnHosts hosts;
  if (!hosts.made()) GTEST_SKIP() << "no mount namespace may be made here (root, or user ones)";
  const TestPeer::Answer yes = [](const v1::LookupRequest&, v1::LookupResponse*) {
    return grpc::Status::OK;
  };
  hosts.Write("127.0.0.2");
  auto before = std::make_unique<TestPeer>(1, yes, "127.0.0.2:0");
  const std::string port = std::to_string(before->port());
  OnePeer one("peer.test:" + port, std::chrono::milliseconds(100));
  ASSERT_TRUE(one.Alive());
  before.reset();
  std::unique_ptr<SilentAddress> silent;
  if (old_address_is_silent) {
    silent = std::make_unique<SilentAddress>("127.0.0.2", std::stoi(port));
    ASSERT_TRUE(silent->works());
  }
  ASSERT_TRUE(Await([&] { return one.pool.Alive() == 0; }));
  // It is away for longer than one connection is tried.
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  const TestPeer after(2, yes, "127.0.0.3:" + port);
  hosts.Write("127.0.0.3");
  const auto begun = std::chrono::steady_clock::now();
  ASSERT_TRUE(Await([&] { return one.pool.Alive() == 1; }));
  const auto time = std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::steady_clock::now() - begun);
  std::printf("found at its new address after %lld ms\n", static_cast<long long>(time.count()));
  EXPECT_LE(time, std::chrono::seconds(2));
}

TEST(PeerPoolNodeTest, APeerAtANewAddressIsFoundWithinTwoSeconds) { FindsAMovedPeer(false); }

TEST(PeerPoolNodeTest, ANewAddressIsFoundThoughTheOldOneTakesConnections) { FindsAMovedPeer(true); }

}  // namespace
}  // namespace embertide

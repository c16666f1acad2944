// Who lives and what is told, by real calls.
#include "peer/peer_pool.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace embertide

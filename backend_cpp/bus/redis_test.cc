// Redis: URLs, and what a connection says to the server and makes of its answers.
#include "bus/redis.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "bus/fake_redis.h"

namespace embertide {
namespace {

using std::chrono::milliseconds;

TEST(RedisUrlTest, PartsAreFound) {
  auto parsed = ParseRedisUrl("redis://me:hush@db.example:6380/12");
  ASSERT_TRUE(parsed.ok());
  EXPECT_EQ(parsed->host, "db.example");
  EXPECT_EQ(parsed->port, 6380);
  EXPECT_EQ(parsed->database, 12);
  EXPECT_EQ(parsed->user, "me");
  EXPECT_EQ(parsed->password, "hush");
  parsed = ParseRedisUrl("redis://:hush@127.0.0.1");
  ASSERT_TRUE(parsed.ok());
  EXPECT_EQ(parsed->host, "127.0.0.1");
  EXPECT_EQ(parsed->port, 6379);
  EXPECT_EQ(parsed->database, 0);
  EXPECT_EQ(parsed->user, "");
  EXPECT_EQ(parsed->password, "hush");
  parsed = ParseRedisUrl("unix:///run/redis.sock");
  ASSERT_TRUE(parsed.ok());
  EXPECT_EQ(parsed->path, "/run/redis.sock");
  EXPECT_EQ(parsed->host, "");
}

TEST(RedisUrlTest, UserAndPasswordMayBePercentEncoded) {
  const auto parsed = ParseRedisUrl("redis://m%65:p%40%2Fs%3as%25%@host:1");
  ASSERT_TRUE(parsed.ok());
  EXPECT_EQ(parsed.value().user, "me");
  EXPECT_EQ(parsed.value().password, "p@/s:s%%");
  auto socket = ParseRedisUrl("unix:///run/a%20b%3fc/redis.sock");
  ASSERT_TRUE(socket.ok());
  EXPECT_EQ(socket->path, "/run/a b?c/redis.sock");
}

TEST(RedisUrlTest, FilesAreNamedInTheQuery) {
  auto parsed = ParseRedisUrl("redis://me@db:6380/2?password_file=/etc/p%3fw");
  ASSERT_TRUE(parsed.ok());
  EXPECT_EQ(parsed->user, "me");
  EXPECT_EQ(parsed->password, "");
  EXPECT_EQ(parsed->password_file, "/etc/p?w");
  EXPECT_EQ(parsed->database, 2);
  EXPECT_FALSE(parsed->tls);
  parsed = ParseRedisUrl("rediss://db?ssl_ca_certs=/ca&ssl_certfile=/crt&ssl_keyfile=/key");
  ASSERT_TRUE(parsed.ok());
  EXPECT_TRUE(parsed->tls);
  EXPECT_EQ(parsed->files, (TlsFiles{"/crt", "/key", "/ca"}));
  EXPECT_EQ(parsed->port, 6379);
}

TEST(RedisUrlTest, WhatIsNoUrlIsRefusedWithoutItsPassword) {
  for (const std::string url : {"",
                                "redis://",
                                "redis:///0",
                                "host:6379",
                                "http://me:hush@host",
                                "rediss://me:hush@host",
                                "rediss://me:hush@host?ssl_ca_certs=",
                                "rediss://host?ssl_ca_certs=/ca&ssl_certfile=/a:hush",
                                "rediss://host?ssl_ca_certs=/ca&ssl_ca_certs=/b:hush",
                                "redis://host?ssl_ca_certs=/ca:hush",
                                "redis://host?password=:hush",
                                "redis://me:hush@host?password_file=/p",
                                "redis://me@host",
                                "redis://me:hush@",
                                "redis://me:hush@host:0",
                                "redis://me:hush@host:65536",
                                "redis://me:hush@host:port",
                                "redis://me:hush@host:1/x",
                                "redis://me:hu@hush@host",
                                "redis://me:hu/hush@host",
                                "redis://:hush",
                                "redis://me:hush",
                                "me:hush@host:6379",
                                "redis://:hush/0",
                                "redis://me:4hush/0",
                                "unix://",
                                "redis://me:hush@[::1]:6379",
                                "redis:/me:hush@host://",
                                "redis:/:hush",
                                "redis://host:6379/:hush"}) {
    const auto parsed = ParseRedisUrl(url);
    ASSERT_FALSE(parsed.ok()) << url;
    EXPECT_EQ(parsed.status().code(), Code::kInvalidArgument);
    EXPECT_EQ(parsed.status().message().find("hush"), std::string::npos) << url;
    EXPECT_NE(parsed.status().message().find("use redis://"), std::string::npos);
  }
  const auto shown = [](const std::string& url) { return ParseRedisUrl(url).status().message(); };
  EXPECT_NE(shown("redis://me:x@host:65536").find("\"redis://...@host:65536\""), std::string::npos);
  EXPECT_NE(shown("host:6379").find("\"host:6379\""), std::string::npos);
  EXPECT_NE(shown("redis://:12345").find("\"redis://:...\""), std::string::npos);
  EXPECT_NE(shown("rediss://host").find("ssl_ca_certs=PATH"), std::string::npos);
}

class RedisConnectionTest : public ::testing::Test {
 protected:
  Result<std::unique_ptr<RedisConnection>> Open(const std::string& user, int database = 0) {
    RedisAddress address = *ParseRedisUrl(redis_.url());
    address.user = user;
    address.password = user.empty() ? "" : user == "me" ? "hush" : "wrong";
    address.database = database;
    return RedisConnection::Open(address, milliseconds(2000));
  }
  FakeRedis redis_;
};

TEST_F(RedisConnectionTest, SaysWhoItIsAndWhichDatabaseItWants) {
  ASSERT_TRUE(Open("").ok());
  ASSERT_TRUE(Open("me", 3).ok());
  EXPECT_EQ(redis_.commands(), std::vector<std::string>({"PING", "AUTH me hush", "SELECT 3"}));
  const auto refused = Open("you");
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), Code::kDeviceError);
  EXPECT_NE(refused.status().message().find("WRONGPASS"), std::string::npos);
}

TEST_F(RedisConnectionTest, APasswordFileIsReadAtEveryConnection) {
  const std::string path =
      ::testing::TempDir() + "/embertide_password" + std::to_string(::getpid());
  RedisAddress address = *ParseRedisUrl(redis_.url());
  address.user = "me";
  address.password_file = path;
  for (const std::string password : {"hush", "changed"}) {
    std::ofstream(path) << password << "\n";
    EXPECT_EQ(RedisConnection::Open(address, milliseconds(2000)).ok(), password == "hush");
  }
  EXPECT_EQ(redis_.commands(),
            std::vector<std::string>({"AUTH me hush", "PING", "AUTH me changed"}));
  std::filesystem::remove(path);
  const auto none = RedisConnection::Open(address, milliseconds(2000));
  ASSERT_FALSE(none.ok());
  EXPECT_EQ(none.status().code(), Code::kDeviceError);
  EXPECT_NE(none.status().message().find(path), std::string::npos);
}

TEST_F(RedisConnectionTest, ReadsWhatFollowsAnEntry) {
  for (uint64_t n = 1; n <= 3; ++n) redis_.Append("a", {n, 5}, std::to_string(n));
  auto connection = Open("");
  ASSERT_TRUE(connection.ok());
  const auto after = connection.value()->ReadAfter("a", "1-5", 1, milliseconds(1));
  ASSERT_TRUE(after.ok());
  ASSERT_EQ(after.value().size(), 1U);
  EXPECT_EQ(after.value()[0].id, "2-5");
  EXPECT_EQ(after.value()[0].message, "2");
  const auto nothing = connection.value()->ReadAfter("a", "3-5", 9, milliseconds(1));
  ASSERT_TRUE(nothing.ok());
  EXPECT_TRUE(nothing.value().empty());
}

TEST_F(RedisConnectionTest, ReadsRangesInOrderAndGoesOnAfterAnErrorOfItsCaller) {
  for (uint64_t n = 1; n <= 3; ++n) redis_.Append("a", {n, 0}, std::to_string(n));
  redis_.Append("b", {1, 0}, std::string("\0\r\n$", 4));
  auto connection = Open("");
  ASSERT_TRUE(connection.ok());
  const std::vector<RedisConnection::Range> ranges = {{"a", "1-0", "2-9", 9, kMaxBytesInFlight},
                                                      {"none", "1-0", "9-0", 9, 10},
                                                      {"b", "1-0", "1-0", 1, 10}};
  std::vector<std::string> read;
  const auto keep = [&](size_t range, const StreamEntry& entry) {
    read.push_back(std::to_string(range) + entry.id + entry.message);
    return Status::Ok();
  };
  ASSERT_TRUE(connection.value()->ReadRanges(ranges, keep).ok());
  const std::vector<std::string> wanted = {"01-01", "02-02", "21-0" + std::string("\0\r\n$", 4)};
  EXPECT_EQ(read, wanted);
  const auto refuse = [](size_t, const StreamEntry&) { return Status(Code::kCorrupt, "no"); };
  EXPECT_EQ(connection.value()->ReadRanges(ranges, refuse).code(), Code::kCorrupt);
  read.clear();
  ASSERT_TRUE(connection.value()->ReadRanges(ranges, keep).ok());
  EXPECT_EQ(read, wanted);
}

TEST_F(RedisConnectionTest, ACommandThatIsRefusedLeavesTheConnection) {
  auto connection = Open("");
  ASSERT_TRUE(connection.ok());
  redis_.Refuse("OOM full");
  const Status status = connection.value()->Execute({{"SADD", "a", "b"}, {"SET", "c", "d"}});
  EXPECT_EQ(status.code(), Code::kRejected);
  EXPECT_NE(status.message().find("OOM full"), std::string::npos);
  EXPECT_TRUE(connection.value()->Get("c").ok());
}

// hiredis's own objects have room for as many elements as an array announces, and its buffer for
// as many bytes as come.
TEST_F(RedisConnectionTest, AReplyWithoutEndIsCutOff) {
  for (const std::string reply : {"$10737418240\r\n", "*2147483647\r\n"}) {
    redis_.AnswerGetWith(reply, reply[0] == '$' ? "aaaaaaaa" : ":1\r\n:2\r\n");
    auto connection = Open("");
    ASSERT_TRUE(connection.ok());
    const auto value = connection.value()->Get("key");
    ASSERT_FALSE(value.ok());
    EXPECT_EQ(value.status().code(), Code::kDeviceError) << value.status().ToString();
    redis_.DropConnections();
  }
  EXPECT_LT(redis_.endless_bytes(), 4 * kMaxReplyBytes);
}

TEST_F(RedisConnectionTest, ALostServerIsADeviceError) {
  auto connection = Open("");
  ASSERT_TRUE(connection.ok());
  redis_.DropConnections();
  const auto lost = connection.value()->ReadAfter("a", "0-0", 1, milliseconds(1));
  ASSERT_FALSE(lost.ok());
  EXPECT_EQ(lost.status().code(), Code::kDeviceError);
}

}  // namespace
}  // namespace embertide

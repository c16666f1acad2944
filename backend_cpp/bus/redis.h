// A connection to one Redis server: pipelined reads of streams. Private to bus.
//
// Used by one thread. Every wait has a bound; after an error the connection is of no more use.
// Needs Redis 6.2 or later (exclusive ranges).
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "embertide/status.h"

struct redisContext;  // NOLINT(readability-identifier-naming): hiredis names it so
struct redisReply;    // NOLINT(readability-identifier-naming)

namespace embertide {

struct RedisAddress {
  std::string host;  // empty: `path` is a Unix socket
  int port = 6379;
  std::string path;
  std::string user;
  std::string password;
  int database = 0;
};

// "redis://[user:password@]host[:port][/database]" or "unix:///path"; user and password may be
// percent-encoded. kInvalidArgument quoting the URL (without what may be a password) otherwise;
// rediss:// is refused: this build has no TLS.
Result<RedisAddress> ParseRedisUrl(const std::string& url);

struct StreamEntry {
  std::string id;
  std::string message;  // field "m"
};

class RedisConnection {
 public:
  // kDeviceError with the server's or the system's reason.
  static Result<std::unique_ptr<RedisConnection>> Open(const RedisAddress& address,
                                                       std::chrono::milliseconds timeout);
  ~RedisConnection();
  RedisConnection(const RedisConnection&) = delete;
  RedisConnection& operator=(const RedisConnection&) = delete;

  // Entries of `stream` after `id`, at most `count`; waits up to `block` (less than the timeout)
  // for the first.
  Result<std::vector<StreamEntry>> ReadAfter(const std::string& stream, const std::string& id,
                                             size_t count, std::chrono::milliseconds block);
  // The value of a string key; nullopt if there is none.
  Result<std::optional<std::string>> Get(const std::string& key);
  struct Range {
    std::string stream;
    std::string after;  // id; "0-0" for all
  };
  // For each range its next entries, at most `count`, in one round trip.
  Result<std::vector<std::vector<StreamEntry>>> ReadRanges(const std::vector<Range>& ranges,
                                                           size_t count);

 private:
  explicit RedisConnection(redisContext* context) : context_(context) {}
  Status Failed(const char* what) const;
  Status Send(const std::vector<std::string>& words);
  Status Receive(const char* what, redisReply** reply);
  Status Authenticate(const RedisAddress& address);
  redisContext* context_;
};

}  // namespace embertide

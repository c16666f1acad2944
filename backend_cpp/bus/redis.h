// A connection to one Redis server: pipelined reads of streams. Private to bus.
//
// Used by one thread. Every wait has a bound, and so has every reply: kMaxReplyBytes, and four
// times the timeout from its first byte to its last. After kDeviceError the connection is of no
// more use. Needs Redis 6.2 or later.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "embertide/status.h"
#include "tls/stream.h"

struct redisContext;  // NOLINT(readability-identifier-naming): hiredis names it so

namespace embertide {

struct RedisAddress {
  std::string host;  // empty: `path` is a Unix socket
  int port = 6379;
  std::string path;
  std::string user;
  std::string password;
  std::string password_file;  // read at every connection; empty: `password`
  int database = 0;
  bool tls = false;
  TlsFiles files;
};

// "redis://[user:password@]host[:port][/database][?password_file=PATH]" or "unix:///path", in which
// what stands between signs may be percent-encoded; "rediss://" for TLS, with ssl_ca_certs=PATH
// and, for a certificate of ours, ssl_certfile=PATH and ssl_keyfile=PATH, as redis-py calls them.
// kInvalidArgument quoting the URL (without what may be a password) otherwise.
Result<RedisAddress> ParseRedisUrl(const std::string& url);

struct StreamEntry {
  std::string id;
  std::string message;  // field "m"
};

// One reply. A batch is at most 1 MiB, a commit 4 MiB; what is longer is not ours.
inline constexpr size_t kMaxReplyBytes = size_t{16} << 20;
// Bytes of several replies that may be under way in Redis and the network.
inline constexpr size_t kMaxBytesInFlight = size_t{8} << 20;

class RedisConnection {
 public:
  // kDeviceError with the server's or the system's reason; kInvalidArgument for certificates that
  // cannot be right.
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
  // Several in one round trip, in order.
  Result<std::vector<std::optional<std::string>>> GetMany(std::span<const std::string> keys);
  // A reply as it was read: strings, integers and arrays, each array before its elements.
  struct Token {
    int type = 0;       // REDIS_REPLY_...
    size_t length = 0;  // elements of an array
    std::string text;
  };
  // Entries of a stream, by their ids.
  struct Range {
    std::string stream;
    std::string first;  // ids; both are included
    std::string last;
    size_t count = 1;      // so many at most
    size_t max_bytes = 0;  // they have no more than that: so much is counted as under way
  };
  // Gives `consume` the entries of each range in turn, with the range's place in `ranges`. Memory:
  // one reply. After an error of `consume`, which is returned, the connection can be used.
  Status ReadRanges(std::span<const Range> ranges,
                    const std::function<Status(size_t range, StreamEntry entry)>& consume);
  // Sends commands that return nothing of use. kRejected, quoting the server, if it refuses one.
  Status Execute(const std::vector<std::vector<std::string>>& commands);

 private:
  explicit RedisConnection(redisContext* context);
  Status Failed(const char* what) const;
  Status Lost(const char* what) const;
  Status Send(const std::vector<std::string>& words);
  // Reads the next reply into tokens_. An error from the server is kDeviceError as well.
  Status Receive(const char* what);
  Status Authenticate(const RedisAddress& address);
  // Sends all that Send has put together.
  Status Flush(const char* what);
  redisContext* context_;
  std::unique_ptr<TlsStream> tls_;
  std::string unsent_;
  std::chrono::milliseconds timeout_{0};
  std::vector<Token> tokens_;
};

}  // namespace embertide

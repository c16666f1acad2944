// hiredis behind values: every reply is copied out, every error is a Status.
#include "bus/redis.h"

#include <hiredis/hiredis.h>

#include <algorithm>
#include <charconv>
#include <string_view>
#include <system_error>

namespace embertide {
namespace {

struct FreeReply {
  void operator()(redisReply* reply) const { freeReplyObject(reply); }
};
using Reply = std::unique_ptr<redisReply, FreeReply>;

timeval Timeval(std::chrono::milliseconds ms) {
  return {static_cast<time_t>(ms.count() / 1000),
          static_cast<suseconds_t>(ms.count() % 1000 * 1000)};
}

// [id, [field, value, ...]] each; entries without field "m" are not ours and have no message.
std::vector<StreamEntry> Entries(const redisReply* reply) {
  std::vector<StreamEntry> entries;
  if (reply == nullptr || reply->type != REDIS_REPLY_ARRAY) return entries;
  for (size_t i = 0; i < reply->elements; ++i) {
    const redisReply* entry = reply->element[i];
    if (entry->type != REDIS_REPLY_ARRAY || entry->elements != 2) continue;
    const redisReply* id = entry->element[0];
    const redisReply* fields = entry->element[1];
    StreamEntry& out = entries.emplace_back();
    out.id.assign(id->str, id->len);
    if (fields->type != REDIS_REPLY_ARRAY) continue;
    for (size_t f = 0; f + 1 < fields->elements; f += 2) {
      const redisReply* name = fields->element[f];
      const redisReply* value = fields->element[f + 1];
      if (std::string_view(name->str, name->len) == "m") out.message.assign(value->str, value->len);
    }
  }
  return entries;
}

// "%40" is "@", as redis-py has it: the trainer is given the same URL.
std::string Unescaped(const std::string& text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    unsigned value = 0;
    const char* hex = text.data() + i + 1;
    if (text[i] == '%' && i + 2 < text.size() &&
        std::from_chars(hex, hex + 2, value, 16).ptr == hex + 2) {
      out.push_back(static_cast<char>(value));
      i += 2;
    } else {
      out.push_back(text[i]);
    }
  }
  return out;
}

// A URL as a message may quote it: without what could be a password, however it is misspelt.
std::string Quotable(const std::string& url) {
  constexpr const char* kDigits = "0123456789";
  const size_t letters = url.find_first_not_of("abcdefghijklmnopqrstuvwxyz");
  const bool scheme = letters != std::string::npos && url.compare(letters, 3, "://") == 0;
  const size_t begin = scheme ? letters + 3 : 0;
  if (const size_t at = url.rfind('@'); at != std::string::npos) {
    return url.substr(0, begin) + "...@" + url.substr(at + 1);
  }
  const size_t colon = url.find(':', begin);
  if (colon == std::string::npos) return url;
  const size_t end = std::min(url.find_first_not_of(kDigits, colon + 1), url.size());
  const size_t digits = end - colon - 1;
  const bool last =
      end == url.size() ||
      (url[end] == '/' && url.find_first_not_of(kDigits, end + 1) == std::string::npos);
  const bool port = digits > 0 && digits <= 5 && last && colon > begin;
  return port ? url : url.substr(0, colon + 1) + "...";
}

bool ParseNumber(std::string_view text, int* number) {
  const auto [at, error] = std::from_chars(text.begin(), text.end(), *number);
  return error == std::errc() && at == text.end() && *number >= 0;
}

// redis://[user:password@]host[:port][/[database]]
bool ParseTcp(const std::string& url, RedisAddress* address) {
  constexpr std::string_view kScheme = "redis://";
  if (!url.starts_with(kScheme)) return false;
  std::string_view rest = url;
  rest.remove_prefix(kScheme.size());
  if (const size_t at = rest.find('@'); at != std::string_view::npos) {
    const std::string_view credentials = rest.substr(0, at);
    const size_t colon = credentials.find(':');
    if (colon == std::string_view::npos || credentials.find('/') != std::string_view::npos) {
      return false;
    }
    address->user = Unescaped(std::string(credentials.substr(0, colon)));
    address->password = Unescaped(std::string(credentials.substr(colon + 1)));
    rest.remove_prefix(at + 1);
  }
  if (const size_t slash = rest.find('/'); slash != std::string_view::npos) {
    const std::string_view database = rest.substr(slash + 1);
    if (!database.empty() && !ParseNumber(database, &address->database)) return false;
    rest = rest.substr(0, slash);
  }
  if (const size_t colon = rest.find(':'); colon != std::string_view::npos) {
    if (!ParseNumber(rest.substr(colon + 1), &address->port)) return false;
    rest = rest.substr(0, colon);
  }
  address->host = rest;
  return !rest.empty() && rest.find('@') == std::string_view::npos && address->port > 0 &&
         address->port < 65536;
}

}  // namespace

Result<RedisAddress> ParseRedisUrl(const std::string& url) {
  static const std::string kUnix = "unix://";
  RedisAddress address;
  if (ParseTcp(url, &address)) return address;
  if (url.starts_with(kUnix) && url.size() > kUnix.size()) {
    RedisAddress socket;
    socket.path = url.substr(kUnix.size());
    return socket;
  }
  return Status(Code::kInvalidArgument,
                "Redis URL \"" + Quotable(url) +
                    "\": use redis://[user:password@]host[:port][/database] or unix:///path" +
                    (url.starts_with("rediss") ? " (this build has no TLS)" : ""));
}

Result<std::unique_ptr<RedisConnection>> RedisConnection::Open(const RedisAddress& address,
                                                               std::chrono::milliseconds timeout) {
  redisContext* context =
      address.host.empty()
          ? redisConnectUnixWithTimeout(address.path.c_str(), Timeval(timeout))
          : redisConnectWithTimeout(address.host.c_str(), address.port, Timeval(timeout));
  if (context == nullptr) return Status(Code::kResourceExhausted, "no memory for a connection");
  std::unique_ptr<RedisConnection> connection(new RedisConnection(context));
  if (context->err != 0) return connection->Failed("connect");
  if (redisSetTimeout(context, Timeval(timeout)) != REDIS_OK) return connection->Failed("timeout");
  EMBERTIDE_RETURN_IF_ERROR(connection->Authenticate(address));
  return connection;
}

RedisConnection::~RedisConnection() { redisFree(context_); }

Status RedisConnection::Failed(const char* what) const {
  return {Code::kDeviceError, std::string("Redis: ") + what + ": " + context_->errstr};
}

Status RedisConnection::Send(const std::vector<std::string>& words) {
  std::vector<const char*> data;
  std::vector<size_t> sizes;
  for (const std::string& word : words) {
    data.push_back(word.data());
    sizes.push_back(word.size());
  }
  const int result =
      redisAppendCommandArgv(context_, static_cast<int>(words.size()), data.data(), sizes.data());
  return result == REDIS_OK ? Status::Ok() : Failed(words[0].c_str());
}

// The next reply; null and a Status if there is none or it is an error.
Status RedisConnection::Receive(const char* what, redisReply** reply) {
  void* raw = nullptr;
  if (redisGetReply(context_, &raw) != REDIS_OK) return Failed(what);
  *reply = static_cast<redisReply*>(raw);
  if ((*reply)->type != REDIS_REPLY_ERROR) return Status::Ok();
  const Status status(Code::kDeviceError, std::string("Redis: ") + what + ": " +
                                              std::string((*reply)->str, (*reply)->len));
  freeReplyObject(*reply);
  *reply = nullptr;
  return status;
}

Status RedisConnection::Authenticate(const RedisAddress& address) {
  const auto command = [&](const std::vector<std::string>& words) -> Status {
    EMBERTIDE_RETURN_IF_ERROR(Send(words));
    redisReply* raw = nullptr;
    const Status status = Receive(words[0].c_str(), &raw);
    const Reply reply(raw);
    return status;
  };
  if (!address.password.empty()) {
    EMBERTIDE_RETURN_IF_ERROR(address.user.empty()
                                  ? command({"AUTH", address.password})
                                  : command({"AUTH", address.user, address.password}));
  }
  if (address.database == 0) return command({"PING"});
  return command({"SELECT", std::to_string(address.database)});
}

Result<std::vector<StreamEntry>> RedisConnection::ReadAfter(const std::string& stream,
                                                            const std::string& id, size_t count,
                                                            std::chrono::milliseconds block) {
  EMBERTIDE_RETURN_IF_ERROR(Send({"XREAD", "COUNT", std::to_string(count), "BLOCK",
                                  std::to_string(block.count()), "STREAMS", stream, id}));
  redisReply* raw = nullptr;
  EMBERTIDE_RETURN_IF_ERROR(Receive("XREAD", &raw));
  const Reply reply(raw);
  // [[stream, entries]], or nil when nothing came.
  if (reply->type != REDIS_REPLY_ARRAY || reply->elements != 1 ||
      reply->element[0]->elements != 2) {
    return std::vector<StreamEntry>();
  }
  return Entries(reply->element[0]->element[1]);
}

Result<std::optional<std::string>> RedisConnection::Get(const std::string& key) {
  EMBERTIDE_RETURN_IF_ERROR(Send({"GET", key}));
  redisReply* raw = nullptr;
  EMBERTIDE_RETURN_IF_ERROR(Receive("GET", &raw));
  const Reply reply(raw);
  if (reply->type != REDIS_REPLY_STRING) return std::optional<std::string>();
  return std::optional<std::string>(std::string(reply->str, reply->len));
}

Result<std::vector<std::vector<StreamEntry>>> RedisConnection::ReadRanges(
    const std::vector<Range>& ranges, size_t count) {
  for (const Range& range : ranges) {
    EMBERTIDE_RETURN_IF_ERROR(
        Send({"XRANGE", range.stream, "(" + range.after, "+", "COUNT", std::to_string(count)}));
  }
  std::vector<std::vector<StreamEntry>> answers;
  for (size_t i = 0; i < ranges.size(); ++i) {
    redisReply* raw = nullptr;
    EMBERTIDE_RETURN_IF_ERROR(Receive("XRANGE", &raw));
    const Reply reply(raw);
    answers.push_back(Entries(reply.get()));
  }
  return answers;
}

}  // namespace embertide

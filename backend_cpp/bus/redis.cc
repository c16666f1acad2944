// hiredis behind values: every reply is parsed into tokens as it comes, every error is a Status.
#include "bus/redis.h"

#include <hiredis/hiredis.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <map>
#include <string_view>
#include <system_error>

#include "base/file.h"
#include "tls/socket.h"

namespace embertide {
namespace {

// A reply has few elements: a range's entries, four tokens each.
constexpr size_t kMaxTokens = 4096;
constexpr size_t kReadBytes = 16384;  // of a TLS record at most
constexpr size_t kMaxPasswordBytes = 4096;

// hiredis gives each part of a reply to these. Its own build objects, and room for as many elements
// as an array announces; tokens take room for what has come.
void* AddToken(const redisReadTask* task, int type, size_t length, std::string text) {
  auto* tokens = static_cast<std::vector<RedisConnection::Token>*>(task->privdata);
  if (tokens->size() == kMaxTokens) return nullptr;  // hiredis then fails the reply
  tokens->push_back({type, length, std::move(text)});
  return tokens;
}
// NOLINTNEXTLINE(bugprone-throwing-static-initialization): constinit, so that nothing runs for it.
constinit redisReplyObjectFunctions token_functions = {
    [](const redisReadTask* task, char* text, size_t size) {
      return AddToken(task, task->type, 0, std::string(text, size));
    },
    [](const redisReadTask* task, int elements) {
      return AddToken(task, REDIS_REPLY_ARRAY, static_cast<size_t>(elements), "");
    },
    [](const redisReadTask* task, long long value) {
      return AddToken(task, REDIS_REPLY_INTEGER, 0, std::to_string(value));
    },
    [](const redisReadTask* task) { return AddToken(task, REDIS_REPLY_NIL, 0, ""); },
    [](void*) {},
};

timeval Timeval(std::chrono::milliseconds ms) {
  return {static_cast<time_t>(ms.count() / 1000),
          static_cast<suseconds_t>(ms.count() % 1000 * 1000)};
}

// Reads [[id, [field, value, ...]], ...] from `*at` on, which then is behind it. Entries without
// field "m" are not ours and have no message. False: the reply is something else.
bool ReadEntries(std::vector<RedisConnection::Token>& tokens, size_t* at,
                 std::vector<StreamEntry>* entries) {
  const auto array = [&](size_t* length) {
    if (*at == tokens.size() || tokens[*at].type != REDIS_REPLY_ARRAY) return false;
    *length = tokens[(*at)++].length;
    return true;
  };
  const auto text = [&](std::string* out) {
    if (*at == tokens.size() || tokens[*at].type != REDIS_REPLY_STRING) return false;
    *out = std::move(tokens[(*at)++].text);
    return true;
  };
  size_t length = 0;
  if (!array(&length)) return false;
  for (size_t i = 0; i < length; ++i) {
    size_t parts = 0;
    size_t fields = 0;
    StreamEntry& entry = entries->emplace_back();
    if (!array(&parts) || parts != 2 || !text(&entry.id) || !array(&fields)) return false;
    for (size_t f = 0; f + 1 < fields; f += 2) {
      std::string name;
      std::string value;
      if (!text(&name) || !text(&value)) return false;
      if (name == "m") entry.message = std::move(value);
    }
    if (fields % 2 != 0) return false;
  }
  return true;
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
std::string Quotable(std::string url) {
  if (const size_t query = url.find('?'); query != std::string::npos) {
    url = url.substr(0, query) + "?...";
  }
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

std::string Says(const char* what, const std::string& why) {
  return std::string("Redis: ") + what + ": " + why;
}

Status NoEntries(const std::string& stream) {
  return {Code::kDeviceError, "Redis: " + stream + ": the reply is no list of entries"};
}

bool ParseNumber(std::string_view text, int* number) {
  const auto [at, error] = std::from_chars(text.begin(), text.end(), *number);
  return error == std::errc() && at == text.end() && *number >= 0;
}

// name=value[&name=value...], each name once and known.
bool ParseQuery(std::string_view query, RedisAddress* address) {
  std::map<std::string_view, std::string*> places = {{"password_file", &address->password_file}};
  if (address->tls) {
    places["ssl_ca_certs"] = &address->files.authorities;
    places["ssl_certfile"] = &address->files.certificate;
    places["ssl_keyfile"] = &address->files.key;
  }
  while (!query.empty()) {
    const std::string_view each = query.substr(0, query.find('&'));
    query.remove_prefix(std::min(each.size() + 1, query.size()));
    const size_t equals = each.find('=');
    const auto place = places.find(each.substr(0, equals));
    if (equals == std::string_view::npos || place == places.end()) return false;
    *place->second = Unescaped(std::string(each.substr(equals + 1)));
    if (place->second->empty()) return false;
    places.erase(place);
  }
  return address->files.certificate.empty() == address->files.key.empty();
}

// redis[s]://[user:password@]host[:port][/[database]][?query]
bool ParseTcp(const std::string& url, RedisAddress* address) {
  constexpr std::string_view kScheme = "redis://";
  constexpr std::string_view kTlsScheme = "rediss://";
  address->tls = url.starts_with(kTlsScheme);
  if (!address->tls && !url.starts_with(kScheme)) return false;
  std::string_view rest = url;
  rest.remove_prefix(address->tls ? kTlsScheme.size() : kScheme.size());
  if (const size_t mark = rest.find('?'); mark != std::string_view::npos) {
    if (!ParseQuery(rest.substr(mark + 1), address)) return false;
    rest = rest.substr(0, mark);
  }
  if (address->tls && address->files.authorities.empty()) return false;
  if (const size_t at = rest.find('@'); at != std::string_view::npos) {
    const std::string_view credentials = rest.substr(0, at);
    const size_t colon = credentials.find(':');
    const bool no_password = colon == std::string_view::npos;
    if (credentials.find('/') != std::string_view::npos ||
        no_password == address->password_file.empty()) {
      return false;
    }
    address->user = Unescaped(std::string(credentials.substr(0, colon)));
    if (!no_password) address->password = Unescaped(std::string(credentials.substr(colon + 1)));
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
    socket.path = Unescaped(url.substr(kUnix.size()));
    return socket;
  }
  return Status(Code::kInvalidArgument,
                "Redis URL \"" + Quotable(url) +
                    "\": use redis://[user:password@]host[:port][/database][?password_file=PATH], "
                    "rediss://... with ssl_ca_certs=PATH (and ssl_certfile, ssl_keyfile), or "
                    "unix:///path");
}

Result<std::unique_ptr<RedisConnection>> RedisConnection::Open(const RedisAddress& address,
                                                               std::chrono::milliseconds timeout) {
  redisContext* context =
      address.host.empty()
          ? redisConnectUnixWithTimeout(address.path.c_str(), Timeval(timeout))
          : redisConnectWithTimeout(address.host.c_str(), address.port, Timeval(timeout));
  if (context == nullptr) return Status(Code::kResourceExhausted, "no memory for a connection");
  std::unique_ptr<RedisConnection> connection(new RedisConnection(context));
  connection->timeout_ = timeout;
  if (context->err != 0) return connection->Failed("connect");
  if (redisSetTimeout(context, Timeval(timeout)) != REDIS_OK) return connection->Failed("timeout");
  if (address.tls) {
    auto tls = TlsStream::Connect(address.files, context->fd, address.host);
    if (!tls.ok()) return Status(tls.status().code(), "Redis: " + tls.status().message());
    connection->tls_ = std::move(*tls);
  }
  EMBERTIDE_RETURN_IF_ERROR(connection->Authenticate(address));
  return connection;
}

RedisConnection::RedisConnection(redisContext* context) : context_(context) {
  context_->reader->fn = &token_functions;
  context_->reader->privdata = &tokens_;
}

RedisConnection::~RedisConnection() { redisFree(context_); }

Status RedisConnection::Failed(const char* what) const {
  return {Code::kDeviceError, Says(what, context_->errstr)};
}

// The status of a send or a receive that gave -1.
Status RedisConnection::Lost(const char* what) const {
  const bool late = errno == EAGAIN || errno == EWOULDBLOCK;
  const std::string why = late ? "nothing came in time" : std::strerror(errno);
  return {Code::kDeviceError, Says(what, tls_ != nullptr ? tls_->Error() : why)};
}

Status RedisConnection::Send(const std::vector<std::string>& words) {
  std::vector<const char*> data;
  std::vector<size_t> sizes;
  for (const std::string& word : words) {
    data.push_back(word.data());
    sizes.push_back(word.size());
  }
  char* command = nullptr;
  const int size =
      redisFormatCommandArgv(&command, static_cast<int>(words.size()), data.data(), sizes.data());
  if (size < 0) return {Code::kResourceExhausted, "Redis: no memory for " + words[0]};
  unsent_.append(command, static_cast<size_t>(size));
  redisFreeCommand(command);
  return Status::Ok();
}

Status RedisConnection::Flush(const char* what) {
  size_t sent = 0;
  while (sent < unsent_.size()) {
    const char* rest = unsent_.data() + sent;
    const size_t left = unsent_.size() - sent;
    const ptrdiff_t done =
        tls_ != nullptr ? tls_->Send(rest, left) : SendSome(context_->fd, rest, left);
    if (done <= 0) return Lost(what);
    sent += static_cast<size_t>(done);
  }
  unsent_.clear();
  return Status::Ok();
}

Status RedisConnection::Receive(const char* what) {
  const auto deadline = std::chrono::steady_clock::now() + 4 * timeout_;
  EMBERTIDE_RETURN_IF_ERROR(Flush(what));
  tokens_.clear();
  redisReader* reader = context_->reader;
  size_t received = 0;
  std::array<char, kReadBytes> bytes;  // NOLINT(cppcoreguidelines-pro-type-member-init): filled
  void* whole = nullptr;
  while (true) {
    if (redisReaderGetReply(reader, &whole) != REDIS_OK) {
      return {Code::kDeviceError, Says(what, reader->errstr)};
    }
    if (whole != nullptr) break;
    if (received > kMaxReplyBytes || std::chrono::steady_clock::now() > deadline) {
      return {Code::kDeviceError, Says(what, "after " + std::to_string(received) +
                                                 " bytes the reply is not at its end")};
    }
    const ptrdiff_t got = tls_ != nullptr ? tls_->Receive(bytes.data(), bytes.size())
                                          : ReceiveSome(context_->fd, bytes.data(), bytes.size());
    if (got == 0) return {Code::kDeviceError, Says(what, "the server hung up")};
    if (got < 0) return Lost(what);
    if (redisReaderFeed(reader, bytes.data(), static_cast<size_t>(got)) != REDIS_OK) {
      return {Code::kDeviceError, Says(what, reader->errstr)};
    }
    received += static_cast<size_t>(got);
  }
  if (tokens_.empty() || tokens_[0].type != REDIS_REPLY_ERROR) return Status::Ok();
  return {Code::kDeviceError, Says(what, tokens_[0].text)};
}

Status RedisConnection::Execute(const std::vector<std::vector<std::string>>& commands) {
  for (const std::vector<std::string>& words : commands) EMBERTIDE_RETURN_IF_ERROR(Send(words));
  Status refused = Status::Ok();
  for (const std::vector<std::string>& words : commands) {
    const Status status = Receive(words[0].c_str());
    if (status.ok()) continue;
    if (tokens_.empty() || tokens_[0].type != REDIS_REPLY_ERROR) return status;
    refused = {Code::kRejected, status.message()};
  }
  return refused;
}

Status RedisConnection::Authenticate(const RedisAddress& address) {
  std::string password = address.password;
  if (!address.password_file.empty()) {
    const Result<std::string> read = ReadWholeFile(address.password_file, kMaxPasswordBytes);
    if (!read.ok()) return {Code::kDeviceError, Says("password_file", read.status().message())};
    password = read.value().substr(0, read.value().find_last_not_of(" \t\r\n") + 1);
    // As while it is replaced; without AUTH this would be whoever Redis takes everybody for.
    if (password.empty()) {
      return {Code::kDeviceError, Says("password_file", address.password_file + " is empty")};
    }
  }
  std::vector<std::vector<std::string>> commands;
  if (!password.empty()) {
    commands.push_back({"AUTH", password});
    if (!address.user.empty()) commands[0].insert(commands[0].begin() + 1, address.user);
  }
  commands.push_back(address.database == 0
                         ? std::vector<std::string>{"PING"}
                         : std::vector<std::string>{"SELECT", std::to_string(address.database)});
  for (const std::vector<std::string>& words : commands) {
    const Status status = Execute({words});
    if (!status.ok()) return {Code::kDeviceError, status.message()};
  }
  return Status::Ok();
}

Result<std::vector<StreamEntry>> RedisConnection::ReadAfter(const std::string& stream,
                                                            const std::string& id, size_t count,
                                                            std::chrono::milliseconds block) {
  EMBERTIDE_RETURN_IF_ERROR(Send({"XREAD", "COUNT", std::to_string(count), "BLOCK",
                                  std::to_string(block.count()), "STREAMS", stream, id}));
  EMBERTIDE_RETURN_IF_ERROR(Receive("XREAD"));
  std::vector<StreamEntry> entries;
  if (tokens_[0].type == REDIS_REPLY_NIL) return entries;
  size_t at = 3;  // [[stream, entries]]
  if (tokens_.size() < 4 || !ReadEntries(tokens_, &at, &entries)) return NoEntries(stream);
  return entries;
}

Result<std::optional<std::string>> RedisConnection::Get(const std::string& key) {
  EMBERTIDE_RETURN_IF_ERROR(Send({"GET", key}));
  EMBERTIDE_RETURN_IF_ERROR(Receive("GET"));
  if (tokens_[0].type != REDIS_REPLY_STRING) return std::optional<std::string>();
  return std::optional<std::string>(std::move(tokens_[0].text));
}

Result<std::vector<std::optional<std::string>>> RedisConnection::GetMany(
    std::span<const std::string> keys) {
  for (const std::string& key : keys) EMBERTIDE_RETURN_IF_ERROR(Send({"GET", key}));
  std::vector<std::optional<std::string>> found(keys.size());
  for (std::optional<std::string>& each : found) {
    EMBERTIDE_RETURN_IF_ERROR(Receive("GET"));
    if (tokens_[0].type == REDIS_REPLY_STRING) each = std::move(tokens_[0].text);
  }
  return found;
}

Status RedisConnection::ReadRanges(
    std::span<const Range> ranges,
    const std::function<Status(size_t range, StreamEntry entry)>& consume) {
  Status first_error = Status::Ok();
  size_t sent = 0;
  size_t in_flight = 0;
  for (size_t received = 0; received < sent || (first_error.ok() && received < ranges.size());
       ++received) {
    while (first_error.ok() && sent < ranges.size() &&
           (sent == received || in_flight + ranges[sent].max_bytes <= kMaxBytesInFlight)) {
      const Range& range = ranges[sent++];
      in_flight += range.max_bytes;
      EMBERTIDE_RETURN_IF_ERROR(Send(
          {"XRANGE", range.stream, range.first, range.last, "COUNT", std::to_string(range.count)}));
    }
    EMBERTIDE_RETURN_IF_ERROR(Receive("XRANGE"));
    in_flight -= ranges[received].max_bytes;
    std::vector<StreamEntry> entries;
    size_t at = 0;
    if (!ReadEntries(tokens_, &at, &entries)) return NoEntries(ranges[received].stream);
    for (size_t i = 0; first_error.ok() && i < entries.size(); ++i) {
      first_error = consume(received, std::move(entries[i]));
    }
  }
  return first_error;
}

}  // namespace embertide

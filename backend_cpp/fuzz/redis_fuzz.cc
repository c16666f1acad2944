// Answers of a Redis: any bytes are entries or an error, and never more entries than they can
// hold.
//
//   input: what the server says after the connection's first PING was answered
//
// hiredis asks for the memory of an array when its length is read: lengths of over five digits are
// left out.
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <filesystem>
#include <thread>

#include "bus/redis.h"
#include "fuzz/fuzz.h"

namespace embertide::fuzz {
namespace {

// A server on a Unix socket that says what it is told to a connection, and hangs up.
class Server {
 public:
  Server() : path_(Folder() + "/redis.sock"), listener_(::socket(AF_UNIX, SOCK_STREAM, 0)) {
    std::filesystem::create_directories(Folder());
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path_.copy(address.sun_path, sizeof(address.sun_path) - 1);
    EMBERTIDE_CHECK(::bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
    EMBERTIDE_CHECK(::listen(listener_, 1) == 0);
  }
  RedisAddress address() const {
    RedisAddress address;
    address.path = path_;
    return address;
  }
  void Say(std::string_view bytes) const {
    const int socket = ::accept(listener_, nullptr, nullptr);
    const std::string text = "+PONG\r\n" + std::string(bytes);
    EMBERTIDE_CHECK(::send(socket, text.data(), text.size(), MSG_NOSIGNAL) >= 0);
    ::shutdown(socket, SHUT_WR);
    // Hanging up on words that were not read would lose those that were said.
    char buffer[4096];
    while (::read(socket, buffer, sizeof(buffer)) > 0) {
    }
    ::close(socket);
  }

 private:
  std::string path_;
  int listener_;
};

bool HasLongArray(std::string_view bytes) {
  size_t digits = 0;
  bool array = false;
  for (const char c : bytes) {
    digits = c >= '0' && c <= '9' ? digits + 1 : 0;
    array = c == '*' || (array && digits > 0);
    if (array && digits > 5) return true;
  }
  return false;
}

std::string Bulk(const std::string& text) {
  return "$" + std::to_string(text.size()) + "\r\n" + text + "\r\n";
}

}  // namespace

std::vector<std::string> Seeds() {
  const std::string entries = "*2\r\n*2\r\n" + Bulk("1-0") + "*2\r\n" + Bulk("m") + Bulk("one") +
                              "*2\r\n" + Bulk("2-0") + "*4\r\n" + Bulk("x") + Bulk("") + Bulk("m") +
                              Bulk("two");
  return {"*1\r\n*2\r\n" + Bulk("s") + entries + entries + "*0\r\n" + Bulk("value"),
          "*-1\r\n*0\r\n-ERR no\r\n$-1\r\n", "*1\r\n*2\r\n:1\r\n:2\r\n*1\r\n*2\r\n+1\r\n$-1\r\n"};
}

void Run(std::string_view input) {
  if (HasLongArray(input)) return;
  static const Server server;
  const std::thread says([input] { server.Say(input); });
  const auto join = [](std::thread* thread) { thread->join(); };
  const std::unique_ptr<std::thread, decltype(join)> joined(const_cast<std::thread*>(&says), join);
  auto connection = RedisConnection::Open(server.address(), std::chrono::milliseconds(2000));
  EMBERTIDE_CHECK(connection.ok());
  const auto check = [&](const std::vector<StreamEntry>& entries) {
    size_t bytes = 0;
    for (const StreamEntry& entry : entries) bytes += entry.id.size() + entry.message.size();
    EMBERTIDE_CHECK(entries.size() <= input.size() && bytes <= input.size());
  };
  const auto after = (*connection)->ReadAfter("s", "0-0", 9, std::chrono::milliseconds(1));
  if (after.ok()) {
    check(after.value());
    const std::vector<RedisConnection::Range> wanted = {{"a", "1-0", "1-9", 9, input.size()},
                                                        {"b", "1-0", "1-9", 9, input.size()}};
    std::vector<std::vector<StreamEntry>> ranges(wanted.size());
    const Status read = (*connection)->ReadRanges(wanted, [&](size_t range, StreamEntry entry) {
      EMBERTIDE_CHECK(range < ranges.size());
      ranges[range].push_back(std::move(entry));
      return Status::Ok();
    });
    if (read.ok()) {
      for (const auto& each : ranges) check(each);
      const auto value = (*connection)->Get("k");
      EMBERTIDE_CHECK(!value.ok() || !value.value() || value.value()->size() <= input.size());
    }
  }
  connection->reset();  // the server hangs up when this does
}

}  // namespace embertide::fuzz

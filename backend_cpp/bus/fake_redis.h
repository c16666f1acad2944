// A Redis in this process for tests: streams and strings, and the commands that readers send.
//
// Listens on a free port of 127.0.0.1; a thread for each connection.
// Thread-safe.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "embertide/status.h"

namespace embertide {

class FakeRedis {
 public:
  using Id = std::pair<uint64_t, uint64_t>;

  FakeRedis() : listener_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    auto* any = reinterpret_cast<sockaddr*>(&address);
    EMBERTIDE_CHECK(::bind(listener_, any, size) == 0 && ::listen(listener_, 8) == 0);
    EMBERTIDE_CHECK(::getsockname(listener_, any, &size) == 0);
    port_ = ntohs(address.sin_port);
    acceptor_ = std::thread([this] { Accept(); });
  }
  ~FakeRedis() {
    ::shutdown(listener_, SHUT_RDWR);
    acceptor_.join();
    ::close(listener_);
    DropConnections();
    for (std::thread& each : connections_) each.join();
  }
  FakeRedis(const FakeRedis&) = delete;
  FakeRedis& operator=(const FakeRedis&) = delete;

  std::string url() const { return "redis://127.0.0.1:" + std::to_string(port_); }

  // Ids are NUMBER-SUFFIX; an entry with the id of another takes its place.
  void Append(const std::string& stream, Id id, const std::string& message) {
    const std::lock_guard lock(mutex_);
    streams_[stream][id] = message;
    appended_.notify_all();
  }
  void Set(const std::string& key, const std::string& value) {
    const std::lock_guard lock(mutex_);
    strings_[key] = value;
  }
  // As a server that is started again.
  void LoseEverything() {
    const std::lock_guard lock(mutex_);
    streams_.clear();
    strings_.clear();
  }
  // Sets the answer to SET from now on; empty: it is done.
  void Refuse(const std::string& refusal) {
    const std::lock_guard lock(mutex_);
    refusal_ = refusal;
  }
  // GET is answered with `begin`, then `part` again and again until the connection ends.
  void AnswerGetWith(const std::string& begin, const std::string& part) {
    const std::lock_guard lock(mutex_);
    endless_ = {begin, part};
  }
  uint64_t endless_bytes() const {
    const std::lock_guard lock(mutex_);
    return endless_bytes_;
  }
  std::map<std::string, std::string> strings() const {
    const std::lock_guard lock(mutex_);
    return strings_;
  }
  void Trim(const std::string& stream) {
    const std::lock_guard lock(mutex_);
    streams_.erase(stream);
  }
  void DropConnections() {
    const std::lock_guard lock(mutex_);
    for (const int each : sockets_) ::shutdown(each, SHUT_RDWR);
  }
  // Commands so far, the words of each joined by spaces.
  std::vector<std::string> commands() const {
    const std::lock_guard lock(mutex_);
    return commands_;
  }

 private:
  using Entries = std::map<Id, std::string>;

  void Accept() {
    while (true) {
      const int socket = ::accept(listener_, nullptr, nullptr);
      if (socket < 0) return;
      const std::lock_guard lock(mutex_);
      sockets_.push_back(socket);
      connections_.emplace_back([this, socket] { Serve(socket); });
    }
  }

  void Serve(int socket) {
    std::string input;
    std::vector<std::string> words;
    while (ReadCommand(socket, &input, &words)) {
      const std::string reply = Answer(words);
      if (::send(socket, reply.data(), reply.size(), MSG_NOSIGNAL) < 0) break;
      if (words[0] == "GET") SendWithoutEnd(socket);
    }
    const std::lock_guard lock(mutex_);
    std::erase(sockets_, socket);
    ::close(socket);
  }

  void SendWithoutEnd(int socket) {
    std::string part;
    {
      const std::lock_guard lock(mutex_);
      if (endless_.second.empty()) return;
      while (part.size() < 4096) part += endless_.second;
    }
    for (ssize_t n = 0; n >= 0;) {
      n = ::send(socket, part.data(), part.size(), MSG_NOSIGNAL);
      const std::lock_guard lock(mutex_);
      endless_bytes_ += n > 0 ? static_cast<uint64_t>(n) : 0;
    }
  }

  static bool ReadMore(int socket, std::string* input) {
    char buffer[4096];
    const ssize_t n = ::recv(socket, buffer, sizeof(buffer), 0);
    if (n > 0) input->append(buffer, static_cast<size_t>(n));
    return n > 0;
  }
  static bool ReadLine(int socket, std::string* input, std::string* line) {
    size_t end = 0;
    while ((end = input->find("\r\n")) == std::string::npos) {
      if (!ReadMore(socket, input)) return false;
    }
    *line = input->substr(0, end);
    input->erase(0, end + 2);
    return true;
  }
  // "*2\r\n$4\r\nPING\r\n..."
  static bool ReadCommand(int socket, std::string* input, std::vector<std::string>* words) {
    std::string line;
    if (!ReadLine(socket, input, &line)) return false;
    words->assign(std::stoul(line.substr(1)), "");
    for (std::string& word : *words) {
      if (!ReadLine(socket, input, &line)) return false;
      const size_t size = std::stoul(line.substr(1));
      while (input->size() < size + 2) {
        if (!ReadMore(socket, input)) return false;
      }
      word = input->substr(0, size);
      input->erase(0, size + 2);
    }
    return true;
  }

  static std::string Bulk(const std::string& text) {
    return "$" + std::to_string(text.size()) + "\r\n" + text + "\r\n";
  }
  static std::string Encode(const Entries& entries) {
    std::string out = "*" + std::to_string(entries.size()) + "\r\n";
    for (const auto& [id, message] : entries) {
      out += "*2\r\n" + Bulk(std::to_string(id.first) + "-" + std::to_string(id.second)) +
             "*2\r\n" + Bulk("m") + Bulk(message);
    }
    return out;
  }
  static Id Parse(const std::string& id) {
    return {std::stoull(id), std::stoull(id.substr(id.find('-') + 1))};
  }
  Entries Between(const std::string& stream, Id first, Id last, size_t count) const {
    Entries found;
    const auto entries = streams_.find(stream);
    if (entries == streams_.end()) return found;
    for (const auto& [id, message] : entries->second) {
      if (id >= first && id <= last && found.size() < count) found[id] = message;
    }
    return found;
  }

  std::string Answer(const std::vector<std::string>& words) {
    std::unique_lock lock(mutex_);
    std::string text;
    for (const std::string& word : words) text += (text.empty() ? "" : " ") + word;
    commands_.push_back(text);
    if (words[0] == "XRANGE") {  // stream first last COUNT n
      return Encode(Between(words[1], Parse(words[2]), Parse(words[3]), std::stoul(words[5])));
    }
    if (words[0] == "XREAD") {  // COUNT n BLOCK ms STREAMS stream id
      Entries found;
      appended_.wait_for(lock, std::chrono::milliseconds(std::stoul(words[4])), [&] {
        Id after = Parse(words[7]);
        after =
            after.second == UINT64_MAX ? Id{after.first + 1, 0} : Id{after.first, after.second + 1};
        found = Between(words[6], after, {UINT64_MAX, UINT64_MAX}, std::stoul(words[2]));
        return !found.empty();
      });
      if (found.empty()) return "*-1\r\n";
      return "*1\r\n*2\r\n" + Bulk(words[6]) + Encode(found);
    }
    if (words[0] == "GET" && !endless_.first.empty()) return endless_.first;
    if (words[0] == "GET") {
      const auto found = strings_.find(words[1]);
      return found == strings_.end() ? "$-1\r\n" : Bulk(found->second);
    }
    if (words[0] == "SET" && !refusal_.empty()) return "-" + refusal_ + "\r\n";
    if (words[0] == "SET") strings_[words[1]] = words[2];
    if (words[0] == "AUTH" && words.back() != "hush") return "-WRONGPASS invalid\r\n";
    return "+OK\r\n";
  }

  int listener_;
  int port_ = 0;
  mutable std::mutex mutex_;
  std::condition_variable appended_;
  std::map<std::string, Entries> streams_;
  std::map<std::string, std::string> strings_;
  std::string refusal_;
  std::pair<std::string, std::string> endless_;
  uint64_t endless_bytes_ = 0;
  std::vector<int> sockets_;
  std::vector<std::string> commands_;
  std::vector<std::thread> connections_;
  std::thread acceptor_;
};

}  // namespace embertide

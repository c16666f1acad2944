// TokenFile: the tokens of a file, one a line: all are accepted, the first is sent. Read anew when
// it changes, so that tokens are replaced without a restart: the new one is first added as a
// further line everywhere, then made the first, then the old one is taken away.
//
// Thread-safe. Private to peer and node.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "embertide/status.h"

namespace embertide {

class TokenFile {
 public:
  // Empty path: no token, everybody's is accepted. kInvalidArgument, naming the file, if it cannot
  // be read or has no token.
  static Result<std::shared_ptr<TokenFile>> Open(const std::string& path);

  // False: nobody is asked for one.
  bool asked() const { return !path_.empty(); }
  // "Bearer TOKEN" of the first line; empty without a file.
  std::string Sent();
  // Whether a value of the metadata `authorization` is that of one of the tokens. The time it takes
  // says nothing of them but their length.
  bool Knows(std::string_view authorization);

 private:
  using Values = std::vector<std::string>;  // "Bearer TOKEN"

  explicit TokenFile(std::string path) : path_(std::move(path)) {}
  // A file that can no longer be read, or is empty, leaves what was read before.
  Status Look();
  // Looks at the file once a second. Whoever does so holds up nobody else.
  std::shared_ptr<const Values> Now();

  const std::string path_;
  std::mutex mutex_;
  bool looking_ = false;
  std::chrono::steady_clock::time_point looked_;
  std::shared_ptr<const Values> values_;
};

}  // namespace embertide

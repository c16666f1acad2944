// TokenFile: the tokens of a file, one a line: all are accepted, the first is sent. Read anew when
// it changes, so that tokens are replaced without a restart: the new one is first added as a
// further line everywhere, then made the first, then the old one is taken away.
//
// Thread-safe. Private to peer and node.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/mutex.h"
#include "embertide/status.h"

namespace embertide {

class TokenFile {
 public:
  struct Options {
    std::string path;       // empty: no token, everybody's is accepted
    bool examples = false;  // whether tokens that everybody can read will do
    // OPTIONAL: told, a line each, of changes that are refused.
    std::function<void(const std::string& line)> log = nullptr;
  };
  // kInvalidArgument, naming the file, if it cannot be read, has no token, or one that cannot be
  // sent.
  static Result<std::shared_ptr<TokenFile>> Open(Options options);

  // False: nobody is asked for one.
  bool asked() const { return !options_.path.empty(); }
  // "Bearer TOKEN" of the first line; empty without a file.
  std::string Sent();
  // Whether a value of the metadata `authorization` is that of one of the tokens. The time it takes
  // says nothing of them but their length.
  bool Knows(std::string_view authorization);

 private:
  using Values = std::vector<std::string>;  // "Bearer TOKEN"

  explicit TokenFile(Options options) : options_(std::move(options)) {}
  // A file that can no longer be read, or is empty, leaves what was read before.
  Status Look();
  // Looks at the file once a second. Whoever does so holds up nobody else.
  std::shared_ptr<const Values> Now();

  const Options options_;
  Mutex mutex_;
  bool looking_ EMBERTIDE_GUARDED_BY(mutex_) = false;
  // What was said last of a change.
  std::string refused_ EMBERTIDE_GUARDED_BY(mutex_);
  std::chrono::steady_clock::time_point looked_ EMBERTIDE_GUARDED_BY(mutex_);
  std::shared_ptr<const Values> values_ EMBERTIDE_GUARDED_BY(mutex_);
};

}  // namespace embertide

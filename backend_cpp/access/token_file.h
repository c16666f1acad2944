// TokenFile: the tokens of a file, one a line: all are accepted, the first is sent. Read anew when
// it changes, so that tokens are replaced without a restart: the new one is first added as a
// further line everywhere, then made the first, then the old one is taken away. A line may say
// whose token it is.
//
// Thread-safe. Private to access, peer, node and front.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "access/identity.h"
#include "base/mutex.h"
#include "embertide/status.h"

namespace embertide {

// Whether two secrets are the same. The time it takes says nothing of them but their length.
bool IsSameSecret(std::string_view one, std::string_view other);

class TokenFile {
 public:
  struct Options {
    std::string path;       // empty: no token, everybody's is accepted
    bool examples = false;  // whether tokens that everybody can read will do
    // Lines are ROLE[@MODEL][/NAME]:TOKEN, as those of a control plane's file, and those that begin
    // with # are left out. Else all tokens are nodes'.
    bool owners = false;
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
  bool Knows(std::string_view authorization) { return OwnerOf(authorization).has_value(); }
  // The owner of that token; nullopt: nobody has it.
  std::optional<Identity> OwnerOf(std::string_view authorization);

 private:
  struct Value {
    std::string sent;  // "Bearer TOKEN"
    Identity owner;
  };
  using Values = std::vector<Value>;

  explicit TokenFile(Options options) : options_(std::move(options)) {}
  // A file that can no longer be read, or is empty, leaves what was read before.
  Status Look();
  // Looks at the file once a second. Whoever does so holds up nobody else.
  std::shared_ptr<const Values> Now();

  const Options options_;
  Mutex mutex_;
  bool looking_ EMBERTIDE_GUARDED_BY(mutex_) = false;
  // The last message about a change.
  std::string refused_ EMBERTIDE_GUARDED_BY(mutex_);
  std::chrono::steady_clock::time_point looked_ EMBERTIDE_GUARDED_BY(mutex_);
  std::shared_ptr<const Values> values_ EMBERTIDE_GUARDED_BY(mutex_);
};

}  // namespace embertide

#include "access/token_file.h"

#include <openssl/crypto.h>

#include <algorithm>
#include <sstream>

#include "base/file.h"

namespace embertide {
namespace {

constexpr std::chrono::seconds kLookEvery{1};
constexpr size_t kMaxBytes = 64 << 10;
constexpr size_t kMinLetters = 16;  // a shorter one can be guessed; as server/services/tokens.py
constexpr std::string_view kExample = "REPLACE-ME";  // as server/services/tokens.py

}  // namespace

Result<std::shared_ptr<TokenFile>> TokenFile::Open(Options options) {
  std::shared_ptr<TokenFile> file(new TokenFile(std::move(options)));
  if (file->asked()) EMBERTIDE_RETURN_IF_ERROR(file->Look());
  return file;
}

Status TokenFile::Look() {
  const Result<std::string> read = ReadWholeFile(options_.path, kMaxBytes);
  if (!read.ok()) {
    return {Code::kInvalidArgument, "token_file cannot be read: " + read.status().message()};
  }
  const auto refuse = [this](const std::string& why) {
    return Status(Code::kInvalidArgument, "token_file " + options_.path + ": " + why);
  };
  auto values = std::make_shared<Values>();
  std::istringstream lines(read.value());
  size_t number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    const size_t begin = line.find_first_not_of(" \t\r");
    if (begin == std::string::npos || (options_.owners && line.starts_with('#'))) continue;
    std::string token = line.substr(begin, line.find_last_not_of(" \t\r") + 1 - begin);
    std::optional<Identity> owner = Identity{"node", "", ""};
    if (options_.owners) {
      const size_t colon = token.find(':');
      owner = colon == std::string::npos ? std::nullopt : ParseOwner(token.substr(0, colon));
      if (!owner) {
        return refuse("line " + std::to_string(number) +
                      " is not ROLE[@MODEL][/NAME]:TOKEN, as reader:TOKEN; roles are reader, "
                      "operator, node, trainer and control");
      }
      token.erase(0, colon + 1);
    }
    // gRPC ends the process over a header that has others.
    if (!std::ranges::all_of(token, [](char c) { return c > ' ' && c <= '~'; })) {
      return refuse("a token has characters that are not printable ASCII");
    }
    if (token.starts_with(kExample) && !options_.examples) {
      return refuse(
          "this is the token of an example, which everybody can read: put the output of `openssl "
          "rand -hex 32` in its place");
    }
    if (token.size() < kMinLetters && !token.starts_with(kExample)) {
      return refuse("a token has " + std::to_string(token.size()) + " letters, and " +
                    std::to_string(kMinLetters) +
                    " is the least: put the output of `openssl rand -hex 32` in its place");
    }
    values->push_back({"Bearer " + token, std::move(*owner)});
  }
  if (values->empty()) {
    return {Code::kInvalidArgument, "token_file " + options_.path + " is empty: nobody could call"};
  }
  const MutexLock lock(mutex_);
  values_ = std::move(values);
  looked_ = std::chrono::steady_clock::now();
  return Status::Ok();
}

std::shared_ptr<const TokenFile::Values> TokenFile::Now() {
  {
    const MutexLock lock(mutex_);
    const auto now = std::chrono::steady_clock::now();
    if (looking_ || now - looked_ <= kLookEvery) return values_;
    looking_ = true;
    looked_ = now;
  }
  const Status looked = Look();
  std::string news;
  {
    const MutexLock lock(mutex_);
    looking_ = false;
    if (looked.message() != refused_) news = refused_ = looked.message();
  }
  if (!news.empty() && options_.log) options_.log(news + "; those before stay");
  const MutexLock lock(mutex_);
  return values_;
}

std::string TokenFile::Sent() { return asked() ? Now()->front().sent : ""; }

std::optional<Identity> TokenFile::OwnerOf(std::string_view authorization) {
  const std::shared_ptr<const Values> values = Now();
  const Value* found = nullptr;
  for (const Value& value : *values) {
    if (IsSameSecret(value.sent, authorization) && found == nullptr) found = &value;
  }
  return found == nullptr ? std::nullopt : std::optional(found->owner);
}

bool IsSameSecret(std::string_view one, std::string_view other) {
  return one.size() == other.size() && CRYPTO_memcmp(one.data(), other.data(), one.size()) == 0;
}

}  // namespace embertide

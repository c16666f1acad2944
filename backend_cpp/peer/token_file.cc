#include "peer/token_file.h"

#include <openssl/crypto.h>

#include <algorithm>
#include <sstream>

#include "base/file.h"

namespace embertide {
namespace {

constexpr std::chrono::seconds kLookEvery{1};
constexpr size_t kMaxBytes = 64 << 10;
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
  auto values = std::make_shared<Values>();
  std::istringstream lines(read.value());
  for (std::string line; std::getline(lines, line);) {
    const size_t begin = line.find_first_not_of(" \t\r");
    if (begin == std::string::npos) continue;
    const std::string token = line.substr(begin, line.find_last_not_of(" \t\r") + 1 - begin);
    // gRPC ends the process over a header that has others.
    if (!std::ranges::all_of(token, [](char c) { return c > ' ' && c <= '~'; })) {
      return {Code::kInvalidArgument, "token_file " + options_.path +
                                          ": a token has characters that are not printable ASCII"};
    }
    if (token.starts_with(kExample) && !options_.examples) {
      return {Code::kInvalidArgument,
              "token_file " + options_.path +
                  ": this is the token of an example, which everybody can read: put the output of "
                  "`openssl rand -hex 32` in its place"};
    }
    values->push_back("Bearer " + token);
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

std::string TokenFile::Sent() { return asked() ? Now()->front() : ""; }

bool TokenFile::Knows(std::string_view authorization) {
  bool known = false;
  for (const std::string& value : *Now()) {
    known |= value.size() == authorization.size() &&
             CRYPTO_memcmp(value.data(), authorization.data(), value.size()) == 0;
  }
  return known;
}

}  // namespace embertide

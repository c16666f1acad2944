#include "peer/token_file.h"

#include <openssl/crypto.h>

#include <sstream>

#include "base/file.h"

namespace embertide {
namespace {

constexpr std::chrono::seconds kLookEvery{1};
constexpr size_t kMaxBytes = 64 << 10;

}  // namespace

Result<std::shared_ptr<TokenFile>> TokenFile::Open(const std::string& path) {
  std::shared_ptr<TokenFile> file(new TokenFile(path));
  if (!path.empty()) EMBERTIDE_RETURN_IF_ERROR(file->Look());
  return file;
}

Status TokenFile::Look() {
  const Result<std::string> read = ReadWholeFile(path_, kMaxBytes);
  if (!read.ok()) {
    return {Code::kInvalidArgument, "token_file cannot be read: " + read.status().message()};
  }
  auto values = std::make_shared<Values>();
  std::istringstream lines(read.value());
  for (std::string line; std::getline(lines, line);) {
    const size_t begin = line.find_first_not_of(" \t\r");
    if (begin == std::string::npos) continue;
    values->push_back("Bearer " + line.substr(begin, line.find_last_not_of(" \t\r") + 1 - begin));
  }
  if (values->empty()) {
    return {Code::kInvalidArgument, "token_file " + path_ + " is empty: nobody could call"};
  }
  const std::lock_guard lock(mutex_);
  values_ = std::move(values);
  looked_ = std::chrono::steady_clock::now();
  return Status::Ok();
}

std::shared_ptr<const TokenFile::Values> TokenFile::Now() {
  {
    const std::lock_guard lock(mutex_);
    const auto now = std::chrono::steady_clock::now();
    if (looking_ || now - looked_ <= kLookEvery) return values_;
    looking_ = true;
    looked_ = now;
  }
  static_cast<void>(Look());
  const std::lock_guard lock(mutex_);
  looking_ = false;
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

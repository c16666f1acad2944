// Certificates' URIs and tokens: whatever they are, nobody gets a role that is not written there.
//
//   input: [u8 what][a URI, an owner, or a token file, with owners or without, and a value of
//          `authorization`, split at a zero byte]
#include <filesystem>

#include "access/identity.h"
#include "access/token_file.h"
#include "fuzz/fuzz.h"

namespace embertide::fuzz {
namespace {

// As ParseIdentity takes it apart, put together again.
std::string UriOf(std::string_view domain, const Identity& identity) {
  std::string uri = "spiffe://" + std::string(domain) + "/role/" + identity.role;
  if (!identity.model.empty()) uri += "/model/" + identity.model;
  if (!identity.name.empty()) uri += "/name/" + identity.name;
  return uri;
}

void CheckUri(std::string_view uri) {
  const auto identity = ParseIdentity(uri);
  if (!identity) return;
  constexpr size_t kScheme = 9;
  const std::string_view domain = uri.substr(kScheme, uri.find('/', kScheme) - kScheme);
  EMBERTIDE_CHECK(UriOf(domain, *identity) == uri);
}

void CheckOwner(std::string_view text) {
  const auto owner = ParseOwner(text);
  if (!owner) return;
  std::string again = owner->role;
  if (!owner->model.empty()) again += "@" + owner->model;
  if (!owner->name.empty()) again += "/" + owner->name;
  EMBERTIDE_CHECK(again == text);
}

// A token is its line's owner's and nobody else's.
void CheckOwners(std::string_view text) {
  const size_t split = text.find('\0');
  const std::string_view file = text.substr(0, split);
  const std::string_view given = split == std::string_view::npos ? "" : text.substr(split + 1);
  const auto tokens = TokenFile::Open({.path = Write("tokens", file), .owners = true});
  if (!tokens.ok()) return;
  const auto owner = tokens.value()->OwnerOf(given);
  if (!owner) return;
  constexpr std::string_view kBearer = "Bearer ";
  EMBERTIDE_CHECK(given.starts_with(kBearer) && given.size() > kBearer.size());
  std::string line = owner->role;
  if (!owner->model.empty()) line += "@" + owner->model;
  if (!owner->name.empty()) line += "/" + owner->name;
  line += ":" + std::string(given.substr(kBearer.size()));
  EMBERTIDE_CHECK(file.find(line) != std::string_view::npos);
}

void CheckTokens(std::string_view text) {
  const size_t split = text.find('\0');
  const std::string_view file = text.substr(0, split);
  const std::string_view given = split == std::string_view::npos ? "" : text.substr(split + 1);
  const auto tokens = TokenFile::Open({Write("tokens", file)});
  if (!tokens.ok()) return;
  EMBERTIDE_CHECK(tokens.value()->asked() && tokens.value()->Knows(tokens.value()->Sent()));
  if (!tokens.value()->Knows(given)) return;
  constexpr std::string_view kBearer = "Bearer ";
  EMBERTIDE_CHECK(given.starts_with(kBearer) && given.size() > kBearer.size());
  EMBERTIDE_CHECK(file.find(given.substr(kBearer.size())) != std::string_view::npos);
}

}  // namespace

std::vector<std::string> Seeds() {
  return {Raw<uint8_t>(0) + "spiffe://embertide/role/node/model/news/name/node-0",
          Raw<uint8_t>(0) + "spiffe://a.b/role/reader",
          Raw<uint8_t>(1) + "first\n second \r\n" + '\0' + "Bearer second",
          Raw<uint8_t>(1) + std::string("\n\n") + '\0' + "Bearer ",
          Raw<uint8_t>(2) + "operator@news/ada",
          Raw<uint8_t>(3) + "# who\nreader:0123456789abcdef\noperator@news/ada:fedcba9876543210\n" +
              '\0' + "Bearer fedcba9876543210"};
}

void Run(std::string_view input) {
  switch (Take<uint8_t>(&input) % 4) {
    case 0:
      return CheckUri(input);
    case 1:
      return CheckTokens(input);
    case 2:
      return CheckOwner(input);
    default:
      return CheckOwners(input);
  }
}

}  // namespace embertide::fuzz

#include "access/identity.h"

#include <grpc/grpc_security_constants.h>
#include <grpcpp/security/auth_context.h>

#include <algorithm>
#include <array>

namespace embertide {
namespace {

constexpr std::string_view kScheme = "spiffe://";
constexpr std::array<std::string_view, 5> kRoles = {"reader", "operator", "node", "trainer",
                                                    "control"};
constexpr size_t kLongestWord = 128;

bool IsWord(std::string_view text) {
  constexpr std::string_view kLetters =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
  return !text.empty() && text.size() <= kLongestWord &&
         text.find_first_not_of(kLetters) == std::string_view::npos;
}

// Takes `begin` and the word after it off the front; true where nothing or a word was there.
bool TakePart(std::string_view* rest, std::string_view begin, std::string* word) {
  if (!rest->starts_with(begin)) return true;
  rest->remove_prefix(begin.size());
  const std::string_view found = rest->substr(0, rest->find('/'));
  if (!IsWord(found)) return false;
  *word = found;
  rest->remove_prefix(found.size());
  return true;
}

bool IsRole(std::string_view text) { return std::ranges::find(kRoles, text) != kRoles.end(); }

}  // namespace

std::optional<Identity> ParseIdentity(std::string_view uri) {
  if (!uri.starts_with(kScheme)) return std::nullopt;
  std::string_view rest = uri.substr(kScheme.size());
  const std::string_view domain = rest.substr(0, rest.find('/'));
  if (!IsWord(domain)) return std::nullopt;
  rest.remove_prefix(domain.size());
  Identity identity;
  const bool well = TakePart(&rest, "/role/", &identity.role) &&
                    TakePart(&rest, "/model/", &identity.model) &&
                    TakePart(&rest, "/name/", &identity.name);
  if (!well || !IsRole(identity.role) || !rest.empty()) return std::nullopt;
  return identity;
}

std::optional<Identity> ParseOwner(std::string_view text) {
  Identity identity;
  identity.role = text.substr(0, text.find_first_of("@/"));
  text.remove_prefix(identity.role.size());
  const bool well = TakePart(&text, "@", &identity.model) && TakePart(&text, "/", &identity.name);
  if (!well || !IsRole(identity.role) || !text.empty()) return std::nullopt;
  return identity;
}

std::optional<Identity> IdentityOf(const grpc::AuthContext* context) {
  if (context == nullptr || !context->IsPeerAuthenticated()) return std::nullopt;
  const auto uris = context->FindPropertyValues(GRPC_PEER_URI_PROPERTY_NAME);
  if (uris.size() != 1) return std::nullopt;
  return ParseIdentity({uris[0].data(), uris[0].size()});
}

}  // namespace embertide

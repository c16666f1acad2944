// Who a caller is, as its certificate says. Private to peer.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace grpc {
class AuthContext;
}

namespace embertide {

// What a certificate may say of its holder. The words are those of server/services/identity.py.
struct Identity {
  std::string role;   // reader, operator, node, trainer or control
  std::string model;  // of which alone; empty: of all
  std::string name;   // of the node, the person, ...; empty: not said
};

// Reads spiffe://DOMAIN/role/ROLE[/model/MODEL][/name/NAME]; nullopt if it is none: each part once,
// in this order, of letters, digits and ._- .
std::optional<Identity> ParseIdentity(std::string_view uri);

// Of the one URI that a certificate of a connection names; nullopt: it names none of ours, or there
// is no certificate.
std::optional<Identity> IdentityOf(const grpc::AuthContext* context);

}  // namespace embertide

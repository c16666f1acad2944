// Who a caller is, as its certificate or its token says. Private to access, peer and front.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace grpc {
class AuthContext;
}

namespace embertide {

// A caller, as his certificate or the line of his token names him. The words are those of
// server/services/identity.py.
struct Identity {
  std::string role;   // reader, operator, node, trainer or control
  std::string model;  // of which alone; empty: of all
  std::string name;   // of the node, the person, ...; empty: not said
};

// Reads spiffe://DOMAIN/role/ROLE[/model/MODEL][/name/NAME]; nullopt if it is none: each part once,
// in this order, of letters, digits and ._- .
std::optional<Identity> ParseIdentity(std::string_view uri);

// Reads ROLE[@MODEL][/NAME], as the line of a token has it; nullopt if it is none.
std::optional<Identity> ParseOwner(std::string_view text);

// The identity in the one URI that a certificate of a connection names; nullopt: it names none of
// ours, or there is no certificate.
std::optional<Identity> IdentityOf(const grpc::AuthContext* context);

}  // namespace embertide

#include "front/admission.h"

namespace embertide::front {
namespace {

constexpr const char* kAdminKey = "triton-grpc-protocol-embertide-admin";
// The beginning of gRPC's name for the other end of a Unix socket.
constexpr std::string_view kUnix = "unix:";

// The address in ipv4:1.2.3.4:567 or ipv6:[::1]:567, escaped; all of a Unix socket's name.
std::string AddressOf(const std::string& peer) {
  return peer.starts_with(kUnix) ? peer : peer.substr(0, peer.rfind(':'));
}

std::string NameOf(const Identity& who) {
  return who.role + (who.model.empty() ? "" : "@" + who.model) + "/" + who.name;
}

}  // namespace

grpc::Status Admission::Refuse(Refused why, grpc::StatusCode code, const std::string& text) const {
  tally_.AddRefused(why);
  return {code, text};
}

grpc::Status Admission::Identify(const grpc::GenericCallbackServerContext& context,
                                 std::optional<Identity>* who) const {
  const auto given = context.client_metadata().find("authorization");
  if (HasTokens() && given != context.client_metadata().end()) {
    *who = options_.tokens->OwnerOf({given->second.data(), given->second.size()});
    if (*who) return grpc::Status::OK;
    return Refuse(Refused::kIdentity, grpc::StatusCode::UNAUTHENTICATED,
                  "the token is not known here");
  }
  if (options_.tls) *who = IdentityOf(context.auth_context().get());
  return grpc::Status::OK;
}

grpc::Status Admission::Admit(const grpc::GenericCallbackServerContext& context,
                              std::string_view method, Right right, Guest* guest) const {
  const std::string peer = context.peer();
  guest->name = AddressOf(peer);
  // Who started this process: the socket is in a folder of his alone.
  if (peer.starts_with(kUnix)) return grpc::Status::OK;
  std::optional<Identity> who;
  if (grpc::Status status = Identify(context, &who); !status.ok()) return status;
  if (who) {
    guest->model = who->model;
    if (!who->name.empty()) guest->name = NameOf(*who);
  }
  const bool operates = who && who->role == "operator";
  if (operates) return grpc::Status::OK;
  const bool asks = !options_.known_callers || (who && who->role == "reader");
  if (right == Right::kAsk && asks) return grpc::Status::OK;
  const bool roles = HasTokens() || options_.tls;
  if (right == Right::kOperate) {
    if (options_.admin_key.empty() && !roles) return grpc::Status::OK;
    const auto given = context.client_metadata().find(kAdminKey);
    if (!options_.admin_key.empty() && given != context.client_metadata().end() &&
        IsSameSecret({given->second.data(), given->second.size()}, options_.admin_key)) {
      return grpc::Status::OK;
    }
    if (!roles) {
      return Refuse(
          Refused::kRight, grpc::StatusCode::UNAVAILABLE,
          std::string("This protocol is restricted, expecting header '") + kAdminKey + "'");
    }
  }
  if (!who) {
    return Refuse(Refused::kIdentity, grpc::StatusCode::UNAUTHENTICATED,
                  HasTokens() ? "no token: send metadata `authorization: Bearer TOKEN`"
                              : "the certificate says no role: its one URI must be "
                                "spiffe://DOMAIN/role/ROLE");
  }
  return Refuse(Refused::kRight, grpc::StatusCode::PERMISSION_DENIED,
                std::string(method) + " needs role " +
                    (right == Right::kAsk ? "reader or operator" : "operator") +
                    "; the caller's is " + who->role);
}

grpc::Status Admission::CheckToken(const std::string& authorization) const {
  if (!authorization.empty() && HasTokens()) {
    if (options_.tokens->OwnerOf(authorization)) return grpc::Status::OK;
    return Refuse(Refused::kIdentity, grpc::StatusCode::UNAUTHENTICATED,
                  "the token is not known here");
  }
  if (!options_.known_callers) return grpc::Status::OK;
  return Refuse(Refused::kIdentity, grpc::StatusCode::UNAUTHENTICATED,
                "no token: send the header `Authorization: Bearer TOKEN`");
}

grpc::Status Admission::CheckModel(const Guest& guest, const std::string& model) const {
  if (guest.model.empty() || guest.model == model) return grpc::Status::OK;
  constexpr size_t kMaxShown = 80;
  return Refuse(Refused::kRight, grpc::StatusCode::PERMISSION_DENIED,
                "the caller is of model '" + guest.model + "' alone; this is '" +
                    model.substr(0, kMaxShown) + "'");
}

}  // namespace embertide::front

// Admission: who calls, and whether he may, by the headers and the connection of a call alone, so
// that no message of a caller is read who may not send it.
//
// The token of `authorization` says who he is, or else his certificate. With neither
// tokens nor TLS all are strangers, and strangers may ask. docs/security.md has the table of roles.
//
// Thread-safe.
#pragma once

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/support/status.h>

#include <cstdint>
#include <memory>
#include <string>

#include "access/token_file.h"
#include "front/tally.h"

namespace embertide::front {

// The right that a call needs.
enum class Right : uint8_t {
  kAsk,      // scores, and what one must know to ask for them
  kOperate,  // what is loaded
};

struct AdmissionOptions {
  std::shared_ptr<TokenFile> tokens = nullptr;  // OPTIONAL: ROLE[@MODEL][/NAME]:TOKEN
  bool tls = false;                             // certificates say who calls
  // Who asks must be known, as a reader or an operator; else whoever can connect may ask.
  bool known_callers = false;
  // Metadata `triton-grpc-protocol-embertide-admin` of those who may operate beside operators.
  // Empty, and neither tokens nor TLS: everybody may.
  std::string admin_key;
};

// Somebody who may call.
struct Guest {
  // Whom calls and bytes are counted for: an identity that has a name; else the address that the
  // call comes from, as one token may be many machines'.
  std::string name;
  std::string model;  // that he may ask for alone; empty: all
};

class Admission {
 public:
  // Requires: the tally outlives it.
  Admission(const AdmissionOptions& options, Tally* tally) : options_(options), tally_(*tally) {}

  // UNAUTHENTICATED, PERMISSION_DENIED, or what tritonserver says to those without its key;
  // counted.
  grpc::Status Admit(const grpc::GenericCallbackServerContext& context, std::string_view method,
                     Right right, Guest* guest) const;
  // Whether who shows this (or nothing: empty) as `authorization`, and no certificate, may ask at
  // all. Counted if not.
  grpc::Status CheckToken(const std::string& authorization) const;
  // Whether a guest may ask for a model, which a call's message names; counted if not.
  grpc::Status CheckModel(const Guest& guest, const std::string& model) const;

 private:
  grpc::Status Identify(const grpc::GenericCallbackServerContext& context,
                        std::optional<Identity>* who) const;
  grpc::Status Refuse(Refused why, grpc::StatusCode code, const std::string& text) const;
  bool HasTokens() const { return options_.tokens != nullptr; }

  const AdmissionOptions options_;
  Tally& tally_;
};

}  // namespace embertide::front

// HOST:PORT or [IPV6]:PORT, as listeners and peers are named. Private to access, node and front.
#pragma once

#include <netdb.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "embertide/status.h"

namespace embertide {

struct Address {
  std::string host;  // without brackets
  std::string port;
};

// nullopt: it has no port.
std::optional<Address> SplitAddress(std::string_view text);

// Where to listen for it; of a name all of its addresses. kInvalidArgument, which says why and does
// not name it.
Result<std::shared_ptr<addrinfo>> ListenAddresses(const std::string& text);

}  // namespace embertide

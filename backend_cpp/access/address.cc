#include "access/address.h"

namespace embertide {

std::optional<Address> SplitAddress(std::string_view text) {
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) return std::nullopt;
  std::string_view host = text.substr(0, colon);
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  return Address{.host = std::string(host), .port = std::string(text.substr(colon + 1))};
}

Result<std::shared_ptr<addrinfo>> ListenAddresses(const std::string& text) {
  const std::optional<Address> address = SplitAddress(text);
  if (!address) return Status(Code::kInvalidArgument, "give HOST:PORT");
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(address->host.c_str(), address->port.c_str(), &hints, &found);
  if (error != 0) return Status(Code::kInvalidArgument, ::gai_strerror(error));
  return std::shared_ptr<addrinfo>(found, ::freeaddrinfo);
}

}  // namespace embertide

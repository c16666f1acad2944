#include "front/http_daemon.h"

#include "access/address.h"

namespace embertide::front {
namespace {

constexpr unsigned kSilenceSeconds = 10;

void Ignore(void* /*self*/, MHD_Connection* /*connection*/, void** /*seen*/,
            MHD_RequestTerminationCode /*why*/) {}

}  // namespace

Result<HttpDaemon> StartHttpDaemon(const HttpDaemonOptions& options) {
  const std::string cannot = options.what + " at " + options.listen + ": ";
  const Result<std::shared_ptr<addrinfo>> address = ListenAddresses(options.listen);
  if (!address.ok()) {
    return Status(Code::kInvalidArgument, cannot + address.status().message());
  }
  unsigned flags = MHD_USE_EPOLL_INTERNAL_THREAD | options.flags;
  if (address.value()->ai_family == AF_INET6) flags |= MHD_USE_IPv6;
  HttpDaemon daemon(MHD_start_daemon(
      flags, 0, nullptr, nullptr, options.answer, options.self, MHD_OPTION_SOCK_ADDR,
      address.value()->ai_addr, MHD_OPTION_NOTIFY_COMPLETED,
      options.completed == nullptr ? &Ignore : options.completed, options.self,
      MHD_OPTION_CONNECTION_LIMIT, options.max_connections, MHD_OPTION_PER_IP_CONNECTION_LIMIT,
      options.max_connections_of_one, MHD_OPTION_CONNECTION_TIMEOUT, kSilenceSeconds,
      MHD_OPTION_CONNECTION_MEMORY_LIMIT, options.connection_bytes, MHD_OPTION_END));
  if (daemon == nullptr) {
    return Status(Code::kDeviceError, cannot + "the address is in use or not of this machine");
  }
  return daemon;
}

MHD_Result Reply(MHD_Connection* connection, unsigned code, std::string_view body,
                 const char* type) {
  MHD_Response* const response = MHD_create_response_from_buffer(
      body.size(), const_cast<char*>(body.data()), MHD_RESPMEM_MUST_COPY);
  if (response == nullptr) return MHD_NO;
  MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, type);
  const MHD_Result queued = MHD_queue_response(connection, code, response);
  MHD_destroy_response(response);
  return queued;
}

}  // namespace embertide::front

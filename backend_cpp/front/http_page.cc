#include "front/http_page.h"

#include <microhttpd.h>

#include <string_view>
#include <utility>

#include "access/address.h"

namespace embertide::front {
namespace {

constexpr unsigned kMaxConnections = 64;
constexpr unsigned kMaxConnectionsOfOne = 16;  // of one address
constexpr unsigned kSilenceSeconds = 10;
constexpr size_t kConnectionBytes = 16 << 10;

MHD_Result Reply(MHD_Connection* connection, unsigned code, const std::string& text,
                 const char* type) {
  MHD_Response* const response = MHD_create_response_from_buffer(
      text.size(), const_cast<char*>(text.data()), MHD_RESPMEM_MUST_COPY);
  if (response == nullptr) return MHD_NO;
  MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, type);
  const MHD_Result queued = MHD_queue_response(connection, code, response);
  MHD_destroy_response(response);
  return queued;
}

}  // namespace

struct HttpPage::Impl {
  HttpAnswers answers;
  MHD_Daemon* daemon = nullptr;

  MHD_Result Answer(MHD_Connection* connection, std::string_view url,
                    std::string_view method) const {
    constexpr const char* kText = "text/plain; charset=utf-8";
    if (method != "GET" && method != "HEAD") {
      return Reply(connection, MHD_HTTP_METHOD_NOT_ALLOWED,
                   "health and metrics alone are answered here, to GET; inferences go over gRPC\n",
                   kText);
    }
    if (url == "/v2/health/live") return Reply(connection, MHD_HTTP_OK, "", kText);
    if (url == "/v2/health/ready") {
      const bool ready = answers.ready();
      return Reply(connection, ready ? MHD_HTTP_OK : MHD_HTTP_SERVICE_UNAVAILABLE, "", kText);
    }
    if (url == "/metrics") return Reply(connection, MHD_HTTP_OK, answers.metrics(), kText);
    if (url == "/slow") return Reply(connection, MHD_HTTP_OK, answers.slow(), "application/json");
    return Reply(connection, MHD_HTTP_NOT_FOUND,
                 "there are /v2/health/live, /v2/health/ready, /metrics and /slow\n", kText);
  }
};

Result<std::unique_ptr<HttpPage>> HttpPage::Start(const std::string& listen, HttpAnswers answers) {
  const std::string cannot = "health and metrics cannot be answered at " + listen + ": ";
  const Result<std::shared_ptr<addrinfo>> address = ListenAddresses(listen);
  if (!address.ok()) {
    return Status(Code::kInvalidArgument, cannot + address.status().message());
  }
  auto impl = std::make_unique<Impl>();
  impl->answers = std::move(answers);
  const auto handle = [](void* self, MHD_Connection* connection, const char* url,
                         const char* method, const char* /*version*/, const char* /*upload*/,
                         size_t* upload_bytes, void** seen) -> MHD_Result {
    // Called first for the headers; a body that follows is not read.
    if (*seen == nullptr) {
      static char once = 0;
      *seen = &once;
      return MHD_YES;
    }
    if (*upload_bytes > 0) return MHD_NO;
    try {
      return static_cast<const Impl*>(self)->Answer(connection, url, method);
    } catch (const std::exception&) {
      return MHD_NO;  // no memory: the connection ends
    }
  };
  unsigned flags = MHD_USE_EPOLL_INTERNAL_THREAD;
  if (address.value()->ai_family == AF_INET6) flags |= MHD_USE_IPv6;
  impl->daemon = MHD_start_daemon(
      flags, 0, nullptr, nullptr, +handle, impl.get(), MHD_OPTION_SOCK_ADDR,
      address.value()->ai_addr, MHD_OPTION_CONNECTION_LIMIT, kMaxConnections,
      MHD_OPTION_PER_IP_CONNECTION_LIMIT, kMaxConnectionsOfOne, MHD_OPTION_CONNECTION_TIMEOUT,
      kSilenceSeconds, MHD_OPTION_CONNECTION_MEMORY_LIMIT, kConnectionBytes, MHD_OPTION_END);
  if (impl->daemon == nullptr) {
    return Status(Code::kDeviceError, cannot + "the address is in use or not of this machine");
  }
  return std::unique_ptr<HttpPage>(new HttpPage(std::move(impl)));
}

HttpPage::HttpPage(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

HttpPage::~HttpPage() { MHD_stop_daemon(impl_->daemon); }

}  // namespace embertide::front

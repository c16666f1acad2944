#include "front/http_page.h"

#include <string_view>
#include <utility>

#include "front/http_daemon.h"

namespace embertide::front {
namespace {

constexpr unsigned kMaxConnections = 64;
constexpr unsigned kMaxConnectionsOfOne = 16;
constexpr size_t kConnectionBytes = 16 << 10;

}  // namespace

struct HttpPage::Impl {
  HttpAnswers answers;
  HttpDaemon daemon;

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
  Result<HttpDaemon> daemon = StartHttpDaemon({.listen = listen,
                                               .what = "health and metrics cannot be answered",
                                               .max_connections = kMaxConnections,
                                               .max_connections_of_one = kMaxConnectionsOfOne,
                                               .connection_bytes = kConnectionBytes,
                                               .answer = +handle,
                                               .self = impl.get()});
  if (!daemon.ok()) return daemon.status();
  impl->daemon = std::move(daemon.value());
  return std::unique_ptr<HttpPage>(new HttpPage(std::move(impl)));
}

HttpPage::HttpPage(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

HttpPage::~HttpPage() = default;

}  // namespace embertide::front

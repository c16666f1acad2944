// embertide_server: Triton's core behind a front of our own. It answers the inference protocol over
// gRPC, health and metrics over HTTP, until SIGTERM.
#include <getopt.h>
#include <google/protobuf/stubs/logging.h>

#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <memory>
#include <optional>
#include <string>

#include "access/address.h"
#include "base/number.h"
#include "front/core.h"
#include "front/http_infer.h"
#include "front/http_page.h"
#include "front/metrics.h"
#include "front/service.h"
#include "front/spans.h"

namespace embertide::front {
namespace {

constexpr const char* kHelp =
    "embertide_server --triton LIBRARY --repository DIR --backends DIR --grpc HOST:PORT [options]\n"
    "\n"
    "Serves the models of a repository by Triton's own core, over gRPC (KServe v2).\n\n"
    "  --triton LIBRARY        libtritonserver.so of a Triton of release 24.10 or later\n"
    "  --repository DIR        models, each a folder with config.pbtxt\n"
    "  --backends DIR          folder that holds embertide/libtriton_embertide.so\n"
    "  --grpc HOST:PORT        where requests are answered\n"
    "  --http HOST:PORT        health and metrics over HTTP (none)\n"
    "  --http-infer HOST:PORT  inferences over HTTP, as JSON, in plain text (none)\n"
    "  --by-name               models are loaded and unloaded by name, in place of all there are\n"
    "  --model NAME            by name: loaded at the start; may be given again\n"
    "  --tls DIR               tls.crt, tls.key and ca.crt: callers show a certificate\n"
    "  --tokens FILE           lines of ROLE[@MODEL][/NAME]:TOKEN: a caller may show a token\n"
    "  --known-callers         readers and operators alone may ask, by certificate or token; with\n"
    "                          tokens, callers need no certificate\n"
    "  --example-tokens        tokens that everybody can read will do\n"
    "  --own-socket PATH       a Unix socket for who started it: everything may be asked there\n"
    "  --max-request-bytes N   of one message (67108864)\n"
    "  --max-calls N           inferences at work at once (4096)\n"
    "  --max-bytes N           of their requests and answers (1073741824)\n"
    "  --max-calls-of-one N    the same of one caller (0: half)\n"
    "  --max-bytes-of-one N    the same of one caller (0: half)\n"
    "  --max-connections N     more are closed at once (1024)\n"
    "  --spans-to HOST:PORT    spans of OpenTelemetry to a collector, as OTLP over gRPC in plain\n"
    "                          text (none)\n"
    "  --spans-every N         of requests without a traceparent, one in so many has a span (1)\n"
    "  --connection-age-ms N   connections are told to go after so long (0: an hour)\n"
    "  --exit-timeout-s N      for requests at work, once it is told to end (3)\n\n"
    "EMBERTIDE_ADMIN_KEY in the environment is asked for by loads and unloads, as metadata\n"
    "triton-grpc-protocol-embertide-admin.\n";

constexpr std::chrono::seconds kRound{1};

struct Options {
  CoreOptions core;
  ServiceOptions service;
  std::string http;
  std::string http_infer;
  std::string tls;
  TokenFile::Options tokens;
  Spans::Options spans;
};

int Refuse(const std::string& why) {
  std::fprintf(stderr, "embertide_server: %s\n", why.c_str());
  return 2;
}

bool IsCollector(const std::string& text) {
  const std::optional<Address> address = SplitAddress(text);
  uint16_t port = 0;
  return address && !address->host.empty() && address->host.find('/') == std::string::npos &&
         ParseNumber(address->port, 1, 65535, &port).empty();
}

// Sets who may call, by the options. Returns why they are wrong, or nothing.
std::string SetCallers(Options* options) {
  AdmissionOptions& admission = options->service.admission;
  const bool tokens = !options->tokens.path.empty();
  if (admission.known_callers && !tokens && options->tls.empty()) {
    return "--known-callers needs --tokens, --tls or both: nobody could say who he is";
  }
  Result<Credentials> credentials = Credentials::Of(
      options->tls, admission.known_callers && tokens ? CallerCertificate::kOptional
                                                      : CallerCertificate::kRequired);
  if (!credentials.ok()) return "--tls " + credentials.status().message();
  options->service.credentials = std::move(*credentials);
  admission.tls = options->service.credentials.tls();
  if (!tokens) return "";
  options->tokens.owners = true;
  Result<std::shared_ptr<TokenFile>> file = TokenFile::Open(options->tokens);
  if (!file.ok()) return "--tokens: " + file.status().message();
  admission.tokens = std::move(*file);
  return "";
}

int Serve(const Options& options, const sigset_t& signals) {
  std::unique_ptr<Spans> spans;
  if (!options.spans.collector.empty()) spans = std::make_unique<Spans>(options.spans);
  Result<std::unique_ptr<Core>> core = Core::Start(options.core);
  if (!core.ok()) return Refuse(core.status().message());
  Result<std::unique_ptr<Service>> service = Service::Start(options.service, **core);
  if (!service.ok()) return Refuse(service.status().message());
  (*service)->SetSpans(spans.get());
  Metrics metrics(**core, **service, spans.get());
  std::unique_ptr<HttpPage> page;
  if (!options.http.empty()) {
    Result<std::unique_ptr<HttpPage>> started = HttpPage::Start(
        options.http,
        {.ready = [&] { return !(*service)->leaving() && (*core)->IsReady(); },
         .metrics =
             [&] {
               metrics.Publish();
               std::string text;
               const grpc::Status read = (*core)->Metrics(&text);
               return read.ok() ? text : "# " + read.error_message() + "\n";
             },
         .slow =
             [&] {
               return (*service)->inferences().slow().Json(std::chrono::steady_clock::now());
             }});
    if (!started.ok()) return Refuse(started.status().message());
    page = std::move(*started);
  }
  std::unique_ptr<HttpInfer> inferences;
  if (!options.http_infer.empty()) {
    Result<std::unique_ptr<HttpInfer>> started =
        HttpInfer::Start({.listen = options.http_infer,
                          .admission = &(*service)->admission(),
                          .tally = (*service)->mutable_tally()},
                         (*service)->InProcess());
    if (!started.ok()) return Refuse(started.status().message());
    inferences = std::move(*started);
  }
  // Not before: metrics must outlive whatever is answered.
  (*service)->Open();
  (*core)->Log(TRITONSERVER_LOG_INFO,
               "answers gRPC at port " + std::to_string((*service)->port()) +
                   (options.http.empty() ? "" : ", health and metrics at " + options.http));
  const timespec round{kRound.count(), 0};
  while (sigtimedwait(&signals, nullptr, &round) < 0) {
    (*service)->EndLate();
    metrics.Publish();
  }
  (*core)->Log(TRITONSERVER_LOG_INFO, "ends: requests at work are finished first");
  (*service)->Drain(std::chrono::seconds(options.core.exit_timeout_s));
  inferences.reset();
  (*core)->Stop();
  return 0;
}

int Run(int argc, char** argv) {
  Options options;
  static constexpr std::array<option, 25> kOptions = {{
      {"triton", required_argument, nullptr, 't'},
      {"repository", required_argument, nullptr, 'r'},
      {"backends", required_argument, nullptr, 'b'},
      {"grpc", required_argument, nullptr, 'g'},
      {"http", required_argument, nullptr, 'p'},
      {"http-infer", required_argument, nullptr, 'j'},
      {"by-name", no_argument, nullptr, 'N'},
      {"model", required_argument, nullptr, 'm'},
      {"tls", required_argument, nullptr, 'l'},
      {"tokens", required_argument, nullptr, 'k'},
      {"known-callers", no_argument, nullptr, 'K'},
      {"example-tokens", no_argument, nullptr, 'x'},
      {"own-socket", required_argument, nullptr, 's'},
      {"max-calls-of-one", required_argument, nullptr, 'O'},
      {"max-bytes-of-one", required_argument, nullptr, 'o'},
      {"max-request-bytes", required_argument, nullptr, 'M'},
      {"max-calls", required_argument, nullptr, 'C'},
      {"max-bytes", required_argument, nullptr, 'B'},
      {"max-connections", required_argument, nullptr, 'n'},
      {"spans-to", required_argument, nullptr, 'S'},
      {"spans-every", required_argument, nullptr, 'E'},
      {"connection-age-ms", required_argument, nullptr, 'a'},
      {"exit-timeout-s", required_argument, nullptr, 'e'},
      {"help", no_argument, nullptr, 'h'},
      {nullptr, 0, nullptr, 0},
  }};
  int flag = 0;
  for (int c = 0; (c = getopt_long(argc, argv, "", kOptions.data(), &flag)) != -1;) {
    const std::string value = optarg == nullptr ? "" : optarg;
    std::string wrong;
    switch (c) {
      case 't':
        options.core.library = value;
        break;
      case 'r':
        options.core.repository = value;
        break;
      case 'b':
        options.core.backends = value;
        break;
      case 'g':
        options.service.listen = value;
        break;
      case 'p':
        options.http = value;
        break;
      case 'j':
        options.http_infer = value;
        break;
      case 'N':
        options.core.by_name = true;
        break;
      case 'm':
        options.core.models.push_back(value);
        break;
      case 'l':
        options.tls = value;
        break;
      case 'k':
        options.tokens.path = value;
        break;
      case 'K':
        options.service.admission.known_callers = true;
        break;
      case 'x':
        options.tokens.examples = true;
        break;
      case 's':
        options.service.own_socket = value;
        break;
      case 'O':
        wrong = ParseNumber(value, 0, 1'000'000, &options.service.infer.max_calls_of_one);
        break;
      case 'o':
        wrong = ParseNumber(value, 0, uint64_t{1} << 40, &options.service.infer.max_bytes_of_one);
        break;
      case 'M':
        wrong = ParseNumber(value, 1024, uint64_t{1} << 30, &options.service.max_message_bytes);
        break;
      case 'C':
        wrong = ParseNumber(value, 1, 1'000'000, &options.service.infer.max_calls);
        break;
      case 'B':
        wrong = ParseNumber(value, 1 << 20, uint64_t{1} << 40, &options.service.infer.max_bytes);
        break;
      case 'n':
        wrong = ParseNumber(value, 1, 1'000'000, &options.service.max_connections);
        break;
      case 'S':
        options.spans.collector = value;
        if (!IsCollector(value)) wrong = "\"" + value + "\"; give HOST:PORT";
        break;
      case 'E':
        wrong = ParseNumber(value, 1, 1'000'000, &options.spans.every);
        break;
      case 'a':
        wrong = ParseNumber(value, 0, 3'600'000, &options.service.max_connection_age_ms);
        break;
      case 'e':
        wrong = ParseNumber(value, 0, 3600, &options.core.exit_timeout_s);
        break;
      case 'h':
        std::fputs(kHelp, stdout);
        return 0;
      default:
        return 2;
    }
    if (!wrong.empty()) {
      return Refuse("--" + std::string(kOptions[static_cast<size_t>(flag)].name) + " " + wrong);
    }
  }
  if (!options.core.models.empty() && !options.core.by_name) {
    return Refuse("--model needs --by-name; without both, all models of the repository are loaded");
  }
  if (options.spans.every > 1 && options.spans.collector.empty()) {
    return Refuse("--spans-every needs --spans-to: nobody takes the spans");
  }
  options.spans.instance = options.service.listen;
  options.spans.version = EMBERTIDE_VERSION;
  if (options.core.library.empty() || options.core.repository.empty() ||
      options.core.backends.empty() || options.service.listen.empty()) {
    return Refuse("--triton, --repository, --backends and --grpc are needed; see --help");
  }
  // The log of refused changes of a file; Triton's own is not there yet.
  options.tokens.log = [](const std::string& line) {
    std::fprintf(stderr, "embertide_server: %s\n", line.c_str());
  };
  if (const std::string wrong = SetCallers(&options); !wrong.empty()) return Refuse(wrong);
  const char* const key = std::getenv("EMBERTIDE_ADMIN_KEY");
  if (key != nullptr) options.service.admission.admin_key = key;
  // Before any thread: they inherit the mask, and the signal is waited for by one of them.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  return Serve(options, signals);
}

}  // namespace
}  // namespace embertide::front

// Only memory for a few strings could still throw.
// NOLINTNEXTLINE(bugprone-exception-escape): see above.
int main(int argc, char** argv) {
  // gRPC would write a line for each stranger whose handshake fails.
  ::setenv("GRPC_VERBOSITY", "NONE", 0);
  // And protobuf one for each name that is no UTF-8.
  google::protobuf::SetLogHandler(nullptr);
  return embertide::front::Run(argc, argv);
}

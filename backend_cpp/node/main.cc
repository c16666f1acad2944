// embertide_node: a node without Triton, for tests with many of them and for tools. It answers
// NodeService, `Read` among it, until SIGTERM.
#include <getopt.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <limits>
#include <stop_token>
#include <string>

#include "base/background_task.h"
#include "base/number.h"
#include "embertide/node.h"

namespace embertide {
namespace {

constexpr const char* kHelp =
    "embertide_node --publication DIR --state URL --peer-address HOST:PORT [options]\n\n"
    "Holds what the plan says of a model and answers for all of it, over gRPC (NodeService).\n\n"
    "  --publication DIR     folder that a trainer publishes to\n"
    "  --state URL           Redis of the plans\n"
    "  --peer-address H:P    where peers reach it; port 0 takes a free one\n"
    "  --bus URL             Redis of the updates; without it, files alone\n"
    "  --control HOST:PORT   control plane to register with\n"
    "  --node NAME           its name in the plan (node-0)\n"
    "  --group N             lookups stay inside a group as long as it answers (0)\n"
    "  --devices N           CPU devices (1)\n"
    "  --numa-nodes LIST     whose memory device 0, 1, ... is in, over again: auto, none or "
    "0,1,...\n"
    "                        (auto: all, if there are several)\n"
    "  --ddr-bytes N         budget of all its devices (1 GiB)\n"
    "  --ssd-bytes N         the same of the SSD tier (0: none)\n"
    "  --ssd-directory DIR   where that lies\n"
    "  --index KIND          plain, or lean: fewer bytes a row, some ns more a key (plain)\n"
    "  --ddr-policy NAME     which rows DDR holds (clock)\n"
    "  --table-budgets LIST  room that tables have to themselves, of the budgets above:\n"
    "                        TABLE=DDR_BYTES[/SSD_BYTES[/POLICY]],...\n"
    "  --hbm-bytes N         of each GPU, for copies of hot rows (0: no GPU is used)\n"
    "  --hbm-devices N       GPUs, from the first that the process sees (1)\n"
    "  --hbm-kind KIND       gpu, or twin: host memory in their place (gpu)\n"
    "  --hbm-policy LIST     at which read rows enter, of all tables and of some: POLICY[,TABLE=\n"
    "                        POLICY...], each clock, clock:2 to clock:15 or none (clock:2)\n"
    "  --ssd-engine ENGINE   auto, io_uring, libaio or pread (auto)\n"
    "  --ssd-compaction-bytes N  of its compaction in the background, a second (64 MiB)\n"
    "  --ssd-seal-interval-ms N  between seals, which it is opened from after a kill (300000; 0: "
    "none)\n"
    "  --ssd-seal-bytes N    of a seal, a second while it is written (64 MiB; 0: as fast as it "
    "goes)\n"
    "  --hot-rows-bytes N    for copies of peers' rows that are read often (32 MiB; 0: none)\n"
    "  --peer-timeout-ms N   for peers, where the caller of Read names no deadline (100)\n"
    "  --window-versions N   versions that may be asked for by number (8)\n"
    "  --ready-staleness-ms N  the health service says no while the newest version here was "
    "committed\n"
    "                        so long before the newest published one (60000)\n"
    "  --join-step-bytes N   rows that a step adds of buckets that come to the node (1 MiB)\n"
    "  --join-rest N         times what a step took that the node rests after it (1)\n"
    "  --plan-file FILE      the last plan is kept here\n"
    "  --token-file FILE     tokens that peers and the control plane ask for; the first is sent\n"
    "  --tls DIR             tls.crt, tls.key and ca.crt, for gRPC\n"
    "  --plaintext           answer without them where others can listen in\n"
    "  --peer-listen H:P     where it listens, if not at --peer-address\n"
    "  --health-listen H:P   the health service alone, in plain text, for probes\n"
    "  --max-degraded-share X  a request fails if no owner answers more than this share of its "
    "keys\n"
    "                        (0); up to it, they read as default rows, and are marked\n";

// Empty, or why the text names no kind.
template <typename Kind>
std::string TakeKind(const Result<Kind>& parsed, Kind* out) {
  if (!parsed.ok()) return parsed.status().message();
  *out = parsed.value();
  return "";
}

std::string ParseMs(const std::string& text, int64_t least, int64_t most,
                    std::chrono::milliseconds* out) {
  int64_t ms = 0;
  std::string wrong = ParseNumber(text, least, most, &ms);
  *out = std::chrono::milliseconds(ms);
  return wrong;
}

constexpr std::chrono::milliseconds kLookAtSignals{100};

int Refuse(const std::string& why) {
  std::fprintf(stderr, "embertide_node: %s\n", why.c_str());
  return 2;
}

int Run(int argc, char** argv) {
  NodeOptions options;
  options.devices = 1;
  static constexpr std::array<option, 38> kOptions = {{
      {"publication", required_argument, nullptr, 'p'},
      {"state", required_argument, nullptr, 's'},
      {"peer-address", required_argument, nullptr, 'a'},
      {"bus", required_argument, nullptr, 'b'},
      {"control", required_argument, nullptr, 'c'},
      {"node", required_argument, nullptr, 'n'},
      {"group", required_argument, nullptr, 'g'},
      {"devices", required_argument, nullptr, 'd'},
      {"numa-nodes", required_argument, nullptr, 'N'},
      {"ddr-bytes", required_argument, nullptr, 'm'},
      {"ssd-bytes", required_argument, nullptr, 'M'},
      {"ssd-directory", required_argument, nullptr, 'S'},
      {"index", required_argument, nullptr, 'e'},
      {"ddr-policy", required_argument, nullptr, 'P'},
      {"table-budgets", required_argument, nullptr, 'T'},
      {"hbm-bytes", required_argument, nullptr, 'G'},
      {"hbm-devices", required_argument, nullptr, 'H'},
      {"hbm-kind", required_argument, nullptr, 'K'},
      {"hbm-policy", required_argument, nullptr, 'A'},
      {"ssd-engine", required_argument, nullptr, 'E'},
      {"ssd-compaction-bytes", required_argument, nullptr, 'C'},
      {"ssd-seal-interval-ms", required_argument, nullptr, 'i'},
      {"ssd-seal-bytes", required_argument, nullptr, 'I'},
      {"hot-rows-bytes", required_argument, nullptr, 'r'},
      {"peer-timeout-ms", required_argument, nullptr, 'w'},
      {"window-versions", required_argument, nullptr, 'v'},
      {"ready-staleness-ms", required_argument, nullptr, 'R'},
      {"join-step-bytes", required_argument, nullptr, 'j'},
      {"join-rest", required_argument, nullptr, 'J'},
      {"plan-file", required_argument, nullptr, 'f'},
      {"token-file", required_argument, nullptr, 't'},
      {"tls", required_argument, nullptr, 'l'},
      {"plaintext", no_argument, nullptr, 'x'},
      {"peer-listen", required_argument, nullptr, 'L'},
      {"health-listen", required_argument, nullptr, 'k'},
      {"max-degraded-share", required_argument, nullptr, 'o'},
      {"help", no_argument, nullptr, 'h'},
      {nullptr, 0, nullptr, 0},
  }};
  constexpr uint64_t kMost = std::numeric_limits<uint64_t>::max();
  int flag = 0;
  for (int c = 0; (c = getopt_long(argc, argv, "", kOptions.data(), &flag)) != -1;) {
    const std::string value = optarg == nullptr ? "" : optarg;
    std::string wrong;
    std::string no_kind;
    switch (c) {
      case 'p':
        options.publication = value;
        break;
      case 's':
        options.state = value;
        break;
      case 'a':
        options.peer_address = value;
        break;
      case 'b':
        options.bus = value;
        break;
      case 'c':
        options.control = value;
        break;
      case 'n':
        options.node = value;
        break;
      case 'g':
        wrong = ParseNumber(value, 0U, std::numeric_limits<uint32_t>::max(), &options.group);
        break;
      case 'd':
        wrong = ParseNumber(value, 1U, 64U, &options.devices);
        break;
      case 'N':
        options.numa_nodes = value;
        break;
      case 'm':
        wrong = ParseNumber(value, uint64_t{1}, kMost, &options.ddr_budget_bytes);
        break;
      case 'M':
        wrong = ParseNumber(value, uint64_t{0}, kMost, &options.ssd_budget_bytes);
        break;
      case 'r':
        wrong = ParseNumber(value, uint64_t{0}, kMost, &options.hot_rows_bytes);
        break;
      case 'S':
        options.ssd_directory = value;
        break;
      case 'e':
        no_kind = TakeKind(ParseIndexKind(value), &options.index);
        break;
      case 'P':
        options.ddr_policy = value;
        break;
      case 'T': {
        Result<std::map<std::string, TableBudget>> budgets = ParseTableBudgets(value);
        if (!budgets.ok()) return Refuse("--table-budgets: " + budgets.status().message());
        options.table_budgets = std::move(*budgets);
        break;
      }
      case 'G':
        wrong = ParseNumber(value, uint64_t{0}, kMost, &options.hbm_budget_bytes);
        break;
      case 'H':
        wrong = ParseNumber(value, 1U, 64U, &options.hbm_devices);
        break;
      case 'K':
        no_kind = TakeKind(ParseHbmKind(value), &options.hbm_kind);
        break;
      case 'A':
        options.hbm_policy = value;
        break;
      case 'E':
        no_kind = TakeKind(ParseSsdEngine(value), &options.ssd_engine);
        break;
      case 'C':
        wrong = ParseNumber(value, uint64_t{0}, kMost, &options.ssd_compaction_bytes_per_s);
        break;
      case 'i':
        wrong = ParseMs(value, 0, int64_t{1} << 32, &options.ssd_seal_interval);
        break;
      case 'I':
        wrong = ParseNumber(value, uint64_t{0}, kMost, &options.ssd_seal_bytes_per_s);
        break;
      case 'w':
        wrong = ParseMs(value, 1, 60'000, &options.peer_timeout);
        break;
      case 'R':
        wrong = ParseMs(value, 0, int64_t{1} << 32, &options.ready_staleness);
        break;
      case 'v':
        wrong = ParseNumber(value, 1U, 1024U, &options.window_versions);
        break;
      case 'j':
        wrong = ParseNumber(value, uint64_t{1}, kMost, &options.join_step_bytes);
        break;
      case 'J':
        wrong = ParseNumber(value, 0U, 1000U, &options.join_rest);
        break;
      case 'f':
        options.plan_file = value;
        break;
      case 't':
        options.token_file = value;
        break;
      case 'l':
        options.tls_folder = value;
        break;
      case 'x':
        options.plaintext = true;
        break;
      case 'k':
        options.health_listen = value;
        break;
      case 'L':
        options.peer_listen = value;
        break;
      case 'o':
        wrong = ParseNumber(value, 0.0, 1.0, &options.max_degraded_share);
        break;
      case 'h':
        std::fputs(kHelp, stdout);
        return 0;
      default:
        return 2;
    }
    if (!no_kind.empty()) {
      return Refuse("--" + std::string(kOptions[static_cast<size_t>(flag)].name) + ": " + no_kind);
    }
    if (!wrong.empty()) {
      return Refuse("--" + std::string(kOptions[static_cast<size_t>(flag)].name) + " " + wrong);
    }
  }
  if (options.publication.empty() || options.state.empty() || options.peer_address.empty()) {
    return Refuse("--publication, --state and --peer-address are needed; see --help");
  }
  // Before any thread: they inherit the mask, and the signal is waited for by one of them.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  options.log = [](const std::string& line) {
    std::fprintf(stderr, "embertide_node: %s\n", line.c_str());
  };
  std::stop_source stop;
  const auto wait_for_signal = [&signals, &stop](std::chrono::milliseconds time) {
    const timespec most{0, std::chrono::nanoseconds(time).count()};
    if (sigtimedwait(&signals, nullptr, &most) > 0) stop.request_stop();
  };
  // While the node starts, which takes as long as its rows and its plan do.
  const BackgroundTask signal_task({.name = "signals"}, [&](const std::stop_token&) {
    wait_for_signal(kLookAtSignals);
    return Status::Ok();
  });
  options.stop = stop.get_token();
  const Result<std::unique_ptr<Node>> node = Node::Open(std::move(options));
  if (!node.ok() && stop.stop_requested()) return 0;
  if (!node.ok()) return Refuse(node.status().ToString());
  if (const std::string& why = node.value()->seal_refusal(); !why.empty()) {
    std::fprintf(stderr, "embertide_node: the seal of the SSD tier is not used: %s\n", why.c_str());
  }
  std::printf("ready at %s, version %llu, epoch %llu, rows from %s\n",
              node.value()->address().c_str(),
              static_cast<unsigned long long>(node.value()->newest()->number),
              static_cast<unsigned long long>(node.value()->plan_epoch()),
              node.value()->opened_from_seal() ? "a seal" : "the snapshot");
  std::fflush(stdout);
  while (!stop.stop_requested()) {
    wait_for_signal(kLookAtSignals);
    node.value()->task_board().StartMissing();
  }
  return 0;
}

}  // namespace
}  // namespace embertide

// Only memory for a few strings could still throw.
// NOLINTNEXTLINE(bugprone-exception-escape): see above.
int main(int argc, char** argv) {
  // gRPC would write a line for each stranger whose handshake fails.
  ::setenv("GRPC_VERBOSITY", "NONE", 0);
  return embertide::Run(argc, argv);
}

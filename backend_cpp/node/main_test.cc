// embertide_node as a process: what it refuses, and how.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <string>

namespace embertide {
namespace {

// Runs it until it ends; returns the exit code, and all that it says.
int RunNode(const std::string& arguments, std::string* said) {
  FILE* const pipe = ::popen((EMBERTIDE_NODE " " + arguments + " 2>&1").c_str(), "r");
  if (pipe == nullptr) return -1;
  std::array<char, 4096> buffer;
  said->clear();
  while (const size_t n = std::fread(buffer.data(), 1, buffer.size(), pipe)) {
    said->append(buffer.data(), n);
  }
  const int status = ::pclose(pipe);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(NodeMainTest, ANumberThatIsNoneIsRefusedByItsFlag) {
  struct Case {
    std::string flag;
    std::string value;
    std::string allowed;
  };
  const std::string most = "18446744073709551615";
  for (const Case& each : {Case{"group", "12x", "0 to 4294967295"},
                           {"group", "-1", "0 to 4294967295"},
                           {"group", "4294967296", "0 to 4294967295"},
                           {"group", "", "0 to 4294967295"},
                           {"devices", "0", "1 to 64"},
                           {"devices", "65", "1 to 64"},
                           {"devices", " 2", "1 to 64"},
                           {"ddr-bytes", "1e9", "1 to " + most},
                           {"ddr-bytes", "0", "1 to " + most},
                           {"ssd-bytes", "1GiB", "0 to " + most},
                           {"ssd-compaction-bytes", "-1", "0 to " + most},
                           {"ssd-seal-interval-ms", "5s", "0 to 4294967296"},
                           {"ssd-seal-bytes", "-1", "0 to " + most},
                           {"ssd-bytes", most + "0", "0 to " + most},
                           {"hbm-bytes", "16M", "0 to " + most},
                           {"hbm-devices", "0", "1 to 64"},
                           {"peer-timeout-ms", "0", "1 to 60000"},
                           {"ready-staleness-ms", "1s", "0 to 4294967296"},
                           {"window-versions", "0", "1 to 1024"},
                           {"join-step-bytes", "1M", "1 to " + most},
                           {"join-rest", "-1", "0 to 1000"},
                           {"hot-rows-bytes", "+1", "0 to " + most}}) {
    std::string said;
    EXPECT_EQ(RunNode("--" + each.flag + " '" + each.value + "'", &said), 2) << each.flag;
    EXPECT_EQ(said, "embertide_node: --" + each.flag + " \"" + each.value +
                        "\"; give a whole number from " + each.allowed + "\n");
  }
}

TEST(NodeMainTest, AnUnknownSsdEngineIsRefused) {
  std::string said;
  EXPECT_EQ(RunNode("--ssd-engine uring", &said), 2);
  EXPECT_NE(said.find("use auto, io_uring, libaio or pread"), std::string::npos) << said;
}

TEST(NodeMainTest, AnUnknownHbmKindIsRefused) {
  std::string said;
  EXPECT_EQ(RunNode("--hbm-kind cpu", &said), 2);
  EXPECT_EQ(said, "embertide_node: --hbm-kind: HBM kind \"cpu\"; use gpu or twin\n");
}

TEST(NodeMainTest, GoodNumbersAreTaken) {
  std::string said;
  EXPECT_EQ(RunNode("--group 7 --devices 64 --ddr-bytes 1 --ssd-bytes 0 --hot-rows-bytes=9", &said),
            2);
  EXPECT_NE(said.find("--publication, --state and --peer-address are needed"), std::string::npos)
      << said;
  EXPECT_EQ(RunNode("--help", &said), 0);
}

}  // namespace
}  // namespace embertide

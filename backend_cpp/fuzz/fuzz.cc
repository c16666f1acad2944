// The functions that libFuzzer calls. Seeds become a corpus in a folder of this process.
#include "fuzz/fuzz.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "embertide/status.h"

namespace embertide::fuzz {
namespace {

std::string MakeFolder() {
  const char* parent = std::filesystem::exists("/dev/shm") ? "/dev/shm" : "/tmp";
  return std::string(parent) + "/embertide-fuzz-" + std::to_string(getpid());
}

// The arguments that libFuzzer was given.
std::string artifact_prefix = "./";
bool replays = false;

}  // namespace

bool Replays() { return replays; }

LastInputs::LastInputs(size_t most) : most_(most), folder_(artifact_prefix + "last") {
  if (replays) return;  // they may be what is run
  std::filesystem::remove_all(folder_);
  std::filesystem::create_directories(folder_);
}

LastInputs::~LastInputs() {
  if (!replays) std::filesystem::remove_all(folder_);
}

void LastInputs::Keep(std::string_view input) {
  if (replays) return;
  const std::string path = folder_ + "/" + std::to_string(kept_++ % most_);
  // Written over: some file systems bring a file to the disk that was made empty first.
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
  EMBERTIDE_CHECK(file >= 0);
  EMBERTIDE_CHECK(::write(file, input.data(), input.size()) == static_cast<ssize_t>(input.size()));
  EMBERTIDE_CHECK(::ftruncate(file, static_cast<off_t>(input.size())) == 0);
  ::close(file);
}

const std::string& Folder() {
  static const std::string folder = MakeFolder();
  return folder;
}

std::string Write(const std::string& name, std::string_view bytes) {
  const std::filesystem::path path = std::filesystem::path(Folder()) / name;
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << bytes;
  return path.string();
}

}  // namespace embertide::fuzz

// LLVM's names.
// NOLINTBEGIN(readability-identifier-naming)
// The stacks of allocations and the freed memory that waits cost more than what is tried; a finding
// is run again with ASAN_OPTIONS=malloc_context_size=30.
extern "C" const char* __asan_default_options() {
  return "malloc_context_size=1:quarantine_size_mb=32";
}

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  namespace fuzz = embertide::fuzz;
  static const std::string corpus = fuzz::Folder() + "/corpus";
  std::filesystem::create_directories(corpus);
  std::atexit([] { std::filesystem::remove_all(fuzz::Folder()); });
  int number = 0;
  for (const std::string& seed : fuzz::Seeds()) {
    fuzz::Write("corpus/seed-" + std::to_string(number++), seed);
  }
  // A file that is named is run alone; else the corpus is one more argument.
  static std::vector<char*> arguments(*argv, *argv + *argc);
  constexpr std::string_view kPrefix = "-artifact_prefix=";
  for (const std::string_view each : arguments) {
    if (each.starts_with(kPrefix)) fuzz::artifact_prefix = each.substr(kPrefix.size());
    if (each.data() != arguments.front() && !each.starts_with('-')) fuzz::replays = true;
  }
  if (fuzz::replays) return 0;
  arguments.push_back(const_cast<char*>(corpus.c_str()));
  *argc = static_cast<int>(arguments.size());
  arguments.push_back(nullptr);
  *argv = arguments.data();
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, size_t size) {
  embertide::fuzz::Run({reinterpret_cast<const char*>(data), size});
  return 0;
}
// NOLINTEND(readability-identifier-naming)

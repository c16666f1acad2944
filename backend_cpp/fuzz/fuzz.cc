// What libFuzzer calls. Seeds become a corpus in a folder of this process.
#include "fuzz/fuzz.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace embertide::fuzz {
namespace {

std::string MakeFolder() {
  const char* parent = std::filesystem::exists("/dev/shm") ? "/dev/shm" : "/tmp";
  return std::string(parent) + "/embertide-fuzz-" + std::to_string(getpid());
}

}  // namespace

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
  for (const char* each : arguments) {
    if (each != arguments.front() && each[0] != '-') return 0;
  }
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

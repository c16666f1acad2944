// For tests: whether this system gives huge pages to who asks.
#pragma once

#include <fstream>
#include <string>

namespace embertide {

inline bool SystemHasHugePages() {
  std::ifstream enabled("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string text;
  std::getline(enabled, text);
  return !text.empty() && text.find("[never]") == std::string::npos;
}

}  // namespace embertide

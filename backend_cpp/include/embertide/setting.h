// Setting: what a parser has to know of an option of proto/embertide/v1/options.proto.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

namespace embertide {

struct Setting {
  const char* name;      // of the parameter
  uint64_t min = 0;      // of a number
  uint64_t max = 0;      // of a number
  bool is_path = false;  // may be relative to the model's folder
  bool is_list = false;  // several values, whose parser names the one that is wrong
};

// The type of an option that is parsed from text by this function.
template <auto Parse>
using ParsedBy = std::remove_cvref_t<decltype(Parse(std::string()).value())>;

}  // namespace embertide

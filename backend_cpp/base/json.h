// JSON from outside this process. nlohmann's conversions cut numbers to fit, and where a fraction
// or a power is too large for the integer asked for, what they do is undefined: here they refuse.
#ifndef EMBERTIDE_BASE_JSON_H_
#define EMBERTIDE_BASE_JSON_H_

#include <concepts>
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace embertide {

// nlohmann's conversions, but for integers: what is no integer, or does not fit, throws
// std::invalid_argument with the value.
template <typename T, typename = void>
struct ExactNumbers : nlohmann::adl_serializer<T> {
  using nlohmann::adl_serializer<T>::from_json;

  template <typename AnyJson>
  static void from_json(const AnyJson& json, T& value)
    requires(std::integral<T> && !std::same_as<T, bool>)
  {
    const auto fits = [](auto number) { return std::in_range<T>(number); };
    if (json.is_number_unsigned() && fits(json.template get_ref<const uint64_t&>())) {
      value = static_cast<T>(json.template get_ref<const uint64_t&>());
    } else if (json.is_number_integer() && !json.is_number_unsigned() &&
               fits(json.template get_ref<const int64_t&>())) {
      value = static_cast<T>(json.template get_ref<const int64_t&>());
    } else {
      throw std::invalid_argument(json.dump() + " is no integer from " +
                                  std::to_string(std::numeric_limits<T>::min()) + " to " +
                                  std::to_string(std::numeric_limits<T>::max()));
    }
  }
};

template <template <typename, typename, typename...> typename Fields>
using JsonOf = nlohmann::basic_json<Fields, std::vector, std::string, bool, int64_t, uint64_t,
                                    double, std::allocator, ExactNumbers>;

using Json = JsonOf<std::map>;  // fields are sorted, so equal values are written alike
using OrderedJson = JsonOf<nlohmann::ordered_map>;  // fields stand as they were written

// Reads a field of an object. Throws std::invalid_argument naming a field that is no such value,
// nlohmann's error naming one that is missing.
template <typename AnyJson, typename T>
void Read(const AnyJson& object, const char* name, T* value) {
  const AnyJson& field = object.at(name);
  try {
    field.get_to(*value);
  } catch (const std::exception& error) {
    throw std::invalid_argument(std::string("field \"") + name + "\": " + error.what());
  }
}

}  // namespace embertide

#endif  // EMBERTIDE_BASE_JSON_H_

// The common part of the binding files: errors, tables, spans. Private to this folder.
//
// The bindings translate and nothing else: every rule stands in the C++ they call. A Status that is
// not ok becomes embertide._store.StoreError with the attribute `code`.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "embertide/serving_store.h"
#include "embertide/training_store.h"

namespace embertide {

// Thrown in C++, raised as StoreError(message) with .code = CodeName(code).
struct BindingError {
  Status status;
};

inline void ThrowIfError(const Status& status) {
  if (!status.ok()) throw BindingError{status};
}

template <typename T>
T ValueOrThrow(Result<T> result) {
  ThrowIfError(result.ok() ? Status::Ok() : result.status());
  return std::move(result.value());
}

inline std::span<const std::byte> BytesIn(const pybind11::bytes& bytes) {
  const std::string_view view(bytes);
  return {reinterpret_cast<const std::byte*>(view.data()), view.size()};
}

inline pybind11::bytes BytesOut(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// C-contiguous arrays; another layout or dtype is copied on the way in.
template <typename T>
using Array = pybind11::array_t<T, pybind11::array::c_style | pybind11::array::forcecast>;

template <typename T>
std::span<const T> SpanOf(const Array<T>& array) {
  return {array.data(), static_cast<size_t>(array.size())};
}

void BindCache(pybind11::module_& m);
void BindCodec(pybind11::module_& m);
void BindRouter(pybind11::module_& m);
void BindStore(pybind11::module_& m);
void BindTransforms(pybind11::module_& m);

}  // namespace embertide

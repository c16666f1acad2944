// Bindings of the transforms of dense features.
#include "bindings.h"
#include "embertide/transform.h"

namespace embertide {
namespace {

namespace py = pybind11;

py::tuple Apply(const Transforms& transforms, const Array<float>& raw_BD) {
  if (raw_BD.ndim() != 2 || static_cast<size_t>(raw_BD.shape(1)) != transforms.inputs()) {
    throw BindingError{
        {Code::kInvalidArgument, "the transforms take [B," + std::to_string(transforms.inputs()) +
                                     "] values, not " + std::to_string(raw_BD.size())}};
  }
  Array<float> out_BT({raw_BD.shape(0), static_cast<py::ssize_t>(transforms.outputs())});
  const uint64_t missing = transforms.Apply(SpanOf(raw_BD), out_BT.mutable_data());
  return py::make_tuple(out_BT, missing);
}

}  // namespace

void BindTransforms(py::module_& m) {
  py::class_<Transforms>(m, "Transforms")
      .def(py::init([](const std::string& text) { return ValueOrThrow(Transforms::Parse(text)); }),
           py::arg("text"))
      .def_property_readonly("text", &Transforms::text)
      .def_property_readonly("inputs", &Transforms::inputs)
      .def_property_readonly("outputs", &Transforms::outputs)
      .def("apply", &Apply, py::arg("raw_BD"));
}

}  // namespace embertide

// embertide._store: the storage engine for Python. See _store.pyi for the contracts.
#include "bindings.h"

PYBIND11_MODULE(_store, m) {
  namespace py = pybind11;
  m.doc() = "Bindings to the tiered embedding store.";
  static py::exception<embertide::BindingError> error(m, "StoreError", PyExc_RuntimeError);
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const embertide::BindingError& e) {
      const py::object type = error;
      const py::object raised = type(e.status.message());
      raised.attr("code") = embertide::CodeName(e.status.code());
      PyErr_SetObject(error.ptr(), raised.ptr());
    }
  });
  embertide::BindCache(m);
  embertide::BindCodec(m);
  embertide::BindRouter(m);
  embertide::BindStore(m);
  embertide::BindTransforms(m);
}

// Bindings of the cache policies and their simulator.
#include "bindings.h"
#include "simulation/simulate.h"

namespace embertide {
namespace {

namespace py = pybind11;

// In the GIL's absence: simulations may run on several threads.
SimulationResult Run(const Trace& trace, std::string policy, uint32_t capacity,
                     uint32_t version_accesses, float utility_decay) {
  const py::gil_scoped_release released;
  return ValueOrThrow(
      Simulate(trace, {std::move(policy), capacity, version_accesses, utility_decay}));
}

}  // namespace

void BindCache(py::module_& m) {
  py::class_<PolicyInfo>(m, "CachePolicy")
      .def_readonly("name", &PolicyInfo::name)
      .def_readonly("about", &PolicyInfo::about)
      .def_readonly("slot_bytes", &PolicyInfo::slot_bytes)
      .def_readonly("history_bytes", &PolicyInfo::history_bytes);
  m.def("cache_policies", &SimulatedPolicies);
  py::class_<SimulationResult>(m, "CacheResult")
      .def_readonly("hits", &SimulationResult::hits)
      .def_readonly("inserted", &SimulationResult::inserted)
      .def_readonly("evicted", &SimulationResult::evicted)
      .def_readonly("refused", &SimulationResult::refused)
      .def_readonly("policy_bytes", &SimulationResult::policy_bytes);
  py::class_<Trace>(m, "CacheTrace")
      .def(py::init([](const Array<int64_t>& keys) {
             return ValueOrThrow(Trace::FromKeys(SpanOf(keys)));
           }),
           py::arg("keys"))
      .def_property_readonly("accesses", [](const Trace& trace) { return trace.numbers().size(); })
      .def_property_readonly("distinct", &Trace::distinct)
      .def("simulate", &Run, py::arg("policy"), py::arg("capacity"), py::kw_only(),
           py::arg("version_accesses") = SimulationOptions().version_accesses,
           py::arg("utility_decay") = SimulationOptions().utility_decay)
      .def("optimal_hits", &OptimalHits, py::arg("capacity"),
           py::call_guard<py::gil_scoped_release>())
      .def("best_fixed_hits", &BestFixedHits, py::arg("capacity"),
           py::call_guard<py::gil_scoped_release>());
}

}  // namespace embertide

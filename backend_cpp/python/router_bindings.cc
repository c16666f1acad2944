// Bindings of Router. The GIL is released while a batch is routed, pooled or summed.
#include "bindings.h"
#include "embertide/router.h"

namespace embertide {
namespace {

namespace py = pybind11;

constexpr auto kFloat = static_cast<py::ssize_t>(sizeof(float));

// bucket_bits, width, dim, owners
using PyTable = std::tuple<uint32_t, uint32_t, uint32_t, Array<uint16_t>>;
// table, keys, offsets or None
using PyKeys = std::tuple<uint32_t, Array<int64_t>, std::optional<Array<uint32_t>>>;
// pooling, out
using PyOut = std::tuple<std::string, py::array>;
// offsets or None, gradients
using PyGradients = std::tuple<std::optional<Array<uint32_t>>, py::array>;

std::span<const uint32_t> OffsetsOf(const std::optional<Array<uint32_t>>& offsets) {
  return offsets.has_value() ? SpanOf(*offsets) : std::span<const uint32_t>();
}

Pooling PoolingOf(const std::string& name) {
  if (name == "sum") return Pooling::kSum;
  if (name == "mean") return Pooling::kMean;
  if (name == "none") return Pooling::kNone;
  throw BindingError{{Code::kInvalidArgument, "pooling \"" + name + "\"; use sum, mean or none"}};
}

// Floats from one row to the next of fp32 whose rows may stand apart.
size_t StrideOf(const py::array& array) {
  const bool fits = py::isinstance<py::array_t<float>>(array) && array.ndim() == 2 &&
                    (array.size() < 2 || array.shape(1) < 2 || array.strides(1) == kFloat) &&
                    (array.shape(0) < 2 || (array.strides(0) % kFloat == 0 &&
                                            array.strides(0) >= array.shape(1) * kFloat));
  if (!fits) {
    throw BindingError{
        {Code::kInvalidArgument, "give fp32 [bags, dim], the floats of a bag together"}};
  }
  return static_cast<size_t>(array.shape(0) < 2 ? array.shape(1) : array.strides(0) / kFloat);
}

Router MakeRouter(const std::vector<PyTable>& tables, uint32_t ranks, uint32_t rank) {
  std::vector<RoutedTable> routed;
  routed.reserve(tables.size());
  for (const auto& [bucket_bits, width, dim, owners] : tables) {
    const auto span = SpanOf(owners);
    routed.push_back({bucket_bits, width, dim, {span.begin(), span.end()}});
  }
  return ValueOrThrow(Router::Make(std::move(routed), ranks, rank));
}

// A batch's keys and the sizes that outputs must have.
struct PyRouted {
  Routed routed;
  std::vector<py::ssize_t> bags;    // by piece
  std::vector<py::ssize_t> keys;    // by piece
  std::vector<py::ssize_t> widths;  // by piece
  std::vector<py::ssize_t> dims;    // by piece
};

PyRouted Route(Router* router, const std::vector<PyKeys>& pieces) {
  std::vector<BagKeys> bags;
  PyRouted out;
  for (const auto& [table, keys, offsets] : pieces) {
    bags.push_back({table, SpanOf(keys), OffsetsOf(offsets)});
    out.keys.push_back(keys.size());
    out.bags.push_back(offsets.has_value() ? std::max<py::ssize_t>(offsets->size(), 1) - 1
                                           : keys.size());
    const auto& tables = router->tables();
    out.widths.push_back(table < tables.size() ? tables[table].width : 0);
    out.dims.push_back(table < tables.size() ? tables[table].dim : 0);
  }
  const py::gil_scoped_release released;
  out.routed = ValueOrThrow(router->Route(bags));
  return out;
}

void CheckPieces(const PyRouted& routed, size_t given) {
  if (given == routed.bags.size()) return;
  throw BindingError{{Code::kInvalidArgument, std::to_string(given) + " features for " +
                                                  std::to_string(routed.bags.size()) +
                                                  " that were routed"}};
}

void CheckShape(const py::array& array, py::ssize_t rows, py::ssize_t least) {
  if (array.shape(0) == rows && array.shape(1) >= least) return;
  throw BindingError{{Code::kInvalidArgument, "an array of " + std::to_string(array.shape(0)) +
                                                  " x " + std::to_string(array.shape(1)) +
                                                  "; give " + std::to_string(rows) + " x " +
                                                  std::to_string(least)}};
}

void Pool(const PyRouted& routed, const Array<float>& rows, std::vector<PyOut> outs) {
  CheckPieces(routed, outs.size());
  std::vector<PooledBags> bags;
  for (size_t p = 0; p < outs.size(); ++p) {
    auto& [name, out] = outs[p];
    const Pooling pooling = PoolingOf(name);
    const size_t stride = StrideOf(out);
    CheckShape(out, pooling == Pooling::kNone ? routed.keys[p] : routed.bags[p], routed.widths[p]);
    bags.push_back({pooling, static_cast<float*>(out.mutable_data()), stride});
  }
  Status status;
  {
    const py::gil_scoped_release released;
    status = routed.routed.Pool(SpanOf(rows), bags);
  }
  ThrowIfError(status);
}

Array<float> Sum(const PyRouted& routed, const std::vector<PyGradients>& pieces) {
  CheckPieces(routed, pieces.size());
  std::vector<BagGradients> bags;
  for (size_t p = 0; p < pieces.size(); ++p) {
    const auto& [offsets, gradients] = pieces[p];
    BagGradients& each = bags.emplace_back();
    each.offsets = OffsetsOf(offsets);
    each.stride = StrideOf(gradients);
    CheckShape(gradients, offsets.has_value() ? routed.bags[p] : routed.keys[p], routed.dims[p]);
    each.gradients = static_cast<const float*>(gradients.data());
  }
  Array<float> sums(static_cast<py::ssize_t>(routed.routed.gradient_floats()));
  const std::span<float> out(sums.mutable_data(), static_cast<size_t>(sums.size()));
  Status status;
  {
    const py::gil_scoped_release released;
    status = routed.routed.Sum(bags, out);
  }
  ThrowIfError(status);
  return sums;
}

// An array over memory that `owner` holds.
template <typename T>
py::array View(std::span<const T> values, const py::object& owner) {
  return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data(), owner);
}

}  // namespace

void BindRouter(py::module_& m) {
  m.attr("EVERYWHERE") = RoutedTable::kEverywhere;
  py::class_<PyRouted>(m, "Routed")
      .def_property_readonly(
          "keys",
          [](const py::object& self) { return View(self.cast<PyRouted&>().routed.keys(), self); })
      .def_property_readonly(
          "counts",
          [](const py::object& self) { return View(self.cast<PyRouted&>().routed.counts(), self); })
      .def_property_readonly("lengths",
                             [](const py::object& self) {
                               return View(self.cast<PyRouted&>().routed.lengths(), self);
                             })
      .def("pool", &Pool, py::arg("rows"), py::arg("outs"))
      .def("sum", &Sum, py::arg("gradients"));
  py::class_<Router>(m, "Router")
      .def(py::init(&MakeRouter), py::arg("tables"), py::kw_only(), py::arg("ranks"),
           py::arg("rank"))
      .def("route", &Route, py::arg("bags"), py::keep_alive<0, 1>())
      .def(
          "set_hosts",
          [](Router* router, uint32_t table, uint32_t as, const Array<int64_t>& keys,
             const Array<uint16_t>& hosts) {
            ThrowIfError(router->SetHosts(table, as, SpanOf(keys), SpanOf(hosts)));
          },
          py::arg("table"), py::arg("as_table"), py::arg("keys"), py::arg("hosts"))
      .def(
          "owners",
          [](const Router& router, uint32_t table, const Array<int64_t>& keys) {
            if (table >= router.tables().size()) {
              throw BindingError{
                  {Code::kInvalidArgument, "table " + std::to_string(table) + " does not exist"}};
            }
            const auto owners = router.OwnersOf(table, SpanOf(keys));
            return py::array_t<uint16_t>(static_cast<py::ssize_t>(owners.size()), owners.data());
          },
          py::arg("table"), py::arg("keys"))
      .def("take_load", [](Router* router) {
        const auto load = router->TakeLoad();
        return py::array_t<uint64_t>(static_cast<py::ssize_t>(load.size()), load.data());
      });
}

}  // namespace embertide

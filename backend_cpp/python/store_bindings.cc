// Bindings of Store. The GIL is released in calls that may take long; arrays are held meanwhile.
#include <algorithm>

#include "bindings.h"
#include "embertide/numa.h"
#include "store/row_ops.h"

namespace embertide {
namespace {

namespace py = pybind11;

using PyPrunedCounts = std::tuple<uint32_t, uint32_t, float>;  // table, counter, worth
// tables, waiting_bytes, counts
using PyPruneGroup = std::tuple<std::vector<uint32_t>, uint64_t, std::vector<PyPrunedCounts>>;

// The options of both faces.
StoreOptions MakeOptions(std::vector<TableConfig> tables, uint32_t devices,
                         uint64_t ddr_budget_bytes, uint64_t ssd_budget_bytes,
                         std::string ssd_directory, const std::string& ssd_engine,
                         std::string ddr_policy, std::map<std::string, TableBudget> table_budgets,
                         const std::string& index) {
  StoreOptions options;
  options.tables = std::move(tables);
  options.devices = devices;
  options.ddr_budget_bytes = ddr_budget_bytes;
  options.ssd_budget_bytes = ssd_budget_bytes;
  options.ssd_directory = std::move(ssd_directory);
  options.ssd_engine = ValueOrThrow(ParseSsdEngine(ssd_engine));
  options.ddr_policy = std::move(ddr_policy);
  options.table_budgets = std::move(table_budgets);
  options.index = ValueOrThrow(ParseIndexKind(index));
  return options;
}

std::vector<PruneGroup> MakeGroups(std::vector<PyPruneGroup> groups) {
  std::vector<PruneGroup> made;
  for (PyPruneGroup& group : groups) {
    PruneGroup& added = made.emplace_back();
    added.tables = std::move(std::get<0>(group));
    added.waiting_bytes = std::get<1>(group);
    for (const auto& [table, counter, worth] : std::get<2>(group)) {
      added.counts.push_back({table, counter, worth});
    }
  }
  return made;
}

Pooling ParsePooling(const std::string& name) {
  if (name == "sum") return Pooling::kSum;
  if (name == "mean") return Pooling::kMean;
  if (name == "none") return Pooling::kNone;
  throw BindingError{{Code::kInvalidArgument, "pooling \"" + name + "\"; use sum, mean or none"}};
}

// One pinned read: (values [n, dim], sources [keys], version).
py::tuple Lookup(const Store& store, uint32_t table, const Array<int64_t>& keys,
                 const std::string& pooling, const Array<uint32_t>& offsets,
                 std::optional<uint64_t> version) {
  if (table >= store.options().tables.size()) {
    throw BindingError{
        {Code::kInvalidArgument, "table " + std::to_string(table) + " does not exist"}};
  }
  const Pooling how = ParsePooling(pooling);
  const uint32_t dim = store.options().tables[table].layout.dim();
  const py::ssize_t rows = how == Pooling::kNone ? keys.size()
                           : offsets.size() == 0 ? 0
                                                 : offsets.size() - 1;
  Array<float> out({rows, static_cast<py::ssize_t>(dim)});
  Array<uint8_t> source(keys.size());
  const ReadView view = ValueOrThrow(version ? store.Pin(*version) : store.PinNewest());
  const LookupRequest request{table, SpanOf(keys),         how, SpanOf(offsets), out.mutable_data(),
                              dim,   source.mutable_data()};
  Status status;
  {
    const py::gil_scoped_release released;
    status = view.Lookup(request);
  }
  ThrowIfError(status);
  return py::make_tuple(out, source, view.version());
}

// The records of `keys` that have a row in the newest version, in their order; a source for each.
py::tuple CopyRows(const Store& store, uint32_t table, const Array<int64_t>& keys) {
  const ReadView view = ValueOrThrow(store.PinNewest());
  std::string records;
  Array<uint8_t> sources(keys.size());
  Status status;
  {
    const py::gil_scoped_release released;
    status = BagReader(view).CopyRows(table, SpanOf(keys), &records, sources.mutable_data());
  }
  ThrowIfError(status);
  return py::make_tuple(py::bytes(records), sources);
}

// A tuple that may lack its last member, which is None then.
template <typename Short, typename Whole>
Whole* WithLast(std::variant<Short, Whole>* each) {
  if (auto* lacks = std::get_if<Short>(each)) {
    constexpr size_t kLast = std::tuple_size_v<Short>;
    *each = std::tuple_cat(std::move(*lacks), std::tuple(std::tuple_element_t<kLast, Whole>()));
  }
  return &std::get<Whole>(*each);
}

// (table, keys, offsets or None, pooling, out); rows of `out` may stand apart. A sixth member is
// the weights of the keys, or None.
using PyUnweighedLookup =
    std::tuple<uint32_t, Array<int64_t>, std::optional<Array<uint32_t>>, std::string, py::array>;
using PyLookup = std::tuple<uint32_t, Array<int64_t>, std::optional<Array<uint32_t>>, std::string,
                            py::array, std::optional<Array<float>>>;
using PyAnyLookup = std::variant<PyUnweighedLookup, PyLookup>;

LookupRequest MakeLookup(const Store& store, PyLookup* from) {
  auto& [table, keys, offsets, pooling, out, weights] = *from;
  const py::ssize_t count = !offsets.has_value()   ? keys.size()
                            : offsets->size() == 0 ? 0
                                                   : offsets->size() - 1;
  const auto& tables = store.options().tables;
  constexpr auto kSize = static_cast<py::ssize_t>(sizeof(float));
  const py::ssize_t dim = table < tables.size() ? tables[table].layout.dim() : 0;
  // An axis of one row may have any stride.
  if (!py::isinstance<py::array_t<float>>(out) || !out.writeable() || out.ndim() != 2 ||
      out.shape(0) != count || out.shape(1) != dim || (dim > 1 && out.strides(1) != kSize) ||
      (count > 1 && (out.strides(0) % kSize != 0 || out.strides(0) < dim * kSize))) {
    throw BindingError{{Code::kInvalidArgument,
                        "out must be fp32 that may be written, bags x dim of the table, "
                        "the floats of a bag together: " +
                            std::to_string(count) + " bags"}};
  }
  if (weights.has_value() && weights->size() != keys.size()) {
    throw BindingError{{Code::kInvalidArgument, std::to_string(weights->size()) + " weights for " +
                                                    std::to_string(keys.size()) +
                                                    " keys; give as many"}};
  }
  LookupRequest request;
  request.table = table;
  request.weights = weights.has_value() ? weights->data() : nullptr;
  request.keys = SpanOf(keys);
  if (offsets.has_value()) {
    request.pooling = ParsePooling(pooling);
    request.offsets = SpanOf(*offsets);
  }
  request.out = static_cast<float*>(out.mutable_data());
  request.out_stride = static_cast<size_t>(count > 1 ? out.strides(0) / kSize : dim);
  return request;
}

// Keys of tables; the arrays must outlive the result.
std::vector<TableKeys> KeysOf(const std::vector<std::pair<uint32_t, Array<int64_t>>>& keys) {
  std::vector<TableKeys> of;
  of.reserve(keys.size());
  for (const auto& [table, array] : keys) of.push_back({table, SpanOf(array)});
  return of;
}

// The same of keys that are in no array yet; those of tables without any are left out.
std::vector<std::pair<uint32_t, Array<int64_t>>> ArraysOf(
    std::span<const TableKeys> keys, std::span<const std::vector<int64_t>> found) {
  std::vector<std::pair<uint32_t, Array<int64_t>>> arrays;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (found[i].empty()) continue;
    arrays.emplace_back(keys[i].table,
                        Array<int64_t>(static_cast<py::ssize_t>(found[i].size()), found[i].data()));
  }
  return arrays;
}

// A RowPlaces for each of the bags, where they are asked for.
using PyPlaces = std::vector<std::shared_ptr<RowPlaces>>;

PyPlaces LookupBags(const Store& store, std::vector<PyAnyLookup> bags, uint32_t threads,
                    bool places) {
  std::vector<LookupRequest> requests;
  PyPlaces told;
  for (PyAnyLookup& each : bags) {
    requests.push_back(MakeLookup(store, WithLast(&each)));
    if (!places) continue;
    told.push_back(std::make_shared<RowPlaces>());
    requests.back().places = told.back().get();
  }
  const ReadView view = ValueOrThrow(store.PinNewest());
  Status status;
  {
    const py::gil_scoped_release released;
    status = view.Lookup(requests, threads);
  }
  ThrowIfError(status);
  return told;
}

// (table, keys, offsets or None, gradients), as BagGradients has them; rows of gradients may stand
// apart. A fifth member is their counts, or None.
using PyUncountedBags = std::tuple<uint32_t, Array<int64_t>, std::optional<Array<uint32_t>>,
                                   py::array_t<float, py::array::forcecast>>;
using PyBags = std::tuple<uint32_t, Array<int64_t>, std::optional<Array<uint32_t>>,
                          py::array_t<float, py::array::forcecast>, std::optional<Array<uint32_t>>>;
using PyAnyBags = std::variant<PyUncountedBags, PyBags>;

// (first chunk, chunks of the whole row) by table, as RowPart.
using PyParts = std::map<uint32_t, std::pair<uint16_t, uint16_t>>;

BagGradients MakeBags(const Store& store, PyBags* from, const PyParts& parts) {
  auto& [table, keys, offsets, gradients, counts] = *from;
  RowPart part;
  if (const auto known = parts.find(table); known != parts.end()) {
    part = {known->second.first, known->second.second};
  }
  constexpr uint32_t kOfSquare = sizeof(double) / sizeof(float);
  const py::ssize_t count = !offsets.has_value()   ? keys.size()
                            : offsets->size() == 0 ? 0
                                                   : offsets->size() - 1;
  const auto& tables = store.options().tables;
  if (table >= tables.size() || gradients.ndim() != 2 || gradients.shape(0) != count ||
      gradients.shape(1) !=
          static_cast<py::ssize_t>(tables[table].learned().dim() + part.chunks * kOfSquare)) {
    throw BindingError{{Code::kInvalidArgument,
                        "gradients must be bags x dim of the table: " + std::to_string(count) +
                            " bags; those of parts of rows have their squares behind them"}};
  }
  const auto size = static_cast<py::ssize_t>(sizeof(float));
  const py::ssize_t apart = gradients.strides(0) / size;
  if (gradients.strides(1) != size || gradients.strides(0) % size != 0 ||
      apart < gradients.shape(1)) {
    gradients = Array<float>(gradients);  // copied
  }
  BagGradients bags{table, SpanOf(keys), {}, gradients.data(), 0};
  bags.part = part;
  if (offsets.has_value()) bags.offsets = SpanOf(*offsets);
  if (counts.has_value()) bags.counts = SpanOf(*counts);
  // An axis of one row may have any stride, numpy's newaxis gives 0.
  bags.stride = static_cast<size_t>(count > 1 ? gradients.strides(0) / size : gradients.shape(1));
  return bags;
}

uint64_t ApplyGradients(TrainingStore* store, std::vector<PyAnyBags> batch, float learning_rate,
                        float epsilon, float initial_accumulator, double beta1, double beta2,
                        float max_gradient_norm, uint32_t threads, const PyPlaces& places,
                        const PyParts& parts) {
  if (!places.empty() && places.size() != batch.size()) {
    throw BindingError{{Code::kInvalidArgument, std::to_string(places.size()) + " places for " +
                                                    std::to_string(batch.size()) +
                                                    " bags; give one for each, or none"}};
  }
  std::vector<BagGradients> bags;
  for (PyAnyBags& each : batch) {
    bags.push_back(MakeBags(*store, WithLast(&each), parts));
    if (!places.empty()) bags.back().places = places[bags.size() - 1].get();
  }
  const StepOptions options{learning_rate, epsilon, initial_accumulator,
                            beta1,         beta2,   max_gradient_norm};
  const py::gil_scoped_release released;
  return ValueOrThrow(store->ApplyGradients(bags, options, threads));
}

// The keys of records, in their order.
std::vector<uint64_t> KeysOf(const RowLayout& layout, std::span<const std::byte> records) {
  std::vector<uint64_t> keys;
  while (!records.empty()) keys.push_back(ValueOrThrow(ReadRecord(layout, &records)).key);
  return keys;
}

// Keys of a bucket's rows, ascending as unsigned numbers.
std::vector<uint64_t> BucketKeys(const Store& store, uint32_t table, uint32_t bucket) {
  std::vector<std::byte> records;
  const ReadView view = ValueOrThrow(store.PinNewest());
  ThrowIfError(store.ExportBucket(view, table, bucket, &records));
  return KeysOf(store.options().tables[table].layout, records);
}

// Training state of a bucket's rows in key order, a member of RowState each: accumulators [rows],
// ages [rows], utilities [rows, chunks], steps [rows], elements [rows, dim or 0].
using PyStates =
    std::tuple<Array<float>, Array<uint32_t>, Array<float>, Array<uint32_t>, Array<float>>;

py::ssize_t ElementsOf(const Store& store, uint32_t table) {
  const StoreOptions& options = store.options();
  return KeepsElements(options.optimizer) ? options.tables[table].learned().dim() : 0;
}

PyStates StatesOut(const Store& store, uint32_t table, const std::vector<RowState>& found) {
  const auto rows = static_cast<py::ssize_t>(found.size());
  const uint32_t chunks = store.options().tables[table].learned().chunks;
  const py::ssize_t elements = ElementsOf(store, table);
  PyStates states{Array<float>(rows), Array<uint32_t>(rows),
                  Array<float>({rows, static_cast<py::ssize_t>(chunks)}), Array<uint32_t>(rows),
                  Array<float>({rows, elements})};
  auto& [accumulators, ages, utilities, steps, kept] = states;
  for (size_t i = 0; i < found.size(); ++i) {
    accumulators.mutable_data()[i] = found[i].accumulator;
    ages.mutable_data()[i] = found[i].age;
    std::copy_n(found[i].utility.begin(), chunks, utilities.mutable_data() + i * chunks);
    steps.mutable_data()[i] = found[i].steps;
    std::ranges::copy(found[i].elements, kept.mutable_data() + i * elements);
  }
  return states;
}

PyStates BucketState(const TrainingStore& store, uint32_t table, uint32_t bucket) {
  std::vector<std::byte> records;
  std::vector<RowState> found;
  const ReadView view = ValueOrThrow(store.PinNewest());
  ThrowIfError(store.ExportBucketWithStates(view, table, bucket, &records, &found));
  return StatesOut(store, table, found);
}

// The states of so many rows of a table; `which` names them in the error.
std::vector<RowState> StatesIn(const Store& store, uint32_t table, size_t count,
                               const PyStates& states, const std::string& which) {
  const auto& [accumulators, ages, utilities, steps, kept] = states;
  const auto rows = static_cast<py::ssize_t>(count);
  const uint32_t chunks = store.options().tables[table].learned().chunks;
  const py::ssize_t elements = ElementsOf(store, table);
  if (accumulators.size() != rows || ages.size() != rows || utilities.size() != rows * chunks ||
      steps.size() != rows || kept.size() != rows * elements) {
    throw BindingError{
        {Code::kInvalidArgument, which + " has " + std::to_string(rows) + " rows of " +
                                     std::to_string(elements) + " elements of state, " +
                                     std::to_string(accumulators.size()) + " states of " +
                                     std::to_string(kept.size()) + " elements in all were given"}};
  }
  std::vector<RowState> found(count);
  for (size_t i = 0; i < count; ++i) {
    const float* first = kept.data() + i * elements;
    found[i] = {
        accumulators.data()[i], ages.data()[i], {}, steps.data()[i], {first, first + elements}};
    std::copy_n(utilities.data() + i * chunks, chunks, found[i].utility.begin());
  }
  return found;
}

void CheckTable(const Store& store, uint32_t table) {
  if (table < store.options().tables.size()) return;
  throw BindingError{
      {Code::kInvalidArgument, "table " + std::to_string(table) + " does not exist"}};
}

py::tuple ExportRows(const TrainingStore& store, uint32_t table, const Array<uint64_t>& keys) {
  CheckTable(store, table);
  std::vector<std::byte> records;
  std::vector<RowState> found;
  ThrowIfError(store.ExportRows(table, SpanOf(keys), &records, &found));
  return py::make_tuple(BytesOut(records), StatesOut(store, table, found));
}

void PutRows(TrainingStore* store, uint32_t table, const py::bytes& records,
             const PyStates& states) {
  CheckTable(*store, table);
  const std::span<const std::byte> bytes = BytesIn(records);
  const size_t count = KeysOf(store->options().tables[table].layout, bytes).size();
  ThrowIfError(store->PutRows(table, bytes, StatesIn(*store, table, count, states, "the records")));
}

// Rows whose states are set after one batch of reads.
constexpr size_t kBroughtAtOnce = 4096;

void SetStates(TrainingStore* store, uint32_t table, std::span<const uint64_t> keys,
               const PyStates& states, const std::string& which) {
  const std::vector<RowState> of_keys = StatesIn(*store, table, keys.size(), states, which);
  for (size_t i = 0; i < keys.size(); ++i) {
    if (i % kBroughtAtOnce == 0) {
      // From an SSD, if there is one; a row that cannot be brought says why below.
      const std::span<const uint64_t> rest = keys.subspan(i);
      const std::span<const uint64_t> part = rest.first(std::min(rest.size(), kBroughtAtOnce));
      const TableKeys of{table, {reinterpret_cast<const int64_t*>(part.data()), part.size()}};
      static_cast<void>(store->BringRows({&of, 1}));
    }
    ThrowIfError(store->SetState(table, keys[i], of_keys[i]));
  }
}

void SetBucketState(TrainingStore* store, uint32_t table, uint32_t bucket, const PyStates& states) {
  const std::vector<uint64_t> keys = BucketKeys(*store, table, bucket);
  SetStates(store, table, keys, states, "bucket " + std::to_string(bucket));
}

py::dict StatsDict(const Store& store) {
  const StoreStats stats = store.Stats();
  py::dict hits;
  for (size_t s = 0; s < kSources; ++s) {
    hits[SourceName(static_cast<Source>(s))] = stats.hits[s];
  }
  py::dict dict;
  dict["rows"] = stats.rows;
  dict["ddr_payload_bytes"] = stats.ddr_payload_bytes;
  dict["index_bytes"] = stats.index_bytes;
  dict["ssd_bytes"] = stats.ssd_bytes;
  dict["ssd"] = py::dict(py::arg("engine") = stats.ssd.engine, py::arg("direct") = stats.ssd.direct,
                         py::arg("blocks_read") = stats.ssd.blocks_read,
                         py::arg("bytes_written") = stats.ssd.bytes_written,
                         py::arg("row_bytes") = stats.ssd.row_bytes,
                         py::arg("compacted_bytes") = stats.ssd.compacted_bytes,
                         py::arg("compacted_rows") = stats.ssd.compacted_rows,
                         py::arg("compactions_forced") = stats.ssd.compactions_forced,
                         py::arg("read_errors") = stats.ssd.read_errors,
                         py::arg("corrupt") = stats.ssd.corrupt,
                         py::arg("write_errors") = stats.ssd.write_errors);
  dict["ddr_budget_bytes"] = stats.ddr_budget_bytes;
  dict["hits"] = hits;
  dict["evictions_to_ssd"] = stats.evictions_to_ssd;
  dict["evictions_by_writers"] = stats.evictions_by_writers;
  dict["promotions"] = stats.promotions;
  dict["refused_promotions"] = stats.refused_promotions;
  dict["refused_rows"] = stats.refused_rows;
  dict["reader_waits_given_up"] = stats.reader_waits_given_up;
  dict["huge_bytes"] = stats.huge_bytes;
  py::list hbm;
  for (const HbmDeviceStats& device : stats.hbm) {
    hbm.append(py::dict(py::arg("budget_bytes") = device.budget_bytes,
                        py::arg("used_bytes") = device.used_bytes, py::arg("rows") = device.rows,
                        py::arg("hits") = device.hits, py::arg("misses") = device.misses,
                        py::arg("placed") = device.placed, py::arg("evictions") = device.evictions,
                        py::arg("ended") = device.ended, py::arg("in_use") = device.in_use,
                        py::arg("deferred") = device.deferred));
  }
  dict["hbm"] = hbm;
  dict["hbm_dropped_misses"] = stats.hbm_dropped_misses;
  dict["hbm_fallbacks"] = stats.hbm_fallbacks;
  dict["hbm_failed"] = stats.hbm_failed;
  dict["new_keys_waiting"] = stats.new_keys_waiting;
  dict["dropped_gradients"] = stats.dropped_gradients;
  dict["refused_gradients"] = stats.refused_gradients;
  dict["clipped_gradients"] = stats.clipped_gradients;
  dict["failed_keys"] = stats.failed_keys;
  dict["step_reads"] = stats.step_reads;
  dict["held_rows_removed"] = stats.held_rows_removed;
  dict["placed_keys"] = stats.placed_keys;
  dict["stale_places"] = stats.stale_places;
  dict["unworthy_keys"] = stats.unworthy_keys;
  dict["worthy_keys_without_room"] = stats.worthy_keys_without_room;
  dict["dropped_accesses"] = stats.dropped_accesses;
  dict["policy_bytes"] = stats.policy_bytes;
  dict["oldest_version"] = stats.oldest_version;
  dict["newest_version"] = stats.newest_version;
  return dict;
}

}  // namespace

void BindStore(py::module_& m) {
  py::class_<TableBudget>(m, "TableBudget")
      .def(py::init([](uint64_t ddr, uint64_t ssd, std::string policy) {
             return TableBudget{ddr, ssd, std::move(policy)};
           }),
           py::kw_only(), py::arg("ddr_bytes"), py::arg("ssd_bytes") = 0,
           py::arg("ddr_policy") = kDefaultDdrPolicy)
      .def_readonly("ddr_bytes", &TableBudget::ddr_bytes)
      .def_readonly("ssd_bytes", &TableBudget::ssd_bytes)
      .def_readonly("ddr_policy", &TableBudget::ddr_policy);
  m.def("numa_nodes", &NumaNodes);
  m.def(
      "probe_ssd",
      [](const std::string& directory, const std::string& engine) {
        const SsdProbe probe =
            ValueOrThrow(ProbeSsd(directory, ValueOrThrow(ParseSsdEngine(engine))));
        return py::make_tuple(SsdEngineName(probe.engine), probe.direct, probe.refused);
      },
      py::arg("directory"), py::arg("engine") = "auto");
  py::class_<PruneOutcome>(m, "PruneOutcome")
      .def_readonly("price", &PruneOutcome::price)
      .def_readonly("rows", &PruneOutcome::rows)
      .def_readonly("bytes", &PruneOutcome::bytes)
      .def_readonly("rows_pruned", &PruneOutcome::rows_pruned)
      .def_readonly("rows_expired", &PruneOutcome::rows_expired)
      .def_readonly("chunks_pruned", &PruneOutcome::chunks_pruned)
      .def_readonly("chunks_regrown", &PruneOutcome::chunks_regrown)
      .def_readonly("rows_unchanged", &PruneOutcome::rows_unchanged);
  m.def("vector_level", &VectorLevel);
  m.def(
      "distinct_keys",
      [](const std::vector<std::pair<uint32_t, Array<int64_t>>>& keys) {
        const std::vector<TableKeys> of = KeysOf(keys);
        std::vector<std::vector<int64_t>> distinct;
        distinct.reserve(of.size());
        {
          const py::gil_scoped_release released;
          for (const TableKeys& each : of) distinct.push_back(KeysOnce(each.keys));
        }
        return ArraysOf(of, distinct);
      },
      py::arg("keys"));
  m.def(
      "squares_of_keys",
      [](const RowLayout& layout, const Array<int64_t>& keys, const Array<float>& gradients) {
        if (gradients.ndim() != 2 || gradients.shape(0) != keys.size() ||
            gradients.shape(1) != static_cast<py::ssize_t>(layout.dim())) {
          throw BindingError{{Code::kInvalidArgument, "gradients must be keys x dim: " +
                                                          std::to_string(keys.size()) + " keys"}};
        }
        KeySquares found;
        {
          const py::gil_scoped_release released;
          found = SquaresOfKeys(layout, SpanOf(keys), gradients.data(), layout.dim());
        }
        Array<uint32_t> places(static_cast<py::ssize_t>(found.places.size()), found.places.data());
        const auto chunks = static_cast<py::ssize_t>(layout.chunks);
        const auto distinct = static_cast<py::ssize_t>(found.squares.size()) / chunks;
        return py::make_tuple(places, Array<double>({distinct, chunks}, found.squares.data()));
      },
      py::arg("layout"), py::arg("keys"), py::arg("gradients"));
  py::class_<RowPlaces, std::shared_ptr<RowPlaces>>(m, "RowPlaces")
      .def("__len__", [](const RowPlaces& places) { return places.keys; })
      .def("found", [](const RowPlaces& places) {
        Array<bool> found(static_cast<py::ssize_t>(places.keys));
        for (size_t k = 0; k < places.keys; ++k) {
          found.mutable_data()[k] = places.words != nullptr && places.words[k] != 0;
        }
        return found;
      });
  py::class_<Store>(m, "Store")
      .def("lookup", &Lookup, py::arg("table"), py::arg("keys"), py::kw_only(),
           py::arg("pooling") = "none", py::arg("offsets") = Array<uint32_t>(0),
           py::arg("version") = py::none())
      .def("lookup_bags", &LookupBags, py::arg("bags"), py::kw_only(), py::arg("threads") = 1,
           py::arg("places") = false)
      .def("export_bucket",
           [](const Store& store, uint32_t table, uint32_t bucket) {
             std::vector<std::byte> records;
             {
               const py::gil_scoped_release released;
               const ReadView view = ValueOrThrow(store.PinNewest());
               ThrowIfError(store.ExportBucket(view, table, bucket, &records));
             }
             return BytesOut(records);
           })
      .def("copy_rows", &CopyRows, py::arg("table"), py::arg("keys"))
      .def("maintain", py::overload_cast<>(&Store::Maintain),
           py::call_guard<py::gil_scoped_release>())
      .def("check_integrity", [](const Store& store) { ThrowIfError(store.CheckIntegrity()); })
      .def("stats", &StatsDict);
  py::class_<ServingStore, Store>(m, "ServingStore")
      .def(
          py::init([](std::vector<TableConfig> tables, uint32_t devices, uint64_t ddr, uint64_t ssd,
                      std::string directory, const std::string& engine, uint32_t window,
                      std::string policy, std::map<std::string, TableBudget> budgets, uint64_t hbm,
                      uint32_t hbm_devices, const std::string& hbm_kind, std::string hbm_policy,
                      const std::string& sums, const std::string& index) {
            StoreOptions options =
                MakeOptions(std::move(tables), devices, ddr, ssd, std::move(directory), engine,
                            std::move(policy), std::move(budgets), index);
            options.window_versions = window;
            options.hbm_budget_bytes = hbm;
            options.hbm_devices = hbm_devices;
            options.hbm_kind = ValueOrThrow(ParseHbmKind(hbm_kind));
            options.hbm_policy = std::move(hbm_policy);
            options.sums = ValueOrThrow(ParseSumKind(sums));
            return ValueOrThrow(ServingStore::Open(std::move(options)));
          }),
          py::kw_only(), py::arg("tables"), py::arg("devices") = 1,
          py::arg("ddr_budget_bytes") = 1ULL << 30, py::arg("ssd_budget_bytes") = 0,
          py::arg("ssd_directory") = "", py::arg("ssd_engine") = "auto",
          py::arg("window_versions") = 8, py::arg("ddr_policy") = kDefaultDdrPolicy,
          py::arg("table_budgets") = std::map<std::string, TableBudget>(),
          py::arg("hbm_budget_bytes") = 0, py::arg("hbm_devices") = 1, py::arg("hbm_kind") = "gpu",
          py::arg("hbm_policy") = kDefaultHbmPolicy, py::arg("sums") = "fp64",
          py::arg("index") = "plain")
      .def("stage_records",
           [](ServingStore* store, uint64_t version, uint32_t table, uint32_t bucket,
              const py::bytes& records) {
             ThrowIfError(store->StageRecords(version, table, bucket, BytesIn(records)));
           })
      .def("commit",
           [](ServingStore* store, uint64_t version) { ThrowIfError(store->Commit(version)); })
      .def(
          "set_ddr_shares",
          [](ServingStore& store,
             const std::vector<std::tuple<uint32_t, uint32_t, uint64_t>>& shares) {
            std::vector<DdrShare> given;
            given.reserve(shares.size());
            for (const auto& [table, device, bytes] : shares) {
              given.push_back({table, device, bytes});
            }
            const py::gil_scoped_release released;
            ThrowIfError(store.SetDdrShares(given));
          },
          py::arg("shares"));
  py::class_<TrainingStore, Store>(m, "TrainingStore")
      .def(
          py::init([](std::vector<TableConfig> tables, uint32_t devices, uint64_t ddr, uint64_t ssd,
                      std::string directory, const std::string& engine, std::string policy,
                      std::map<std::string, TableBudget> budgets, uint32_t accesses,
                      const std::string& utility, double decay, std::vector<PyPruneGroup> groups,
                      const std::string& optimizer, const std::string& index, uint64_t hold_bytes) {
            StoreOptions options =
                MakeOptions(std::move(tables), devices, ddr, ssd, std::move(directory), engine,
                            std::move(policy), std::move(budgets), index);
            options.new_row_accesses = accesses;
            options.utility = ValueOrThrow(ParseUtilityKind(utility));
            options.utility_decay = decay;
            options.prune_groups = MakeGroups(std::move(groups));
            options.optimizer = ValueOrThrow(ParseOptimizer(optimizer));
            options.hold_bytes = hold_bytes;
            return ValueOrThrow(TrainingStore::Open(std::move(options)));
          }),
          py::kw_only(), py::arg("tables"), py::arg("devices") = 1,
          py::arg("ddr_budget_bytes") = 1ULL << 30, py::arg("ssd_budget_bytes") = 0,
          py::arg("ssd_directory") = "", py::arg("ssd_engine") = "auto",
          py::arg("ddr_policy") = kDefaultDdrPolicy,
          py::arg("table_budgets") = std::map<std::string, TableBudget>(),
          py::arg("new_row_accesses") = 1, py::arg("utility") = "squares",
          py::arg("utility_decay") = StoreOptions().utility_decay,
          py::arg("prune_groups") = std::vector<PyPruneGroup>(),
          py::arg("optimizer") = OptimizerName(StoreOptions().optimizer),
          py::arg("index") = "plain", py::arg("hold_bytes") = 0)
      .def("ensure_rows",
           [](TrainingStore* store, uint32_t table, const Array<int64_t>& keys) {
             const py::gil_scoped_release released;
             return ValueOrThrow(store->EnsureRows(table, SpanOf(keys)));
           })
      .def(
          "bring_rows",
          [](TrainingStore* store, const std::vector<std::pair<uint32_t, Array<int64_t>>>& keys,
             uint32_t threads) {
            const std::vector<TableKeys> of = KeysOf(keys);
            const py::gil_scoped_release released;
            return ValueOrThrow(store->BringRows(of, threads));
          },
          py::arg("keys"), py::kw_only(), py::arg("threads") = 1)
      .def(
          "hold_rows",
          [](TrainingStore* store, const std::vector<std::pair<uint32_t, Array<int64_t>>>& keys) {
            const std::vector<TableKeys> of = KeysOf(keys);
            std::vector<std::vector<int64_t>> first;
            {
              const py::gil_scoped_release released;
              first = ValueOrThrow(store->HoldRows(of));
            }
            return ArraysOf(of, first);
          },
          py::arg("keys"))
      .def(
          "release_rows",
          [](TrainingStore* store, const std::vector<std::pair<uint32_t, Array<int64_t>>>& keys) {
            const std::vector<TableKeys> of = KeysOf(keys);
            const py::gil_scoped_release released;
            ThrowIfError(store->ReleaseRows(of));
          },
          py::arg("keys"))
      .def("hold_bytes_of",
           [](const TrainingStore& store, uint32_t table) {
             if (table >= store.options().tables.size()) {
               throw BindingError{
                   {Code::kInvalidArgument, "table " + std::to_string(table) + " does not exist"}};
             }
             return store.HoldBytes(table);
           })
      .def("held",
           [](const TrainingStore& store) {
             const TrainingStore::HeldSize held = store.Held();
             return py::make_tuple(held.rows, held.bytes, held.most_bytes);
           })
      .def("apply_gradients", &ApplyGradients, py::arg("bags"), py::kw_only(),
           py::arg("learning_rate"), py::arg("epsilon") = StepOptions().epsilon,
           py::arg("initial_accumulator") = StepOptions().initial_accumulator,
           py::arg("beta1") = StepOptions().beta1, py::arg("beta2") = StepOptions().beta2,
           py::arg("max_gradient_norm") = StepOptions().max_gradient_norm, py::arg("threads") = 1,
           py::arg("places") = PyPlaces(), py::arg("parts") = PyParts())
      .def(
          "add_counts",
          [](TrainingStore* store, uint32_t table, const Array<int64_t>& keys,
             const Array<float>& logs) {
            const auto& tables = store->options().tables;
            const py::ssize_t counters =
                table >= tables.size() ? 0
                                       : tables[table].layout.dim() - tables[table].learned().dim();
            if (logs.ndim() != 2 || logs.shape(0) != keys.size() || logs.shape(1) != counters) {
              throw BindingError{
                  {Code::kInvalidArgument,
                   "logs must be keys x counters of the table: " + std::to_string(keys.size()) +
                       " x " + std::to_string(counters)}};
            }
            const py::gil_scoped_release released;
            return ValueOrThrow(
                store->AddCounts(table, SpanOf(keys), logs.data(), static_cast<size_t>(counters)));
          },
          py::arg("table"), py::arg("keys"), py::arg("logs"))
      .def("set_live",
           [](TrainingStore* store, uint32_t table, int64_t key, uint16_t live) {
             ThrowIfError(store->SetLive(table, static_cast<uint64_t>(key), live));
           })
      .def(
          "prune",
          [](TrainingStore* store, uint32_t group, uint64_t bytes, uint32_t max_age,
             const std::optional<std::vector<std::string>>& samples) {
            const py::gil_scoped_release released;
            return ValueOrThrow(store->Prune(
                group, bytes, max_age,
                samples ? std::span<const std::string>(*samples) : std::span<const std::string>()));
          },
          py::arg("group"), py::arg("bytes"), py::kw_only(), py::arg("max_age") = 0,
          py::arg("samples") = py::none())
      .def("prune_rows", [](const TrainingStore& store,
                            uint32_t group) { return ValueOrThrow(store.PruneRows(group)); })
      .def("prune_sample",
           [](TrainingStore* store, uint32_t group, uint64_t rows) {
             std::string sample;
             {
               const py::gil_scoped_release released;
               sample = ValueOrThrow(store->PruneSample(group, rows));
             }
             return py::bytes(sample);
           })
      .def("record_sensitivity",
           [](TrainingStore* store, uint32_t table, double at_stake, double squares) {
             ThrowIfError(store->RecordSensitivity(table, at_stake, squares));
           })
      .def("prune_room", [](const TrainingStore& store,
                            uint32_t group) { return ValueOrThrow(store.PruneRoom(group)); })
      .def("set_prune_room",
           [](TrainingStore* store, uint32_t group, uint64_t bytes) {
             ThrowIfError(store->SetPruneRoom(group, bytes));
           })
      .def("seen_bytes", [](const TrainingStore& store,
                            uint32_t group) { return ValueOrThrow(store.SeenBytes(group)); })
      .def("prune_state",
           [](const TrainingStore& store, uint32_t group) {
             return py::bytes(ValueOrThrow(store.PruneState(group)));
           })
      .def("set_prune_state",
           [](TrainingStore* store, uint32_t group, const std::string& state) {
             ThrowIfError(store->SetPruneState(group, state));
           })
      .def(
          "load_prune_states",
          [](TrainingStore* store, uint32_t group, const std::vector<std::string>& states,
             bool seen) { ThrowIfError(store->LoadPruneStates(group, states, seen)); },
          py::arg("group"), py::arg("states"), py::kw_only(), py::arg("seen"))
      .def("prune_state_of_format_5",
           [](const TrainingStore& store, uint32_t group, const std::string& state) {
             return py::bytes(ValueOrThrow(store.PruneStateOfFormat5(group, state)));
           })
      .def("take_changes",
           [](TrainingStore* store, uint32_t table, uint32_t bucket) {
             std::vector<std::byte> records;
             {
               const py::gil_scoped_release released;  // rows may come from a drive
               ThrowIfError(store->TakeChanges(table, bucket, &records));
             }
             return BytesOut(records);
           })
      .def("import_records",
           [](TrainingStore* store, uint32_t table, uint32_t bucket, const py::bytes& records) {
             const std::span<const std::byte> bytes = BytesIn(records);
             const py::gil_scoped_release released;  // who called holds the bytes
             ThrowIfError(store->ImportRecords(table, bucket, bytes));
           })
      .def("mark_changed",
           [](TrainingStore* store, uint32_t table, uint32_t bucket, const Array<uint64_t>& keys) {
             ThrowIfError(store->MarkChanged(table, bucket, SpanOf(keys)));
           })
      .def("bucket_state", &BucketState)
      .def("set_bucket_state", &SetBucketState)
      .def("export_rows", &ExportRows, py::arg("table"), py::arg("keys"))
      .def("put_rows", &PutRows, py::arg("table"), py::arg("records"), py::arg("states"))
      .def(
          "set_states",
          [](TrainingStore* store, uint32_t table, const Array<uint64_t>& keys,
             const PyStates& states) {
            CheckTable(*store, table);
            SetStates(store, table, SpanOf(keys), states, "table " + std::to_string(table));
          },
          py::arg("table"), py::arg("keys"), py::arg("states"));
}

}  // namespace embertide

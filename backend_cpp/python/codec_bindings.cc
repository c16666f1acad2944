// Bindings of the row codec, checksums and snapshots.
#include <algorithm>
#include <bit>
#include <map>
#include <optional>
#include <span>

#include "bindings.h"
#include "embertide/checksum.h"
#include "embertide/hash.h"
#include "embertide/snapshot.h"

namespace embertide {
namespace {

namespace py = pybind11;

RowLayout MakeLayout(const std::string& dtype, uint16_t chunks, uint16_t chunk_dim) {
  const RowLayout layout{chunks, chunk_dim, ValueOrThrow(ParseDType(dtype))};
  ThrowIfError(layout.Validate());
  return layout;
}

void RefuseKeys(const RowLayout& layout) {
  if (layout.is_keys()) throw BindingError{{Code::kInvalidArgument, "rows of keys are no values"}};
}

py::bytes Encode(const RowLayout& layout, uint16_t live, const Array<float>& values) {
  RefuseKeys(layout);
  if (values.size() != layout.dim() || (live & ~layout.full_mask()) != 0) {
    throw BindingError{{Code::kInvalidArgument, "a row of " + std::to_string(layout.dim()) +
                                                    " values in " + std::to_string(layout.chunks) +
                                                    " chunks cannot hold " +
                                                    std::to_string(values.size()) +
                                                    " values, mask " + std::to_string(live)}};
  }
  std::vector<std::byte> payload(layout.PayloadBytes(live));
  EncodePayload(layout, live, values.data(), payload.data());
  return BytesOut(payload);
}

py::bytes Record(uint64_t key, uint16_t live, int kind, const py::bytes& payload) {
  std::vector<std::byte> record;
  AppendRecord({key, live, static_cast<RecordKind>(kind), BytesIn(payload)}, &record);
  return BytesOut(record);
}

// Cuts records into pieces of at most `max_bytes`: (bytes, rows, tombstones) each.
py::list CutRecords(const RowLayout& layout, const py::bytes& records, size_t max_bytes) {
  py::list pieces;
  std::span<const std::byte> rest = BytesIn(records);
  const std::byte* begin = rest.data();
  uint64_t rows = 0;
  uint64_t tombstones = 0;
  const auto cut = [&](const std::byte* end) {
    if (end != begin) pieces.append(py::make_tuple(BytesOut({begin, end}), rows, tombstones));
    begin = end;
    rows = tombstones = 0;
  };
  while (!rest.empty()) {
    const std::byte* at = rest.data();
    const RowRecord record = ValueOrThrow(ReadRecord(layout, &rest));
    if (static_cast<size_t>(rest.data() - begin) > max_bytes) cut(at);
    ++(record.kind == RecordKind::kRow ? rows : tombstones);
  }
  cut(rest.data());
  return pieces;
}

Array<uint64_t> RecordKeys(const RowLayout& layout, const py::bytes& records) {
  std::vector<uint64_t> keys;
  for (std::span<const std::byte> rest = BytesIn(records); !rest.empty();) {
    keys.push_back(ValueOrThrow(ReadRecord(layout, &rest)).key);
  }
  return Array<uint64_t>(static_cast<py::ssize_t>(keys.size()), keys.data());
}

// Records as arrays: (keys [N], live masks [N], 0 of tombstones, where each record begins and the
// last one ends [N + 1], values [N, dim], zeros where a chunk is dead).
py::tuple DecodeRecords(const RowLayout& layout, const py::bytes& records) {
  RefuseKeys(layout);
  const std::span<const std::byte> all = BytesIn(records);
  std::vector<RowRecord> rows;
  std::vector<uint64_t> begins = {0};
  for (std::span<const std::byte> rest = all; !rest.empty();) {
    rows.push_back(ValueOrThrow(ReadRecord(layout, &rest)));
    begins.push_back(all.size() - rest.size());
  }
  const auto count = static_cast<py::ssize_t>(rows.size());
  Array<uint64_t> keys(count);
  Array<uint16_t> live(count);
  Array<float> values({count, static_cast<py::ssize_t>(layout.dim())});
  for (size_t i = 0; i < rows.size(); ++i) {
    keys.mutable_data()[i] = rows[i].key;
    live.mutable_data()[i] = rows[i].live;
    DecodePayload(layout, rows[i].live, rows[i].payload.data(),
                  values.mutable_data() + i * layout.dim());
  }
  return py::make_tuple(
      keys, live, Array<uint64_t>(static_cast<py::ssize_t>(begins.size()), begins.data()), values);
}

// Records as those of a layout with another dtype.
py::bytes ConvertedRecords(const RowLayout& from, const RowLayout& to, const py::bytes& records) {
  RefuseKeys(from);
  RefuseKeys(to);
  if (from.chunks != to.chunks || from.chunk_dim != to.chunk_dim) {
    throw BindingError{{Code::kInvalidArgument, "rows of " + std::to_string(from.chunks) +
                                                    " chunks of " + std::to_string(from.chunk_dim) +
                                                    " are none of " + std::to_string(to.chunks) +
                                                    " of " + std::to_string(to.chunk_dim)}};
  }
  std::vector<std::byte> out;
  const std::span<const std::byte> in = BytesIn(records);
  Status status;
  {
    const py::gil_scoped_release released;
    status = ConvertRecords(from, to, in, &out);
  }
  ThrowIfError(status);
  return BytesOut(out);
}

// Records of rows of keys: items [N, dim] of the keys [N], a tombstone where a key has no item.
py::bytes EncodeKeyRecords(const RowLayout& layout, const Array<uint64_t>& keys,
                           const Array<int64_t>& items) {
  if (!layout.is_keys() || items.ndim() != 2 || items.shape(0) != keys.size() ||
      items.shape(1) != static_cast<py::ssize_t>(layout.dim())) {
    throw BindingError{{Code::kInvalidArgument, "give a layout of keys, and " +
                                                    std::to_string(layout.dim()) +
                                                    " items for each of the keys"}};
  }
  std::vector<std::byte> records;
  std::vector<std::byte> payload(layout.PayloadBytes(layout.full_mask()));
  for (py::ssize_t i = 0; i < keys.size(); ++i) {
    const uint16_t live = EncodeKeys(layout, items.data() + i * items.shape(1), payload.data());
    const auto kind = live == 0 ? RecordKind::kExpired : RecordKind::kRow;
    AppendRecord({keys.data()[i], live, kind, {payload.data(), layout.PayloadBytes(live)}},
                 &records);
  }
  return BytesOut(records);
}

// The reverse: (keys [N], items [N, dim]).
py::tuple DecodeKeyRecords(const RowLayout& layout, const py::bytes& records) {
  if (!layout.is_keys()) {
    throw BindingError{{Code::kInvalidArgument, "rows of values are no keys"}};
  }
  const Array<uint64_t> keys = RecordKeys(layout, records);
  Array<int64_t> items({keys.size(), static_cast<py::ssize_t>(layout.dim())});
  int64_t* to = items.mutable_data();
  for (std::span<const std::byte> rest = BytesIn(records); !rest.empty(); to += layout.dim()) {
    const RowRecord record = ValueOrThrow(ReadRecord(layout, &rest));
    CopyKeys(layout, record.live, record.payload.data(), to);
  }
  return py::make_tuple(keys, items);
}

// (live mask, payload bytes) of a key's row; None without one.
std::optional<std::pair<uint16_t, size_t>> FindRecord(const RowLayout& layout,
                                                      const py::bytes& records, int64_t key) {
  for (std::span<const std::byte> rest = BytesIn(records); !rest.empty();) {
    const RowRecord record = ValueOrThrow(ReadRecord(layout, &rest));
    if (record.key != static_cast<uint64_t>(key) || record.kind != RecordKind::kRow) continue;
    return std::pair(record.live, record.payload.size());
  }
  return std::nullopt;
}

// The numbers of rows that have 0, 1, ... `chunks` live chunks.
std::vector<uint64_t> CountLive(const RowLayout& layout, const py::bytes& records) {
  std::vector<uint64_t> rows(layout.chunks + 1);
  for (std::span<const std::byte> rest = BytesIn(records); !rest.empty();) {
    ++rows[std::popcount(ValueOrThrow(ReadRecord(layout, &rest)).live)];
  }
  return rows;
}

// (rows added, removed, changed) from `before` to `after`, whose keys ascend.
py::tuple DiffRecords(const RowLayout& layout, const py::bytes& before, const py::bytes& after) {
  uint64_t added = 0;
  uint64_t removed = 0;
  uint64_t changed = 0;
  const auto next = [&](std::span<const std::byte>* rest) -> std::optional<RowRecord> {
    if (rest->empty()) return std::nullopt;
    return ValueOrThrow(ReadRecord(layout, rest));
  };
  std::span<const std::byte> left = BytesIn(before);
  std::span<const std::byte> right = BytesIn(after);
  std::optional<RowRecord> old = next(&left);
  std::optional<RowRecord> now = next(&right);
  while (old.has_value() || now.has_value()) {
    if (!now.has_value() || (old.has_value() && old->key < now->key)) {
      ++removed;
      old = next(&left);
    } else if (!old.has_value() || now->key < old->key) {
      ++added;
      now = next(&right);
    } else {
      const bool equal = old->live == now->live && std::ranges::equal(old->payload, now->payload);
      changed += equal ? 0 : 1;
      old = next(&left);
      now = next(&right);
    }
  }
  return py::make_tuple(added, removed, changed);
}

// The rows of `base`, whose keys ascend, after `changes` one after the other; keys ascend.
py::bytes MergeRecords(const RowLayout& layout, const py::bytes& base,
                       const std::vector<py::bytes>& changes) {
  std::map<uint64_t, std::span<const std::byte>> rows;
  const auto apply = [&](std::span<const std::byte> rest) {
    while (!rest.empty()) {
      const std::byte* begin = rest.data();
      const RowRecord record = ValueOrThrow(ReadRecord(layout, &rest));
      if (record.kind == RecordKind::kRow) {
        rows[record.key] = {begin, rest.data()};
      } else {
        rows.erase(record.key);
      }
    }
  };
  apply(BytesIn(base));
  for (const py::bytes& each : changes) apply(BytesIn(each));
  std::vector<std::byte> out;
  for (const auto& [key, bytes] : rows) out.insert(out.end(), bytes.begin(), bytes.end());
  return BytesOut(out);
}

// The records that bring `keys`, which ascend, back to what they are in `state`: its records, and
// tombstones for the keys that it lacks.
py::bytes RestoreRecords(const RowLayout& layout, const py::bytes& state,
                         const Array<uint64_t>& keys) {
  std::map<uint64_t, std::span<const std::byte>> rows;
  for (std::span<const std::byte> rest = BytesIn(state); !rest.empty();) {
    const std::byte* begin = rest.data();
    const uint64_t key = ValueOrThrow(ReadRecord(layout, &rest)).key;
    rows[key] = {begin, rest.data()};
  }
  std::vector<std::byte> out;
  for (const uint64_t key : std::span(keys.data(), static_cast<size_t>(keys.size()))) {
    const auto found = rows.find(key);
    if (found == rows.end()) {
      AppendRecord({key, 0, RecordKind::kExpired, {}}, &out);
    } else {
      out.insert(out.end(), found->second.begin(), found->second.end());
    }
  }
  return BytesOut(out);
}

// The records of `records` that `others` lacks or has with other bytes; keys ascend in both.
py::bytes DifferingRecords(const RowLayout& layout, const py::bytes& records,
                           const py::bytes& others) {
  std::span<const std::byte> rest = BytesIn(records);
  std::span<const std::byte> left = BytesIn(others);
  std::span<const std::byte> other;  // the first record of `others` that is not passed yet
  uint64_t other_key = 0;
  std::vector<std::byte> differing;
  while (!rest.empty()) {
    const std::byte* begin = rest.data();
    const uint64_t key = ValueOrThrow(ReadRecord(layout, &rest)).key;
    const std::span<const std::byte> bytes(begin, rest.data());
    while ((other.empty() || other_key < key) && !left.empty()) {
      const std::byte* const first = left.data();
      other_key = ValueOrThrow(ReadRecord(layout, &left)).key;
      other = {first, left.data()};
    }
    if (!other.empty() && other_key == key && std::ranges::equal(other, bytes)) continue;
    differing.insert(differing.end(), bytes.begin(), bytes.end());
  }
  return BytesOut(differing);
}

py::bytes ReadBucket(const std::string& directory, const TableConfig& table,
                     const BucketFileInfo& info) {
  std::vector<std::byte> records;
  Status status;
  {
    const py::gil_scoped_release released;
    status = ReadBucketFile(directory, table, info, [&](std::span<const std::byte> block) {
      records.insert(records.end(), block.begin(), block.end());
      return Status::Ok();
    });
  }
  ThrowIfError(status);
  return BytesOut(records);
}

BucketFileInfo WriteBucket(const std::string& directory, const TableConfig& table, uint32_t bucket,
                           uint64_t version, const py::bytes& records) {
  const std::span<const std::byte> bytes = BytesIn(records);
  const py::gil_scoped_release released;  // a drive may take long
  return ValueOrThrow(WriteBucketFile(directory, table, bucket, version, bytes));
}

void BindSnapshotTypes(py::module_& m) {
  py::class_<RowLayout>(m, "RowLayout")
      .def(py::init(&MakeLayout), py::kw_only(), py::arg("dtype") = "fp32", py::arg("chunks") = 1,
           py::arg("chunk_dim"))
      .def_readonly("chunks", &RowLayout::chunks)
      .def_readonly("chunk_dim", &RowLayout::chunk_dim)
      .def_property_readonly("dim", &RowLayout::dim)
      .def_property_readonly("dtype", [](const RowLayout& l) { return DTypeName(l.dtype); });
  py::class_<TableConfig>(m, "TableConfig")
      .def(py::init([](std::string name, uint32_t id, RowLayout layout, uint32_t bucket_bits,
                       uint64_t init_seed, float init_scale, std::vector<float> default_row,
                       uint16_t counter_chunks) {
             TableConfig table{std::move(name),
                               id,
                               layout,
                               bucket_bits,
                               init_seed,
                               init_scale,
                               std::move(default_row),
                               counter_chunks};
             ThrowIfError(table.Validate());
             return table;
           }),
           py::kw_only(), py::arg("name"), py::arg("id"), py::arg("layout"),
           py::arg("bucket_bits") = 0, py::arg("init_seed") = 0, py::arg("init_scale") = 0.01F,
           py::arg("default_row") = std::vector<float>(), py::arg("counter_chunks") = 0)
      .def_readonly("name", &TableConfig::name)
      .def_readonly("id", &TableConfig::id)
      .def_readonly("layout", &TableConfig::layout)
      .def_readonly("bucket_bits", &TableConfig::bucket_bits)
      .def_readonly("init_seed", &TableConfig::init_seed)
      .def_readonly("init_scale", &TableConfig::init_scale)
      .def_readonly("default_row", &TableConfig::default_row)
      .def_readonly("counter_chunks", &TableConfig::counter_chunks);
  py::class_<BucketFileInfo>(m, "BucketFileInfo")
      .def(py::init([](std::string path, std::string table, uint32_t bucket, uint64_t version,
                       uint64_t rows, uint64_t bytes, uint32_t crc32c) {
             return BucketFileInfo{std::move(path), std::move(table), bucket, version, rows, bytes,
                                   crc32c};
           }),
           py::kw_only(), py::arg("path"), py::arg("table"), py::arg("bucket"), py::arg("version"),
           py::arg("rows"), py::arg("bytes"), py::arg("crc32c"))
      .def_readonly("path", &BucketFileInfo::path)
      .def_readonly("table", &BucketFileInfo::table)
      .def_readonly("bucket", &BucketFileInfo::bucket)
      .def_readonly("version", &BucketFileInfo::version)
      .def_readonly("rows", &BucketFileInfo::rows)
      .def_readonly("bytes", &BucketFileInfo::bytes)
      .def_readonly("crc32c", &BucketFileInfo::crc32c);
}

}  // namespace

void BindCodec(py::module_& m) {
  BindSnapshotTypes(m);
  m.attr("HASH_NAME") = kHashName;
  m.attr("HASH_SEED") = kHashSeed;
  m.attr("FORMAT_VERSION") = kFormatVersion;
  m.def("hash_key", [](int64_t key) { return HashKey(static_cast<uint64_t>(key)); });
  m.def("initial_value",
        [](uint64_t seed, uint32_t table_id, int64_t key, uint32_t d, float scale) {
          return InitialValue(seed, table_id, static_cast<uint64_t>(key), d, scale);
        });
  m.def(
      "crc32c",
      [](const py::bytes& bytes, uint32_t before) { return Crc32c(BytesIn(bytes), before); },
      py::arg("data"), py::arg("before") = 0, py::pos_only());
  m.def("join_crc32c", &JoinCrc32c, py::arg("first"), py::arg("second"), py::arg("second_bytes"),
        py::pos_only());
  m.def("encode_payload", &Encode);
  m.def("encode_record", &Record, py::arg("key"), py::arg("live"), py::arg("kind"),
        py::arg("payload"));
  m.def("cut_records", &CutRecords, py::arg("layout"), py::arg("records"), py::arg("max_bytes"));
  m.def("find_record", &FindRecord, py::arg("layout"), py::arg("records"), py::arg("key"));
  m.def("decode_records", &DecodeRecords, py::arg("layout"), py::arg("records"));
  m.def("convert_records", &ConvertedRecords);
  m.def("encode_key_records", &EncodeKeyRecords, py::arg("layout"), py::arg("keys"),
        py::arg("items"));
  m.def("decode_key_records", &DecodeKeyRecords, py::arg("layout"), py::arg("records"));
  m.def("record_keys", &RecordKeys, py::arg("layout"), py::arg("records"));
  m.def("count_live", &CountLive, py::arg("layout"), py::arg("records"));
  m.def("differing_records", &DifferingRecords, py::arg("layout"), py::arg("records"),
        py::arg("others"));
  m.def("diff_records", &DiffRecords, py::arg("layout"), py::arg("before"), py::arg("after"));
  m.def("merge_records", &MergeRecords);
  m.def("restore_records", &RestoreRecords);
  m.def("write_bucket_file", &WriteBucket);
  m.def("read_bucket_file", &ReadBucket);
  m.def("check_manifest", [](const std::string& json) {
    return ManifestToJson(ValueOrThrow(ManifestFromJson(json)));
  });
}

}  // namespace embertide

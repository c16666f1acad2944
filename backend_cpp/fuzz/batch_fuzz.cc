// Batches of the bus on their way into a store: what it takes is what the records say, every
// invariant holds, and what it refuses changes nothing.
//
//   input: ([u8 flags][u32 length][RowBatch])...    flags: 1 mend the checksum, 2 commit after it
#include <map>

#include "bus/test_publication.h"
#include "embertide/hash.h"
#include "embertide/serving_store.h"
#include "fuzz/fuzz.h"

namespace embertide::fuzz {
namespace {

constexpr size_t kMaxBatches = 16;

StoreOptions Options() {
  StoreOptions options;
  TableConfig table;
  table.name = "item";
  table.layout = {2, 3, DType::kBf16};
  table.bucket_bits = 1;
  options.tables = {table};
  options.devices = 2;
  options.ddr_budget_bytes = 4ULL << 20;
  options.window_versions = 2;
  return options;
}

using Rows = std::map<uint64_t, std::string>;  // key -> its record

// Applies records to the rows; false if they are no records of the bucket.
bool Apply(const TableConfig& table, uint32_t bucket, std::string_view records, Rows* rows) {
  std::span<const std::byte> rest = std::as_bytes(std::span(records));
  Rows next = *rows;
  while (!rest.empty()) {
    const std::byte* begin = rest.data();
    const Result<RowRecord> record = ReadRecord(table.layout, &rest);
    if (!record.ok()) return false;
    const uint64_t key = record.value().key;
    if (BucketOfHash(HashKey(key), table.bucket_bits) != bucket) return false;
    if (record.value().kind == RecordKind::kRow) {
      next[key] = std::string(reinterpret_cast<const char*>(begin),
                              static_cast<size_t>(rest.data() - begin));
    } else {
      next.erase(key);
    }
  }
  *rows = next;
  return true;
}

void CheckRows(const ServingStore& store, const std::array<Rows, 2>& rows) {
  const auto view = store.PinNewest();
  EMBERTIDE_CHECK(view.ok());
  for (uint32_t bucket = 0; bucket < 2; ++bucket) {
    std::vector<std::byte> held;
    EMBERTIDE_CHECK(store.ExportBucket(view.value(), 0, bucket, &held).ok());
    std::string want;
    for (const auto& [key, record] : rows[bucket]) want += record;
    EMBERTIDE_CHECK(std::string(reinterpret_cast<const char*>(held.data()), held.size()) == want);
  }
  const Status integrity = store.CheckIntegrity();
  EMBERTIDE_CHECK(integrity.ok());
}

}  // namespace

std::vector<std::string> Seeds() {
  google::protobuf::SetLogHandler(nullptr);  // of strings that are no UTF-8
  const TableConfig table = Options().tables[0];
  std::string seed;
  for (uint64_t version = 1; version <= 3; ++version) {
    for (uint32_t bucket = 0; bucket < 2; ++bucket) {
      std::vector<std::byte> records;
      for (uint64_t key = version; key < 12; ++key) {
        if (BucketOfHash(HashKey(key), 1) != bucket) continue;
        const auto live = static_cast<uint16_t>(key % 4);
        const std::vector<std::byte> payload(table.layout.PayloadBytes(live), std::byte{64});
        const bool gone = version > 1 && key % 3 == 0;
        AppendRecord({key, gone ? uint16_t{0} : live, gone ? RecordKind::kPruned : RecordKind::kRow,
                      gone ? std::span<const std::byte>() : payload},
                     &records);
      }
      const std::string text(reinterpret_cast<const char*>(records.data()), records.size());
      const std::string batch = MakeBatch({version, 1}, 0, bucket, 1, text).SerializeAsString();
      seed += Raw(static_cast<uint8_t>(1 + 2 * bucket)) + Raw(static_cast<uint32_t>(batch.size())) +
              batch;
    }
  }
  return {seed};
}

void Run(std::string_view input) {
  const auto store = std::move(*ServingStore::Open(Options()));
  const TableConfig& table = store->options().tables[0];
  std::array<Rows, 2> rows;
  uint64_t version = 1;
  for (size_t i = 0; i < kMaxBatches && !input.empty(); ++i) {
    const auto flags = Take<uint8_t>(&input);
    const size_t length = std::min<size_t>(Take<uint32_t>(&input), input.size());
    v1::RowBatch batch;
    const bool parsed = batch.ParseFromArray(input.data(), static_cast<int>(length));
    input.remove_prefix(length);
    if (!parsed) continue;
    if ((flags & 1U) != 0) {
      batch = MakeBatch({batch.version(), batch.lineage()}, batch.table_id(), batch.bucket(),
                        batch.sequence(), batch.records());
    }
    if (!CheckBatch(batch).ok()) continue;
    const Status staged = store->StageRecords(version, batch.table_id(), batch.bucket(),
                                              std::as_bytes(std::span(batch.records())));
    const bool fits = batch.table_id() == 0 && batch.bucket() < 2 &&
                      Apply(table, batch.bucket(), batch.records(), &rows[batch.bucket() % 2]);
    EMBERTIDE_CHECK(staged.ok() == fits);
    if ((flags & 2U) == 0) continue;
    EMBERTIDE_CHECK(store->Commit(version++).ok());
    CheckRows(*store, rows);
  }
  EMBERTIDE_CHECK(store->Commit(version).ok());
  CheckRows(*store, rows);
}

}  // namespace embertide::fuzz

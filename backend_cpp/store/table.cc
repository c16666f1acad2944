// Tables: their records, validated.
#include "store/table.h"

namespace embertide {

Status ValidateRecords(const Table& table, uint32_t bucket, std::span<const std::byte> records,
                       uint32_t* rows) {
  const TableConfig& config = table.config;
  while (!records.empty()) {
    const Result<RowRecord> record = ReadRecord(config.layout, &records);
    if (!record.ok()) return record.status();
    if (BucketOfHash(HashKey(record.value().key), config.bucket_bits) != bucket) {
      return {Code::kCorrupt, "key " + std::to_string(record.value().key) + " of table " +
                                  config.name + " is not of bucket " + std::to_string(bucket)};
    }
    if (rows != nullptr && record.value().kind == RecordKind::kRow) ++*rows;
  }
  return Status::Ok();
}

}  // namespace embertide

// Samples of keys: one that is taken names the model's tables alone, is within its bytes, and can
// be kept, written and read again.
//
//   input: [KeySample]
#include "embertide/v1/key_sample.pb.h"
#include "fuzz/fuzz.h"
#include "node/key_sample.h"

namespace embertide::fuzz {
namespace {

constexpr uint64_t kMaxBytes = 4096;

std::vector<TableConfig> Tables() {
  std::vector<TableConfig> tables(2);
  tables[0].name = "user";
  tables[1].name = "item";
  return tables;
}

}  // namespace

std::vector<std::string> Seeds() {
  google::protobuf::SetLogHandler(nullptr);  // of strings that are no UTF-8
  KeySample sample(kMaxBytes);
  sample.Add({{0, {5, -7}}, {1, {1, 2, 3}}});
  sample.Add({{1, {9}}});
  return {sample.Serialized(Tables()), ""};
}

void Run(std::string_view input) {
  static const std::vector<TableConfig> tables = Tables();
  const auto read = KeySample::Parse(std::string(input), tables, kMaxBytes);
  if (!read.ok()) {
    EMBERTIDE_CHECK(read.status().code() == Code::kCorrupt);
    return;
  }
  uint64_t bytes = 0;
  KeySample sample(kMaxBytes);
  for (const KeySample::Lookup& lookup : read.value()) {
    EMBERTIDE_CHECK(!lookup.empty());
    for (const KeySample::Keys& of : lookup) {
      EMBERTIDE_CHECK(of.table < tables.size());
      bytes += of.keys.size() * sizeof(int64_t);
    }
    sample.Add(lookup);
    EMBERTIDE_CHECK(sample.figures().bytes <= kMaxBytes);
  }
  EMBERTIDE_CHECK(bytes <= kMaxBytes);
  const auto again = KeySample::Parse(sample.Serialized(tables), tables, kMaxBytes);
  EMBERTIDE_CHECK(again.ok() && again.value().size() == sample.figures().lookups);
}

}  // namespace embertide::fuzz

// Samples of rows, written, read and put together.
#include "store/prune_sample.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

namespace embertide {
namespace {

struct SampleHead {
  uint64_t step;
  uint32_t rare;
  uint32_t tables;
};
struct TableHead {
  double scale;
  uint32_t floats;
  uint32_t rows;
};

template <typename T>
void Append(const T& value, std::string* to) {
  to->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

// False: there are too few bytes left.
template <typename T>
bool Take(std::string_view* from, T* value) {
  if (from->size() < sizeof(T)) return false;
  from->copy(reinterpret_cast<char*>(value), sizeof(T));
  from->remove_prefix(sizeof(T));
  return true;
}

// The same whatever their order, which changes.
double SumInOrder(std::vector<float>* values) {
  std::ranges::sort(*values);
  return std::accumulate(values->begin(), values->end(), 0.0);
}

Status Unlike(const std::string& what, const std::string& one, const std::string& other) {
  return {Code::kInvalidArgument, what + " " + one + " in one sample and " + other +
                                      " in another; ranks must take them in the same step, of the "
                                      "same number of rows, after the same stakes"};
}

}  // namespace

CountsWorth TableSample::FindWorth(const RowCost& cost, const CountsWorth& before) const {
  std::vector<float> logs;
  std::vector<float> learned;
  for (size_t row = 0; row < rows.size(); row += floats) {
    const float* utility = rows.data() + row;
    learned.insert(learned.end(), utility, utility + cost.chunks);
    if (utility[cost.chunks] != 0.0F) logs.push_back(utility[cost.chunks]);
  }
  if (logs.empty()) return before;
  CountsWorth worth = before;
  worth.reference = *std::ranges::max_element(logs);
  for (float& log : logs) log = std::exp2(log - worth.reference);
  worth.of_reference =
      static_cast<float>(worth.of.worth * SumInOrder(&learned) / SumInOrder(&logs));
  return worth;
}

std::string GroupSample::Write() const {
  std::string bytes;
  Append(SampleHead{step, rare, static_cast<uint32_t>(tables.size())}, &bytes);
  for (const TableSample& table : tables) {
    const auto rows = static_cast<uint32_t>(table.rows.size() / std::max(table.floats, 1U));
    Append(TableHead{table.scale, table.floats, rows}, &bytes);
    bytes.append(reinterpret_cast<const char*>(table.rows.data()),
                 table.rows.size() * sizeof(float));
  }
  return bytes;
}

Result<GroupSample> GroupSample::Read(std::string_view bytes) {
  const Status wrong = {Code::kInvalidArgument, "a prune sample of " +
                                                    std::to_string(bytes.size()) +
                                                    " bytes is cut short or is none; give what "
                                                    "prune_sample returned"};
  SampleHead head{};
  if (!Take(&bytes, &head)) return wrong;
  GroupSample sample{head.step, head.rare, {}};
  for (uint32_t t = 0; t < head.tables; ++t) {
    TableHead table{};
    if (!Take(&bytes, &table)) return wrong;
    const uint64_t floats = uint64_t{table.floats} * table.rows;
    if (floats > bytes.size() / sizeof(float)) return wrong;
    TableSample& added = sample.tables.emplace_back(TableSample{table.scale, table.floats, {}});
    added.rows.resize(floats);
    std::memcpy(added.rows.data(), bytes.data(), floats * sizeof(float));
    bytes.remove_prefix(floats * sizeof(float));
  }
  if (!bytes.empty()) return wrong;
  return sample;
}

Status GroupSample::Add(const GroupSample& other) {
  const auto same = [](const char* what, auto one, auto another) -> Status {
    if (one == another) return Status::Ok();
    return Unlike(what, std::to_string(one), std::to_string(another));
  };
  EMBERTIDE_RETURN_IF_ERROR(same("step", step, other.step));
  EMBERTIDE_RETURN_IF_ERROR(same("one of 2^n rows, n", rare, other.rare));
  EMBERTIDE_RETURN_IF_ERROR(same("tables", tables.size(), other.tables.size()));
  for (size_t t = 0; t < tables.size(); ++t) {
    const TableSample& added = other.tables[t];
    EMBERTIDE_RETURN_IF_ERROR(same("scale", tables[t].scale, added.scale));
    EMBERTIDE_RETURN_IF_ERROR(same("floats of a row", tables[t].floats, added.floats));
    tables[t].rows.insert(tables[t].rows.end(), added.rows.begin(), added.rows.end());
  }
  return Status::Ok();
}

}  // namespace embertide

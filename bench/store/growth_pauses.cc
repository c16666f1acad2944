// How long a writer waits for one new row while a table grows from nothing. Prints, as JSON, how
// many inserts took up to each power of two nanoseconds, and the longest; run by
// bench.store.growth.
//
//   growth_pauses ROWS BUCKET_BITS
#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "embertide/hash.h"
#include "embertide/row.h"
#include "one_table.h"

namespace embertide {
namespace {

constexpr uint32_t kDim = 32;
constexpr uint32_t kPowers = 40;

void Run(uint64_t rows, uint32_t bucket_bits) {
  const auto store = OpenOneTable(kDim, bucket_bits, rows, rows * 60 + (256ULL << 20));
  const std::vector<std::byte> payload(4 * kDim);
  std::array<uint64_t, kPowers> histogram{};
  uint64_t longest = 0;
  std::vector<std::byte> record;
  for (uint64_t key = 0; key < rows; ++key) {
    record.clear();
    AppendRecord({key, 1, RecordKind::kRow, payload}, &record);
    const auto begin = std::chrono::steady_clock::now();
    const Status staged =
        store->StageRecords(1, 0, BucketOfHash(HashKey(key), bucket_bits), record);
    const auto took = std::chrono::steady_clock::now() - begin;
    ExitIfError(staged);
    const auto nanos =
        static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(took).count());
    ++histogram[std::min<uint64_t>(std::bit_width(nanos), kPowers - 1)];
    longest = std::max(longest, nanos);
  }
  std::printf("{\"longest_ns\": %lu, \"histogram\": [", longest);
  for (uint32_t p = 0; p < kPowers; ++p) std::printf("%s%lu", p == 0 ? "" : ", ", histogram[p]);
  std::printf("]}\n");
}

}  // namespace
}  // namespace embertide

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "growth_pauses ROWS BUCKET_BITS\n");
    return 2;
  }
  embertide::Run(std::strtoull(argv[1], nullptr, 10),
                 static_cast<uint32_t>(std::strtoul(argv[2], nullptr, 10)));
  return 0;
}

// How long a writer waits for one new row while a table grows from nothing, with a thread beside it
// that maintains the store as a node's worker does. Prints, as JSON, how many inserts took up to
// each power of two nanoseconds by the clock, and the longest by the clock and of the thread's own
// CPU time, and how many took longer than a millisecond; apart from those during which the system
// took a core away from the process (an involuntary switch). Then, as a measure of the machine, the
// same of a loop that only asks for the time, for as long as the inserts took: a virtual machine
// stands still without a switch; and of a loop that writes a byte to each of as many new pages as
// the rows took: a virtual machine whose host takes back what is free (balloon, free page
// reporting) waits milliseconds for some of them, whoever asks. So that such waits are not the
// store's, what it takes is written to once and given back just before, which leaves it with the
// virtual machine for a moment. Run by bench.store.growth.
//
//   growth_pauses ROWS BUCKET_BITS
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <thread>
#include <vector>

#include "embertide/hash.h"
#include "embertide/row.h"
#include "one_table.h"

namespace embertide {
namespace {

constexpr uint32_t kDim = 32;
constexpr uint32_t kPowers = 40;
constexpr uint64_t kLongNs = 1'000'000;
constexpr std::chrono::milliseconds kMaintainEvery{10};

uint64_t Nanos(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

struct Moment {
  uint64_t clock = 0;
  uint64_t cpu = 0;
  rusage usage{};
  static Moment Now() {
    Moment now;
    getrusage(RUSAGE_SELF, &now.usage);
    now.cpu = Nanos(CLOCK_THREAD_CPUTIME_ID);
    now.clock = Nanos(CLOCK_MONOTONIC);
    return now;
  }
};

struct Waits {
  std::array<uint64_t, kPowers> histogram{};
  uint64_t total = 0;        // by the clock
  uint64_t longest = 0;      // by the clock
  uint64_t longest_own = 0;  // by the clock, of those with no involuntary switch
  uint64_t longest_cpu = 0;
  uint64_t longs = 0;      // longer than kLongNs by the clock
  uint64_t longs_own = 0;  // of those, with no involuntary switch

  void Add(const Moment& begin, const Moment& end) {
    const uint64_t took = end.clock - begin.clock;
    ++histogram[std::min<uint64_t>(std::bit_width(took), kPowers - 1)];
    total += took;
    longest = std::max(longest, took);
    longest_cpu = std::max(longest_cpu, end.cpu - begin.cpu);
    const bool taken_away = end.usage.ru_nivcsw != begin.usage.ru_nivcsw;
    if (!taken_away) longest_own = std::max(longest_own, took);
    if (took <= kLongNs) return;
    ++longs;
    longs_own += static_cast<uint64_t>(!taken_away);
  }
};

// The waits that the machine itself gives a thread that waits for nothing.
Waits Idle(uint64_t nanos) {
  Waits waits;
  Moment before = Moment::Now();
  const uint64_t until = before.clock + nanos;
  while (before.clock < until) {
    const Moment now = Moment::Now();
    waits.Add(before, now);
    before = now;
  }
  return waits;
}

// Writes to so many bytes of new memory, page by page, and gives them back.
Waits TouchNew(uint64_t bytes) {
  constexpr uint64_t kPage = 4096;
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) ExitIfError({Code::kResourceExhausted, "no memory to touch"});
  madvise(mapped, bytes, MADV_NOHUGEPAGE);
  Waits waits;
  Moment before = Moment::Now();
  for (uint64_t at = 0; at < bytes; at += kPage) {
    static_cast<volatile char*>(mapped)[at] = 1;
    const Moment now = Moment::Now();
    waits.Add(before, now);
    before = now;
  }
  munmap(mapped, bytes);
  return waits;
}

void Print(const char* name, const Waits& waits) {
  std::printf("\"%s\": {\"total_ns\": %lu, \"longest_ns\": %lu, ", name, waits.total,
              waits.longest);
  std::printf("\"longest_own_ns\": %lu, \"longest_cpu_ns\": %lu, ", waits.longest_own,
              waits.longest_cpu);
  std::printf("\"over_1_ms\": %lu, \"over_1_ms_own\": %lu, \"histogram\": [", waits.longs,
              waits.longs_own);
  for (uint32_t p = 0; p < kPowers; ++p) {
    std::printf("%s%lu", p == 0 ? "" : ", ", waits.histogram[p]);
  }
  std::printf("]}");
}

void Run(uint64_t rows, uint32_t bucket_bits) {
  const uint64_t budget = rows * 60 + (256ULL << 20);
  const auto store = OpenOneTable(kDim, bucket_bits, rows, budget);
  // Twice: rows come to lie in huge pages beside what they leave.
  const Waits touches = TouchNew(2 * budget);
  std::atomic<bool> over = false;
  std::thread worker([&] {
    while (!over) {
      store->Maintain();
      std::this_thread::sleep_for(kMaintainEvery);
    }
  });
  const std::vector<std::byte> payload(4 * kDim);
  Waits waits;
  std::vector<std::byte> record;
  const uint64_t start = Nanos(CLOCK_MONOTONIC);
  for (uint64_t key = 0; key < rows; ++key) {
    record.clear();
    AppendRecord({key, 1, RecordKind::kRow, payload}, &record);
    const uint32_t bucket = BucketOfHash(HashKey(key), bucket_bits);
    const Moment begin = Moment::Now();
    const Status staged = store->StageRecords(1, 0, bucket, record);
    Moment end;
    end.clock = Nanos(CLOCK_MONOTONIC);
    end.cpu = Nanos(CLOCK_THREAD_CPUTIME_ID);
    getrusage(RUSAGE_SELF, &end.usage);
    ExitIfError(staged);
    waits.Add(begin, end);
  }
  const uint64_t took = Nanos(CLOCK_MONOTONIC) - start;
  over = true;
  worker.join();
  std::printf("{");
  Print("inserts", waits);
  std::printf(", ");
  Print("idle", Idle(took));
  std::printf(", ");
  Print("touches", touches);
  std::printf("}\n");
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

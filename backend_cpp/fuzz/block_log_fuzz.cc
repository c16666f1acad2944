// Blocks of the SSD log, as a disk may give them back: a row that is read lies in its block, and
// its key is the one asked for; no byte of a block may differ.
//
//   input: [u8 mend][u16 slot][u16 bytes][u64 key][block]    mend: the checksum is put right
#include "embertide/checksum.h"
#include "fuzz/fuzz.h"
#include "ssd/block_log.h"

namespace embertide::fuzz {
namespace {

constexpr uint32_t kTable = 0;

// One block, which is whatever the input says.
class OneBlock : public BlockFile {
 public:
  explicit OneBlock(std::string* block) : block_(block) {}
  Status Read(std::span<const uint64_t> blocks, const BlockSink& sink) override {
    for (size_t read = 0; read < blocks.size(); ++read) {
      EMBERTIDE_RETURN_IF_ERROR(sink(read, std::as_bytes(std::span(*block_)).data()));
    }
    return Status::Ok();
  }
  Status Write(uint64_t, std::span<const std::byte> bytes) override {
    std::memcpy(block_->data(), bytes.data(), kBlockBytes);
    return Status::Ok();
  }
  Status Sync() override { return Status::Ok(); }
  const char* engine() const override { return "input"; }
  bool direct() const override { return false; }

 private:
  std::string* block_;
};

void MendChecksum(std::string* block) {
  const uint32_t crc = Crc32c(std::as_bytes(std::span(*block).subspan(4)));
  std::memcpy(block->data(), &crc, sizeof(crc));
}

}  // namespace

std::vector<std::string> Seeds() {
  std::string block(kBlockBytes, '\0');
  BlockLog log(std::make_unique<OneBlock>(&block), 2 * kSegmentBytes);
  const std::string row(40, 'r');
  const std::vector<LogEntry> entries = {{5, kTable, std::as_bytes(std::span(row))},
                                         {6, kTable, std::as_bytes(std::span(row).first(3))},
                                         {~0ULL, kTable, std::as_bytes(std::span(row).first(0))}};
  std::vector<uint64_t> slots;
  EMBERTIDE_CHECK(log.Append(entries, &slots).ok());
  MendChecksum(&block);  // that of a segment's salt, which Run has not
  std::vector<std::string> seeds;
  for (size_t e = 0; e < entries.size(); ++e) {
    seeds.push_back(Raw(static_cast<uint8_t>(e % 2)) + Raw(static_cast<uint16_t>(slots[e])) +
                    Raw(static_cast<uint16_t>(entries[e].bytes.size())) + Raw(entries[e].key) +
                    block.substr(0, 160));
  }
  return seeds;
}

void Run(std::string_view input) {
  const bool mend = Take<uint8_t>(&input) != 0;
  const auto slot = Take<uint16_t>(&input);
  const auto bytes = Take<uint16_t>(&input);
  const auto key = Take<uint64_t>(&input);
  if (bytes > kMaxEntryBytes) return;
  std::string block(input.substr(0, kBlockBytes));
  block.resize(kBlockBytes);
  if (mend) MendChecksum(&block);
  const BlockLog log(std::make_unique<OneBlock>(&block), 2 * kSegmentBytes);
  std::vector<std::byte> row(bytes + 1U);
  LogRead read{slot, key, kTable, bytes, row.data()};
  const Status status = log.Read({&read, 1});
  if (!status.ok()) {
    EMBERTIDE_CHECK(status.code() == Code::kCorrupt);
    return;
  }
  const size_t at = (slot & ((1U << kSsdOffsetBits) - 1U)) * 8U;
  EMBERTIDE_CHECK(std::memcmp(block.data() + at, &key, sizeof(key)) == 0);
  EMBERTIDE_CHECK(at + kEntryHeaderBytes + bytes <= kBlockBytes);
  EMBERTIDE_CHECK(std::memcmp(row.data(), block.data() + at + kEntryHeaderBytes, bytes) == 0);
  block[key % kBlockBytes] ^= static_cast<char>(1U << slot % 8);
  EMBERTIDE_CHECK(log.Read({&read, 1}).code() == Code::kCorrupt);
}

}  // namespace embertide::fuzz

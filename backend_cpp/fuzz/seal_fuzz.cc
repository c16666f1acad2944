// Seals: what is read can be written and read again; no byte of a valid file may differ.
//
//   input: [u8 manifest][text], or [u8 rows][u8 mend][u16 flip][u32 segments_at][frames]
//   mend: the frames' checksums are put right before they are read
#include "embertide/checksum.h"
#include "fuzz/fuzz.h"
#include "store/seal_file.h"

namespace embertide::fuzz {
namespace {

constexpr size_t kFrameHeader = 16;

SealInfo Info() {
  SealInfo info;
  info.sequence = 3;
  info.model = "news";
  info.schema_id = ~0ULL;
  info.first = {5, 1, 7};
  info.last = {6, 1, 8};
  info.tables = {"item"};
  info.logs = {"device-0.log", ""};
  info.file = "seal-3.rows";
  return info;
}

void MendChecksums(std::string* file) {
  for (size_t at = 0; at + kFrameHeader <= file->size();) {
    uint32_t bytes = 0;
    std::memcpy(&bytes, file->data() + at + 8, sizeof(bytes));
    if (bytes > file->size() - at - kFrameHeader) return;
    const auto all = std::as_bytes(std::span(*file));
    const uint32_t crc = Crc32c(all.subspan(at + kFrameHeader, bytes), Crc32c(all.subspan(at, 12)));
    std::memcpy(file->data() + at + 12, &crc, sizeof(crc));
    at += kFrameHeader + bytes;
  }
}

// Everything in it, or an error.
Status ReadAll(uint64_t bytes, uint64_t segments_at, std::vector<SealPart>* parts,
               std::vector<std::vector<SealedSegment>>* segments) {
  SealInfo info = Info();
  info.file_bytes = bytes;
  info.segments_at = segments_at;
  EMBERTIDE_CHECK(WriteSealInfo(Folder(), info).ok());
  const auto reader = SealReader::Open(Folder(), Info());
  if (!reader.ok()) return reader.status();
  *segments = reader.value()->segments();
  return reader.value()->ReadParts([&](const SealPart& part) {
    parts->push_back(part);
    return Status::Ok();
  });
}

std::string WriteAll(const std::vector<SealPart>& parts,
                     const std::vector<std::vector<SealedSegment>>& segments, SealInfo* info) {
  const std::string path = Folder() + "/seal-3.rows";
  const auto writer = SealWriter::Create(path);
  EMBERTIDE_CHECK(writer.ok());
  for (const SealPart& part : parts) EMBERTIDE_CHECK(writer.value()->Add(part).ok());
  EMBERTIDE_CHECK(writer.value()->Finish(segments, info).ok());
  std::string bytes(info->file_bytes, '\0');
  FILE* file = std::fopen(path.c_str(), "rb");
  EMBERTIDE_CHECK(file != nullptr);
  EMBERTIDE_CHECK(std::fread(bytes.data(), 1, bytes.size(), file) == bytes.size());
  std::fclose(file);
  return bytes;
}

void RunManifest(std::string_view text) {
  Write("seal.json", text);
  const Result<SealInfo> read = ReadSealInfo(Folder());
  if (!read.ok()) return;
  EMBERTIDE_CHECK(WriteSealInfo(Folder(), read.value()).ok());
  const Result<SealInfo> again = ReadSealInfo(Folder());
  EMBERTIDE_CHECK(again.ok() && again.value().last == read.value().last &&
                  again.value().tables == read.value().tables &&
                  again.value().file_bytes == read.value().file_bytes);
}

}  // namespace

std::vector<std::string> Seeds() {
  SealPart part{0, 1, 0, 9, 0, kHashEnd / 2, {{5, 77}, {6, 1ULL << 40}}, {}};
  part.records.assign(40, std::byte{3});
  SealPart rest{0, 1, 0, 9, kHashEnd / 2, kHashEnd, {}, {}};
  const std::vector<std::vector<SealedSegment>> segments = {{{2, 99, 0, 4, 5, 300}}, {}};
  SealInfo info = Info();
  const std::string file = WriteAll({part, rest}, segments, &info);
  std::vector<std::string> seeds;
  for (const uint8_t mend : {0, 1}) {
    seeds.push_back(Raw(uint8_t{1}) + Raw(mend) + Raw(uint16_t{50}) +
                    Raw(static_cast<uint32_t>(info.segments_at)) + file);
  }
  EMBERTIDE_CHECK(WriteSealInfo(Folder(), info).ok());
  FILE* manifest = std::fopen((Folder() + "/seal.json").c_str(), "rb");
  EMBERTIDE_CHECK(manifest != nullptr);
  std::string text(4096, '\0');
  text.resize(std::fread(text.data(), 1, text.size(), manifest));
  std::fclose(manifest);
  seeds.push_back(Raw(uint8_t{0}) + text);
  // Past any integer: once read as one, which is undefined.
  seeds.push_back(Raw(uint8_t{0}) + R"({"crc32c":95231111111111111111111111111111,"seal":{}})");
  return seeds;
}

void Run(std::string_view input) {
  if (Take<uint8_t>(&input) == 0) return RunManifest(input);
  const bool mend = Take<uint8_t>(&input) != 0;
  const auto flip = Take<uint16_t>(&input);
  const auto segments_at = Take<uint32_t>(&input);
  std::string file(input);
  if (mend) MendChecksums(&file);
  Write("seal-3.rows", file);
  std::vector<SealPart> parts;
  std::vector<std::vector<SealedSegment>> segments;
  if (!ReadAll(file.size(), segments_at, &parts, &segments).ok()) return;
  // The file that was read is written again as it is, but for how segments are cut into frames.
  SealInfo info = Info();
  const std::string again = WriteAll(parts, segments, &info);
  EMBERTIDE_CHECK(info.segments_at == segments_at);
  std::vector<SealPart> parts_again;
  std::vector<std::vector<SealedSegment>> segments_again;
  EMBERTIDE_CHECK(ReadAll(again.size(), segments_at, &parts_again, &segments_again).ok());
  EMBERTIDE_CHECK(parts_again.size() == parts.size());
  for (size_t p = 0; p < parts.size(); ++p) {
    EMBERTIDE_CHECK(EncodePart(parts[p]) == EncodePart(parts_again[p]));
  }
  file[flip % file.size()] ^= static_cast<char>(1U << flip % 8);
  Write("seal-3.rows", file);
  parts.clear();
  EMBERTIDE_CHECK(!ReadAll(file.size(), segments_at, &parts, &segments).ok());
}

}  // namespace embertide::fuzz

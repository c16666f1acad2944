// Reading the promotion record: "EMPRM001 REVISION CRC32C\n", then JSON.
#include "bus/promotion.h"

#include <charconv>
#include <filesystem>

#include "base/file.h"
#include "base/json.h"
#include "embertide/checksum.h"

namespace embertide {
namespace {

constexpr std::string_view kMagic = "EMPRM001 ";

// A number of the header, up to `end`.
bool TakeNumber(std::string_view* text, int base, char end, uint64_t* number) {
  const auto [at, error] =
      std::from_chars(text->data(), text->data() + text->size(), *number, base);
  const auto taken = static_cast<size_t>(at - text->data());
  if (error != std::errc() || taken >= text->size() || (*text)[taken] != end) return false;
  text->remove_prefix(taken + 1);
  return true;
}

}  // namespace

Result<Promotion> ParsePromotion(const std::string& bytes, const std::string& where) {
  std::string_view rest = bytes;
  uint64_t revision = 0;
  uint64_t crc = 0;
  if (!rest.starts_with(kMagic)) return Status(Code::kCorrupt, where + " is no promotion record");
  rest.remove_prefix(kMagic.size());
  if (!TakeNumber(&rest, 10, ' ', &revision) || !TakeNumber(&rest, 16, '\n', &crc)) {
    return Status(Code::kCorrupt, where + " is no promotion record");
  }
  if (crc != Crc32c(std::as_bytes(std::span(rest)))) {
    return Status(Code::kCorrupt, where + " fails its checksum");
  }
  try {
    const Json json = Json::parse(rest);
    Promotion record;
    Read(json, "revision", &record.revision);
    Read(json, "promoted", &record.promoted);
    Read(json, "totals", &record.totals);
    for (const Json& each : json.at("withdrawn")) {
      Promotion::Range& range = record.withdrawn.emplace_back();
      Read(each, "first", &range.first);
      Read(each, "last", &range.last);
    }
    for (const Json& each : json.at("undone")) {
      Promotion::Undone& undone = record.undone.emplace_back();
      Read(each, "number", &undone.number);
      Read(each, "to", &undone.to);
    }
    if (record.revision != revision) throw std::invalid_argument("two revisions");
    return record;
  } catch (const std::exception& error) {
    return Status(Code::kCorrupt, where + ": " + error.what());
  }
}

Result<Promotion> ReadPromotion(const std::string& publication) {
  const std::string path = publication + "/promoted.json";
  std::error_code none;
  if (!std::filesystem::exists(path, none)) return Promotion();
  const Result<std::string> bytes = ReadWholeFile(path, kMaxPromotionBytes);
  if (!bytes.ok()) return bytes.status();
  return ParsePromotion(bytes.value(), path);
}

std::string PromotionKey(const std::string& model) { return "e:{" + model + ":commit}:promoted"; }

}  // namespace embertide

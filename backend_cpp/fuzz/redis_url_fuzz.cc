// URLs of Redis: a password is never quoted, whatever surrounds it.
//
//   input: [u8 place][URL], into which ":password@" or, from place 128 on, where the URL has no @,
//          ":password" is put at place % 128
#include "bus/redis.h"
#include "fuzz/fuzz.h"

namespace embertide::fuzz {
namespace {

constexpr char kPassword[] = "Hush0Hush";

}  // namespace

std::vector<std::string> Seeds() {
  return {Raw<uint8_t>(10) + "redis://medb.example:6380/12",
          Raw<uint8_t>(9) + "rediss://host",
          Raw<uint8_t>(99) + "unix:///run/redis.sock",
          Raw<uint8_t>(8) + "redis://[::1]:6379",
          Raw<uint8_t>(127) + "redis://me:p%40%2Fhush@host",
          Raw<uint8_t>(127) + "rediss://me@host?ssl_ca_certs=/ca&password_file=/p"};
}

void Run(std::string_view input) {
  const auto place = Take<uint8_t>(&input);
  std::string url(input);
  if (url.find(kPassword) != std::string::npos) return;
  const bool bare = place >= 128 && url.find('@') == std::string::npos;
  if (place % 128U <= url.size()) {
    url.insert(place % 128U, std::string(":") + kPassword + (bare ? "" : "@"));
  }
  const Result<RedisAddress> address = ParseRedisUrl(url);
  if (!address.ok()) {
    EMBERTIDE_CHECK(address.status().message().find(kPassword) == std::string::npos);
    return;
  }
  EMBERTIDE_CHECK(address.value().host.empty() != address.value().path.empty());
  EMBERTIDE_CHECK(address.value().port > 0 && address.value().port < 65536);
  EMBERTIDE_CHECK(address.value().database >= 0);
}

}  // namespace embertide::fuzz

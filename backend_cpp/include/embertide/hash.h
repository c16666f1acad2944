// The one hash of keys: a bijective mixer of 64 bits, the same in trainer, files, bus and node.
//
//   hash:  63            64-b | ...  | 31                     0
//          [ bucket: top b bits ][     ][ position in the bucket ]
//
// Its name and seed stand in every file; a reader refuses another hash rather than misplace rows.
#pragma once

#include <cstdint>

namespace embertide {

inline constexpr const char kHashName[] = "splitmix64";
// Arbitrary odd constant; changing it makes every existing snapshot unreadable, on purpose.
inline constexpr uint64_t kHashSeed = 0x9e3779b97f4a7c15ULL;

// Steele, Lea & Flood's finaliser (SplitMix64), a bijection of 64-bit words.
// Always inlined: files of wider vectors compile it, too.
[[gnu::always_inline]] constexpr uint64_t HashKey(uint64_t key) {
  uint64_t z = key + kHashSeed;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

// The key of a hash.
constexpr uint64_t KeyOfHash(uint64_t hash) {
  uint64_t z = hash ^ (hash >> 31) ^ (hash >> 62);
  z *= 0x319642b2d24d8ec3ULL;  // the other factors' inverses
  z = z ^ (z >> 27) ^ (z >> 54);
  z *= 0x96de1b173f119089ULL;
  z = z ^ (z >> 30) ^ (z >> 60);
  return z - kHashSeed;
}
static_assert(KeyOfHash(HashKey(0)) == 0 &&
              KeyOfHash(HashKey(0x123456789abcdefULL)) == 0x123456789abcdefULL);

// The bucket that owns a hash. Requires: bucket_bits <= 17.
constexpr uint32_t BucketOfHash(uint64_t hash, uint32_t bucket_bits) {
  return static_cast<uint32_t>(hash >> 1 >> (63 - bucket_bits));  // also for 0 bits
}

}  // namespace embertide

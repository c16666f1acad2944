// The six kernels. Decisions are the host's: no kernel allocates, evicts or waits for another one,
// and no two of a launch write the same bytes but for the mark "used" and an entry's `until`, which
// are atomics.
//
// Why fp64 sums cost little here, on paper: a pooled gather waits for DRAM. An element is converted
// and added once. An H100 adds 17e12 doubles/s and converts 3.7e12 (16 a clock and SM, by the
// programming guide): 15 TB/s of fp32 elements, 7 of fp16 and 3.7 of int8, beside 3.35 TB/s of
// DRAM. A consumer GPU does both at 1/64 of its fp32 rate (AD102: 0.6e12/s): fp32 rows are held to
// about 1.3 TB/s, near its DRAM's 1 TB/s, and fp16 and int8 rows to a half and a quarter: there
// arithmetic is the bound.
//
// Included once by whoever gives CUDA's words a meaning: cuda_device.cu, and emulated_device.cc,
// which runs this very code on host threads in tests.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hbm/device.h"

#ifdef __CUDACC__
#define EMBERTIDE_UNROLL _Pragma("unroll")
#else
#define EMBERTIDE_UNROLL
#endif

namespace embertide {
namespace {

constexpr uint32_t kWarp = 32;
constexpr uint32_t kAllLanes = 0xffffffffU;
constexpr uint32_t kBlockThreads = 128;
constexpr uint32_t kBlockWarps = kBlockThreads / kWarp;
// Lanes that look for one key, and the ways that one of them looks at: 16 bytes of tags.
constexpr uint32_t kKeyLanes = 4;
constexpr uint32_t kLaneWays = kHbmWays / kKeyLanes;
constexpr uint32_t kBlockKeys = kBlockThreads / kKeyLanes;
// Rows of a bag asked for before the first is added.
constexpr uint32_t kRowsAhead = 4;

static_assert(kHbmWays == kWarp, "a lane surveys one way");
static_assert(kLaneWays * sizeof(uint16_t) == sizeof(uint4));
static_assert(sizeof(unsigned long long) == sizeof(uint64_t));

// Every kernel below gives one warp, a few lanes of one, or a thread to one item. Beyond the last
// it returns: whole warps at a time where a warp works together, and after the vote where lanes of
// several items vote together, so that a vote meets all lanes.
__device__ uint32_t WarpIndex() { return blockIdx.x * kBlockWarps + threadIdx.x / kWarp; }
__device__ uint32_t ThreadIndex() { return blockIdx.x * kBlockThreads + threadIdx.x; }
__device__ uint32_t Lane() { return threadIdx.x % kWarp; }

// --- the directory

// A bit for each of the eight tags of two bytes there that is `tag`.
__device__ uint32_t WaysAlike(const uint4& tags, uint32_t tag) {
  const uint32_t pairs[4] = {tags.x, tags.y, tags.z, tags.w};
  uint32_t alike = 0;
  EMBERTIDE_UNROLL
  for (uint32_t p = 0; p < 4; ++p) {
    alike |= ((pairs[p] & 0xffffU) == tag ? 1U : 0U) << 2 * p;
    alike |= (pairs[p] >> 16 == tag ? 2U : 0U) << 2 * p;
  }
  return alike;
}

__global__ void LookupKernel(HbmDirectory cache, HbmDevice::LookupArgs args) {
  const uint32_t i = ThreadIndex() / kKeyLanes;
  const uint32_t part = ThreadIndex() % kKeyLanes;
  bool found = false;
  if (i < args.count) {
    const uint32_t table = args.tables[i];
    const uint64_t key = args.keys[i];
    const uint64_t hash = HbmHash(table, key);
    // A position that is not to be looked for probes as well, for a table that no entry has.
    const uint64_t first = uint64_t{HbmSetOf(hash, cache.sets)} * kHbmWays + part * kLaneWays;
    const uint4 tags = *reinterpret_cast<const uint4*>(cache.tags + first);
    // A key stands in one way, but other keys' tags may be the same.
    for (uint32_t alike = WaysAlike(tags, HbmTagOf(hash)); alike != 0 && !found;
         alike &= alike - 1) {
      HbmEntry* at = cache.entries + first + (__ffs(static_cast<int>(alike)) - 1);
      const HbmEntry entry = *at;
      found = entry.key == key && HbmTableOf(entry.meta) == table && args.version >= entry.since &&
              args.version < entry.until;
      if (!found) continue;
      if ((entry.meta & kHbmUsed) == 0) atomicOr(&at->meta, kHbmUsed);
      HbmRef ref;
      ref.payload = cache.pages + uint64_t{entry.slot} * kHbmSlotUnit;
      ref.live = HbmLiveOf(entry.meta);
      ref.kind = HbmRefKind::kRow;
      args.refs[i] = ref;
      args.answers[i] = 0x10000U | ref.live;
    }
  }
  const uint32_t finders = __ballot_sync(kAllLanes, found);
  const uint32_t of_key = finders >> (Lane() - part) & ((1U << kKeyLanes) - 1U);
  if (i < args.count && of_key == 0 && part == 0) args.answers[i] = 0;
}

__global__ void PlaceKernel(HbmDirectory cache, const HbmPlacement* placements, uint32_t count,
                            const std::byte* payloads) {
  const uint32_t i = WarpIndex();
  if (i >= count) return;
  const HbmPlacement& placement = placements[i];
  const HbmEntry entry = placement.entry;
  const auto* from = reinterpret_cast<const uint4*>(payloads + placement.from);
  auto* to = reinterpret_cast<uint4*>(cache.pages + uint64_t{entry.slot} * kHbmSlotUnit);
  for (uint32_t v = Lane(); v * sizeof(uint4) < placement.bytes; v += kWarp) to[v] = from[v];
  if (Lane() != 0) return;
  cache.entries[placement.way] = entry;
  const uint64_t hash = HbmHash(HbmTableOf(entry.meta), entry.key);
  cache.tags[placement.way] = entry.until == 0 ? uint16_t{0} : HbmTagOf(hash);
}

__global__ void EndKernel(HbmDirectory cache, const HbmEnding* endings, uint32_t count) {
  const uint32_t i = ThreadIndex();
  if (i >= count) return;
  // The earliest end holds, in whatever order two of one row come.
  atomicMin(reinterpret_cast<unsigned long long*>(&cache.entries[endings[i].way].until),
            static_cast<unsigned long long>(endings[i].until));
}

__global__ void SurveyKernel(HbmDirectory cache, const uint32_t* sets, uint32_t count,
                             uint32_t* used) {
  const uint32_t i = WarpIndex();
  if (i >= count) return;
  HbmEntry& entry = cache.entries[uint64_t{sets[i]} * kHbmWays + Lane()];
  const uint32_t meta = entry.meta;
  const uint32_t ways = __ballot_sync(kAllLanes, (meta & kHbmUsed) != 0);
  if ((meta & kHbmUsed) != 0) entry.meta = meta & ~kHbmUsed;
  if (Lane() == 0) used[i] = ways;
}

// --- pooling

__global__ void SetRefsKernel(HbmRef* refs, const uint32_t* at, const HbmRef* given,
                              uint32_t count) {
  const uint32_t i = ThreadIndex();
  if (i < count) refs[at[i]] = given[i];
}

// A ref in one load of 16 bytes.
static_assert(offsetof(HbmRef, live) == 8 && offsetof(HbmRef, kind) == 10);
__device__ HbmRef LoadRef(const HbmRef* from) {
  const uint4 raw = *reinterpret_cast<const uint4*>(from);
  HbmRef ref;
  ref.payload = reinterpret_cast<const std::byte*>(uint64_t{raw.y} << 32 | raw.x);
  ref.live = static_cast<uint16_t>(raw.z);
  ref.kind = static_cast<HbmRefKind>(raw.z >> 16 & 0xffU);
  return ref;
}

// kWidth neighbouring elements; `at` is aligned to all of them. Not of int4, which has two a byte.
template <DType kDType, int kWidth>
__device__ void LoadElements(const std::byte* at, float (&values)[kWidth]) {
  static_assert(kWidth == 1 || kWidth == 4);
  if constexpr (kDType == DType::kFp32 && kWidth == 4) {
    const float4 raw = *reinterpret_cast<const float4*>(at);
    values[0] = raw.x;
    values[1] = raw.y;
    values[2] = raw.z;
    values[3] = raw.w;
  } else if constexpr (kDType == DType::kFp32) {
    values[0] = *reinterpret_cast<const float*>(at);
  } else if constexpr (kDType == DType::kInt8 && kWidth == 4) {
    const char4 raw = *reinterpret_cast<const char4*>(at);
    values[0] = static_cast<float>(raw.x);
    values[1] = static_cast<float>(raw.y);
    values[2] = static_cast<float>(raw.z);
    values[3] = static_cast<float>(raw.w);
  } else if constexpr (kDType == DType::kInt8) {
    values[0] = static_cast<float>(*reinterpret_cast<const int8_t*>(at));
  } else {
    uint16_t raw[kWidth];
    if constexpr (kWidth == 4) {
      const ushort4 four = *reinterpret_cast<const ushort4*>(at);
      raw[0] = four.x;
      raw[1] = four.y;
      raw[2] = four.z;
      raw[3] = four.w;
    } else {
      raw[0] = *reinterpret_cast<const uint16_t*>(at);
    }
    EMBERTIDE_UNROLL
    for (int w = 0; w < kWidth; ++w) {
      values[w] = kDType == DType::kBf16 ? __uint_as_float(uint32_t{raw[w]} << 16)
                                         : __half2float(__ushort_as_half(raw[w]));
    }
  }
}

// The part of every row that one lane reads: kWidth dimensions of one chunk.
struct Place {
  uint32_t dimension;
  uint32_t chunk;
  uint32_t in_chunk;
};

// The values of a payload of `live` chunks there; zeros in a dead chunk.
template <DType kDType, int kWidth>
__device__ void LoadRow(const HbmTable& table, const Place& place, const std::byte* payload,
                        uint32_t live, float (&values)[kWidth]) {
  EMBERTIDE_UNROLL
  for (int w = 0; w < kWidth; ++w) values[w] = 0.0F;
  if ((live >> place.chunk & 1U) == 0) return;
  const uint32_t before = __popc(live & ((1U << place.chunk) - 1U));
  const uint32_t element = before * table.chunk_dim + place.in_chunk;
  if constexpr (kDType == DType::kInt4) {
    const float scale = *reinterpret_cast<const float*>(payload);
    const std::byte* at = payload + 4 + element / 2;
    // Four elements are two bytes that lie side by side; one is half of a byte.
    uint32_t word = 0;
    if constexpr (kWidth == 4) {
      word = *reinterpret_cast<const uint16_t*>(at);
    } else {
      word = *reinterpret_cast<const uint8_t*>(at) >> element % 2 * 4;
    }
    EMBERTIDE_UNROLL
    for (int w = 0; w < kWidth; ++w) {
      const int32_t step = static_cast<int32_t>(word << (28 - 4 * w)) >> 28;
      values[w] = scale * static_cast<float>(step) + 0.0F;  // no -0, as on the CPU
    }
  } else if constexpr (kDType == DType::kInt8) {
    const float scale = *reinterpret_cast<const float*>(payload);
    LoadElements<kDType, kWidth>(payload + 4 + element, values);
    EMBERTIDE_UNROLL
    for (int w = 0; w < kWidth; ++w) values[w] = scale * values[w];
  } else {
    LoadElements<kDType, kWidth>(payload + uint64_t{element} * DTypeBits(kDType) / 8, values);
  }
}

// Adds what is no row of the table.
template <DType kDType, int kWidth>
__device__ void AddAny(const HbmTable& table, const Place& place, const HbmRef& ref,
                       double (&sums)[kWidth]) {
  if (ref.kind == HbmRefKind::kNothing) return;
  float values[kWidth];
  if (ref.kind == HbmRefKind::kSums) {
    const auto* others = reinterpret_cast<const double*>(ref.payload) + place.dimension;
    EMBERTIDE_UNROLL
    for (int w = 0; w < kWidth; ++w) sums[w] += others[w];
    return;
  }
  if (ref.kind == HbmRefKind::kFloats) {
    LoadElements<DType::kFp32, kWidth>(ref.payload + uint64_t{place.dimension} * sizeof(float),
                                       values);
  } else {
    LoadRow<kDType, kWidth>(table, place, ref.payload, ref.live, values);
  }
  EMBERTIDE_UNROLL
  for (int w = 0; w < kWidth; ++w) sums[w] += static_cast<double>(values[w]);
}

// Lanes share the dimensions of a bag and nothing else: they need no votes. Rows are added in
// order.
template <DType kDType, int kWidth>
__device__ void PoolBag(const HbmDevice::PoolArgs& args, const HbmBag& bag, const HbmTable& table) {
  const HbmRef* refs = args.refs + bag.first;
  for (uint32_t d = Lane() * kWidth; d < table.dim; d += kWarp * kWidth) {
    const Place place{d, d / table.chunk_dim, d % table.chunk_dim};
    float* out = args.out + bag.out + d;
    if (bag.count == 1 && !bag.partial) {
      const HbmRef ref = LoadRef(refs);
      float values[kWidth];
      const bool row = ref.kind == HbmRefKind::kRow;
      if (row) LoadRow<kDType, kWidth>(table, place, ref.payload, ref.live, values);
      if (ref.kind == HbmRefKind::kFloats) {
        LoadElements<DType::kFp32, kWidth>(ref.payload + uint64_t{d} * sizeof(float), values);
      }
      if (row || ref.kind == HbmRefKind::kFloats) {
        EMBERTIDE_UNROLL
        for (int w = 0; w < kWidth; ++w) out[w] = values[w];
        continue;
      }
    }
    double sums[kWidth] = {};
    for (uint32_t k = 0; k < bag.count; k += kRowsAhead) {
      HbmRef group[kRowsAhead];
      bool rows = true;
      EMBERTIDE_UNROLL
      for (uint32_t u = 0; u < kRowsAhead; ++u) {
        if (k + u < bag.count) group[u] = LoadRef(refs + k + u);
        const bool nothing = group[u].kind == HbmRefKind::kNothing;
        if (nothing) group[u].live = 0;  // reads as zeros
        rows = rows && (nothing || group[u].kind == HbmRefKind::kRow);
      }
      if (rows) {
        float values[kRowsAhead][kWidth];
        EMBERTIDE_UNROLL
        for (uint32_t u = 0; u < kRowsAhead; ++u) {
          LoadRow<kDType, kWidth>(table, place, group[u].payload, group[u].live, values[u]);
        }
        EMBERTIDE_UNROLL
        for (uint32_t u = 0; u < kRowsAhead; ++u) {
          EMBERTIDE_UNROLL
          for (int w = 0; w < kWidth; ++w) sums[w] += static_cast<double>(values[u][w]);
        }
      } else {
        EMBERTIDE_UNROLL
        for (uint32_t u = 0; u < kRowsAhead; ++u) {
          AddAny<kDType, kWidth>(table, place, group[u], sums);
        }
      }
    }
    double* partials = args.partials + bag.out + d;
    EMBERTIDE_UNROLL
    for (int w = 0; w < kWidth; ++w) {
      if (bag.partial) {
        partials[w] = sums[w];
      } else {
        out[w] = static_cast<float>(bag.divisor == 1 ? sums[w] : sums[w] / bag.divisor);
      }
    }
  }
}

template <DType kDType>
__device__ void PoolBagOf(const HbmDevice::PoolArgs& args, const HbmBag& bag,
                          const HbmTable& table) {
  // Four elements of a chunk lie side by side, aligned, where chunks hold multiples of four.
  if (table.chunk_dim % 4 == 0) {
    PoolBag<kDType, 4>(args, bag, table);
  } else {
    PoolBag<kDType, 1>(args, bag, table);
  }
}

__global__ void __launch_bounds__(kBlockThreads) PoolKernel(HbmDevice::PoolArgs args) {
  const uint32_t i = WarpIndex();
  if (i >= args.count) return;
  const HbmBag bag = args.bags[i];
  const HbmTable table = args.tables[bag.table];
  switch (table.dtype) {
    case DType::kFp32:
      return PoolBagOf<DType::kFp32>(args, bag, table);
    case DType::kFp16:
      return PoolBagOf<DType::kFp16>(args, bag, table);
    case DType::kBf16:
      return PoolBagOf<DType::kBf16>(args, bag, table);
    case DType::kInt8:
      return PoolBagOf<DType::kInt8>(args, bag, table);
    case DType::kInt4:
      return PoolBagOf<DType::kInt4>(args, bag, table);
    case DType::kKeys:  // no bag is of such a table
      return;
  }
}

}  // namespace
}  // namespace embertide

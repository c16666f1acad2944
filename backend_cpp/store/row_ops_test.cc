// Every kind of vectors gives the bits of decoding a row and adding it, dimension by dimension.
#include "store/row_ops.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "embertide/serving_store.h"
#include "store/test_rows.h"

namespace embertide {
namespace {

class RowOpsTest : public testing::TestWithParam<VectorCase> {
 protected:
  void SetUp() override {
    ops_ = RowOpsOf(std::get<0>(GetParam()));
    if (ops_ == nullptr) GTEST_SKIP() << "this CPU has no " << std::get<0>(GetParam());
    layout_.dtype = std::get<1>(GetParam());
    std::tie(layout_.chunks, layout_.chunk_dim) = std::get<2>(GetParam());
    dtype_ = static_cast<size_t>(layout_.dtype);
  }
  // n rows, and what they decode to; `whole`: with all chunks live.
  void MakeRows(size_t n, bool whole) {
    std::mt19937 random(7);
    std::normal_distribution<float> values(0.0F, 3.0F);
    payloads_.clear();
    rows_.clear();
    decoded_.clear();
    for (size_t r = 0; r < n; ++r) {
      const auto live =
          static_cast<uint16_t>(whole ? layout_.full_mask() : random() & layout_.full_mask());
      std::vector<float> row(layout_.dim());
      for (float& value : row) value = values(random);
      // At an odd address, as rows in records are.
      payloads_.emplace_back(layout_.PayloadBytes(live) + 1);
      EncodePayload(layout_, live, row.data(), payloads_.back().data() + 1);
      DecodePayload(layout_, live, payloads_.back().data() + 1, row.data());
      rows_.push_back({payloads_.back().data() + 1, live});
      decoded_.push_back(row);
    }
  }

  const RowOps* ops_ = nullptr;
  RowLayout layout_;
  size_t dtype_ = 0;
  std::vector<std::vector<std::byte>> payloads_;
  std::vector<FoundRow> rows_;
  std::vector<std::vector<float>> decoded_;
};

TEST_P(RowOpsTest, SumsAreThoseOfAddingInOrder) {
  const std::vector<float> some = {0.5F, -1.0F, 0.0F, 1e-7F, 3.3F, -7.25F, 1e8F, 0.1F, 1.0F};
  const std::vector<float> ones(some.size(), 1.0F);
  for (const auto& [whole, weights] :
       {std::pair{true, &ones}, {false, &ones}, {true, &some}, {false, &some}}) {
    MakeRows(some.size(), whole);
    const float* given = weights == &ones ? nullptr : weights->data();
    const auto product = [&](size_t r, size_t d) {
      return double{weights->at(r)} * double{decoded_[r][d]};
    };
    for (size_t n = 0; n <= rows_.size(); ++n) {
      std::vector<double> sums(layout_.dim(), 0.25);
      std::vector<double> expected = sums;
      for (size_t r = 0; r < n; ++r) {
        for (size_t d = 0; d < expected.size(); ++d) expected[d] += product(r, d);
      }
      ops_->add[dtype_](layout_, rows_.data(), given, n, sums.data());
      ASSERT_EQ(sums, expected) << n << " rows, whole: " << whole << ", weighed: " << !!given;
      std::vector<float> pooled(layout_.dim(), 7.0F);
      std::vector<double> work(layout_.dim(), 7.0);
      for (const double divisor : {1.0, 3.0}) {
        ops_->pool[dtype_](layout_, rows_.data(), given, n, divisor, work.data(), pooled.data());
        for (size_t d = 0; d < expected.size(); ++d) {
          double sum = 0.0;
          for (size_t r = 0; r < n; ++r) sum += product(r, d);
          ASSERT_EQ(pooled[d], static_cast<float>(sum / divisor)) << n << " rows by " << divisor;
        }
      }
      std::vector<float> rounded(layout_.dim());
      ops_->round(sums.data(), layout_.dim(), 3.0, rounded.data());
      for (size_t d = 0; d < expected.size(); ++d) {
        ASSERT_EQ(rounded[d], static_cast<float>(expected[d] / 3.0));
      }
    }
  }
}

// The same bits by all vectors, and within the bound that SumKind states.
TEST_P(RowOpsTest, SumsInFp32AreThoseOfAddingInOrderAndWithinTheirBound) {
  for (const bool whole : {true, false}) {
    MakeRows(9, whole);
    for (size_t n = 1; n <= rows_.size(); ++n) {
      for (const double divisor : {1.0, 3.0}) {
        std::vector<float> pooled(layout_.dim() + 1, 7.0F);
        ops_->pool32[dtype_](layout_, rows_.data(), n, divisor, pooled.data());
        for (size_t d = 0; d < layout_.dim(); ++d) {
          float sum = 0.0F;
          double exact = 0.0;
          double magnitude = 0.0;
          for (size_t r = 0; r < n; ++r) {
            sum += decoded_[r][d];
            exact += double{decoded_[r][d]};
            magnitude += std::abs(double{decoded_[r][d]});
          }
          ASSERT_EQ(pooled[d], sum / static_cast<float>(divisor)) << n << " rows by " << divisor;
          const double bound = (static_cast<double>(n) + 1) * 0x1p-24 * magnitude / divisor;
          ASSERT_LE(std::abs(double{pooled[d]} - exact / divisor), bound);
        }
        ASSERT_EQ(pooled.back(), 7.0F) << "written behind the row";
      }
    }
  }
}

TEST_P(RowOpsTest, ARowIsWrittenAsItDecodes) {
  for (const bool whole : {true, false}) {
    MakeRows(20, whole);
    const size_t stride = layout_.dim() + 3;
    std::vector<float> out(rows_.size() * stride, 7.0F);
    std::vector<float> expected = out;
    for (size_t r = 0; r < rows_.size(); ++r) {
      std::ranges::copy(decoded_[r], expected.begin() + static_cast<long>(r * stride));
    }
    ops_->write[dtype_](layout_, rows_.data(), rows_.size(), out.data(), stride);
    ASSERT_EQ(out, expected);
  }
}

class KeyOpsTest : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    ops_ = RowOpsOf(GetParam());
    if (ops_ == nullptr) GTEST_SKIP() << "this CPU has no " << GetParam();
  }
  const RowOps* ops_ = nullptr;
};

TEST_P(KeyOpsTest, HashesAreThoseOfOneKeyAtATime) {
  std::mt19937_64 random(3);
  for (size_t n = 0; n < 40; ++n) {
    std::vector<uint64_t> keys(n);
    for (uint64_t& key : keys) key = random();
    std::vector<uint64_t> hashes(n);
    ops_->hashes(keys.data(), n, hashes.data());
    for (size_t i = 0; i < n; ++i) ASSERT_EQ(hashes[i], HashKey(keys[i]));
  }
}

// Groups as they come about: entries are taken from the front and never empty again, and a deleted
// one keeps its key.
TEST_P(KeyOpsTest, AWordIsThatOfTheKeyOrSaysWhetherToGoOn) {
  std::mt19937_64 random(5);
  for (int turn = 0; turn < 20000; ++turn) {
    IndexGroup group{};
    const uint32_t used = random() % (kPlainEntries + 1);
    const uint64_t wanted = random() % 4 == 0 ? 0 : random();
    const uint32_t at = random() % 8;  // from `used` on: it is not there
    uint64_t expected = used == kPlainEntries ? kContinueProbe : 0;
    for (uint32_t i = 0; i < used; ++i) {
      const bool deleted = random() % 4 == 0;
      const uint64_t count = (random() % 64) << 57;
      const uint64_t word = Location(TierId::kDdr, 15, random() % 1000).word() | count;
      group.key(i) = i == at ? wanted : random() | 1;
      group.plain_word(i) = deleted ? kIndexDeleted : word;
      if (i == at) expected = deleted ? expected : word;
    }
    const GroupRef ref(&group, 0);
    uint64_t word = 7;
    ops_->find(&ref, &wanted, 1, &word);
    // Whether a deleted key is looked for further makes no difference: it stands nowhere else.
    if (at < used && group.plain_word(at) == kIndexDeleted) {
      ASSERT_TRUE(word == 0 || word == kContinueProbe) << "turn " << turn;
    } else {
      ASSERT_EQ(word, expected) << "turn " << turn;
    }
  }
}

// The same of lean groups, of some at once: rows, chains and removed keys, some of whose hashes
// differ in one bit alone.
TEST_P(KeyOpsTest, OfALeanGroupARowIsThatOfTheHashOrItSaysWhatElse) {
  const LeanShape shape = LeanShape::Of({4, 16, DType::kFp32}, 3, 4, 1 << 20);
  VersionNode node;
  std::mt19937_64 random(6);
  for (int turn = 0; turn < 2000; ++turn) {
    constexpr size_t kMost = 50;
    const size_t n = 1 + random() % kMost;
    std::vector<IndexGroup> groups(n);
    std::vector<GroupRef> refs;
    std::vector<uint64_t> wanted(n);
    std::vector<uint64_t> expected(n);
    for (size_t k = 0; k < n; ++k) {
      const uint64_t turned = random() % 8 == 0 ? 0 : random();
      wanted[k] = turned;
      const uint32_t used = random() % (kLeanEntries + 1);
      const uint32_t at = random() % 9;  // from `used` on: it is not there
      bool tag_is_there = false;
      expected[k] = used == kLeanEntries ? kContinueProbe : 0;
      for (uint32_t i = 0; i < used; ++i) {
        // Bits that neither word nor tag hold are no difference.
        const uint64_t one = uint64_t{1}
                             << (random() % (LeanShape::kBesideBits + 64 - shape.slot_bits));
        const uint64_t its = i == at ? turned : random() % 4 == 0 ? turned ^ one : random();
        const Location row(TierId::kDdr, 1 + random() % 15, random() % (1 << 17) * 8);
        const uint32_t chance = random() % 8;
        const Location place = chance == 0   ? Location(&node)
                               : chance == 1 ? Location::Removed(RecordKind::kPruned)
                                             : row;
        LeanShape::SetBeside(&groups[k], i, its);
        groups[k].lean_word(i) = shape.WordOf(place, its);
        if (static_cast<uint16_t>(its) != static_cast<uint16_t>(turned)) continue;
        // The first of the same tag decides, or sends to the index.
        const bool told = i == at && chance > 1 && static_cast<uint16_t>(turned) != 0;
        if (!tag_is_there) expected[k] = told ? row.word() : kAskIndex;
        tag_is_there = true;
      }
      // Empty entries have the tag 0.
      const bool as_empty = used < kLeanEntries && static_cast<uint16_t>(turned) == 0;
      if (!tag_is_there && as_empty) expected[k] = kAskIndex;
      refs.emplace_back(&groups[k], shape.slot_bits);
    }
    std::vector<uint64_t> found(n);
    ops_->find(refs.data(), wanted.data(), n, found.data());
    for (size_t k = 0; k < n; ++k) {
      const bool row =
          expected[k] != 0 && expected[k] != kContinueProbe && expected[k] != kAskIndex;
      ASSERT_EQ(row ? shape.RowOf(found[k]).word() : found[k], expected[k])
          << "turn " << turn << ", key " << k;
    }
  }
}

// A word of a row, and the row; or of something else.
struct AWord {
  uint64_t word = 0;
  Location row;
};

// Draws a row's word, with an access count or as FindLean gives it; half of the time another one.
AWord DrawWord(const RowLayout& layout, const LeanShape& lean, bool is_lean,
               std::mt19937_64* random) {
  const std::array<uint64_t, 5> others = {0, kAskIndex, (1ULL << 63) + 4096,
                                          Location(TierId::kSsd, 1, 9).word(), kContinueProbe};
  const uint64_t other = (*random)() % (2 * others.size());
  if (other < others.size()) return {others[other], {}};
  const uint64_t units = (*random)() % (1U << 20);
  const bool whole = (*random)() % 4 == 0;
  const auto live =
      static_cast<uint16_t>(whole ? layout.full_mask() : 1 + (*random)() % layout.full_mask());
  const Location row(TierId::kDdr, live, units << lean.unit_shift);
  if (is_lean) return {Location::kDdrKind | units << layout.chunks | live, row};
  return {row.word() | ((*random)() % 64 << 57), row};
}

TEST_P(KeyOpsTest, ARowsPlaceAndLinesAreThoseThatItsWordSays) {
  std::mt19937_64 random(5);
  static std::array<IndexGroup, 4> groups;
  auto* const base = reinterpret_cast<std::byte*>(0x7f0000000000);
  const std::vector<RowLayout> layouts = {{1, 16, DType::kFp32},
                                          {1, 16, DType::kInt8},
                                          {4, 16, DType::kFp16},
                                          {16, 16, DType::kInt8},
                                          {3, 10, DType::kInt4}};
  for (size_t turn = 0; turn < 400; ++turn) {
    const RowLayout& layout = layouts[turn % layouts.size()];
    const bool is_lean = turn / layouts.size() % 2 == 1;
    const LeanShape lean = LeanShape::Of(layout, 0, 4, 1U << 24);
    const RowShape shape =
        is_lean ? RowShape::OfLean(layout, base, lean) : RowShape::OfPlain(layout, base);
    const size_t n = 1 + random() % 64;
    std::vector<AWord> drawn(n);
    std::vector<uint64_t> words(n + RowOps::kPlacedAtOnce);
    std::vector<GroupRef> refs(words.size());
    for (size_t k = 0; k < n; ++k) {
      drawn[k] = DrawWord(layout, lean, is_lean, &random);
      words[k] = drawn[k].word;
      refs[k] = {&groups[random() % groups.size()], is_lean ? lean.slot_bits : 0U};
    }
    std::vector<FoundRow> found(words.size());
    std::vector<Lines> lines(words.size());
    const RowOps::Placed placed =
        ops_->place(shape, words.data(), refs.data(), n, found.data(), lines.data());
    RowOps::Placed expected = {0, 0};
    for (size_t k = 0; k < n; ++k) {
      const uint64_t bit = uint64_t{1} << k;
      if (words[k] == kContinueProbe) {
        expected.go_on |= bit;
        EXPECT_EQ(lines[k].first, reinterpret_cast<uintptr_t>(refs[k].Behind(1)));
        EXPECT_EQ(lines[k].count, 1);
      } else if (!Location::FromWord(words[k]).is_ddr_row()) {
        expected.other |= bit;
      } else {
        const Location& row = drawn[k].row;
        const std::byte* const payload = SlabArena::AddressOf(base, row.slot());
        const auto at = reinterpret_cast<uintptr_t>(payload);
        ASSERT_EQ(found[k].payload, payload) << "turn " << turn << ", key " << k;
        ASSERT_EQ(found[k].live, row.live());
        EXPECT_EQ(found[k].source, Source::kDdr);
        EXPECT_EQ(found[k].kind, FoundKind::kRow);
        EXPECT_EQ(lines[k].first, at / kLine * kLine);
        EXPECT_EQ(lines[k].count, LinesOf(at, layout.PayloadBytes(row.live())));
      }
    }
    ASSERT_EQ(placed.go_on, expected.go_on) << "turn " << turn;
    ASSERT_EQ(placed.other, expected.other) << "turn " << turn;
  }
}

StoreOptions SummedInFp32() {
  StoreOptions options;
  options.tables = TestTables();
  options.sums = SumKind::kFp32;
  return options;
}

TEST(SumKindTest, AStoreAddsAsItsOptionsSay) {
  const auto pooled = [](SumKind kind) {
    StoreOptions options = SummedInFp32();
    options.sums = kind;
    const TableConfig& table = options.tables[0];
    auto store = ServingStore::Open(options);
    EXPECT_TRUE(store.ok()) << store.status().ToString();
    // 2^24 + 1 + 1: in fp32 the ones are lost one by one.
    TestRows rows;
    for (const auto& [key, value] : {std::pair{1, 0x1p24F}, {2, 1.0F}, {3, 1.0F}}) {
      TestRow row{table.layout.full_mask(), {}};
      row.payload.resize(table.layout.PayloadBytes(row.live));
      EncodePayload(table.layout, row.live, std::vector<float>(table.layout.dim(), value).data(),
                    row.payload.data());
      rows[{0, static_cast<uint64_t>(key)}] = row;
    }
    for (uint32_t b = 0; b < table.buckets(); ++b) {
      const auto records = BucketRecords(options.tables, rows, 0, b);
      EXPECT_TRUE((*store)->StageRecords(1, 0, b, records).ok());
    }
    EXPECT_TRUE((*store)->Commit(1).ok());
    const std::vector<int64_t> keys = {1, 2, 3};
    const std::vector<uint32_t> offsets = {0, 3};
    std::vector<float> out(table.layout.dim());
    LookupRequest request{0, keys, Pooling::kSum, offsets, out.data(), out.size()};
    auto view = (*store)->Pin(1);
    EXPECT_TRUE(view.ok() && view->Lookup(request).ok());
    return out[0];
  };
  EXPECT_EQ(pooled(SumKind::kFp64), 0x1p24F + 2.0F);
  EXPECT_EQ(pooled(SumKind::kFp32), 0x1p24F);
}

TEST(SumKindTest, Fp32IsRefusedWhereOthersAddInFp64) {
  const auto refusal = [](const auto& change) {
    StoreOptions options = SummedInFp32();
    change(&options);
    const auto store = ServingStore::Open(options);
    return store.ok() ? std::string() : store.status().ToString();
  };
  EXPECT_NE(refusal([](auto* o) { o->hold_all = false; }).find("nodes that share a model"),
            std::string::npos);
  EXPECT_NE(TrainingStore::Open(SummedInFp32()).status().message().find("a trainer adds in fp64"),
            std::string::npos);
  EXPECT_NE(refusal([](auto* o) { o->hbm_budget_bytes = 1 << 30; }).find("GPUs add in fp64"),
            std::string::npos);
  EXPECT_FALSE(ParseSumKind("fp16").ok());
}

// Each in a process of its own, for the level is chosen when one starts.
class VectorLevelDeathTest : public testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
  void TearDown() override { unsetenv("EMBERTIDE_VECTORS"); }
  // Ends the process, after it has said which level it has, or why it opens no store.
  [[noreturn]] static void Tell() {
    StoreOptions options;
    options.tables = TestTables();
    const auto store = ServingStore::Open(options);
    std::fprintf(stderr, "%s\n", store.ok() ? VectorLevel() : store.status().ToString().c_str());
    std::exit(0);
  }
};

TEST_F(VectorLevelDeathTest, TheEnvironmentNamesTheLevel) {
  for (const char* level : {"plain", "avx2", "avx512"}) {
    setenv("EMBERTIDE_VECTORS", level, 1);
    const std::string said = RowOpsOf(level) == nullptr
                                 ? std::string("EMBERTIDE_VECTORS=") + level + ": this CPU has no"
                                 : std::string("^") + level;
    EXPECT_EXIT(Tell(), testing::ExitedWithCode(0), said);
  }
}

TEST_F(VectorLevelDeathTest, AnUnknownLevelOpensNoStore) {
  setenv("EMBERTIDE_VECTORS", "avx3", 1);
  EXPECT_EXIT(Tell(), testing::ExitedWithCode(0),
              "EMBERTIDE_VECTORS=avx3: use one of avx512, avx2, plain, or unset it");
}

INSTANTIATE_TEST_SUITE_P(All, KeyOpsTest, testing::Values("plain", "avx2", "avx512"));

// Dimensions with and without a tail, chunks wider and narrower than a vector.
INSTANTIATE_TEST_SUITE_P(All, RowOpsTest, VectorCases());
INSTANTIATE_TEST_SUITE_P(Int4, RowOpsTest, Int4Cases());

}  // namespace
}  // namespace embertide

// Answers of a peer, over gRPC as it gives them: the asker gives rows, defaults or an error, and
// values that are of the answer.
//
//   input: [u8 results], then for each: [u8 refusal][u8 n][n sources][u8 n][n bytes of rows]
//                                       [u8 sums][f64 the first]
//
// Versions and the plan's epoch are right. gRPC parses the message itself.
#include <cmath>

#include "fuzz/fuzz.h"
#include "node/test_fleet.h"

namespace embertide::fuzz {
namespace {

// A node that asks, and a peer that holds bucket 1 and says what it is told.
struct Asker {
  Asker()
      : fleet(2, 1),
        peer(1, [this](const v1::LookupRequest& request, v1::LookupResponse* response) {
          if (!request.parts().empty()) {
            *response->mutable_results() = answer.results();
            response->set_plan_epoch(1);
          }
          return grpc::Status::OK;
        }) {
    fleet.SetAddress(1, peer.address());
    fleet.model.WriteSnapshot({1, 1}, {{fleet.KeyOf(0), 5.0F}});
    fleet.Write(fleet.MakePlan(1));
    NodeOptions options = fleet.Options(0);
    options.hot_rows_bytes = 0;
    fleet.Start(0, options);
    EMBERTIDE_CHECK(Await([this] { return fleet.node(0).fleet_stats().peers_alive == 1; }));
    near = fleet.KeyOf(0);
    for (uint64_t from = 0; far.size() < 3; from = far.back() + 1) {
      far.push_back(fleet.KeyOf(1, from));
    }
    stub = fleet.Stub(0);
  }
  TestFleet fleet;
  v1::LookupResponse answer;
  TestPeer peer;
  uint64_t near = 0;
  std::vector<uint64_t> far;
  std::unique_ptr<v1::NodeService::Stub> stub;
};

Asker& TheAsker() {
  static Asker asker;
  return asker;
}

std::string TakeBytes(std::string_view* input) {
  const size_t n = std::min<size_t>(Take<uint8_t>(input), input->size());
  const std::string bytes(input->substr(0, n));
  input->remove_prefix(n);
  return bytes;
}

// Two results are asked for.
v1::LookupResponse TakeAnswer(std::string_view* input) {
  v1::LookupResponse answer;
  const int results = Take<uint8_t>(input) % 8 == 7 ? 3 : 2;
  while (answer.results_size() < results) {
    v1::LookupResult* result = answer.add_results();
    const auto refusal = Take<uint8_t>(input);
    if (refusal > 252) result->set_refusal(static_cast<v1::LookupRefusal>(refusal - 252));
    result->set_sources(TakeBytes(input));
    result->set_rows(TakeBytes(input));
    const auto sums = Take<uint8_t>(input);
    const auto first = Take<double>(input);
    for (int i = 0; i < sums; ++i) result->add_sums(first + i);
  }
  return answer;
}

std::string Sized(const std::string& bytes) {
  return Raw(static_cast<uint8_t>(bytes.size())) + bytes;
}

}  // namespace

std::vector<std::string> Seeds() {
  std::vector<std::byte> record;
  AppendRecord({TheAsker().far[2], 1, RecordKind::kRow, std::vector<std::byte>(16, std::byte{66})},
               &record);
  const std::string row(reinterpret_cast<const char*>(record.data()), record.size());
  // A sum for the bag of two keys, and a row for the key alone.
  const std::string sums = Raw<uint8_t>(0) +
                           Sized(std::string(2, static_cast<char>(Source::kDdr))) + Sized("") +
                           Raw<uint8_t>(TestModel::kDim) + Raw(7.0);
  const std::string rows = Raw<uint8_t>(0) +
                           Sized(std::string(1, static_cast<char>(Source::kSsd))) + Sized(row) +
                           Raw<uint8_t>(0) + Raw(0.0);
  const std::string refused =
      Raw<uint8_t>(254) + Sized("") + Sized("") + Raw<uint8_t>(0) + Raw(0.0);
  const std::string two(1, '\0');
  return {two + sums + rows, two + rows + sums, two + sums + refused, two + refused + refused};
}

// An answer of the right form, and no other, gives values, which are then those of the answer.
void Run(std::string_view input) {
  Asker& asker = TheAsker();
  asker.answer = TakeAnswer(&input);
  v1::ReadRequest request;
  request.add_keys(asker.near);
  for (const uint64_t key : asker.far) request.add_keys(key);
  for (const uint32_t length : {3, 1}) request.add_lengths(length);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  v1::ReadResponse response;
  const grpc::Status status = asker.stub->Read(&context, request, &response);
  EMBERTIDE_CHECK(status.error_code() != grpc::StatusCode::DEADLINE_EXCEEDED);
  if (!status.ok()) return;
  EMBERTIDE_CHECK(response.embeddings_size() == 2 * static_cast<int>(TestModel::kDim));
  EMBERTIDE_CHECK(response.sources().size() == 4);
  const v1::LookupResult* sums = nullptr;
  for (const v1::LookupResult& result : asker.answer.results()) {
    if (result.sources().size() == 2) sums = &result;
  }
  EMBERTIDE_CHECK(sums != nullptr && sums->sums_size() == static_cast<int>(TestModel::kDim));
  for (uint32_t d = 0; d < TestModel::kDim; ++d) {
    const auto got = response.embeddings(static_cast<int>(d));
    const auto want = static_cast<float>(5.0 + sums->sums(static_cast<int>(d)));
    EMBERTIDE_CHECK(got == want || (std::isnan(got) && std::isnan(want)));
  }
}

}  // namespace embertide::fuzz

// Calls of peers and tools to a node, over gRPC as they make them: a call is refused as a whole or
// answered in full, and the node goes on answering.
//
//   input: [u8 what][LookupRequest or ReadRequest or ExplainRequest]
#include "fuzz/fuzz.h"
#include "node/test_fleet.h"

namespace embertide::fuzz {
namespace {

constexpr uint64_t kKeys = 50;

// A node that holds the whole model, at version 1 of lineage 1.
struct Served {
  Served() : fleet(1) {
    TestModel::Rows rows;
    for (uint64_t key = 0; key < kKeys; ++key) rows[key] = static_cast<float>(key);
    fleet.model.WriteSnapshot({1, 1}, rows);
    fleet.Write(fleet.MakePlan(1));
    fleet.StartAll();
    stub = fleet.Stub(0);
  }
  TestFleet fleet;
  std::unique_ptr<v1::NodeService::Stub> stub;
};

// As requests are made: their parts of 2^31 keys do not fit an input of a fuzzer.
struct Context : grpc::ClientContext {
  Context() { set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20)); }
};

void CheckCode(const grpc::Status& status) {
  EMBERTIDE_CHECK(status.ok() || status.error_code() == grpc::StatusCode::INVALID_ARGUMENT ||
                  status.error_code() == grpc::StatusCode::NOT_FOUND ||
                  status.error_code() == grpc::StatusCode::OUT_OF_RANGE);
}

void Look(const Served& served, const v1::LookupRequest& request) {
  Context context;
  v1::LookupResponse response;
  const grpc::Status status = served.stub->Lookup(&context, request, &response);
  CheckCode(status);
  if (!status.ok()) return;
  EMBERTIDE_CHECK(response.results_size() == request.parts_size());
  for (int p = 0; p < request.parts_size(); ++p) {
    const v1::LookupPart& part = request.parts(p);
    const v1::LookupResult& result = response.results(p);
    if (result.refusal() != v1::LOOKUP_REFUSAL_UNSPECIFIED) {
      EMBERTIDE_CHECK(part.version().number() != 1 || part.version().lineage() != 1);
      continue;
    }
    EMBERTIDE_CHECK(result.sources().size() == static_cast<size_t>(part.keys_size()));
    const bool weighed = part.pooling() == v1::PART_POOLING_WEIGHED_SUM;
    const bool sums = weighed || part.pooling() == v1::PART_POOLING_SUM;
    const int dim = sums ? static_cast<int>(TestModel::kDim) : 0;
    EMBERTIDE_CHECK(result.sums_size() == (sums ? part.bag_offsets_size() - 1 : 0) * dim);
    for (int bag = 0; sums && bag + 1 < part.bag_offsets_size(); ++bag) {
      double want = 0;
      for (uint32_t i = part.bag_offsets(bag); i < part.bag_offsets(bag + 1); ++i) {
        const uint64_t key = part.keys(static_cast<int>(part.bag_keys(static_cast<int>(i))));
        const double weight = weighed ? double{part.bag_weights(static_cast<int>(i))} : 1.0;
        want += weight * (key < kKeys ? static_cast<double>(key) : -1.0);
      }
      EMBERTIDE_CHECK(result.sums(bag * dim) == want);
    }
  }
}

void Read(const Served& served, const v1::ReadRequest& request) {
  Context context;
  v1::ReadResponse response;
  const grpc::Status status = served.stub->Read(&context, request, &response);
  CheckCode(status);
  if (!status.ok()) return;
  EMBERTIDE_CHECK(response.embeddings_size() ==
                  request.lengths_size() * static_cast<int>(TestModel::kDim));
  EMBERTIDE_CHECK(response.sources().size() == static_cast<size_t>(request.keys_size()));
}

}  // namespace

std::vector<std::string> Seeds() {
  google::protobuf::SetLogHandler(nullptr);  // of strings that are no UTF-8
  v1::LookupRequest request;
  request.set_plan_epoch(1);
  for (const auto pooling :
       {v1::PART_POOLING_ROWS, v1::PART_POOLING_SUM, v1::PART_POOLING_WEIGHED_SUM}) {
    v1::LookupPart* part = request.add_parts();
    part->mutable_version()->set_number(1);
    part->mutable_version()->set_lineage(1);
    for (const uint64_t key : {3ULL, 7ULL, 99ULL}) part->add_keys(key);
    part->set_pooling(pooling);
    if (pooling == v1::PART_POOLING_ROWS) continue;
    for (const uint32_t offset : {0, 2, 2, 4}) part->add_bag_offsets(offset);
    for (const uint32_t place : {0, 1, 1, 2}) part->add_bag_keys(place);
    if (pooling == v1::PART_POOLING_SUM) continue;
    for (const float weight : {0.5F, -2.0F, 1.0F, 3.0F}) part->add_bag_weights(weight);
  }
  v1::ReadRequest read;
  for (const uint64_t key : {1ULL, 2ULL, 3ULL}) read.add_keys(key);
  for (const uint32_t length : {2, 0, 1}) read.add_lengths(length);
  v1::ExplainRequest explain;
  explain.set_table("item");
  explain.set_key(3);
  return {Raw<uint8_t>(0) + request.SerializeAsString(), Raw<uint8_t>(1) + read.SerializeAsString(),
          Raw<uint8_t>(2) + explain.SerializeAsString()};
}

void Run(std::string_view input) {
  static const Served served;
  const auto what = Take<uint8_t>(&input);
  const auto size = static_cast<int>(input.size());
  if (what % 3 == 0) {
    v1::LookupRequest request;
    if (request.ParseFromArray(input.data(), size)) Look(served, request);
  } else if (what % 3 == 1) {
    v1::ReadRequest request;
    if (request.ParseFromArray(input.data(), size)) Read(served, request);
  } else {
    Context context;
    v1::ExplainRequest request;
    v1::ExplainResponse response;
    if (!request.ParseFromArray(input.data(), size)) return;
    CheckCode(served.stub->Explain(&context, request, &response));
  }
}

}  // namespace embertide::fuzz

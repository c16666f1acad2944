// A fuzz target: valid inputs by our own encoders, and what must hold whatever the bytes are.
//
//   parser of bytes from outside                        | target
//   ----------------------------------------------------+---------------------
//   row records (files, bus, peers, Python)             | record_fuzz.cc
//   bucket files                                        | bucket_file_fuzz.cc
//   manifest.json                                       | manifest_fuzz.cc
//   commit.pb, delta files, dense tensors of a commit   | delta_fuzz.cc
//   batches of the bus, staged into a store             | batch_fuzz.cc
//   blocks of the SSD log                               | block_log_fuzz.cc
//   seals of the SSD tier                               | seal_fuzz.cc
//   safetensors                                         | tensors_fuzz.cc
//   transforms of dense features                        | transforms_fuzz.cc
//   replies of Redis; its URL                           | redis_fuzz.cc, redis_url_fuzz.cc
//   plans, from the state store or a file               | plan_fuzz.cc
//   samples of keys for a start                         | key_sample_fuzz.cc
//   requests of peers and tools; answers of peers       | lookup_fuzz.cc, answer_fuzz.cc
//   URIs of certificates, tokens                        | identity_fuzz.cc
//   connections to a node's ports, by bytes             | frames_fuzz.cc
//   tensors of a Triton request                         | request_fuzz.cc
//   requests of the inference protocol; in JSON         | infer_fuzz.cc, json_message_fuzz.cc
//   config.pbtxt, as Triton's JSON                      | model_config_fuzz.cc
//   connections to what Python serves                   | bench/thrown.py
//
// Not here: the description inside a dense package, which torch has opened and run by then, and
// commits on the bus, whose messages are those of delta_fuzz.cc and whose order follower_test.cc
// tries.
//
// `make fuzz` runs each for a fixed count and seed. A broken property aborts; libFuzzer then leaves
// the input in build/fuzz/findings, and the target given that file runs it alone. `make fuzz-long`
// runs those of listeners 10^7 times (bench/fuzz.py).
#pragma once

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace embertide::fuzz {

// The functions that each target defines. `Run` gets any bytes, one call at a time.
std::vector<std::string> Seeds();
void Run(std::string_view input);

// A folder of this process, in memory where the system has one; removed at the end.
const std::string& Folder();
// Folder() + "/" + name, made of these bytes.
std::string Write(const std::string& name, std::string_view bytes);

// Whether inputs are named that are to be run, each once.
bool Replays();

// For a target whose runs go on after they returned: the last inputs as files of FINDINGS-last,
// FINDINGS being libFuzzer's -artifact_prefix. They are removed if the process ends well.
class LastInputs {
 public:
  explicit LastInputs(size_t most);
  ~LastInputs();
  LastInputs(const LastInputs&) = delete;
  LastInputs& operator=(const LastInputs&) = delete;
  void Keep(std::string_view input);

 private:
  const size_t most_;
  const std::string folder_;
  uint64_t kept_ = 0;
};

// The raw bytes of a number at the front of `input`, which moves past it; 0 past the end.
template <typename T>
T Take(std::string_view* input) {
  T value{};
  const size_t n = std::min(sizeof(T), input->size());
  std::memcpy(&value, input->data(), n);
  input->remove_prefix(n);
  return value;
}

template <typename T>
std::string Raw(T value) {
  return {reinterpret_cast<const char*>(&value), sizeof(value)};
}

}  // namespace embertide::fuzz

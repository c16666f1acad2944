// Requests of the inference protocol in JSON, by bytes: what is read can be written as an answer's
// tensors, and those are read again as the same bytes.
#include "embertide/status.h"
#include "front/json_message.h"
#include "fuzz/fuzz.h"

namespace embertide::fuzz {

std::vector<std::string> Seeds() {
  return {R"({"id":"1","parameters":{"timeout":2000,"a":"b","c":1.5},"inputs":[{"name":"KEYS",)"
          R"("datatype":"INT64","shape":[1,2],"data":[[5,-1]]}],"outputs":[{"name":"SCORE"}]})",
          R"({"inputs":[{"name":"D","datatype":"FP32","shape":[3],"data":[0.1,null,-1e9]},)"
          R"({"name":"T","datatype":"BYTES","shape":[2],"data":["a\u00e9",""]},)"
          R"({"name":"U","datatype":"UINT8","shape":[1],"data":[255]},)"
          R"({"name":"B","datatype":"BOOL","shape":[1],"data":[true]}]})"};
}

void Run(std::string_view input) {
  inference::ModelInferRequest request;
  if (!front::FromJson(input, &request).ok()) return;
  EMBERTIDE_CHECK(request.inputs_size() == request.raw_input_contents_size());
  inference::ModelInferResponse response;
  for (int i = 0; i < request.inputs_size(); ++i) {
    auto* const output = response.add_outputs();
    output->set_name(request.inputs(i).name());
    output->set_datatype(request.inputs(i).datatype());
    *output->mutable_shape() = request.inputs(i).shape();
    response.add_raw_output_contents(request.raw_input_contents(i));
  }
  std::string body;
  EMBERTIDE_CHECK(front::ToJson(response, &body).ok());
  // An answer's "outputs" are written as a request's "inputs" are.
  const size_t outputs = body.find("\"outputs\":[");
  EMBERTIDE_CHECK(outputs != std::string::npos);
  const std::string again = "{\"inputs\":[" + body.substr(outputs + 11);
  inference::ModelInferRequest second;
  EMBERTIDE_CHECK(front::FromJson(again, &second).ok());
  for (int i = 0; i < request.inputs_size(); ++i) {
    // Infinity, which 1e999 becomes, is written as NaN is: as null.
    if (request.inputs(i).datatype().starts_with("FP")) {
      EMBERTIDE_CHECK(request.raw_input_contents(i).size() == second.raw_input_contents(i).size());
    } else {
      EMBERTIDE_CHECK(request.raw_input_contents(i) == second.raw_input_contents(i));
    }
  }
}

}  // namespace embertide::fuzz

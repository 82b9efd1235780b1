// A target of libFuzzer, which scripts/fuzz_header.sh builds and runs: any bytes as the header of a safetensors file.
// An accepted header must be as the checks promise; a refusal must be a sentence about the file.
#include <cstdlib>
#include <string_view>

#include <attnpack/weights/detail/file_errors.h>
#include <attnpack/weights/detail/safetensors_file.h>

namespace {

constexpr uint64_t kSize = 64;  // bytes of data that the header describes
const std::string kPath = "/folder/model.safetensors";

void require(bool condition) {
  if (!condition) std::abort();
}

// Every accepted tensor lies in the data and has as many bits as its sizes need.
void check_tensors(const std::map<std::string, attnpack::StoredTensor>& tensors) {
  uint64_t total = 0;
  for (const auto& [name, tensor] : tensors) {
    require(tensor.begin <= tensor.end && tensor.end <= kSize);
    unsigned __int128 bits = tensor.dtype->bits;
    for (const auto size : tensor.shape) bits *= size;
    require(bits == 8 * (tensor.end - tensor.begin));
    total += tensor.end - tensor.begin;
  }
  require(total == kSize);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const auto header = attnpack::naming(kPath, "is not a safetensors file", attnpack::kGetAgain,
                                         [&] { return attnpack::parse_json(text); });
    require(!attnpack::shown(header).empty());
    if (header.as<attnpack::Json::Object>()) check_tensors(attnpack::read_safetensors_header(kPath, header, kSize));
  } catch (const c10::ValueError& error) {
    const auto words = attnpack::reason_of(error);
    require(words.rfind(kPath + ": ", 0) == 0 && words.find('\n') == std::string::npos);
  }
  return 0;
}

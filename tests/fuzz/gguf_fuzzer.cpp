// A target of libFuzzer, which scripts/fuzz_header.sh builds and runs: any bytes as the header of a GGUF file. An
// accepted header must lie in the file and keep its limits; a refusal must be a sentence about the file.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>

#include <attnpack/weights/detail/file_errors.h>
#include <attnpack/weights/detail/gguf_header.h>

namespace {

const std::string kPath = "/folder/model.gguf";

void require(bool condition) {
  if (!condition) std::abort();
}

void check_header(const attnpack::GgufHeader& header, size_t size) {
  require(header.end <= size && header.places.size() == header.metadata.size());
  uint64_t end = 24;  // of the magic, the version and the two counts
  for (size_t i = 0; i < header.places.size(); ++i) {
    require(header.places[i].begin == end && header.places[i].end > end);
    end = header.places[i].end;
    require(!attnpack::shown(header.metadata[i].value).empty());
  }
  for (const auto& tensor : header.tensors) require(!tensor.shape.empty() && tensor.shape.size() <= 4);
  require(header.alignment > 0 && (header.alignment & (header.alignment - 1)) == 0);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const int memory = memfd_create("model", 0);
  static const auto name = "/proc/self/fd/" + std::to_string(memory);
  require(ftruncate(memory, 0) == 0 && pwrite(memory, data, size, 0) == static_cast<ssize_t>(size));
  try {
    check_header(attnpack::naming(kPath, "is no GGUF file that can be read", "get it again",
                                  [&] { return attnpack::read_gguf_header(kPath, attnpack::File(name)); }),
                 size);
  } catch (const c10::ValueError& error) {
    const auto words = attnpack::reason_of(error);
    require(words.rfind(kPath + ": ", 0) == 0 && words.find('\n') == std::string::npos);
  }
  return 0;
}

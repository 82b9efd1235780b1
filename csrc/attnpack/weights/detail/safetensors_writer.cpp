#include <attnpack/weights/detail/safetensors_writer.h>

#include <ATen/core/Formatting.h>
#include <ATen/core/grad_mode.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include <attnpack/core/check.h>
#include <attnpack/weights/detail/file.h>
#include <attnpack/weights/detail/file_errors.h>
#include <attnpack/weights/detail/safetensors_dtypes.h>
#include <attnpack/weights/detail/utf8.h>

namespace attnpack {

namespace {

const StoredDtype* stored_dtype(at::ScalarType type) {
  const auto* end = std::end(kStoredDtypes);
  const auto* found =
      std::find_if(std::begin(kStoredDtypes), end, [&](const auto& known) { return known.type == type; });
  return found == end ? nullptr : found;
}

std::string json_text(const std::string& words) {
  std::string text = "\"";
  for (const char c : words) {
    const auto code = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      (text += '\\') += c;
    } else if (code < 0x20) {
      ((text += "\\u00") += code < 0x10 ? '0' : '1') += "0123456789abcdef"[code & 0xf];
    } else {
      text += c;
    }
  }
  return text + '"';
}

std::string json_entry(const StoredDtype& dtype, const std::vector<int64_t>& shape, uint64_t begin, uint64_t end) {
  return text_of({"{\"dtype\":\"", dtype.name, "\",\"shape\":[", joined_by(",", shape), "],\"data_offsets\":[", begin,
                  ",", end, "]}"});
}

// Raises for text of the header that is not UTF-8, which no reader takes. called: "tensors: got the name ".
void check_text(const char* called, const std::string& text) {
  ATTNPACK_CHECK(is_utf8(text), called, in_quotes(text), ", want UTF-8");
}

}  // namespace

NewFile::NewFile(const std::string& path)
    : descriptor_(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666)) {
  if (descriptor_ < 0) raise_system_error();
}

NewFile::~NewFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void NewFile::write_at(uint64_t offset, const void* bytes, uint64_t size) const {
  const auto* from = static_cast<const char*>(bytes);
  while (size > 0) {
    const auto count = pwrite(descriptor_, from, size, offset);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) raise_system_error();
    from += count, offset += count, size -= count;
  }
}

void NewFile::close() {
  if (fsync(descriptor_) < 0) raise_system_error();
  const int failed = ::close(descriptor_);
  descriptor_ = -1;
  if (failed < 0) raise_system_error();
}

void check_storable(const std::string& name, const at::Tensor& tensor) {
  const auto refuse = [&](bool bad, const char* what, const char* fix) {
    ATTNPACK_CHECK(!bad, "tensors: got ", what, " as ", excerpt(name), ", want numbers in memory: ", fix);
  };
  refuse(!tensor.defined(), "an undefined tensor", "leave the name out");
  refuse(tensor.is_quantized(), "a quantised tensor", "call .dequantize() on it");
  refuse(tensor.is_nested(), "a nested tensor", "save its parts");
  refuse(tensor.layout() != at::kStrided, "a sparse tensor", "call .to_dense() on it");
  refuse(tensor.is_meta(), "a tensor on meta", "load its numbers first");
  refuse(!stored_dtype(tensor.scalar_type()), toString(tensor.scalar_type()), "convert it with .to()");
  check_text("tensors: got the name ", name);
  ATTNPACK_CHECK(name != "__metadata__",
                 "tensors: got the name __metadata__, which the format keeps for itself: "
                 "give the tensor another name");
}

SafetensorsWriter::SafetensorsWriter(const std::string& path, const std::vector<AnnouncedTensor>& tensors,
                                     const std::map<std::string, std::string>& metadata)
    : path_(path), file_(path) {
  std::string header = "{\"__metadata__\":{";
  for (const auto& [key, word] : metadata) {
    check_text("metadata: got the name ", key);
    check_text("metadata: got ", word);
    if (header.back() != '{') header += ',';
    header += json_text(key) + ':' + json_text(word);
  }
  header += '}';
  for (const auto& announced : tensors) {
    const auto* dtype = stored_dtype(announced.dtype);
    ATTNPACK_CHECK(dtype, "tensors: got ", excerpt(announced.name), " of dtype ", toString(announced.dtype),
                   ", which the format does not have: convert it with .to()");
    const auto begin = size_;
    size_ += c10::multiply_integers(announced.shape) * (dtype->bits / 8);
    header += ',' + json_text(announced.name) + ':' + json_entry(*dtype, announced.shape, begin, size_);
    const bool is_new = places_.emplace(announced.name, Place{announced, begin}).second;
    ATTNPACK_CHECK(is_new, "tensors: got ", excerpt(announced.name), " twice, want each name once");
  }
  header += '}';
  header.append((8 - header.size() % 8) % 8, ' ');  // then the data begin at a multiple of 8
  unsigned char length[8];
  for (int i = 0; i < 8; ++i) length[i] = header.size() >> (8 * i) & 0xff;
  file_.write_at(0, length, 8);
  file_.write_at(8, header.data(), header.size());
  start_ = 8 + header.size();
}

void SafetensorsWriter::write_tensor(const std::string& name, const at::Tensor& tensor) {
  check_storable(name, tensor);
  const auto found = places_.find(name);
  ATTNPACK_CHECK(found != places_.end() && tensor.sizes().equals(found->second.announced.shape) &&
                     tensor.scalar_type() == found->second.announced.dtype,
                 "tensor: got ", excerpt(name), " of dtype ", tensor.scalar_type(), " and shape ", tensor.sizes(),
                 ", want what was announced for ", path_);
  const at::NoGradGuard no_grad;
  const auto plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous();
  if (plain.numel() > 0) file_.write_at(start_ + found->second.begin, plain.const_data_ptr(), plain.nbytes());
  found->second.written = true;
}

void SafetensorsWriter::close() {
  for (const auto& [name, place] : places_)
    ATTNPACK_CHECK(place.written, "close: ", path_, " lacks ", excerpt(name), ": write each tensor that was announced");
  file_.close();
}

}  // namespace attnpack

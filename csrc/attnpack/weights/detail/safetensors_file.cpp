#include <attnpack/weights/detail/safetensors_file.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>

#include <attnpack/weights/detail/file_errors.h>

namespace attnpack {

namespace {

constexpr int64_t kMostHeaderValues = 20 * kMostTensors;  // a tensor of four dims has 14

at::TensorOptions on_cpu(at::ScalarType dtype) { return at::TensorOptions().device(at::kCPU).dtype(dtype); }

// The length that the file's first 8 bytes give, lowest byte first.
uint64_t read_length(const File& file) {
  unsigned char bytes[8];
  file.read_at(0, bytes, 8);
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | bytes[i];
  return length;
}

std::string dtype_names(const StoredDtype* begin, const StoredDtype* end) {
  std::string names;
  for (; begin != end; ++begin) {
    if (begin->type) (names += names.empty() ? "" : ", ") += begin->name;
  }
  return names;
}

}  // namespace

SafetensorsFile::SafetensorsFile(std::string path) : path_(std::move(path)) {
  const auto header = naming(path_, "is not a safetensors file", kGetAgain, [&] {
    file_ = std::make_unique<File>(path_);
    const auto size = file_->size();
    const auto length = size < 8 ? 0 : read_length(*file_);
    refuse_unless(size >= 8 && length <= size - 8, path_, ": is no whole safetensors file (it has ", size, " bytes); ",
                  kGetAgain);
    refuse_unless(length <= kLongestJson, "its header has ", length, " bytes, which may be ", kLongestJson);
    std::string text(length, '\0');
    file_->read_at(8, text.data(), length);
    const auto first = text.find_first_not_of(" \n\t\r");
    refuse_unless(first != std::string::npos && text[first] == '{',
                  "Expecting value: the header is no JSON object, which begins with {");
    start_ = 8 + length;
    return parse_json(text, kMostHeaderValues);
  });
  tensors_ = read_safetensors_header(path_, header, file_->size() - start_);
}

const StoredTensor& SafetensorsFile::tensor(const std::string& name) const {
  const auto found = tensors_.find(name);
  refuse_unless(found != tensors_.end(), path_, ": has no tensor ", excerpt(name), "; give a name that it has");
  return found->second;
}

at::ScalarType SafetensorsFile::weight_dtype(const std::string& name) const {
  const auto* dtype = tensor(name).dtype;
  const auto* end = kStoredDtypes + kWeightDtypes;
  refuse_unless(dtype < end, path_, ": tensor ", excerpt(name), " is ", dtype->name, "; readable are ",
                dtype_names(kStoredDtypes, end));
  return *dtype->type;
}

std::vector<int64_t> SafetensorsFile::sizes(const std::string& name) const {
  const auto& shape = tensor(name).shape;
  // Zeros aside too: torch multiplies the sizes of an empty tensor for its strides.
  uint64_t product = 1;
  const bool fits = std::all_of(shape.begin(), shape.end(), [&](uint64_t size) {
    return !__builtin_mul_overflow(product, std::max<uint64_t>(size, 1), &product) && product <= INT64_MAX;
  });
  refuse_unless(fits, path_, ": tensor ", excerpt(name), " is empty, and its other sizes are too large for a tensor; ",
                kGetAgain);
  return {shape.begin(), shape.end()};
}

template <typename Call>
auto SafetensorsFile::reading(const std::string& name, const Call& call) const {
  return naming(path_, text_of({"tensor ", excerpt(name), " cannot be read"}).c_str(), kGetAgain, call);
}

at::Tensor SafetensorsFile::map(const std::string& name) const {
  const auto& stored = tensor(name);
  refuse_unless(stored.dtype->type.has_value(), path_, ": tensor ", excerpt(name), " is ", stored.dtype->name,
                ", which torch does not have; readable are ",
                dtype_names(std::begin(kStoredDtypes), std::end(kStoredDtypes)));
  const auto shape = sizes(name);
  const auto options = on_cpu(*stored.dtype->type);
  if (stored.begin == stored.end) return at::empty(shape, options);
  return reading(name, [&] {
    const auto mapped = file_->map();
    auto* data = mapped.get() + start_ + stored.begin;
    // Another byte than 0 and 1 is no bool of C++.
    if (options.dtype() == at::kBool) return at::from_blob(data, shape, on_cpu(at::kByte)).ne(0);
    if ((start_ + stored.begin) % (stored.dtype->bits / 8) != 0) {
      auto copied = at::empty(shape, options);
      std::copy_n(data, stored.end - stored.begin, static_cast<char*>(copied.data_ptr()));
      return copied;
    }
    return at::from_blob(data, shape, [mapped](void*) {}, options);
  });
}

at::Tensor SafetensorsFile::elements(const std::string& name, int64_t first, int64_t most) const {
  const auto& stored = tensor(name);
  const auto dtype = weight_dtype(name);  // first: an element of another dtype may be less than a byte
  const uint64_t item = c10::elementSize(dtype);
  const auto count = std::clamp<int64_t>((stored.end - stored.begin) / item - first, 0, most);
  auto chunk = at::empty({count}, on_cpu(dtype));
  reading(name, [&] { file_->read_at(start_ + stored.begin + first * item, chunk.data_ptr(), count * item); });
  return chunk;
}

void SafetensorsFile::read(const std::string& name, const at::Tensor& out) const {
  const auto shape = sizes(name);
  refuse_unless(out.sizes().equals(shape), path_, ": tensor ", excerpt(name), " has shape ", at::IntArrayRef(shape),
                ", and is read into one of shape ", out.sizes());
  const auto flat = out.detach().view(-1);
  for (int64_t first = 0; first < flat.numel(); first += kChunk) {
    const auto chunk = elements(name, first, kChunk);
    flat.slice(0, first, first + chunk.numel()).copy_(chunk);
  }
}

}  // namespace attnpack

#include <attnpack/weights/detail/gguf_file.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <limits>
#include <utility>

#include <attnpack/weights/detail/file_errors.h>

namespace attnpack {

namespace {

// Numbers that are widened at a time: torch copies so few by one thread, whose turns with our own threads would cost
// more than the copy, and the allocator gives their memory back whole.
constexpr int64_t kPieceNumbers = 1 << 15;

at::TensorOptions bytes_on_cpu() { return at::TensorOptions().device(at::kCPU).dtype(at::kByte); }

// Bytes of a tensor; none if they are more than a file can have.
std::optional<uint64_t> tensor_bytes(const std::vector<uint64_t>& shape, const GgufBlock& block) {
  if (std::count(shape.begin(), shape.end(), 0U)) return 0;
  uint64_t bytes = shape.back() / block.numbers;
  const auto multiply = [&](uint64_t size) { return !__builtin_mul_overflow(bytes, size, &bytes); };
  const bool fits = multiply(block.bytes) && std::all_of(shape.begin(), shape.end() - 1, multiply);
  return fits ? std::make_optional(bytes) : std::nullopt;
}

// As in the sentence about a split file: str() of Python.
std::string plain_words(const Json& value) {
  const auto* words = value.as<std::string>();
  return words ? *words : shown(value);
}

bool is_one_file(const Json& count) {
  const auto* integer = count.as<int64_t>();
  const auto* number = count.as<double>();
  return count.as<bool>() || (integer && (*integer == 0 || *integer == 1)) ||
         (number && (*number == 0 || *number == 1));
}

// The words for a file of that general.type.
const char* what_is(const std::string& type) {
  static constexpr std::pair<const char*, const char*> kKinds[] = {
      {"adapter", "a LoRA adapter"}, {"imatrix", "an importance matrix"}, {"mmproj", "a multimodal projector"}};
  const auto* found =
      std::find_if(std::begin(kKinds), std::end(kKinds), [&](const auto& kind) { return kind.first == type; });
  return found == std::end(kKinds) ? "no model" : found->second;
}

}  // namespace

int64_t GgufTensor::rows() const {
  if (std::count(shape.begin(), shape.end(), 0)) return 0;
  return c10::multiply_integers(shape.begin(), shape.end() - 1);
}

GgufFile::GgufFile(std::string path, GgufOtherTypes others) : path_(std::move(path)), others_(std::move(others)) {
  const auto why = why_no_file(path_);
  refuse_unless(why.empty(), path_, ": ", why, "; give the path of a .gguf file, or use from_hf for a directory");
  auto header = naming(path_, "is no GGUF file that can be read", kGetFileAgain, [&] {
    file_ = std::make_unique<File>(path_);
    return read_gguf_header(path_, *file_);
  });
  metadata_ = std::move(header.metadata);
  places_ = std::move(header.places);
  alignment_ = header.alignment;
  for (size_t i = 0; i < metadata_.size(); ++i) keys_.emplace(metadata_[i].name, i);
  std::map<uint32_t, GgufBlock> blocks;
  for (const auto& tensor : header.tensors)
    if (!blocks.count(tensor.type)) blocks.emplace(tensor.type, gguf_block(path_, tensor.type, others_));
  const auto start = padded(header.end, alignment_);
  uint64_t end = 0;
  for (const auto& tensor : header.tensors) {
    refuse_unless(!has(tensor.name), path_, ": has tensor ", excerpt(tensor.name), " twice", kDamaged);
    const auto& block = blocks.at(tensor.type);
    refuse_unless(tensor.shape.back() % block.numbers == 0, path_, ": tensor ", excerpt(tensor.name), " has rows of ",
                  tensor.shape.back(), ", which its type stores in blocks of ", block.numbers, kDamaged);
    refuse_unless(tensor.at == end, path_, ": tensor ", excerpt(tensor.name), " begins at byte ", tensor.at,
                  " of the data, but the tensors before it end at ", end, " (alignment ", alignment_, ")", kDamaged);
    add_tensor(tensor, block, start + end);
    end = padded(end + tensors_.at(tensor.name).bytes(), alignment_);
  }
}

void GgufFile::add_tensor(const GgufHeader::Tensor& described, const GgufBlock& block, uint64_t at) {
  const auto& shape = described.shape;
  const auto bytes = tensor_bytes(shape, block);
  constexpr auto kMost = std::numeric_limits<uint64_t>::max();
  const auto end = bytes && *bytes < kMost - at ? at + *bytes : kMost;
  refuse_unless(end <= file_->size(), path_, ": tensor ", excerpt(described.name), " ends at byte ", end,
                end == kMost ? " or later" : "", ", but the file has ", file_->size(), kTruncated);
  for (const auto size : shape)
    refuse_unless(size <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max()), path_, ": tensor ",
                  excerpt(described.name), " has a size of ", size, kDamaged);
  tensors_[described.name] = {
      {shape.begin(), shape.end()}, described.type, at, shape.back() / block.numbers * block.bytes};
  names_.push_back(described.name);
}

const Json* GgufFile::find(std::string_view key) const {
  const auto found = keys_.find(key);
  return found == keys_.end() ? nullptr : &metadata_[found->second].value;
}

const GgufTensor& GgufFile::tensor(const std::string& name) const {
  const auto found = tensors_.find(name);
  refuse_unless(found != tensors_.end(), path_, ": has no tensor ", excerpt(name), "; ", kGetFileAgain);
  return found->second;
}

void GgufFile::check_model() const {
  if (const auto* count = find("split.count"); count && !is_one_file(*count)) {
    const auto* number_at = find("split.no");
    const auto* number = number_at ? number_at->as<int64_t>() : nullptr;
    const bool known = number && *number < std::numeric_limits<int64_t>::max();
    refuse_unless(false, path_, ": is ", known ? "part " + std::to_string(*number + 1) : "a part",
                  " of a GGUF file that was split into ", excerpt(plain_words(*count)),
                  " (split.count), wants a whole one; join the parts with `llama-gguf-split --merge PART1 OUT`");
  }
  const auto* type = find("general.type");
  const auto* words = type ? type->as<std::string>() : nullptr;
  refuse_unless(!type || (words && *words == "model"), path_, ": is ", words ? what_is(*words) : "no model",
                " (general.type is ", quoted(type), "), wants a model; give the GGUF file of the model itself");
}

void GgufFile::check_rows(const std::string& name, int64_t first, int64_t rows) const {
  const auto there = tensor(name).rows();
  refuse_unless(first >= 0 && rows >= 0 && first <= there && rows <= there - first, path_, ": tensor ", excerpt(name),
                " has ", there, " rows, not ", rows, " from row ", first, " on");
}

std::optional<at::Tensor> GgufFile::blocks(const std::string& name, int64_t first, int64_t rows) const {
  const auto& described = tensor(name);
  const auto* layout = gguf_stored_layout(described.type);
  if (!layout || described.shape.size() < 2) return std::nullopt;
  check_rows(name, first, rows);
  const auto failed = text_of({"tensor ", excerpt(name), " cannot be mapped"});
  const auto mapped = naming(path_, failed.c_str(), kGetFileAgain, [&] { return file_->map(); });
  auto* const data = mapped.get() + described.offset + first * described.row_bytes;
  const auto blocks = static_cast<int64_t>(described.row_bytes) / layout->bytes;
  refuse_unless(are_scales_finite(*layout, data, rows * blocks), path_, ": tensor ", excerpt(name),
                " has a scale that is not finite", kDamaged);
  return at::from_blob(data, {rows, blocks, layout->bytes}, [mapped](void*) {}, bytes_on_cpu());
}

void GgufFile::read(const std::string& name, const at::Tensor& out, int64_t first) const {
  const auto& described = tensor(name);
  const auto columns = described.shape.back();
  if (described.shape.size() == 1 && (first != 0 || out.numel() != columns)) {
    const auto whole = at::empty({columns}, bytes_on_cpu().dtype(at::kFloat));
    read(name, whole);
    out.detach().copy_(whole.narrow(0, first, out.numel()).view(out.sizes()));
    return;
  }
  if (out.numel() == 0) return;
  const auto rows = out.detach().view({-1, columns});
  check_rows(name, first, rows.size(0));
  const auto step = std::max<int64_t>(1, kPieceNumbers / columns);
  const auto failed = text_of({"tensor ", excerpt(name), " cannot be read"});
  const auto piece =
      at::empty({std::min(step, rows.size(0)), static_cast<int64_t>(described.row_bytes)}, bytes_on_cpu());
  for (int64_t begin = 0; begin < rows.size(0); begin += step) {
    const auto count = std::min(step, rows.size(0) - begin);
    const auto bytes = piece.narrow(0, 0, count);
    naming(path_, failed.c_str(), kGetFileAgain, [&] {
      file_->read_at(described.offset + (first + begin) * described.row_bytes, bytes.data_ptr(), bytes.numel());
    });
    rows.narrow(0, begin, count).copy_(widen_gguf(described.type, bytes, others_));
  }
}

}  // namespace attnpack

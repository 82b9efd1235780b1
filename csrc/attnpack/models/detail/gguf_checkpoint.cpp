#include <attnpack/models/detail/gguf_checkpoint.h>

#include <ATen/ATen.h>

namespace attnpack {

namespace {

Shapes shapes_of(const GgufPieces& pieces) {
  Shapes shapes;
  for (const auto& [name, piece] : pieces) shapes[name] = {piece.shape.begin(), piece.shape.end()};
  return shapes;
}

// "k_proj" of "model.layers.0.self_attn.k_proj.weight"
std::string module_of(const std::string& name) {
  const auto end = name.rfind('.');
  if (end == name.npos || end == 0) return "";
  const auto begin = name.rfind('.', end - 1);
  return begin == name.npos ? name.substr(0, end) : name.substr(begin + 1, end - begin - 1);
}

// Rows of each head as halves, of those that lie as pairs.
at::Tensor unpaired(const at::Tensor& rows, int64_t heads) {
  auto sizes = rows.sizes().vec();
  const auto half = sizes[0] / heads / 2;
  sizes[0] = 2;
  sizes.insert(sizes.begin(), {heads, half});
  return rows.reshape(sizes).transpose(1, 2).reshape(rows.sizes());
}

}  // namespace

GgufCheckpoint::GgufCheckpoint(std::shared_ptr<const GgufFile> file, std::optional<int64_t> max_positions)
    : settings_(std::move(file)), family_(gguf_family(settings_)), options_(1, 1, 1, 1) {
  const auto sizes = gguf_sizes(settings_, family_);
  pieces_ = gguf_pieces(settings_, family_, sizes);
  settings_.set_shapes(shapes_of(pieces_));
  options_ = gguf_options(settings_, family_, sizes, max_positions);
}

void GgufCheckpoint::read(const std::string& name, const at::Tensor& out) const {
  const auto& piece = pieces_.at(name);
  if (piece.recipe) {
    const std::lock_guard lock(making_);
    out.copy_(made_of(piece, false)->at(piece.target));
    return;
  }
  settings_.file().read(piece.sources[0], out, piece.first);
  if (const auto heads = interleaved_heads(name)) out.copy_(unpaired(out, *heads));
}

std::optional<at::Tensor> GgufCheckpoint::blocks(const std::string& name) const {
  const auto& piece = pieces_.at(name);
  if (piece.shape.size() != 2) return std::nullopt;
  if (piece.recipe) {
    if (!piece.recipe->rows) return std::nullopt;
    const std::lock_guard lock(making_);
    const auto& made = made_of(piece, true);
    return made ? std::optional(made->at(piece.target).contiguous()) : std::nullopt;
  }
  const auto found = settings_.file().blocks(piece.sources[0], piece.first, piece.shape[0]);
  const auto heads = interleaved_heads(name);
  return found && heads ? std::optional(unpaired(*found, *heads)) : found;
}

const GgufCheckpoint::Made& GgufCheckpoint::made_of(const GgufPiece& piece, bool as_blocks) const {
  const std::pair key{piece.sources, as_blocks};
  if (last_ == key) return made_;
  made_.reset();
  last_ = {};  // a source may raise
  std::vector<at::Tensor> stored;
  for (const auto& name : piece.sources)
    if (const auto found = source(name, as_blocks)) stored.push_back(*found);
  if (stored.size() == piece.sources.size()) made_ = piece.recipe->make(stored);
  last_ = key;
  return made_;
}

std::optional<at::Tensor> GgufCheckpoint::source(const std::string& name, bool as_blocks) const {
  const auto& file = settings_.file();
  const auto& shape = file.tensor(name).shape;
  if (as_blocks) return file.blocks(name, 0, shape[0]);
  const auto numbers = at::empty(shape, at::kFloat);
  file.read(name, numbers);
  return numbers;
}

std::optional<int64_t> GgufCheckpoint::interleaved_heads(const std::string& name) const {
  const auto module = module_of(name);
  if (!family_.interleaved || (module != "q_proj" && module != "k_proj")) return std::nullopt;
  return module == "q_proj" ? options_.num_heads() : *options_.num_kv_heads();
}

}  // namespace attnpack

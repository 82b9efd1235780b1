#include <attnpack/models/detail/hf_checkpoint.h>

#include <ATen/ops/empty.h>

#include <algorithm>
#include <filesystem>
#include <initializer_list>
#include <set>

#include <attnpack/models/detail/hf_config.h>
#include <attnpack/weights/detail/file_errors.h>
#include <attnpack/weights/detail/shards.h>

namespace attnpack {

namespace {

const std::string kHead = "lm_head.weight", kEmbedding = "model.embed_tokens.weight";

HfSettings read_settings(const std::string& directory) {
  const auto config = (std::filesystem::path(directory) / "config.json").string();
  refuse_unless(is_file(config), directory, ": has no config.json; give the directory of a Hugging Face checkpoint");
  HfSettings settings(directory, read_json_file(config));
  settings.enter_language_model();
  return settings;
}

bool are_equal(const SafetensorsFile& a, const std::string& name_a, const SafetensorsFile& b,
               const std::string& name_b) {
  if (a.sizes(name_a) != b.sizes(name_b) || a.weight_dtype(name_a) != b.weight_dtype(name_b)) return false;
  const auto count = c10::multiply_integers(a.sizes(name_a));
  for (int64_t first = 0; first < count; first += kChunk) {
    if (!a.elements(name_a, first, kChunk).equal(b.elements(name_b, first, kChunk))) return false;
  }
  return true;
}

bool begins_with_one_of(const std::string& name, std::initializer_list<const char*> beginnings) {
  return std::any_of(beginnings.begin(), beginnings.end(), [&](const char* each) { return name.starts_with(each); });
}

// The name in a file of the whole language model. A file of the base model lacks the beginning, as do the first
// checkpoints of GPT-2.
std::string full_name(const std::string& name, const std::string& base) {
  if (begins_with_one_of(name, {"embed_tokens.", "layers.", "norm.", "final_layernorm.", "embedding_norm.", "embed_in.",
                                "final_layer_norm.", "embed_tokens_per_layer.", "per_layer_model_projection.",
                                "per_layer_projection_norm."}))
    return base + name;
  if (begins_with_one_of(name, {"wte.", "wpe.", "word_embeddings.", "h.", "ln_f."})) return "transformer." + name;
  return name;
}

// A name in a file of a model with pictures, as the file of its language model has it; empty for what is not of that.
std::string name_in_language_model(const std::string& name) {
  constexpr std::pair<std::string_view, const char*> kBeginnings[] = {
      {"model.language_model.", "model."},
      {"language_model.model.", "model."},  // as transformers 4 wrote it
      {"language_model.lm_head.", "lm_head."},
      {"lm_head.", "lm_head."},
  };
  for (const auto& [theirs, ours] : kBeginnings)
    if (name.starts_with(theirs)) return ours + name.substr(theirs.size());
  return "";
}

// A layer after the last one: DeepSeek-V3 has there what predicts a token further.
bool is_further_layer(const std::string& name, const CausalLMOptions& options) {
  return options.latent() && name.starts_with(text_of({"model.layers.", options.num_layers(), "."}));
}

std::vector<int64_t> sizes_of(const StoredTensor& tensor) { return {tensor.shape.begin(), tensor.shape.end()}; }

}  // namespace

HfCheckpoint::HfCheckpoint(std::string directory, std::optional<int64_t> max_positions)
    : HfCheckpoint(directory, read_settings(directory), max_positions) {}

HfCheckpoint::HfCheckpoint(std::string directory, HfSettings settings, std::optional<int64_t> max_positions)
    : path_(std::move(directory)), quantization_(settings), options_(hf_options(settings, max_positions)) {
  const auto& family = hf_family(settings);
  const NameOf name_of = [&](const std::string& stored) {
    return settings.multimodal() ? name_in_language_model(stored) : full_name(stored, family.base);
  };
  find_files(name_of);
  std::set<std::string> scales;  // they come with their weights
  for (const auto& [name, file] : files_) scales.insert(quantization_.scales_of(name));
  for (const auto& [name, file] : files_)
    if (!scales.count(name)) add(name, family.parts(name_of(name), options_));
  if (options_.tie_embeddings()) find_tied_head();
  refuse_unless(options_.tie_embeddings() || sources_.count(kHead) || !sources_.count(kEmbedding), path_, ": lacks ",
                kHead,
                ", as a file of the base model does, and its embedding is not tied; get the file of the "
                "language model, or set tie_word_embeddings to true in config.json if the head is the embedding");
  const auto& latent = options_.latent();
  const auto widest =
      latent ? *latent->qk_nope_head_dim() + *latent->qk_rope_head_dim() + *latent->v_head_dim() : *options_.head_dim();
  check_sizes(path_, sources_.size(), options_.num_layers(), options_.num_heads(), widest);
}

void HfCheckpoint::find_files(const NameOf& name_of) {
  for (const auto& file : open_safetensors(path_)) {
    for (const auto& [name, tensor] : file->tensors()) {
      const auto full = name_of(name);
      // Old checkpoints carry the frequencies, which follow from the configuration.
      const bool frequencies = full.ends_with(".rotary_emb.inv_freq");
      if (!full.empty() && !frequencies && !is_further_layer(full, options_)) files_.emplace(name, file);
    }
  }
}

void HfCheckpoint::add(const std::string& stored, const std::vector<HfPart>& parts) {
  auto scales = quantization_.scales_of(stored);
  if (!files_.count(scales)) scales.clear();  // weights that are not quantised have none
  plain_ = plain_ && parts.size() == 1 && parts[0].name == stored && !parts[0].cut && scales.empty();
  for (const auto& part : parts) {
    const bool is_new = sources_[part.name].emplace(part.piece, Piece{stored, scales, part.cut}).second;
    refuse_unless(is_new, path_, ": has ", excerpt(part.name), " twice, once as ", excerpt(stored), "; ", kGetAgain);
  }
}

at::Tensor HfCheckpoint::part_of(const Piece& piece, const Load& load) const {
  if (!piece.scales.empty()) return quantization_.numbers(load(piece.stored), load(piece.scales), piece.cut);
  return piece.cut ? piece.cut(load(piece.stored)) : load(piece.stored);
}

Shapes HfCheckpoint::shapes() const {
  const auto without_numbers = [&](const std::string& name) {
    const auto& stored = files_.at(name)->tensors().at(name);
    refuse_unless(stored.dtype->type.has_value(), "it is ", stored.dtype->name, ", which torch does not have");
    return at::empty(sizes_of(stored), at::TensorOptions().device(at::kMeta).dtype(*stored.dtype->type));
  };
  Shapes shapes;
  for (const auto& [name, source] : sources_) {
    const auto& first = source.begin()->second;
    if (source.size() == 1 && first.is_whole()) {
      shapes[name] = files_.at(first.stored)->tensors().at(first.stored).shape;
      continue;
    }
    std::vector<int64_t> sizes;
    for (const auto& [number, piece] : source) {
      // &piece: Clang before 16 captures no structured binding by [&].
      naming(path_, (piece.stored + " does not fit the configuration").c_str(), kGetAgain, [&, &piece = piece] {
        const auto part = part_of(piece, without_numbers).sizes().vec();
        if (sizes.empty()) {
          sizes = part;
        } else {
          const bool beside = part.size() == sizes.size() && !part.empty() &&
                              std::equal(part.begin() + 1, part.end(), sizes.begin() + 1);
          refuse_unless(beside, "it has the shape ", at::IntArrayRef(part), ", its neighbours ",
                        at::IntArrayRef(sizes));
          sizes[0] += part[0];
        }
      });
    }
    shapes[name] = {sizes.begin(), sizes.end()};
  }
  return shapes;
}

at::ScalarType HfCheckpoint::dtype(const std::string& name) const {
  const auto& source = sources_.at(name).begin()->second;
  return source.scales.empty() ? files_.at(source.stored)->weight_dtype(source.stored) : at::kBFloat16;
}

void HfCheckpoint::read(const std::string& name, const at::Tensor& out) const {
  const auto& source = sources_.at(name);
  const auto& first = source.begin()->second;
  if (source.size() == 1 && first.is_whole()) return files_.at(first.stored)->read(first.stored, out);
  dtype(name);  // raises for one that is no weight's
  const auto load = [&](const std::string& stored) { return files_.at(stored)->map(stored); };
  if (source.size() == 1) {
    out.copy_(part_of(first, load));
    return;
  }
  int64_t row = 0;
  for (const auto& [number, piece] : source) {
    const auto part = part_of(piece, load);
    out.narrow(0, row, part.size(0)).copy_(part);
    row += part.size(0);
  }
}

// As transformers does: a stored head that differs from the embedding is the head, and a head without an embedding is
// both.
void HfCheckpoint::find_tied_head() {
  const auto head = sources_.find(kHead), embedding = sources_.find(kEmbedding);
  if (head == sources_.end()) return;
  if (embedding == sources_.end()) {
    sources_.emplace(kEmbedding, head->second);
    plain_ = false;
  } else if (const auto& head_name = head->second.begin()->second.stored,
             &embedding_name = embedding->second.begin()->second.stored;
             are_equal(*files_.at(head_name), head_name, *files_.at(embedding_name), embedding_name)) {
    files_.erase(head_name);
  } else {
    options_.tie_embeddings(false);
    return;
  }
  sources_.erase(kHead);
}

HfCheckpoint::Files HfCheckpoint::files_by_name() const {
  Files files;
  for (const auto& [name, source] : sources_) files.emplace(name, files_.at(source.begin()->second.stored));
  return files;
}

}  // namespace attnpack

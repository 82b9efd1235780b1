#include <attnpack/models/detail/hf_checkpoint.h>

#include <ATen/ops/empty.h>

#include <filesystem>
#include <set>

#include <attnpack/models/detail/hf_config.h>
#include <attnpack/weights/detail/file_errors.h>
#include <attnpack/weights/detail/shards.h>

namespace attnpack {

namespace {

HfSettings read_settings(const std::string& directory) {
  const auto config = (std::filesystem::path(directory) / "config.json").string();
  refuse_unless(is_file(config), directory, ": has no config.json; give the directory of a Hugging Face checkpoint");
  return HfSettings(directory, read_json_file(config));
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

// A layer after the last one: DeepSeek-V3 has there what predicts a token further.
bool is_further_layer(const std::string& name, const CausalLMOptions& options) {
  return options.latent() && name.rfind(c10::str("model.layers.", options.num_layers(), "."), 0) == 0;
}

std::vector<int64_t> sizes_of(const StoredTensor& tensor) { return {tensor.shape.begin(), tensor.shape.end()}; }

}  // namespace

HfCheckpoint::HfCheckpoint(std::string directory, std::optional<int64_t> max_positions)
    : HfCheckpoint(directory, read_settings(directory), max_positions) {}

HfCheckpoint::HfCheckpoint(std::string directory, HfSettings settings, std::optional<int64_t> max_positions)
    : path_(std::move(directory)), quantization_(settings), options_(hf_options(settings, max_positions)) {
  find_files();
  const auto& family = hf_family(settings);
  std::set<std::string> scales;  // they come with their weights
  for (const auto& [name, file] : files_) scales.insert(quantization_.scales_of(name));
  for (const auto& [name, file] : files_)
    if (!scales.count(name)) add(name, family.parts(name, options_));
  if (options_.tie_embeddings()) drop_tied_head();
  const auto& latent = options_.latent();
  const auto widest =
      latent ? *latent->qk_nope_head_dim() + *latent->qk_rope_head_dim() + *latent->v_head_dim() : *options_.head_dim();
  check_sizes(path_, sources_.size(), options_.num_layers(), options_.num_heads(), widest);
}

void HfCheckpoint::find_files() {
  for (const auto& file : open_safetensors(path_)) {
    for (const auto& [name, tensor] : file->tensors()) {
      // Old checkpoints carry the frequencies, which follow from the configuration.
      if (!name.ends_with(".rotary_emb.inv_freq") && !is_further_layer(name, options_)) files_.emplace(name, file);
    }
  }
}

void HfCheckpoint::add(const std::string& stored, const std::vector<HfPart>& parts) {
  auto scales = quantization_.scales_of(stored);
  if (!files_.count(scales)) scales.clear();  // weights that are not quantised have none
  plain_ = plain_ && parts.size() == 1 && parts[0].name == stored && !parts[0].cut && scales.empty();
  for (const auto& part : parts) {
    const bool is_new = sources_.emplace(part.name, Source{stored, scales, part.cut}).second;
    refuse_unless(is_new, path_, ": has ", brief(part.name), " twice, once as ", brief(stored), "; ", kGetAgain);
  }
}

at::Tensor HfCheckpoint::part_of(const Source& source, const Load& load) const {
  if (source.scales.empty()) return source.cut(load(source.stored));
  return quantization_.numbers(load(source.stored), load(source.scales), source.cut);
}

Shapes HfCheckpoint::shapes() const {
  const auto without_numbers = [&](const std::string& name) {
    const auto& stored = files_.at(name)->tensors().at(name);
    refuse_unless(stored.dtype->type.has_value(), "it is ", stored.dtype->name, ", which torch does not have");
    return at::empty(sizes_of(stored), at::TensorOptions().device(at::kMeta).dtype(*stored.dtype->type));
  };
  Shapes shapes;
  for (const auto& [name, source] : sources_) {
    if (source.is_whole()) {
      shapes[name] = files_.at(source.stored)->tensors().at(source.stored).shape;
      continue;
    }
    const auto sizes = naming(path_, (source.stored + " does not fit the configuration").c_str(), kGetAgain,
                              [&] { return part_of(source, without_numbers).sizes().vec(); });
    shapes[name] = {sizes.begin(), sizes.end()};
  }
  return shapes;
}

at::ScalarType HfCheckpoint::dtype(const std::string& name) const {
  const auto& source = sources_.at(name);
  return source.scales.empty() ? files_.at(source.stored)->weight_dtype(source.stored) : at::kBFloat16;
}

void HfCheckpoint::read(const std::string& name, const at::Tensor& out) const {
  const auto& source = sources_.at(name);
  if (source.is_whole()) return files_.at(source.stored)->read(source.stored, out);
  dtype(name);  // raises for one that is no weight's
  out.copy_(part_of(source, [&](const std::string& stored) { return files_.at(stored)->map(stored); }));
}

void HfCheckpoint::drop_tied_head() {
  const std::string head = "lm_head.weight";
  const auto tied = sources_.find("model.embed_tokens.weight");
  const auto embedding = tied == sources_.end() ? head : tied->second.stored;
  const auto found = files_.find(head), other = files_.find(embedding);
  if (found == files_.end() || !sources_.count(head)) return;
  refuse_unless(tied == sources_.end() || are_equal(*found->second, head, *other->second, embedding), path_,
                ": config.json sets tie_word_embeddings, but ", head, " differs from ", embedding,
                "; set tie_word_embeddings to false");
  files_.erase(found);
  sources_.erase(head);
}

}  // namespace attnpack

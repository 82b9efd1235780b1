#include <attnpack/models/detail/hf_checkpoint.h>

#include <ATen/ops/empty.h>

#include <filesystem>

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

bool ends_with(const std::string& text, std::string_view end) {
  return text.size() >= end.size() && std::string_view(text).substr(text.size() - end.size()) == end;
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

CausalLMOptions read_options(const std::string& directory, std::optional<int64_t> max_positions) {
  auto settings = read_settings(directory);
  return hf_options(settings, max_positions);
}

// A layer after the last one: DeepSeek-V3 has there what predicts a token further.
bool is_further_layer(const std::string& name, const CausalLMOptions& options) {
  return options.latent() && name.rfind(c10::str("model.layers.", options.num_layers(), "."), 0) == 0;
}

std::vector<int64_t> sizes_of(const StoredTensor& tensor) { return {tensor.shape.begin(), tensor.shape.end()}; }

}  // namespace

HfCheckpoint::HfCheckpoint(std::string directory, std::optional<int64_t> max_positions)
    : path_(std::move(directory)), options_(read_options(path_, max_positions)) {
  const auto& family = hf_family(read_settings(path_));
  for (const auto& file : open_safetensors(path_)) {
    for (const auto& [name, tensor] : file->tensors()) {
      // Old checkpoints carry the frequencies, which follow from the configuration.
      if (ends_with(name, ".rotary_emb.inv_freq") || is_further_layer(name, options_)) continue;
      files_.emplace(name, file);
      add(name, family.parts(name, options_));
    }
  }
  if (options_.tie_embeddings()) drop_tied_head();
  const auto& latent = options_.latent();
  const auto widest =
      latent ? *latent->qk_nope_head_dim() + *latent->qk_rope_head_dim() + *latent->v_head_dim() : *options_.head_dim();
  check_sizes(path_, sources_.size(), options_.num_layers(), options_.num_heads(), widest);
}

void HfCheckpoint::add(const std::string& stored, const std::vector<HfPart>& parts) {
  plain_ = plain_ && parts.size() == 1 && parts[0].name == stored && !parts[0].cut;
  for (const auto& part : parts) {
    const bool is_new = sources_.emplace(part.name, Source{stored, part.cut}).second;
    refuse_unless(is_new, path_, ": has ", brief(part.name), " twice, once as ", brief(stored), "; ", kGetAgain);
  }
}

Shapes HfCheckpoint::shapes() const {
  Shapes shapes;
  for (const auto& [name, source] : sources_) {
    const auto& stored = files_.at(source.stored)->tensors().at(source.stored);
    if (!source.cut) {
      shapes[name] = stored.shape;
      continue;
    }
    const auto sizes = naming(path_, (source.stored + " does not fit the configuration").c_str(), kGetAgain, [&] {
      return source.cut(at::empty(sizes_of(stored), at::TensorOptions().device(at::kMeta))).sizes().vec();
    });
    shapes[name] = {sizes.begin(), sizes.end()};
  }
  return shapes;
}

void HfCheckpoint::read(const std::string& name, const at::Tensor& out) const {
  const auto& source = sources_.at(name);
  const auto& file = files_.at(source.stored);
  if (!source.cut) return file->read(source.stored, out);
  file->weight_dtype(source.stored);  // raises for one that is no weight's
  out.copy_(source.cut(file->map(source.stored)));
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

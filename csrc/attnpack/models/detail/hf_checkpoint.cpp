#include <attnpack/models/detail/hf_checkpoint.h>

#include <filesystem>

#include <attnpack/models/detail/hf_config.h>
#include <attnpack/weights/detail/file_errors.h>
#include <attnpack/weights/detail/shards.h>

namespace attnpack {

namespace {

CausalLMOptions read_options(const std::string& directory, std::optional<int64_t> max_positions) {
  const auto config = (std::filesystem::path(directory) / "config.json").string();
  refuse_unless(is_file(config), directory, ": has no config.json; give the directory of a Hugging Face checkpoint");
  return hf_options(HfSettings(directory, read_json_file(config)), max_positions);
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

}  // namespace

HfCheckpoint::HfCheckpoint(std::string directory, std::optional<int64_t> max_positions)
    : path_(std::move(directory)), options_(read_options(path_, max_positions)) {
  for (const auto& file : open_safetensors(path_)) {
    for (const auto& [name, tensor] : file->tensors()) {
      // Old checkpoints carry the frequencies, which follow from the configuration.
      if (!ends_with(name, ".rotary_emb.inv_freq")) files_.emplace(name, file);
    }
  }
  if (options_.tie_embeddings()) drop_tied_head();
  check_sizes(path_, files_.size(), options_.num_layers(), options_.num_heads(), *options_.head_dim());
}

Shapes HfCheckpoint::shapes() const {
  Shapes shapes;
  for (const auto& [name, file] : files_) shapes[name] = file->tensors().at(name).shape;
  return shapes;
}

void HfCheckpoint::drop_tied_head() {
  const std::string head = "lm_head.weight", embedding = "model.embed_tokens.weight";
  const auto found = files_.find(head), other = files_.find(embedding);
  if (found == files_.end()) return;
  refuse_unless(other == files_.end() || are_equal(*found->second, head, *other->second, embedding), path_,
                ": config.json sets tie_word_embeddings, but ", head, " differs from ", embedding,
                "; set tie_word_embeddings to false");
  files_.erase(found);
}

}  // namespace attnpack

#pragma once

#include <attnpack/models/detail/gguf_pieces.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace attnpack {

// A GGUF file seen as a CausalLM: its options, and its tensors by the names of the state dict.
class GgufCheckpoint {
 public:
  // Checks settings and sizes; check_checkpoint_tensors compares all shapes.
  explicit GgufCheckpoint(std::shared_ptr<const GgufFile> file, std::optional<int64_t> max_positions = std::nullopt);

  const std::string& architecture() const { return settings_.architecture(); }
  const CausalLMOptions& options() const { return options_; }
  // By the names of the state dict.
  const Shapes& shapes() const { return settings_.shapes(); }
  // Fills `out` with the tensor of that name, rows of queries and keys in Hugging Face's order.
  void read(const std::string& name, const at::Tensor& out) const;
  // The weight of that name as the file holds it, rows of queries and keys in Hugging Face's order: only these are
  // copied. None if the file holds it otherwise.
  std::optional<at::Tensor> blocks(const std::string& name) const;

 private:
  // The tensors that a recipe makes, as numbers or as blocks. None if a source has no blocks.
  using Made = std::optional<std::vector<at::Tensor>>;

  // Makes the tensors of the piece's recipe. They are kept until another recipe is asked for, so that each source is
  // read once.
  const Made& made_of(const GgufPiece& piece, bool as_blocks) const;
  std::optional<at::Tensor> source(const std::string& name, bool as_blocks) const;
  // How many heads a weight has whose rows the file stores by RoPE pairs, (2i, 2i + 1) of a head, where Hugging Face
  // has (i, i + head_dim / 2).
  std::optional<int64_t> interleaved_heads(const std::string& name) const;

  GgufSettings settings_;
  const GgufFamily& family_;
  GgufPieces pieces_;
  CausalLMOptions options_;
  mutable std::mutex making_;  // guards last_ and made_
  mutable std::pair<std::vector<std::string>, bool> last_;
  mutable Made made_;
};

}  // namespace attnpack

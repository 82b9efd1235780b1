#pragma once

#include <attnpack/models/detail/checkpoint_checks.h>
#include <attnpack/models/detail/hf_parts.h>
#include <attnpack/models/detail/hf_quantization.h>
#include <attnpack/weights/detail/safetensors_file.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace attnpack {

// A Hugging Face directory seen as a CausalLM: its options, and its tensors by the names of the state dict.
class HfCheckpoint {
 public:
  using Files = std::map<std::string, std::shared_ptr<SafetensorsFile>>;

  // Opens the files and checks sizes; check_checkpoint_tensors compares all shapes.
  explicit HfCheckpoint(std::string directory, std::optional<int64_t> max_positions = std::nullopt);

  const std::string& path() const { return path_; }
  const CausalLMOptions& options() const { return options_; }
  const Files& files() const { return files_; }  // which file each stored tensor is in, by its own name
  Files files_by_name() const;                   // the same by the names of the state dict
  // Whether the stored tensors are those of the state dict, under the same names.
  bool is_plain() const { return plain_; }
  // By the names of the state dict.
  Shapes shapes() const;
  // The dtype of the stored tensor; bf16 for one that is quantised.
  at::ScalarType dtype(const std::string& name) const;
  // Fills `out` with the tensor of that name.
  void read(const std::string& name, const at::Tensor& out) const;

 private:
  // Where rows of a tensor of the state dict come from.
  struct Piece {
    std::string stored;
    std::string scales;                                // of a quantised one, else empty
    std::function<at::Tensor(const at::Tensor&)> cut;  // none for all of it

    bool is_whole() const { return !cut && scales.empty(); }
  };
  using Source = std::map<int, Piece>;  // of all its rows, by the numbers of the parts
  using Load = std::function<at::Tensor(const std::string& stored)>;

  HfCheckpoint(std::string directory, HfSettings settings, std::optional<int64_t> max_positions);
  // The name of a stored tensor in a file of the whole language model; empty for one that is not of it.
  using NameOf = std::function<std::string(const std::string& stored)>;

  void find_files(const NameOf& name_of);
  void add(const std::string& stored, const std::vector<HfPart>& parts);
  // The piece, out of what `load` gives for the stored tensors.
  at::Tensor part_of(const Piece& piece, const Load& load) const;
  void find_tied_head();

  std::string path_;
  HfQuantization quantization_;
  CausalLMOptions options_;
  Files files_;
  std::map<std::string, Source> sources_;
  bool plain_ = true;
};

}  // namespace attnpack

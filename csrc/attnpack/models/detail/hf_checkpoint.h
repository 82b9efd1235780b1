#pragma once

#include <attnpack/models/detail/whole_checkpoint.h>
#include <attnpack/weights/detail/safetensors_file.h>

#include <map>
#include <memory>
#include <optional>
#include <string>

namespace attnpack {

// A Hugging Face directory seen as a CausalLM: its options, and its tensors by the names of the state dict.
class HfCheckpoint {
 public:
  using Files = std::map<std::string, std::shared_ptr<SafetensorsFile>>;

  // Opens the files and checks sizes; check_whole compares all shapes.
  explicit HfCheckpoint(std::string directory, std::optional<int64_t> max_positions = std::nullopt);

  const std::string& path() const { return path_; }
  const CausalLMOptions& options() const { return options_; }
  const Files& files() const { return files_; }  // which file each tensor is in
  Shapes shapes() const;
  // Fills `out` with the tensor of that name.
  void read(const std::string& name, const at::Tensor& out) const { files_.at(name)->read(name, out); }

 private:
  void drop_tied_head();

  std::string path_;
  CausalLMOptions options_;
  Files files_;
};

}  // namespace attnpack

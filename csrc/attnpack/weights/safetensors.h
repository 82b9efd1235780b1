#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>

namespace attnpack {

// Tensors by name.
using StateDict = std::map<std::string, at::Tensor>;

// The tensors of a .safetensors file or of a checkpoint directory: of its model.safetensors, or of the shards that its
// model.safetensors.index.json names. The files are mapped: memory grows as tensors are read. A tensor that does not
// begin at a multiple of its element's size is copied, and so is a bool one. Writes to a tensor never reach the file.
// The file must keep its length while tensors of it live.
//
// Accepts and refuses files as Rust's reader does (https://github.com/huggingface/safetensors), but for names that
// stand twice and for more than 100,000 tensors. Raises c10::ValueError, a sentence that names the file and the tensor.
StateDict load_safetensors(const std::string& path);

// Writes tensors of any strides, dtype and device as a .safetensors file. Tensors that share memory are written once
// per name. The file appears whole or not at all, in place of what stood at `path`; a link there is replaced and not
// followed. Raises c10::ValueError for a tensor that has no numbers (undefined, meta, sparse, quantised), and a
// sentence that names the file if the disk is full or the folder takes no file: then nothing of it is kept.
void save_safetensors(const StateDict& tensors, const std::string& path,
                      const std::map<std::string, std::string>& metadata = {{"format", "pt"}});

}  // namespace attnpack

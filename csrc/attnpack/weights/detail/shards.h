#pragma once

#include <attnpack/weights/detail/safetensors_file.h>

#include <memory>
#include <string>
#include <vector>

namespace attnpack {

// The object in a JSON file; raises, naming the file, if there is none.
Json read_json_file(const std::string& path);

// The safetensors of a checkpoint directory: model.safetensors, or the shards that the index's weight_map names. It
// raises unless the weight_map names each tensor of these files, with the right file, and no other tensor.
std::vector<std::shared_ptr<SafetensorsFile>> open_safetensors(const std::string& directory);

}  // namespace attnpack

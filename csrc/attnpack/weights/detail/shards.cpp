#include <attnpack/weights/detail/shards.h>

#include <filesystem>
#include <set>

#include <attnpack/weights/detail/file_errors.h>

namespace attnpack {

namespace {

// Which file each tensor is in. weight_map is an object of texts.
using Places = std::map<std::string, std::string>;

bool is_shard_name(const std::string& name) {
  constexpr std::string_view kSuffix = ".safetensors";
  // A conversion writes the shards under these names. Its other files have other suffixes, so no shard can overwrite
  // them.
  return name.find('/') == std::string::npos && name.size() >= kSuffix.size() &&
         std::string_view(name).substr(name.size() - kSuffix.size()) == kSuffix;
}

Places read_places(const std::string& index, const Json& content) {
  const auto* found = content.find("weight_map");
  const auto* members = found ? found->as<Json::Object>() : nullptr;
  refuse_unless(members && !members->empty(), index, ": has no weight_map, which names each tensor's file; ",
                kGetAgain);
  check_tensor_count(index, members->size());
  Places places;
  for (const auto& [name, shard] : *members) {
    const auto* file = shard.as<std::string>();
    refuse_unless(file && is_shard_name(*file), index, ": names the file ", quoted(shard),
                  ", wants the name of one in the same folder, NAME.safetensors");
    places.emplace(name, *file);
  }
  return places;
}

std::shared_ptr<SafetensorsFile> open_shard(const std::string& path, const std::string& shard, const std::string& index,
                                            const Places& places, const std::set<std::string>& wanted) {
  auto file = std::make_shared<SafetensorsFile>(path);
  for (const auto& name : wanted) {
    refuse_unless(file->has(name), index, ": says that ", excerpt(name), " is in ", excerpt(shard),
                  ", which lacks it; ", kGetAgain);
  }
  for (const auto& [name, tensor] : file->tensors()) {
    const auto place = places.find(name);
    refuse_unless(place != places.end(), index, ": does not name ", excerpt(name), " of ", excerpt(shard), "; ",
                  kGetAgain);
    refuse_unless(place->second == shard, index, ": says that ", excerpt(name), " is in ", excerpt(place->second),
                  ", but ", excerpt(shard), " has it; ", kGetAgain);
  }
  return file;
}

}  // namespace

Json read_json_file(const std::string& path) {
  auto value =
      naming(path, "cannot be read as JSON", kGetAgain, [&] { return parse_json(read_bounded(path, kLongestJson)); });
  refuse_unless(value.as<Json::Object>(), path, ": holds ", kind_of(value), ", a JSON object is needed");
  return value;
}

std::vector<std::shared_ptr<SafetensorsFile>> open_safetensors(const std::string& directory) {
  const std::string name = "model.safetensors.index.json";
  const auto folder = std::filesystem::path(directory);
  const auto single = (folder / "model.safetensors").string(), index = (folder / name).string();
  if (is_file(single)) return {std::make_shared<SafetensorsFile>(single)};
  refuse_unless(is_file(index), directory, ": has neither model.safetensors nor ", name,
                "; save the checkpoint in safetensors form (transformers: model.save_pretrained)");

  const auto places = read_places(index, read_json_file(index));
  std::map<std::string, std::set<std::string>> wanted;
  for (const auto& [tensor, shard] : places) wanted[shard].insert(tensor);
  for (const auto& [shard, names] : wanted) {
    refuse_unless(is_file((folder / shard).string()), directory, ": lacks ", excerpt(shard), ", which ", name,
                  " names; ", kGetAgain);
  }
  // Each file is compared with the index before the next one is opened: to open a file may cost much.
  std::vector<std::shared_ptr<SafetensorsFile>> files;
  for (const auto& [shard, names] : wanted)
    files.push_back(open_shard((folder / shard).string(), shard, index, places, names));
  return files;
}

}  // namespace attnpack

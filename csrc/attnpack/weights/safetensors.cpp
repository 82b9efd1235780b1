#include <attnpack/weights/safetensors.h>

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <random>

#include <attnpack/weights/detail/file_errors.h>
#include <attnpack/weights/detail/safetensors_writer.h>
#include <attnpack/weights/detail/shards.h>

namespace attnpack {

namespace {

// A name in the folder of `path` that no other run uses.
std::string partial_of(const std::filesystem::path& path) {
  std::random_device random;
  const auto name = text_of({".", path.filename().string(), ".", random(), random(), ".partial"});
  return (path.parent_path() / name).string();
}

// Returns after the folder's entry of `path` is on the disk, where the file system can say so.
void sync_folder(const std::filesystem::path& path) {
  const auto folder = path.has_parent_path() ? path.parent_path().string() : std::string(".");
  const int descriptor = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return;
  fsync(descriptor);
  close(descriptor);
}

// The largest elements first, so that each tensor begins at a multiple of its element's size.
std::vector<AnnouncedTensor> announced(const StateDict& tensors) {
  std::vector<AnnouncedTensor> result;
  for (const auto& [name, tensor] : tensors) {
    check_storable(name, tensor);
    result.push_back({name, tensor.sizes().vec(), tensor.scalar_type()});
  }
  std::stable_sort(result.begin(), result.end(),
                   [](const auto& a, const auto& b) { return c10::elementSize(a.dtype) > c10::elementSize(b.dtype); });
  return result;
}

}  // namespace

StateDict load_safetensors(const std::string& path) {
  std::error_code error;
  const bool folder = std::filesystem::is_directory(path, error);
  const auto files = folder ? open_safetensors(path)
                            : std::vector<std::shared_ptr<SafetensorsFile>>{std::make_shared<SafetensorsFile>(path)};
  StateDict tensors;
  for (const auto& file : files) {
    for (const auto& [name, stored] : file->tensors()) tensors.emplace(name, file->map(name));
  }
  return tensors;
}

void save_safetensors(const StateDict& tensors, const std::string& path,
                      const std::map<std::string, std::string>& metadata) {
  const auto list = announced(tensors);
  const auto partial = partial_of(path);
  try {
    SafetensorsWriter writer(partial, list, metadata);
    for (const auto& each : list) writer.write_tensor(each.name, tensors.at(each.name));
    writer.close();
    std::filesystem::rename(partial, path);
    sync_folder(path);
  } catch (const std::exception& error) {
    const auto* system = dynamic_cast<const std::system_error*>(&error);
    const bool theirs = system && system->code() == std::errc::file_exists;
    if (!theirs) std::remove(partial.c_str());
    if (!system) throw;
    refuse_unless(false, path, ": cannot be written (", system->code().message(),
                  "), and nothing of it is kept; make room on the disk, or choose another place");
  }
}

}  // namespace attnpack

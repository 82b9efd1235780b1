#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace attnpack {

// A folder for a test's files, which goes with it.
class Folder {
 public:
  Folder() {
    auto name = (std::filesystem::temp_directory_path() / "attnpack.XXXXXX").string();
    if (!mkdtemp(name.data())) throw std::filesystem::filesystem_error("mkdtemp", std::error_code());
    root_ = name;
  }
  // Not by remove_all: torch 2.11's libtorch.so gives programs its own, which crashes.
  ~Folder() {
    std::vector<std::string> paths{root_};
    for (const auto& entry : std::filesystem::recursive_directory_iterator(root_)) paths.push_back(entry.path());
    std::sort(paths.rbegin(), paths.rend());  // the files of a folder come before it
    for (const auto& path : paths) std::remove(path.c_str());
  }
  Folder(const Folder&) = delete;

  std::string path(const std::string& name) const { return (root_ / name).string(); }
  // Writes a file and gives its path.
  std::string write(const std::string& name, const std::string& bytes) const {
    std::ofstream(path(name), std::ios::binary) << bytes;
    return path(name);
  }
  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(root_)) names.push_back(entry.path().filename());
    std::sort(names.begin(), names.end());
    return names;
  }

 private:
  std::filesystem::path root_;
};

}  // namespace attnpack

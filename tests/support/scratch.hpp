// A private temporary folder for a test; the destructor removes it.
#pragma once

#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>

namespace zr::test {

class Scratch {
 public:
  Scratch() {
    std::string path = (std::filesystem::temp_directory_path() / "zeroth-test-XXXXXX").string();
    ::umask(022);  // the host rejects plug-ins that a group can write
    if (!::mkdtemp(path.data())) throw std::runtime_error("cannot create the folder " + path);
    folder_ = path;
  }
  ~Scratch() {
    std::error_code error;
    std::filesystem::permissions(folder_, std::filesystem::perms::owner_all, error);
    std::filesystem::remove_all(folder_, error);
  }
  Scratch(const Scratch&) = delete;

  const std::filesystem::path& folder() const { return folder_; }
  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::string write(const std::string& name, const std::string& text) const {
    std::filesystem::create_directories((folder_ / name).parent_path());
    std::ofstream(folder_ / name, std::ios::binary) << text;
    return path(name);
  }
  std::string copy(const std::string& from, const std::string& as = "") const {
    const auto to = folder_ / (as.empty() ? std::filesystem::path(from).filename().string() : as);
    std::filesystem::create_directories(to.parent_path());
    std::filesystem::copy_file(from, to, std::filesystem::copy_options::overwrite_existing);
    return to.string();
  }

 private:
  std::filesystem::path folder_;
};

}  // namespace zr::test

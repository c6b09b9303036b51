// Fixture of the checkpoint tests: runs jobs from lists of overrides and reads their results.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "checkpoint/folder.hpp"
#include "checkpoint/load.hpp"
#include "support/multirank.hpp"
#include "support/scratch.hpp"
#include "support/shell.hpp"
#include "support/train_bodies.hpp"

namespace zr::test {

using Json = nlohmann::json;
using testing::Outcome;
namespace fs = std::filesystem;

class CheckpointTest : public ::testing::Test {
 protected:
  static std::string zeroth_bin() { return ZR_BUILD_DIR "/bin/zeroth "; }
  Outcome shell(const std::string& words) const;
  // The command line of a job whose n ranks run `body`.
  static std::string launch(int n, const RankBody& body, const std::string& overrides);
  // Runs one job per line, each on n ranks, with 24 micro-batches per step in total for every n.
  void run(int n, const std::string& lines, const std::string& overrides = "");
  // Runs `body` on two ranks with CHECKPOINT set to folder `where`.
  Outcome run_pair(const RankBody& body, const std::string& overrides = "", const std::string& where = "c");
  Json summary(const std::string& name) const;
  std::string hash(const std::string& name) const { return summary(name).at("weights_hash"); }
  std::map<int64_t, std::string> losses(const std::string& name) const;
  std::vector<std::string> names_in(const std::string& folder) const;
  // Flips a bit of the byte at distance from_end from the end of a file.
  void damage(const std::string& file, std::size_t from_end = 5) const;
  // All bytes of a checkpoint's tensors by kind, name and dtype, without buffers.
  static std::map<std::string, std::string> contents(const std::string& folder);
  const Scratch scratch_;
};

}  // namespace zr::test

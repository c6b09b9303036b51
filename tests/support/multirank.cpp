// The main function of programs with multi-rank tests: runs the tests, or one rank body in the process of a rank.
#include "support/multirank.hpp"

#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <map>

#include "support/job_command.hpp"
#include "zr/engine.hpp"

namespace zr::test {
namespace {

std::map<std::string, RankBody::Function>& bodies() {
  static std::map<std::string, RankBody::Function> all;
  return all;
}

}  // namespace

// BODY TOML [path=value ...]
int run_rank_body(const std::vector<std::string>& arguments) {
  if (arguments.size() < 2 || !RankBody::exists(arguments[0])) {
    std::cerr << "usage: PROGRAM --rank BODY TOML [path=value ...]; the bodies are:\n";
    for (const auto& [name, body] : bodies()) std::cerr << "  " << name << "\n";
    return 64;
  }
  const int code = zr::guarded([&] {
    bodies().at(arguments[0])(arguments[1], {arguments.begin() + 2, arguments.end()});
  });
  return ::testing::Test::HasFailure() ? kFailedAssertion : code;
}

RankBody::RankBody(std::string name, Function function) : name_(std::move(name)) {
  if (bodies().emplace(name_, std::move(function)).second) return;
  std::cerr << "two rank bodies have the name '" << name_ << "'; rename one of them\n";
  std::abort();
}

bool RankBody::exists(const std::string& name) { return bodies().count(name) > 0; }

bool jobs_run_on_hosts() { return std::getenv("ZR_TEST_HOSTS") != nullptr; }

std::string rank_command(const std::string& body) {
  return std::filesystem::read_symlink("/proc/self/exe").string() + " --rank " + body;
}

std::vector<std::string> rank_words(const RankBody& body) {
  return {std::filesystem::read_symlink("/proc/self/exe"), "--rank", body.name()};
}

}  // namespace zr::test

int main(int argc, char** argv) {
  zr::test::skip_earlier_destructors();
  ::setenv("ZR_PROGRESS", "off", 0);  // of the ranks; tests of the progress set it
  if (argc < 2 || std::string(argv[1]) != "--rank") {
    ::testing::InitGoogleTest(&argc, argv);
    return RUN_ALL_TESTS();
  }
  int none = 1;  // the arguments are those of the body
  ::testing::InitGoogleTest(&none, argv);
  return zr::test::run_rank_body({argv + 2, argv + argc});
}

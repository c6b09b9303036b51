// The exact message for every rejected plug-in: plugin_errors.txt.
#include <gtest/gtest.h>

#include "base/error.hpp"
#include "plugin/plugin_host.hpp"
#include "support/golden_cases.hpp"

namespace zr::host {

namespace {
// The error of a job that uses optimizer 'bad' of this folder.
std::string outcome(const std::string& folder) {
  Ledger ledger;
  ThreadPool pool(1);
  plugin::PluginHost host(ledger, pool);
  std::string said = "no error";
  try {
    const plugin::Component bad = plugin::Registry({folder}).load(plugin::Role::optimizer, "bad", "job.toml:1:13");
    const auto keys = config::keys_of(bad.table->keys, bad.table->n_keys, "optimizer.bad");
    const config::JobConfig config = config::Document::parse("optimizer = \"bad\"", "job.toml", {}).check(keys, 1);
    const plugin::Instance instance(host, bad, config, "optimizer.bad");
  } catch (const Error& failure) {
    said = failure.what();
  }
  for (auto at = said.find(folder); at != said.npos; at = said.find(folder))
    said.replace(at, folder.size(), "{folder}");
  return said;
}
}  // namespace

TEST(PluginErrorsTest, MatchTheGoldenFile) {
  golden::check(ZR_SOURCE_DIR "/tests/golden/plugin_errors.txt", 40, [](const golden::Case& one) {
    return std::vector<golden::ProducedPart>{{"says", outcome(ZR_BUILD_DIR "/tests/plugins/" + one.title)}};
  });
}

}  // namespace zr::host

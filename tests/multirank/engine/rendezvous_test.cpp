// Ranks that no launcher has started: the program says which rank it is.
#include <cstdlib>

#include "support/engine_test.hpp"

namespace {

using namespace engine_tests;

// Trains as the rank that the variables TEST_RANK and TEST_ADDRESS say, if they are set.
const zr::test::RankBody trains_by_rendezvous("trains_by_rendezvous", [](const std::string& toml,
                                                                         const std::vector<std::string>& overrides) {
  std::optional<zr::Rendezvous> where;
  if (const char* rank = std::getenv("TEST_RANK")) where = {std::atoi(rank), 2, std::getenv("TEST_ADDRESS")};
  const std::vector<zr::Key> keys{{"parity.model", "everything", "which model"}};
  const zr::Program program(toml, overrides, keys, where);
  EXPECT_EQ(zr::Program(toml, overrides, keys).rank(), program.rank()) << "the process is that rank from now on";
  if (where) {
    EXPECT_THROW(zr::Program(toml, overrides, keys, zr::Rendezvous{1 - program.rank(), 2, where->address}),
                 zr::UserError);
  }
  const auto model = parity::make(program.text("parity.model"), 7);
  zr::Engine engine(program, *model);
  while (!engine.done()) {
    engine.backward(model->loss(engine.step_index(), engine.micro_index()));
    engine.step();
  }
  const std::string hash = engine.weights_hash();
  std::cout << "rank " + std::to_string(engine.rank()) + " of " + std::to_string(engine.world()) + " " + hash + "\n"
            << std::flush;
});

TEST_F(EngineTest, RanksMeetByARendezvous) {
  ONE_HOST_ONLY("the ranks start without a launcher");
  const std::string words = program(2, trains_by_rendezvous, "strategy=zero1 train.steps=3");
  const std::string address = "TEST_ADDRESS=127.0.0.1:" + std::to_string(20000 + ::getpid() % 10000);
  const std::string start = "env -u ZR_RANK " + address + " TEST_RANK=";
  const Result alone = shell("(" + start + "1 " + words + " & " + start + "0 " + words + " && wait $!)");
  EXPECT_EQ(alone.code, 0) << alone.output;
  const Result launched = launch(2, words);
  std::smatch hash;
  ASSERT_TRUE(std::regex_search(launched.output, hash, std::regex("rank 0 of 2 ([0-9a-f]{16})"))) << launched.output;
  for (const std::string rank : {"rank 0 of 2 ", "rank 1 of 2 "})
    EXPECT_NE(alone.output.find(rank + hash[1].str()), std::string::npos) << alone.output;
}

}  // namespace

// The messages that ranks exchange about checkpoints, through the job's store.
#include "engine/saver.hpp"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/address_v4.hpp>
#include <chrono>
#include <exception>
#include <functional>
#include <string>

#include "base/error.hpp"
#include "base/ledger.hpp"
#include "checkpoint/save.hpp"
#include "control/control.hpp"
#include "control/store.hpp"

namespace zr::host {
namespace {

constexpr int kRanks = 2;

void set(const char* name, const std::string& value) { ::setenv(name, value.c_str(), 1); }

pid_t start_rank(int rank, uint16_t port, const std::function<void(const std::shared_ptr<control::Control>&)>& work) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  set("ZR_RANK", std::to_string(rank));
  set("ZR_WORLD", std::to_string(kRanks));
  set("ZR_LOCAL_RANK", std::to_string(rank));
  set("ZR_LOCAL_WORLD", std::to_string(kRanks));
  set("ZR_STORE", "127.0.0.1:" + std::to_string(port));
  set("ZR_JOB", "saver");
  set("ZR_TOKEN", "saver");
  int code = 0;
  try {
    const auto control = control::Control::join();
    work(control);
    control->leave(1, false);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    code = 1;
  }
  std::exit(code);
}

TEST(SaverTest, RemovesItsKeysFromStore) {
  boost::asio::io_context io;
  control::Store::Options options;
  options.world = kRanks;
  options.job = options.token = "saver";
  control::Store store(io, options, boost::asio::ip::address_v4::loopback(), {0});
  const auto agree_often = [](const std::shared_ptr<control::Control>& control) {
    Ledger ledger;
    engine::Saver saver(control, ledger);
    for (int round = 0; round < 1000; ++round) run_on_all_ranks(saver.checkpoint_comm(), [] {});
    const checkpoint::CheckpointComm peers = saver.checkpoint_comm();
    const std::string long_word(2 << 20, 'x');
    const auto all = peers.gather(long_word);
    if (control->rank() == 0 && all.at(1) != long_word) fail_internal("the gathered text is wrong");
    if (peers.broadcast(control->rank() == 0 ? long_word : "") != long_word)
      fail_internal("the broadcast text is wrong");
  };
  int running = 0;
  for (int rank = 0; rank < kRanks; ++rank) running += start_rank(rank, store.port(), agree_often) > 0;
  while (running > 0) {
    io.run_for(std::chrono::milliseconds(20));
    for (int status = 0; running > 0 && ::waitpid(-1, &status, WNOHANG) > 0; --running) EXPECT_EQ(status, 0);
  }
  io.run_for(std::chrono::milliseconds(20));
  EXPECT_EQ(store.bytes(), 0u);
}

}  // namespace
}  // namespace zr::host

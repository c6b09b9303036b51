// Trains, and pauses in a phase of the job until a file `go` exists: phases PHASE RANK FOLDER JOB.toml [key=value ...].
// RANK pauses (-1: all ranks) after it has made the file `paused.RANK` in FOLDER; PHASE is start, forward, backward,
// exchange, save, exit or none.
#include <sys/syscall.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "zr/engine.hpp"
#include "zr/parameters.hpp"

namespace {
constexpr int64_t kStep = 4;  // the index of the step whose phases are meant

std::string& phase_to_pause_in = *new std::string;
std::filesystem::path& folder = *new std::filesystem::path;
int rank_to_pause = -1, own_rank = 0;
bool in_the_step = false;

bool chosen() { return rank_to_pause == -1 || rank_to_pause == own_rank; }
void mark() { std::ofstream(folder / ("paused." + std::to_string(own_rank))); }
void pause_now() {
  mark();
  while (!std::filesystem::exists(folder / "go")) std::this_thread::sleep_for(std::chrono::milliseconds(2));
}
void pause_in(const std::string& phase) {
  if (phase == phase_to_pause_in && chosen()) pause_now();
}

struct NetImpl : torch::nn::Module {
  torch::nn::Linear first = register_module("first", torch::nn::Linear(8, 16));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(16, 4));
  torch::Tensor forward(const torch::Tensor& x) {
    torch::Tensor hidden = first->forward(x).tanh();
    if (in_the_step) {
      pause_in("forward");
      hidden.register_hook([](const torch::Tensor&) {
        pause_in("backward");
        if (phase_to_pause_in != "exchange") return;
        // The others pause, so that the chosen rank waits for them in an exchange.
        if (chosen()) {
          mark();
        } else {
          pause_now();
        }
      });
    }
    return last->forward(hidden);
  }
};
TORCH_MODULE(Net);
}  // namespace

// The engine's library calls this one: files of a checkpoint are synchronized before it is complete.
extern "C" int fdatasync(int fd) {
  if (phase_to_pause_in == "save") {
    char path[4096];
    const std::string link = "/proc/self/fd/" + std::to_string(fd);
    const ssize_t length = ::readlink(link.c_str(), path, sizeof path);
    const std::string name(path, length > 0 ? size_t(length) : 0);
    if (name.find("step-00000004") != std::string::npos) pause_in("save");
  }
  return static_cast<int>(::syscall(SYS_fdatasync, fd));
}

int main(int argc, char** argv) {
  if (argc < 5) return 64;
  phase_to_pause_in = argv[1];
  rank_to_pause = std::atoi(argv[2]);
  folder = argv[3];
  if (const char* rank = std::getenv("ZR_RANK")) own_rank = std::atoi(rank);
  return zr::guarded([&] {
    const zr::Program program(argv[4], std::vector<std::string>(argv + 5, argv + argc));
    torch::manual_seed(1);
    Net net;
    pause_in("start");
    {
      zr::Engine engine(program, *net);
      while (!engine.done()) {
        in_the_step = engine.step_index() == kStep;
        torch::manual_seed(100 + engine.step_index() * 10 + engine.rank());
        engine.backward(net->forward(torch::randn({2, 8})).square().mean());
        engine.step();
      }
    }
    pause_in("exit");
  });
}

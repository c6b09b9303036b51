// A program whose engine, scopes and children end as its first argument says: lifetime MODE JOB.toml [key=value ...].
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "zr/engine.hpp"
#include "zr/parameters.hpp"
#include "zr/recompute.hpp"

namespace {
using Model = torch::nn::Linear;
using Engine = std::unique_ptr<zr::Engine>;
using Arguments = std::vector<std::string>;

// Destroyed in the opposite order.
Engine engine_after_the_model;
std::unique_ptr<zr::Gathered> gathered_after_all;
Model model{nullptr};
Engine engine;
std::unique_ptr<zr::Gathered> gathered;
std::unique_ptr<zr::Engine::Evaluation> evaluation;
std::unique_ptr<zr::Program> program;

Engine make(const Arguments& arguments) {
  program = std::make_unique<zr::Program>(arguments[0], Arguments(arguments.begin() + 1, arguments.end()));
  torch::manual_seed(1);
  model = Model(8, 4);
  return std::make_unique<zr::Engine>(*program, *model);
}
void step(zr::Engine& by) {
  const torch::Tensor x = torch::ones({2, 8});
  by.backward(zr::checkpoint([](const torch::Tensor& in) { return model->forward(in).tanh(); }, x).square().mean());
  by.step();
}
void train(zr::Engine& by) {
  while (!by.done()) step(by);
}

zr::Engine* in_use = nullptr;

// Runs `child` in a child and returns its exit code, or 128 + its signal.
int code_of_child(const std::function<void()>& child) {
  std::fflush(nullptr);
  const pid_t pid = ::fork();
  if (pid == 0) child();
  int status = 0;
  ::waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
struct ReturnFromMain {};  // thrown by a child: main() returns 9

const std::vector<std::pair<const char*, std::function<void(const Arguments&)>>> kChildren{
    {"returns", [](const Arguments&) { throw ReturnFromMain(); }},
    {"throws", [](const Arguments&) { throw std::runtime_error("in the child"); }},
    {"exits", [](const Arguments&) { std::exit(9); }},
    {"ends", [](const Arguments&) { ::_exit(9); }},
    {"executes", [](const Arguments&) { ::execl("/bin/sh", "sh", "-c", "exit 9", nullptr); }},
    {"trains", [](const Arguments&) { in_use->barrier(); }},
    {"computes",
     [](const Arguments&) {
       model->forward(torch::ones({2, 8}));
     }},
    {"joins",
     [](const Arguments& a) {
       program.release();
       const zr::Program again(a[0]);
       std::exit(again.world());
     }},
};

const std::map<std::string, std::function<void(const Arguments&)>> kModes{
    {"no_memory_in_forward",
     [](const Arguments& a) {
       const Engine own = make(a);
       step(*own);
       model->forward(torch::empty({int64_t{1} << 45, 8}));
     }},
    {"namespace", [](const Arguments& a) { train(*(engine = make(a))); }},
    {"before_its_model", [](const Arguments& a) { train(*(engine_after_the_model = make(a))); }},
    {"function",
     [](const Arguments& a) {
       static const Engine own = make(a);
       train(*own);
     }},
    {"thread",
     [](const Arguments& a) {
       thread_local const Engine own = make(a);
       train(*own);
     }},
    {"other_thread", [](const Arguments& a) { std::thread([&] { train(*(engine = make(a))); }).join(); }},
    {"leaked", [](const Arguments& a) { train(*make(a).release()); }},
    {"exception",
     [](const Arguments& a) {
       step(*(engine = make(a)));
       throw std::runtime_error("the data is corrupt");
     }},
    {"fails_at_once",
     [](const Arguments& a) {
       const Engine own = make(a);
       throw std::runtime_error("the data is missing");
     }},
    {"exit",
     [](const Arguments& a) {
       const Engine own = make(a);
       step(*own);
       std::exit(5);
     }},
    {"exit_on_one_rank",
     [](const Arguments& a) {
       const Engine own = make(a);
       step(*own);
       if (own->rank() == 1) std::exit(0);
       train(*own);
     }},
    {"exit_after_exception",
     [](const Arguments& a) {
       try {
         step(*(engine = make(a)));
         throw std::runtime_error("caught");
       } catch (const std::runtime_error&) {
         std::exit(5);
       }
     }},
    {"exit_in_callback",
     [](const Arguments& a) {
       engine = make(a);
       engine->on_step([](const zr::StepResult& result) {
         if (result.step == 2) std::exit(0);
       });
       train(*engine);
     }},
    {"exit_in_schedule",
     [](const Arguments& a) {
       engine = make(a);
       engine->set_schedule([](int64_t index) { return index == 1 ? (std::exit(6), 0.0) : 0.1; });
       train(*engine);
     }},
    {"exit_in_forward",
     [](const Arguments& a) {
       engine = make(a);
       step(*engine);
       const torch::Tensor x = torch::ones({2, 8}).requires_grad_();
       torch::Tensor y = model->forward(x);
       y.register_hook([](const torch::Tensor&) { std::exit(7); });
       engine->backward(y.sum());
     }},
    {"exit_while_a_thread_is_in_a_call",
     [](const Arguments& a) {
       static std::promise<void> inside;
       std::thread([&a] {
         engine = make(a);
         engine->set_schedule([](int64_t) -> double {
           inside.set_value();
           std::promise<void>().get_future().wait();
           return 0;
         });
         train(*engine);
       }).detach();
       inside.get_future().wait();
       std::exit(0);
     }},
    {"scopes",
     [](const Arguments& a) {
       train(*(engine = make(a)));
       gathered = std::make_unique<zr::Gathered>(model->parameters());
       gathered_after_all = std::make_unique<zr::Gathered>(model->parameters());
       evaluation = std::make_unique<zr::Engine::Evaluation>(*engine);
     }},
    {"deferred", [](const Arguments&) { model = zr::deferred([] { return Model(8, 4); }); }},
    {"saves_at_exit",
     [](const Arguments& a) {
       engine = make(a);
       std::atexit([] { std::printf("saved %s\n", engine->save("saved").c_str()); });
       train(*engine);
     }},
    {"late_at_exit",
     [](const Arguments& a) {
       std::atexit([] {
         try {
           engine->save("saved");
         } catch (const zr::UserError& error) {
           std::printf("%s\n", error.what());
         }
       });
       train(*(engine = make(a)));
     }},
    {"quick_exit",
     [](const Arguments& a) {
       step(*(engine = make(a)));
       std::quick_exit(0);
     }},
    {"children",  // one after another, within a gather scope after the first step
     [](const Arguments& a) {
       const Engine own = make(a);
       in_use = own.get();
       step(*own);
       for (const auto& [name, child] : kChildren) {
         const auto scope = zr::gather(model->parameters());
         std::printf("child %s: %d\n", name, code_of_child([&] { child(a); }));
       }
       train(*own);
     }},
};
}  // namespace

int main(int argc, char** argv) {
  if (argc < 3 || !kModes.count(argv[1])) return 64;
  const Arguments arguments(argv + 2, argv + argc);
  try {
    return zr::guarded([&] {
      try {
        kModes.at(argv[1])(arguments);
      } catch (const ReturnFromMain&) {
        throw zr::ExitRequest{9};
      }
    });
  } catch (...) {
    return 65;
  }
}

// The TorchBind classes Scope and Mailbox, and the scopes that belong to no engine.
#include <atomic>
#include <memory>

#include "python/boundary.hpp"
#include "zr/parameters.hpp"
#include "zr/recompute.hpp"

namespace zr::python {

void while_unwinding(const std::function<void()>& fn) {
  struct Guard {
    const std::function<void()>& fn;
    ~Guard() { fn(); }
  };
  struct Unwind {};
  try {
    const Guard guard{fn};
    throw Unwind();
  } catch (const Unwind&) {
  }
}

void Scope::end(bool unwinds) {
  if (!destroy_) return;
  const std::function<void()> destroy = std::exchange(destroy_, nullptr);
  if (unwinds) return while_unwinding(destroy);
  cross(destroy);
}

namespace {
// The functions of Python that run a block of zeroth.checkpoint again, and forget it, by its number.
using BlockFunction = int32_t (*)(int64_t block);
std::atomic<BlockFunction> run_block{nullptr}, forget_block{nullptr};

// A block until its autograd graph is freed.
struct Block {
  explicit Block(int64_t its_number) : number(its_number) {}
  ~Block() {
    if (const BlockFunction forget = forget_block) forget(number);
  }
  Block(const Block&) = delete;
  const int64_t number;
};

c10::intrusive_ptr<Scope> recompute(const std::vector<torch::Tensor>& inputs,
                                    const c10::intrusive_ptr<Mailbox>& mailbox, int64_t number) {
  const auto run = [block = std::make_shared<Block>(number), mailbox](const std::vector<torch::Tensor>& tensors) {
    mailbox->arguments = tensors;
    const BlockFunction function = run_block;
    const bool failed = !function || function(block->number) != 0;
    mailbox->arguments.clear();
    if (failed) throw CallbackFailed();
  };
  return make_scope<detail::RecomputeScope>(run, inputs);
}
}  // namespace

void define_scopes(torch::Library& m) {
  m.class_<Mailbox>("Mailbox")
      .def(torch::init<>())
      .def("arguments", [](const c10::intrusive_ptr<Mailbox>& self) { return self->arguments; })
      .def("put",
           [](const c10::intrusive_ptr<Mailbox>& self, torch::Tensor result) { self->result = std::move(result); });
  m.class_<Scope>("Scope")
      .def("end", &Scope::end)
      .def_static("gather",
                  [](const std::vector<torch::Tensor>& parameters) { return make_scope<Gathered>(parameters); })
      .def_static("deferred", [] { return make_scope<detail::DeferredScope>(); })
      .def_static("recompute", &recompute)
      .def_static("set_blocks", [](int64_t run, int64_t forget) {
        run_block = reinterpret_cast<BlockFunction>(run);
        forget_block = reinterpret_cast<BlockFunction>(forget);
      });
}

}  // namespace zr::python

// The TorchBind classes Scope and Mailbox, and the scopes that belong to no engine.
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
// The block of zeroth.checkpoint: `address`, the function of Python that runs it again with the tensors in `mailbox`.
c10::intrusive_ptr<Scope> recompute(const std::vector<torch::Tensor>& inputs,
                                    const c10::intrusive_ptr<Mailbox>& mailbox, int64_t address) {
  const auto again = function_at<>(address);
  const auto run = [again, mailbox](const std::vector<torch::Tensor>& tensors) {
    mailbox->arguments = tensors;
    again();
    mailbox->arguments.clear();
  };
  return make_scope<detail::RecomputeScope>(run, inputs);
}
}  // namespace

void define_scopes(torch::Library& m) {
  m.class_<Mailbox>("Mailbox")
      .def(torch::init<>())
      .def("arguments", [](const c10::intrusive_ptr<Mailbox>& self) { return self->arguments; })
      .def("put", [](const c10::intrusive_ptr<Mailbox>& self, torch::Tensor result) {
        self->result = std::move(result);
      });
  m.class_<Scope>("Scope")
      .def("end", &Scope::end)
      .def_static("gather",
                  [](const std::vector<torch::Tensor>& parameters) { return make_scope<Gathered>(parameters); })
      .def_static("deferred", [] { return make_scope<detail::DeferredScope>(); })
      .def_static("recompute", &recompute);
}

}  // namespace zr::python

#include "api/module.hpp"

#include <torch/csrc/jit/api/module.h>

#include <map>
#include <sstream>
#include <unordered_set>

#include "base/error.hpp"
#include "base/text.hpp"
#include "checkpoint/manifest.hpp"
#include "model/parameter_registry.hpp"

namespace zr {

namespace {

// "a.b.weight" -> {"a", "b"} and "weight".
struct ParameterPath {
  explicit ParameterPath(const std::string& name) {
    const auto dot = name.rfind('.');
    last = dot == name.npos ? name : name.substr(dot + 1);
    std::istringstream in(dot == name.npos ? "" : name.substr(0, dot));
    for (std::string part; std::getline(in, part, '.');) submodules.push_back(part);
  }
  std::vector<std::string> submodules;
  std::string last;
};

class NnModule final : public ProgramModule {
 public:
  explicit NnModule(const torch::nn::Module& module) : module_(module) {}
  Tensors parameters() const override { return list_of(module_.named_parameters()); }
  Tensors buffers() const override { return list_of(module_.named_buffers()); }
  Tensors parameter(const std::string& name) const override {
    const ParameterPath path(name);
    const torch::nn::Module* at = &module_;
    for (const std::string& part : path.submodules) {
      const auto children = at->named_children();  // the children themselves are owned by `at`
      const auto* child = children.find(part);
      if (!child) return {};
      at = child->get();
    }
    const auto parameters = at->named_parameters(false);
    const torch::Tensor* tensor = parameters.find(path.last);
    return tensor ? Tensors{{name, *tensor}} : Tensors{};
  }

 private:
  static Tensors list_of(const torch::OrderedDict<std::string, torch::Tensor>& tensors) {
    Tensors list;
    for (const auto& item : tensors) list.emplace_back(item.key(), item.value());
    return list;
  }
  const torch::nn::Module& module_;
};

class ScriptModule final : public ProgramModule {
 public:
  explicit ScriptModule(const torch::jit::Module& module) : module_(module) {}
  Tensors parameters() const override { return list_of(module_.named_parameters()); }
  Tensors buffers() const override { return list_of(module_.named_buffers()); }
  Tensors parameter(const std::string& name) const override {
    const ParameterPath path(name);
    torch::jit::Module at = module_;
    for (const std::string& part : path.submodules) {
      if (!at.hasattr(part) || !at.attr(part).isModule()) return {};
      at = at.attr(part).toModule();
    }
    for (const auto& item : at.named_parameters(false))
      if (item.name == path.last) return {{name, item.value}};
    return {};
  }

 private:
  template <class List>
  static Tensors list_of(const List& tensors) {
    Tensors list;
    for (const auto& item : tensors) list.emplace_back(item.name, item.value);
    return list;
  }
  const torch::jit::Module module_;
};

class TensorList final : public ProgramModule {
 public:
  explicit TensorList(std::function<ModelTensors()> list) : list_(std::move(list)) {
    if (!list_) host::fail_user("zr::Engine: the function that lists the tensors is empty; pass one that returns them");
  }
  Tensors parameters() const override { return list().parameters; }
  Tensors buffers() const override { return list().buffers; }
  Tensors parameter(const std::string& name) const override {
    for (auto& item : parameters())
      if (item.first == name) return {item};
    return {};
  }

 private:
  ModelTensors list() const {
    ModelTensors tensors;
    try {
      tensors = list_();
    } catch (...) {
      throw host::ProgramException{std::current_exception()};
    }
    std::unordered_set<std::string_view> names{"__metadata__"};  // which safetensors files have
    check(tensors.parameters, "parameter", names);
    check(tensors.buffers, "buffer", names);
    return tensors;
  }
  // Removes undefined tensors. `names`: those that are taken, to which it adds.
  static void check(Tensors& tensors, const std::string& kind, std::unordered_set<std::string_view>& names) {
    std::erase_if(tensors, [](const auto& item) { return !item.second.defined(); });
    const auto fail = [&kind](const std::string& name, const char* problem) {
      host::fail_user("zr::Engine: the list of tensors has the " + kind + " '" + host::printable(name) + "', " +
                      problem);
    };
    for (const auto& [name, tensor] : tensors) {
      if (name.empty()) fail(name, "which has no name; name it");
      if (name.size() > host::checkpoint::kMaxNameBytes || host::find_not_utf8(name) != name.npos)
        fail(name.substr(0, 40), "whose name is longer than 4096 bytes or not UTF-8; give it another name");
      if (!names.insert(name).second) fail(name, "whose name is taken; give each tensor a name of its own");
    }
  }
  const std::function<ModelTensors()> list_;
};

}  // namespace

ProgramModulePtr program_module(const torch::nn::Module& module) { return std::make_shared<NnModule>(module); }
ProgramModulePtr program_module(const torch::jit::Module& module) { return std::make_shared<ScriptModule>(module); }
ProgramModulePtr program_module(std::function<ModelTensors()> list) {
  return std::make_shared<TensorList>(std::move(list));
}

host::engine::ParameterChange parameter_change(const host::model::TorchModel& model, const Tensors& current,
                                               const Tensors& buffers) {
  host::engine::ParameterChange change;
  std::map<uint32_t, std::vector<std::string>> names;  // the current names of each known parameter
  std::set<const void*> added;
  const auto& known = model.parameters();
  for (const auto& [name, tensor] : current) {
    const auto ref = host::model::ParameterRegistry::find(tensor.unsafeGetTensorImpl());
    if (ref && ref->model == &model) {
      auto& names_of_param = names[ref->param];
      names_of_param.push_back(name);
      if (names_of_param.size() > 1) continue;
      const host::plan::Parameter& before = known[ref->param];
      if (before.name != name) change.renames.push_back({name, before.name, {}});
      if (before.frozen && tensor.requires_grad()) change.log.push_back("'" + name + "' is now trained");
      if (!before.frozen && !tensor.requires_grad())
        change.log.push_back("'" + name + "' is now frozen; its optimizer state is dropped");
    } else if (added.insert(tensor.unsafeGetTensorImpl()).second) {
      change.fresh.insert(name);
      change.log.push_back("'" + name + "' is new");
    }
  }
  for (uint32_t i = 0; i < known.size(); ++i) {
    std::vector<std::string> before{known[i].name};
    before.insert(before.end(), known[i].aliases.begin(), known[i].aliases.end());
    const auto at = names.find(i);
    if (at == names.end())
      change.log.push_back("'" + known[i].name + "' was removed from the model; its state is dropped");
    else if (at->second != before)
      change.log.push_back("the names of '" + at->second.front() + "' have changed");
  }
  for (const std::string& text : model.changed_buffers(buffers)) change.log.push_back("buffer " + text);
  change.any = !change.log.empty();
  return change;
}

}  // namespace zr

#include "api/module.hpp"

#include <torch/csrc/jit/api/module.h>

#include <map>
#include <sstream>

#include "model/parameter_registry.hpp"

namespace zr {

ProgramModule::ProgramModule(torch::nn::Module& module) : module_(&module) {}
ProgramModule::ProgramModule(const torch::jit::Module& module)
    : script_(std::make_shared<const torch::jit::Module>(module)) {}

Tensors ProgramModule::parameters() const {
  Tensors list;
  if (module_)
    for (const auto& item : module_->named_parameters()) list.emplace_back(item.key(), item.value());
  else
    for (const auto& item : script_->named_parameters()) list.emplace_back(item.name, item.value);
  return list;
}

Tensors ProgramModule::buffers() const {
  Tensors list;
  if (module_)
    for (const auto& item : module_->named_buffers()) list.emplace_back(item.key(), item.value());
  else
    for (const auto& item : script_->named_buffers()) list.emplace_back(item.name, item.value);
  return list;
}

Tensors ProgramModule::parameter(const std::string& name) const {
  const auto dot = name.rfind('.');
  const std::string last = dot == name.npos ? name : name.substr(dot + 1);
  std::istringstream path(dot == name.npos ? "" : name.substr(0, dot));
  Tensors found;
  std::string part;
  if (module_) {
    const torch::nn::Module* at = module_;
    while (std::getline(path, part, '.')) {
      const auto children = at->named_children();  // the children themselves are owned by `at`
      const auto* child = children.find(part);
      if (!child) return found;
      at = child->get();
    }
    const auto parameters = at->named_parameters(false);
    if (const torch::Tensor* tensor = parameters.find(last)) found.emplace_back(name, *tensor);
  } else {
    torch::jit::Module at = *script_;
    while (std::getline(path, part, '.')) {
      if (!at.hasattr(part) || !at.attr(part).isModule()) return found;
      at = at.attr(part).toModule();
    }
    for (const auto& item : at.named_parameters(false))
      if (item.name == last) found.emplace_back(name, item.value);
  }
  return found;
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

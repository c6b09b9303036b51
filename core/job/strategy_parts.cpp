#include "job/strategy_parts.hpp"

namespace zr::host::job {

StrategyParts::StrategyParts(const std::vector<const plugin::Instance*>& instances, const plan::MemoryPlan& plan)
    : plan_(plan), part_of_(plan.input.parameters.size()), number_of_(plan.input.parameters.size()) {
  for (const plugin::Instance* instance : instances) {
    const std::vector<uint32_t> params = plan.input.parameters_of(parts());
    for (uint32_t number = 0; number < params.size(); ++number) {
      part_of_[params[number]] = parts();
      number_of_[params[number]] = number;
    }
    parts_.push_back({instance, instance->api<zr_strategy_api>()});
  }
}

template <class Fn>
zr_code StrategyParts::on_all(const Fn& fn) const {
  for (const PartInstance& part : parts_)
    if (const zr_code code = fn(part); code != ZR_OK) return code;
  return ZR_OK;
}

template <class Fn>
zr_code StrategyParts::by_part(const uint32_t* params, uint32_t n, const Fn& fn) const {
  for (uint32_t part = 0; part < parts(); ++part) {
    std::vector<uint32_t> numbers, indices;
    for (uint32_t i = 0; i < n; ++i) {
      if (part_of_[params[i]] != part) continue;
      numbers.push_back(number_of_[params[i]]);
      indices.push_back(i);
    }
    if (numbers.empty()) continue;
    if (const zr_code code = fn(parts_[part], numbers, indices); code != ZR_OK) return code;
  }
  return ZR_OK;
}

zr_code StrategyParts::bind(const std::vector<zr_view>& buffers, const zr_comm_ref& comm, zr_error* error) {
  const zr_view* first = buffers.data();
  for (uint32_t i = 0; i < parts(); ++i) {
    PartInstance& part = parts_[i];
    const uint32_t count = plan_.rank_plan.part_buffers[i];
    part.input = std::make_unique<plan::PlanInputView>(plan_.input, plan_.rank, i);
    const zr_bind bind{sizeof(zr_bind), count, first, comm};
    const zr_code code = part.api->bind(part.instance->self(), &part.input->in(), &bind, error);
    if (code != ZR_OK) return code;
    first += count;
  }
  return ZR_OK;
}

zr_code StrategyParts::grad_destination(uint32_t param, int64_t* first, const zr_use* use, zr_view* dst,
                                        zr_error* error) const {
  const PartInstance& part = parts_[part_of_[param]];
  return part.api->grad_destination(part.instance->self(), number_of_[param], first, use, dst, error);
}

zr_code StrategyParts::grad_ready(uint32_t param, int64_t first, int64_t count, const zr_use* use,
                                  zr_error* error) const {
  const PartInstance& part = parts_[part_of_[param]];
  return part.api->grad_ready(part.instance->self(), number_of_[param], first, count, use, error);
}

zr_code StrategyParts::event(uint32_t kind, const zr_use* use, zr_error* error) const {
  return on_all([&](const PartInstance& part) { return part.api->event(part.instance->self(), kind, use, error); });
}

zr_code StrategyParts::event_of(uint32_t part, uint32_t kind, const zr_use* use, zr_error* error) const {
  return parts_[part].api->event(parts_[part].instance->self(), kind, use, error);
}

zr_code StrategyParts::grads_finish(const zr_use* use, zr_error* error) const {
  return on_all([&](const PartInstance& part) { return part.api->grads_finish(part.instance->self(), use, error); });
}

zr_code StrategyParts::updated(const zr_use* use, zr_error* error) const {
  return on_all([&](const PartInstance& part) { return part.api->updated(part.instance->self(), use, error); });
}

zr_code StrategyParts::acquire(const uint32_t* params, uint32_t n, const zr_use* use, zr_view* full,
                               zr_error* error) const {
  if (parts() == 1) return parts_[0].api->acquire(parts_[0].instance->self(), params, n, use, full, error);
  std::vector<uint32_t> acquired;
  const auto acquire_part = [&](const PartInstance& part, const std::vector<uint32_t>& numbers, const auto& indices) {
    std::vector<zr_view> views(numbers.size());
    const auto count = static_cast<uint32_t>(numbers.size());
    const zr_code code = part.api->acquire(part.instance->self(), numbers.data(), count, use, views.data(), error);
    for (std::size_t i = 0; i < views.size(); ++i) {
      full[indices[i]] = views[i];
      if (code == ZR_OK) acquired.push_back(params[indices[i]]);
    }
    return code;
  };
  const zr_code code = by_part(params, n, acquire_part);
  CallError ignored;
  if (code != ZR_OK && !acquired.empty())  // of an earlier part; the job fails with the first error
    release(acquired.data(), static_cast<uint32_t>(acquired.size()), use, &ignored);
  return code;
}

zr_code StrategyParts::release(const uint32_t* params, uint32_t n, const zr_use* use, zr_error* error) const {
  if (parts() == 1) return parts_[0].api->release(parts_[0].instance->self(), params, n, use, error);
  return by_part(params, n, [&](const PartInstance& part, const std::vector<uint32_t>& numbers, const auto&) {
    return part.api->release(part.instance->self(), numbers.data(), static_cast<uint32_t>(numbers.size()), use, error);
  });
}

}  // namespace zr::host::job

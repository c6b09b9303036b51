// A base for models of tests that are only host memory: what a device, a program and libtorch add to a model is absent.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "model/model.hpp"

namespace zr::testing {

class HostModel : public host::model::Model {
 public:
  std::size_t deferred() const override { return 0; }
  void construct(const ConstructMemory&, bool) override {}
  host::DeviceMemory* memory() override { return nullptr; }
  void keep_on_device() override {}
  void weights_changed(bool) override {}
  void values_replaced(const std::vector<uint32_t>&) override {}
  void use_threads(ParallelFor) override {}
  void on_use(Uses) override {}
  void bind_shared(uint32_t, const void*, zr_dtype) override {}
  void unbind(uint32_t, zr_dtype) override {}
  void attach(uint32_t, void*) override {}
  std::vector<uint32_t> written() override { return {}; }
  std::vector<uint32_t> may_be_written_untracked() override { return {}; }
  void check_bindings() override {}
  void check_scopes(const std::string&) override {}
  void check_scope(uint32_t, const std::string&) override {}
  void* reserve_parameter(uint32_t, zr_dtype, bool) override { return nullptr; }
  void cancel_reserved_parameters() override {}
  void return_parameters() override {}
  void on_gradient_computed(std::function<void(uint32_t)>) override {}
  void deliver_on_thread(bool) override {}
  void finish_gradients() override {}
  void drop_computed_gradients() override {}
  zr_view gradient(uint32_t) override { return {}; }
  void drop_gradient(uint32_t) override {}
  void hide_gradients(bool) override {}
  std::vector<host::model::ModelBuffer> buffers() override { return {}; }
  void write_buffers() override {}
  std::vector<host::model::ModelBuffer> empty_buffers() const override { return {}; }
  void convert_buffers(zr_dtype) override {}
  Temporaries temporaries() const override { return {}; }
  host::model::DeviceBytes device_memory() const override { return {}; }
  void forget_peak() override {}
  void limit_temporaries(int64_t, const std::function<void(int64_t)>&) override {}
  void offload_saved_tensors(OffloadCallbacks) override {}
  void seed(uint64_t) override {}
};

}  // namespace zr::testing

#include "conform/library.hpp"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>

// ZR_SIZE_0_9 pastes the names of their constants together.
#include "zr/abi/communicator.h"  // IWYU pragma: keep
#include "zr/abi/offload.h"       // IWYU pragma: keep
#include "zr/abi/optimizer.h"     // IWYU pragma: keep
#include "zr/abi/strategy.h"      // IWYU pragma: keep

namespace zr::conform {

Library& Case::library() {
  if (!library_) library_ = std::make_shared<Library>(file_);
  return *library_;
}

namespace {
// zeroth-conform contains an unwinder of its own, which is initialized by its first exception. A plug-in that throws
// uses another one, which calls this one: uninitialized, it would end the process.
void prepare_for_exceptions() {
  try {
    throw Failure{};
  } catch (const Failure&) {
  }
}
}  // namespace

Library::Library(const std::filesystem::path& file) {
  prepare_for_exceptions();
  handle_ = ::dlopen(std::filesystem::absolute(file).c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle_) fail("it cannot be loaded: ", ::dlerror());
  link_map* map = nullptr;
  ::dlinfo(handle_, RTLD_DI_LINKMAP, static_cast<void*>(&map));
  struct Search {
    uintptr_t base;
    Library* library;
  } search{map->l_addr, this};
  ::dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* data) {
        auto& [base, library] = *static_cast<Search*>(data);
        if (info->dlpi_addr != base) return 0;
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const auto& header = info->dlpi_phdr[i];
          if (header.p_type != PT_LOAD || !(header.p_flags & PF_X)) continue;
          const uintptr_t first = base + header.p_vaddr;
          library->first_ = library->first_ ? std::min(library->first_, first) : first;
          library->last_ = std::max(library->last_, first + header.p_memsz);
        }
        return 1;
      },
      &search);
}

const zr_module* Library::module(uint32_t host_minor) const {
  void* const symbol = ::dlsym(handle_, "zr_module_v1");
  if (!symbol) fail("it does not export zr_module_v1");
  const zr_module* module = nullptr;
  call_void("zr_module_v1()", [&] { module = reinterpret_cast<const zr_module* (*)(uint32_t)>(symbol)(host_minor); });
  if (!module) fail("zr_module_v1(", host_minor, ") returned NULL");
  return module;
}

bool Library::contains(const void* address) const {
  const auto at = reinterpret_cast<uintptr_t>(address);
  return at >= first_ && at < last_;
}

const zr_component& Library::component(const std::string& role, const std::string& id) const {
  const zr_module* const all = module();
  for (uint32_t i = 0; i < all->n_components; ++i)
    if (all->components[i]->id == id && role_of_kind(all->components[i]->kind) == role) return *all->components[i];
  fail("it has no ", role, " '", id, "' any more");
}

void Library::start() {
  if (started_) return;
  started_ = true;
  const zr_module* const all = module();
  if (all->startup) must("startup()", [&](zr_error* error) { return all->startup(error); });
}

std::string role_of_kind(const char* kind) {
  for (const char* role : {"strategy", "communicator", "optimizer", "offload"})
    if (kind && concat("zr.", role, "/1") == kind) return role;
  return "";
}

std::size_t api_size_of(const std::string& role) {
  if (role == "strategy") return ZR_SIZE_0_9(zr_strategy_api);
  if (role == "communicator") return ZR_SIZE_0_9(zr_communicator_api);
  if (role == "optimizer") return ZR_SIZE_0_9(zr_optimizer_api);
  return ZR_SIZE_0_9(zr_offload_api);
}

Answer create(const zr_component& component, TestHost& host, ConfigTable& table, void** self) {
  table.ended = false;
  Answer answer =
      call("create()", [&](zr_error* error) { return component.create(host.abi(), table.abi(), self, error); });
  table.ended = true;
  for (auto& [key, value] : table.values)  // the memory of strings is not valid any more
    if (auto* text = std::get_if<std::string>(&value); text && host.options().mode.withdraw_arguments)
      std::fill(text->begin(), text->end(), '?');
  return answer;
}

KeyValues Instance::values_for(Case& test) {
  return values_of(test.library().component(test.role(), test.id()), test.values());
}

Instance::Instance(Case& test, TestHost& host, const KeyValues& values)
    : component_(test.library().component(test.role(), test.id())), host_(host), table_(host.new_table(values)) {
  test.library().start();
  const Answer answer = create(component_, host, table_, &self_);
  if (!answer.ok()) fail("create() ", answer.said());
  if (!self_) fail("create() returned ZR_OK, but left *self NULL");
}

void Instance::destroy() {
  if (self_) call_void("destroy()", [&] { component_.destroy(self_); });
  self_ = nullptr;
}

Instance::~Instance() {
  try {
    destroy();
  } catch (const Failure& failure) {
    host_.report(failure.reason);
  }
}

}  // namespace zr::conform

#include "library.hpp"

#include <dlfcn.h>

#include "zr/base.hpp"

namespace nccl {

namespace {

constexpr const char* kRemedy =
    "; install NCCL 2.14 or newer (package libnccl2, or the one of libtorch), or name its file in "
    "communicator.nccl.library; or set communicator = \"mpi\"";

template <class Function>
void find(void* library, const char* symbol, const std::string& name, Function*& function) {
  void* const found = ::dlsym(library, symbol);
  if (!found)
    throw zr::PluginError(ZR_UNSUPPORTED,
                          "communicator 'nccl': " + name + " has no function " + symbol + ": it is too old" + kRemedy);
  function = reinterpret_cast<Function*>(found);
}

std::string version_text(int version) {
  const int major = version < 10000 ? version / 1000 : version / 10000;
  const int minor = version < 10000 ? version % 1000 / 100 : version % 10000 / 100;
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(version % 100);
}

}  // namespace

Functions load_library(const std::string& name) {
  void* const library = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    const char* const reason = ::dlerror();
    throw zr::PluginError(ZR_UNSUPPORTED, std::string("communicator 'nccl' cannot load NCCL's library: ") +
                                              (reason ? reason : name.c_str()) + kRemedy);
  }
  Functions f{};
  int version = 0;
  find(library, "ncclGetVersion", name, f.get_version);
  if (f.get_version(&version) != kSuccess || version < kOldest)
    throw zr::PluginError(ZR_UNSUPPORTED, "communicator 'nccl': " + name + " is NCCL " + version_text(version) +
                                              ", which is too old" + kRemedy);
  find(library, "ncclGetUniqueId", name, f.get_unique_id);
  find(library, "ncclCommInitRankConfig", name, f.comm_init_rank_config);
  find(library, "ncclCommFinalize", name, f.comm_finalize);
  find(library, "ncclCommDestroy", name, f.comm_destroy);
  find(library, "ncclCommAbort", name, f.comm_abort);
  find(library, "ncclCommGetAsyncError", name, f.comm_get_async_error);
  find(library, "ncclGetErrorString", name, f.get_error_string);
  find(library, "ncclGetLastError", name, f.get_last_error);
  find(library, "ncclGroupStart", name, f.group_start);
  find(library, "ncclGroupEnd", name, f.group_end);
  find(library, "ncclSend", name, f.send);
  find(library, "ncclRecv", name, f.recv);
  find(library, "ncclAllGather", name, f.all_gather);
  find(library, "ncclBroadcast", name, f.broadcast);
  if (::dlsym(library, "ncclCommRegister") && ::dlsym(library, "ncclCommDeregister")) {
    find(library, "ncclCommRegister", name, f.comm_register);
    find(library, "ncclCommDeregister", name, f.comm_deregister);
  }
  return f;
}

}  // namespace nccl

// The communicator "nccl" with one rank, beside libtorch, which has loaded NCCL already: connects, moves data with the
// operations that NCCL performs with one rank, closes; and aborts a second connection. NCCL rejects two ranks on one
// GPU, so more cannot be had there; tests/simulators/sim_nccl has several ranks.
//   gpu_nccl NUMBER NCCL BACKEND
// NUMBER: of the device. NCCL: its library. BACKEND: the library with libtorch's backend. Prints one line of JSON;
// exits with 1 if data differs.
#include <dlfcn.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "connection.hpp"
#include "library.hpp"

namespace {

constexpr int64_t kBytes = int64_t{8} << 20;

class Rank {
 public:
  explicit Rank(int number) : device_(nccl::open_device(number)), stream_(device_->create_stream()) {
    for (void** memory : {&from_, &to_}) *memory = device_->allocate(kBytes);
    host_ = static_cast<unsigned char*>(device_->allocate_host(kBytes));
  }
  ~Rank() {
    device_->free_host(host_);
    for (void* memory : {from_, to_}) device_->free(memory);
    device_->destroy_stream(stream_);
  }
  Rank(const Rank&) = delete;
  nccl::GpuDevice& device() { return *device_; }
  void* from() const { return from_; }
  void* to() const { return to_; }
  void* stream() const { return stream_; }

  void register_memory(nccl::Connection& connection) {
    for (void* const memory : {from_, to_}) connection.register_memory(memory, kBytes);
  }
  // True if the stream reaches its end within ten seconds.
  bool ends() {
    const auto mark = device_->make_mark();
    mark->record(stream_);
    nccl::Wait waited;
    while (!mark->is_reached() && waited.elapsed() < std::chrono::seconds(10)) waited.pause();
    return mark->is_reached();
  }

  // True if the operation moves each byte from `from` to `to`.
  template <class Operation>
  bool moves(nccl::Connection& connection, const char* name, unsigned char first, const Operation& operation) {
    for (int64_t i = 0; i < kBytes; ++i) host_[i] = static_cast<unsigned char>(first + i * 7);
    device_->copy(from_, host_, kBytes, stream_);
    connection.group(name, [&](const nccl::Functions& functions, nccl::Comm comm) {
      return operation(functions, from_, to_, comm, stream_);
    });
    wait(connection, name);  // before the host writes
    std::memset(host_, 0, kBytes);
    device_->copy(host_, to_, kBytes, stream_);
    wait(connection, name);
    for (int64_t i = 0; i < kBytes; ++i)
      if (host_[i] != static_cast<unsigned char>(first + i * 7)) return false;
    return true;
  }

 private:
  void wait(nccl::Connection& connection, const char* name) {
    const auto mark = device_->make_mark();
    mark->record(stream_);
    for (nccl::Wait waited; !mark->is_reached(); waited.pause()) connection.check(name);
  }

  const std::unique_ptr<nccl::GpuDevice> device_;
  void* const stream_;
  void *from_ = nullptr, *to_ = nullptr;
  unsigned char* host_ = nullptr;
};

nccl::UniqueId new_id(const nccl::Functions& functions) {
  nccl::UniqueId id{};
  if (functions.get_unique_id(&id) != nccl::kSuccess) throw zr::PluginError(ZR_COMM, "ncclGetUniqueId failed");
  return id;
}

int run(int number, const char* library) {
  const nccl::Functions functions = nccl::load_library(library);
  int version = 0;
  functions.get_version(&version);
  Rank rank(number);
  bool broadcasts = false, gathers = false, is_aborted = false;
  {
    nccl::Connection connection(functions, rank.device(), new_id(functions), 0, 1, std::chrono::seconds(60), [] {});
    rank.register_memory(connection);
    broadcasts = rank.moves(connection, "broadcast", 1,
                            [](const auto& nccl, void* from, void* to, nccl::Comm comm, void* stream) {
                              return nccl.broadcast(from, to, kBytes, nccl::kUint8, 0, comm, stream);
                            });
    gathers = rank.moves(connection, "all_gather", 2,
                         [](const auto& nccl, void* from, void* to, nccl::Comm comm, void* stream) {
                           return nccl.all_gather(from, to, kBytes, nccl::kUint8, comm, stream);
                         });
  }
  nccl::Connection aborted(functions, rank.device(), new_id(functions), 0, 1, std::chrono::seconds(60), [] {});
  aborted.group("before the abort", [&](const nccl::Functions& functions_of_nccl, nccl::Comm comm) {
    return functions_of_nccl.broadcast(rank.from(), rank.to(), kBytes, nccl::kUint8, 0, comm, rank.stream());
  });
  aborted.abort();
  try {
    aborted.check("after the abort");
  } catch (const zr::PluginError& error) {
    is_aborted = error.code() == ZR_CANCELLED && rank.ends();
  }
  std::printf("{\"name\": \"nccl\", \"version\": %d, \"broadcast\": %s, \"all_gather\": %s, \"abort\": %s}\n", version,
              broadcasts ? "true" : "false", gathers ? "true" : "false", is_aborted ? "true" : "false");
  return broadcasts && gathers && is_aborted ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: %s NUMBER NCCL BACKEND\n", argv[0]);
    return 64;
  }
  if (!::dlopen(argv[3], RTLD_NOW | RTLD_GLOBAL)) {
    std::fprintf(stderr, "%s\n", ::dlerror());
    return 3;
  }
  try {
    return run(std::atoi(argv[1]), argv[2]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpu_nccl: %s\n", error.what());
    return 3;
  }
}

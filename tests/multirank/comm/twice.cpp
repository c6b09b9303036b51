// A communicator that does nothing and resolves every completion several times.
#include "zr/communicator.hpp"

namespace {

class Twice {
 public:
  Twice(const zr::Host& host, int64_t times) : host_(host), times_(times) {}
  void submit(const zr_coll&, zr_stream*, zr_done* given) {
    const zr::Done done = zr::Done::retained(host_, given);
    for (int64_t i = 0; done && i < times_; ++i) done.resolve();
  }
  void abort() noexcept {}

 private:
  zr::Host host_;
  int64_t times_;
};

class TwicePlugin : public zr::Communicator<TwicePlugin, Twice> {
 public:
  static constexpr zr_key keys[] = {zr::key_int("times", "2", 1, 9, "how often it resolves a completion")};
  TwicePlugin(const zr::Config& config, const zr::Host& host) : host_(host), times_(config.integer("times")) {}
  zr_comm_caps caps() const {
    zr_comm_caps caps{};
    caps.flags = ZR_COMM_ASYNC;
    caps.ops = 1u << ZR_ALL_GATHER | 1u << ZR_BARRIER;
    caps.dtypes = 1u << ZR_U8;
    caps.device_types = zr::kCpuOnly;
    return caps;
  }
  std::unique_ptr<Twice> open(const zr_comm_open&) { return std::make_unique<Twice>(host_, times_); }

 private:
  zr::Host host_;
  int64_t times_;
};

}  // namespace

ZR_COMMUNICATOR(TwicePlugin, "twice", "tests", "1.0.0");

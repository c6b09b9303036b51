// A communicator with faults that keys switch on: shows that the parity matrix detects them.
#include <memory>

#include "poor.hpp"
#include "zr/ordered_reduce.hpp"

namespace {

struct Fault {
  bool backwards = false;  // ranks are added from the last to the first
  std::string drops;       // only the first collective whose operation and label contain this text is executed
};

class Faulty : public poor::Poor {
 public:
  Faulty(const zr::Host& host, const zr_comm_open& how, Fault fault) : Poor(host, how), fault_(std::move(fault)) {}

  void submit(const zr_coll& c, zr_stream* stream, zr_done* done) {
    if (dropped(c)) return;
    if (c.op == ZR_REDUCE_SCATTER || c.op == ZR_ALL_REDUCE) {
      reduce(c);
    } else if (c.op == ZR_ALL_GATHER) {
      gather(static_cast<const char*>(c.src.data), parts(c.counts, c.src.count, bytes_of(c.src.dtype)),
             static_cast<char*>(c.dst.data));
    } else {
      Poor::submit(c, stream, done);
    }
  }

 private:
  static int64_t bytes_of(zr_dtype dtype) {
    return dtype == ZR_F64 || dtype == ZR_I64    ? 8
           : dtype == ZR_F32 || dtype == ZR_I32  ? 4
           : dtype == ZR_BF16 || dtype == ZR_F16 ? 2
                                                 : 1;
  }

  // Whether the collective, as in "reduce_bucket_0" of both kinds of reductions, matches `drops` and is not the first
  // match.
  bool dropped(const zr_coll& c) {
    if (fault_.drops.empty() || !c.label) return false;
    std::string what = std::string(c.op == ZR_ALL_GATHER ? "all_gather_" : "reduce_") + c.label;
    for (char& letter : what) letter = letter == ' ' ? '_' : letter;
    return what.find(fault_.drops) != std::string::npos && done_++ > 0;
  }

  void reduce(const zr_coll& c) {
    const int64_t size = bytes_of(c.src.dtype), full = c.src.count * size;
    std::vector<char> all(static_cast<size_t>(full * world_));
    gather(static_cast<const char*>(c.src.data), std::vector<int64_t>(static_cast<size_t>(world_), full), all.data());
    int64_t own = 0;
    if (c.op == ZR_REDUCE_SCATTER) {
      const std::vector<int64_t> shard_bytes = parts(c.counts, c.dst.count, size);
      for (int r = 0; r < rank_; ++r) own += shard_bytes[static_cast<size_t>(r)];
    }
    std::vector<const void*> sources;
    for (int i = 0; i < world_; ++i)
      sources.push_back(all.data() + (fault_.backwards ? world_ - 1 - i : i) * full + own);
    void* out = c.dst.data;
    if (c.dst.count > 0)
      zr::ordered_reduce({c.reduce, (c.flags & ZR_COLL_ACCUMULATE) != 0, c.src.dtype, c.dst.dtype}, sources.data(),
                         world_, &out, 1, 0, c.dst.count, false);
  }

  Fault fault_;
  int done_ = 0;
};

class FaultyPlugin : public zr::Communicator<FaultyPlugin, Faulty> {
 public:
  static constexpr zr_key keys[] = {
      zr::key_bool("backwards", "false", "ranks are added from the last to the first"),
      zr::key_text("drops", "\"\"", nullptr,
                   "executes only the first collective whose operation and label contain this text")};
  FaultyPlugin(const zr::Config& config, const zr::Host& host)
      : host_(host), fault_{config.boolean("backwards"), config.text("drops")} {}
  zr_comm_caps caps() const {
    zr_comm_caps caps{};
    caps.ops = 1u << ZR_ALL_GATHER | 1u << ZR_REDUCE_SCATTER | 1u << ZR_ALL_REDUCE | 1u << ZR_BARRIER;
    caps.dtypes = 0x1fe;
    caps.reduces = 1u << ZR_SUM;
    caps.flags = ZR_COMM_RANK_ORDERED | ZR_COMM_UPCAST | ZR_COMM_ACCUMULATE;
    caps.device_types = zr::kCpuOnly;
    return caps;
  }
  std::unique_ptr<Faulty> open(const zr_comm_open& how) { return std::make_unique<Faulty>(host_, how, fault_); }

 private:
  zr::Host host_;
  Fault fault_;
};

}  // namespace

ZR_COMMUNICATOR(FaultyPlugin, "faulty", "tests", "1.0.0");

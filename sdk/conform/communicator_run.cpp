#include "conform/communicator_run.hpp"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <thread>

#include "conform/process.hpp"
#include "conform/simulated_device.hpp"
#include "conform/use.hpp"
#include "zr/float_cast.hpp"
#include "zr/names.hpp"

namespace zr::conform {

namespace {
constexpr double kFinishSeconds = 10;
}

zr_comm_caps caps_of(Instance& instance, const Mode& mode) {
  ArgumentMemory arguments(mode);
  zr_comm_caps* out = arguments.sized(zr_comm_caps{});
  const auto& api = instance.api<zr_communicator_api>();
  must("caps()", [&](zr_error* error) { return api.caps(instance.self(), out, error); });
  zr_comm_caps copy;
  ZR_TAKE(&copy, out);
  return copy;
}

// ---- an open communicator

OpenComm::OpenComm(Instance& instance, const Mode& mode)
    : instance_(instance),
      mode_(mode),
      api_(instance.api<zr_communicator_api>()),
      has_barrier_(has(caps_of(instance, mode).ops, ZR_BARRIER)),
      gathered_(static_cast<std::size_t>(world())) {
  static int opened = 0;  // equal on all ranks
  prefix_ = concat("conform.", ++opened, ".");
  ArgumentMemory arguments(mode_);
  zr_comm_open options{};
  options.rank = rank();
  options.world = world();
  options.device = {ZR_DEVICE_CPU, 0};
  options.axis = arguments.text("data");
  options.store_prefix = arguments.text(prefix_);
  const zr_comm_open* passed = arguments.sized(options);
  const Answer answer =
      call("open()", [&](zr_error* error) { return api_.open(instance_.self(), passed, &comm_, error); });
  if (answer.code == ZR_UNSUPPORTED) {
    const zr_comm_caps caps = caps_of(instance, mode);
    if ((caps.flags & ZR_COMM_STREAMS) && simulated_type(caps.device_types) < 0)
      skip("it cannot be checked without a device: open() ", answer.said());
  }
  require(answer.ok(), "open() ", answer.said());
  require(comm_, "open() returned ZR_OK, but left *comm NULL");
}

OpenComm::~OpenComm() {
  try {
    close();
  } catch (const Failure& failure) {
    host().report(failure.reason);
  }
}

void OpenComm::close() {
  if (comm_) call_void("close()", [&] { api_.close(comm_); });
  comm_ = nullptr;
}

Answer OpenComm::submit(const zr_coll& coll, Completion* done) const {
  ArgumentMemory arguments(mode_);
  const auto copy = [&](const int64_t* counts) {
    return counts ? arguments.list(std::vector<int64_t>(counts, counts + world())) : nullptr;
  };
  zr_coll given = coll;
  given.counts = copy(coll.counts);
  given.recv_counts = copy(coll.recv_counts);
  given.label = arguments.text("bucket 3");
  const zr_coll* passed = arguments.sized(given);
  return call("submit()", [&](zr_error* error) {
    return api_.submit(comm_, passed, nullptr, done ? done->abi() : nullptr, error);
  });
}

void OpenComm::run(const zr_coll& coll) const {
  if (const Answer answer = submit(coll); !answer.ok()) fail("submit() of ", name_of_op(coll.op), " ", answer.said());
}

zr_coll OpenComm::barrier(uint64_t fingerprint) {
  zr_coll coll = all_gather_of(&gathered_[static_cast<std::size_t>(rank())], 1, gathered_.data(), world(), ZR_U8);
  if (has_barrier_) {
    coll = {};
    coll.size = sizeof coll;
    coll.op = ZR_BARRIER;
  }
  coll.fingerprint = fingerprint;
  return coll;
}

void OpenComm::progress() const {
  if (api_.progress) must("progress()", [&](zr_error* error) { return api_.progress(comm_, error); });
}

void OpenComm::finish(Completion& done) const {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(kFinishSeconds);
  while (!done.is_resolved()) {
    progress();
    require(std::chrono::steady_clock::now() < deadline, "submit() with a completion never resolves it");
    std::this_thread::yield();
  }
  require(done.code() == ZR_OK, "a completion was resolved with ", code_text(done.code()), ": ", done.text());
}

// ---- cases

int64_t CollectiveCase::total() const { return std::accumulate(parts.begin(), parts.end(), int64_t{0}); }
int64_t CollectiveCase::start(int rank) const {
  return std::accumulate(parts.begin(), parts.begin() + rank, int64_t{0});
}
int64_t CollectiveCase::src_count(int rank) const {
  const int64_t own = parts[static_cast<std::size_t>(rank)];
  if (op == ZR_BROADCAST || op == ZR_SCATTER) return rank == root ? total() : 0;
  return op == ZR_ALL_GATHER || op == ZR_GATHER ? own : total();
}
int64_t CollectiveCase::dst_count(int rank) const {
  const int64_t own = parts[static_cast<std::size_t>(rank)];
  if (op == ZR_REDUCE || op == ZR_GATHER) return rank == root ? total() : 0;
  if (op == ZR_ALL_TO_ALL) return own * world;
  return op == ZR_REDUCE_SCATTER || op == ZR_SCATTER ? own : total();
}
std::string CollectiveCase::text() const {
  return concat(name_of_op(op), " of ", total(), " elements of ", name_of(src), src == dst ? "" : " to fp32",
                is_reduction(op) ? (reduce == ZR_SUM   ? " (sum)"
                                    : reduce == ZR_MIN ? " (min)"
                                                       : " (max)")
                                 : "",
                ", ", world, " ranks", passes_counts ? ", with counts" : "", in_place ? ", in place" : "",
                flags & ZR_COLL_ACCUMULATE ? ", accumulating" : "", flags & ZR_COLL_INT8 ? ", 8 bits" : "",
                flags & ZR_COLL_INT4 ? ", 4 bits" : "", flags & ZR_COLL_ANY_ORDER ? ", in any order" : "");
}

namespace {
// Elements of each rank: none, one, and others, equal and different.
std::vector<std::vector<int64_t>> cuts_for(int world) {
  const auto n = static_cast<std::size_t>(world);
  std::vector<std::vector<int64_t>> cuts{std::vector<int64_t>(n, 0), std::vector<int64_t>(n, 1),
                                         std::vector<int64_t>(n, 17), std::vector<int64_t>(n, 9001)};
  std::vector<int64_t> uneven, gaps;
  for (int r = 0; r < world; ++r) {
    uneven.push_back(100 + 977 * ((r + 1) % world) + r);
    gaps.push_back(r % 2 ? 501 : 0);
  }
  cuts.push_back(uneven);
  cuts.push_back(gaps);
  return cuts;
}

bool has_parts(uint32_t op) {
  return op == ZR_REDUCE_SCATTER || op == ZR_ALL_GATHER || op == ZR_GATHER || op == ZR_SCATTER || op == ZR_ALL_TO_ALL;
}

bool supports(const zr_comm_caps& caps, const CollectiveCase& one) {
  if (!has(caps.ops, one.op) || !has(caps.dtypes, static_cast<uint64_t>(one.src))) return false;
  return is_reduction(one.op) ? has(caps.reduces, one.reduce) : one.reduce == ZR_SUM;
}
}  // namespace

std::vector<CollectiveCase> all_cases(const zr_comm_caps& caps, int world) {
  std::vector<CollectiveCase> cases;
  const std::vector<std::vector<int64_t>> cuts = cuts_for(world);
  for (uint32_t op = ZR_ALL_REDUCE; op <= ZR_ALL_TO_ALL; ++op)
    for (zr_dtype dtype = ZR_F32; dtype <= ZR_I64; ++dtype)
      for (std::size_t cut = 0; cut < cuts.size(); ++cut)
        for (uint32_t reduce = ZR_SUM; reduce <= (cut == 2 ? ZR_MAX : ZR_SUM); ++reduce) {
          const CollectiveCase one{.op = op,
                                   .reduce = reduce,
                                   .src = dtype,
                                   .dst = dtype,
                                   .world = world,
                                   .root = static_cast<int>(cut) % world,
                                   .parts = cuts[cut],
                                   .passes_counts = has_parts(op) && (cut >= 4 || cut == 2)};
          if (supports(caps, one)) cases.push_back(one);
        }
  return cases;
}

std::string random_elements(zr_dtype dtype, int64_t count, uint64_t seed, bool exact) {
  std::mt19937_64 random(seed);
  std::string bytes(static_cast<std::size_t>(count * size_of(dtype)), 0);
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t x = random();
    const double small = static_cast<double>(x % 31) - 15;
    const double value = exact ? small
                               : (static_cast<double>(x >> 11) * 0x1p-52 - 1) * (x % 3 == 0   ? 1e3
                                                                                 : x % 3 == 1 ? 1
                                                                                              : 1e-3);
    char* at = bytes.data() + i * size_of(dtype);
    const auto put = [&](auto element) { std::memcpy(at, &element, sizeof element); };
    switch (dtype) {
      case ZR_F32: put(static_cast<float>(value)); break;
      case ZR_F64: put(value); break;
      case ZR_BF16: put(to_bf16(static_cast<float>(value))); break;
      case ZR_F16: put(to_f16(static_cast<float>(value))); break;
      default: std::memcpy(at, &x, static_cast<std::size_t>(size_of(dtype)));
    }
  }
  return bytes;
}

namespace {

// The memory of one rank for a case.
struct Memory {
  char *src = nullptr, *dst = nullptr;
};

// In-place operations have one array: src is this rank's part of dst, or dst this rank's part of src.
Memory place(const CollectiveCase& one, int rank, char* first, char* second) {
  if (!one.in_place) return {first, second};
  const int64_t own = one.start(rank) * size_of(one.src);
  if ((one.op == ZR_ALL_GATHER || one.op == ZR_GATHER) && one.dst_count(rank) > 0) return {first + own, first};
  if (one.op == ZR_REDUCE_SCATTER || one.op == ZR_SCATTER)
    return {first, one.src_count(rank) > 0 ? first + own : first};
  return {first, first};
}

zr_coll coll_of(const CollectiveCase& one, int rank, const Memory& memory, const int64_t* recv_counts) {
  zr_coll coll{};
  coll.size = sizeof coll;
  coll.op = one.op;
  coll.reduce = is_reduction(one.op) ? one.reduce : 0;
  coll.flags = one.flags;
  coll.root = one.root;
  coll.src = view_of(memory.src, one.src_count(rank), one.src);
  coll.dst = view_of(memory.dst, one.dst_count(rank), one.dst);
  coll.counts = one.passes_counts ? one.parts.data() : nullptr;
  if (one.op == ZR_ALL_TO_ALL && one.passes_counts) coll.recv_counts = recv_counts;
  coll.fingerprint = 1 + one.op * 1000003u + static_cast<uint64_t>(one.total()) * 31 + static_cast<uint64_t>(one.src);
  return coll;
}

std::size_t array_bytes(const CollectiveCase& one, int rank) {
  const int64_t count = std::max(one.src_count(rank), one.dst_count(rank));
  return static_cast<std::size_t>(std::max(count, one.total()) * 8 + 64);
}

// Fills src and dst; returns the content of dst after the operation.
std::string expected_result(const CollectiveCase& one, int own_rank, const CaseOptions& options, const Memory& own) {
  std::vector<std::vector<char>> firsts, seconds;
  std::vector<RankCollective> ranks;
  Memory placed;
  for (int r = 0; r < one.world; ++r) {
    char* first = firsts.emplace_back(array_bytes(one, r)).data();
    char* second = seconds.emplace_back(array_bytes(one, r)).data();
    const Memory memory = place(one, r, first, second);
    const auto seed = options.seed * 1000 + static_cast<uint64_t>(r);
    const std::string dst = random_elements(one.dst, one.dst_count(r), seed + 500, options.exact);
    const std::string src = random_elements(one.src, one.src_count(r), seed, options.exact);
    std::copy(dst.begin(), dst.end(), memory.dst);
    std::copy(src.begin(), src.end(), memory.src);
    if (r == own_rank) {
      std::copy(dst.begin(), dst.end(), own.dst);
      std::copy(src.begin(), src.end(), own.src);
      placed = memory;
    }
    const std::vector<int64_t> received(static_cast<std::size_t>(one.world), one.parts[static_cast<std::size_t>(r)]);
    ranks.emplace_back(coll_of(one, r, memory, received.data()), one.world);
  }
  perform(ranks);
  return {placed.dst, static_cast<std::size_t>(one.dst_count(own_rank) * size_of(one.dst))};
}

}  // namespace

void check_case(const OpenComm& comm, const CollectiveCase& one, const CaseOptions& options) {
  const int rank = comm.rank();
  std::vector<Array> arrays;  // exact sizes, before guard pages
  char *first = nullptr, *second = nullptr;
  if (options.allocate) {
    first = options.allocate(static_cast<int64_t>(array_bytes(one, rank)));
    second = options.allocate(static_cast<int64_t>(array_bytes(one, rank)));
  } else {
    const auto bytes = [](int64_t count, zr_dtype dtype) { return static_cast<std::size_t>(count * size_of(dtype)); };
    const std::size_t src = bytes(one.src_count(rank), one.src), dst = bytes(one.dst_count(rank), one.dst);
    first = arrays.emplace_back(one.in_place ? std::max(src, dst) : src, 8).data();
    second = arrays.emplace_back(dst, 8).data();
  }
  const Memory memory = place(one, rank, first, second);
  const std::string expected = expected_result(one, rank, options, memory);
  const std::string source(memory.src, static_cast<std::size_t>(one.src_count(rank) * size_of(one.src)));
  const std::vector<int64_t> received(static_cast<std::size_t>(one.world), one.parts[static_cast<std::size_t>(rank)]);
  const zr_coll coll = coll_of(one, rank, memory, received.data());
  if (options.completion) {
    Completion& done = comm.host().new_completion();
    const Answer answer = comm.submit(coll, &done);
    if (answer.code == ZR_UNSUPPORTED) skip("submit() does not support completions: ", answer.text);
    if (!answer.ok()) fail("submit() of ", one.text(), " ", answer.said());
    comm.finish(done);
  } else {
    if (const Answer answer = comm.submit(coll); !answer.ok()) fail("submit() of ", one.text(), " ", answer.said());
  }
  if (options.checks_source) {
    for (const Array& array : arrays) require(array.surroundings_are_intact(), one.text(), " writes outside its views");
    require(one.in_place || source == std::string(memory.src, source.size()), one.text(), " changes src");
  } else {
    require(expected == std::string(memory.dst, expected.size()), one.text(), " gives a wrong result");
  }
}

CaseRun run_case(const OpenComm& comm, const CollectiveCase& one, const std::string& src, bool completion) {
  const int rank = comm.rank();
  const auto dst_bytes = static_cast<std::size_t>(one.dst_count(rank) * size_of(one.dst));
  const Array first(one.in_place ? std::max(src.size(), dst_bytes) : src.size(), 8), second(dst_bytes, 8);
  for (const Array* array : {&first, &second}) std::memset(array->data(), 0, array->size());
  const Memory memory = place(one, rank, first.data(), second.data());
  std::copy(src.begin(), src.end(), memory.src);
  zr_coll coll = coll_of(one, rank, memory, nullptr);
  coll.fingerprint += uint64_t{one.flags} << 40;
  Completion* const done = completion ? &comm.host().new_completion() : nullptr;
  const Answer answer = comm.submit(coll, done);
  if (completion && answer.code == ZR_UNSUPPORTED) skip("submit() does not support completions: ", answer.text);
  if (!answer.ok()) fail("submit() of ", one.text(), " ", answer.said());
  if (done) comm.finish(*done);
  const bool is_intact = first.surroundings_are_intact() && second.surroundings_are_intact();
  return {{memory.dst, dst_bytes}, is_intact && (one.in_place || src == std::string(memory.src, src.size()))};
}

zr_coll all_gather_of(void* src, int64_t count, void* dst, int world, zr_dtype dtype) {
  zr_coll coll{};
  coll.size = sizeof coll;
  coll.op = ZR_ALL_GATHER;
  coll.src = view_of(src, count, dtype);
  coll.dst = view_of(dst, count * world, dtype);
  coll.fingerprint = 11;
  return coll;
}

void on_comms(Case& test, const std::vector<int>& worlds, const std::function<void(OpenComm&, Instance&)>& body,
              const std::function<void(int rank, int world)>& prepare) {
  for (const int world : worlds) {
    const Store store;
    run_ranks(world, [&](int rank) {
      test.note("rank ", rank, " of ", world);
      if (prepare) prepare(rank, world);
      TestHost host({.rank = rank, .world = world, .store = &store});
      Instance instance(test, host);
      OpenComm comm(instance);
      body(comm, instance);
      comm.close();
      instance.destroy();
      instance.check_host();
    });
  }
}

void use_communicator(Instance& instance, const Mode& mode) {
  const zr_comm_caps caps = caps_of(instance, mode);
  OpenComm comm(instance, mode);
  for (const CollectiveCase& one : all_cases(caps, comm.world()))
    if (one.src == ZR_U8 || one.src == ZR_F32)
      check_case(comm, one, {.seed = 3, .completion = mode.withdraw_arguments});
  comm.close();
}

}  // namespace zr::conform

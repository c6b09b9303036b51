// ZR-C01 and up: the results of collectives.
#include <string>

#include "conform/communicator_run.hpp"
#include "conform/rule.hpp"
#include "conform/simulated_device.hpp"

namespace zr::conform {

namespace {

std::string text_of(const zr_comm_caps& caps) {
  return concat("flags ", caps.flags, ", ops ", caps.ops, ", dtypes ", caps.dtypes, ", reduces ", caps.reduces,
                ", device_types ", caps.device_types);
}

void capabilities_are_valid(Case& test) {
  on_comms(test, {2}, [&](OpenComm& comm, Instance& instance) {
    TestHost host(instance.host().options());
    Instance unopened(test, host);
    const zr_comm_caps caps = caps_of(unopened);
    require(has(caps.device_types, ZR_DEVICE_CPU), "device_types is ", caps.device_types, ", without CPU memory");
    require(has(caps.ops, ZR_ALL_GATHER) && has(caps.dtypes, ZR_U8),
            "it has no all_gather of uint8, from which the host composes missing operations");
    const auto require_same = [&](Instance& one, const char* when) {
      for (int i = 0; i < 100; ++i) {
        const std::string now = text_of(caps_of(one));
        require(now == text_of(caps), "caps() was ", text_of(caps), " at first, and is ", now, " ", when);
      }
    };
    require_same(unopened, "before open()");
    require_same(instance, "after open()");
    comm.run(comm.barrier());
    require_same(instance, "after an operation");
    require(!instance.api<zr_communicator_api>().mem_alloc == !instance.api<zr_communicator_api>().mem_free,
            "only one of mem_alloc and mem_free is NULL");
  });
  TestHost host;
  Instance instance(test, host);
  if (const zr_comm_caps caps = caps_of(instance); caps.flags & ZR_COMM_STREAMS)
    test.remark(concat("not checked here: mem_alloc() on a device, and submit() with a stream, which need ",
                       text_of_device_types(caps.device_types)));
}

// Runs the cases of the capabilities that `change` accepts and adapts.
void check_cases(Case& test, const std::vector<int>& worlds, const CaseOptions& options,
                 const std::function<bool(const zr_comm_caps&, CollectiveCase&)>& change, const char* missing) {
  on_comms(test, worlds, [&](OpenComm& comm, Instance& instance) {
    const zr_comm_caps caps = caps_of(instance);
    CaseOptions own = options;
    if (!own.exact) own.exact = !(caps.flags & ZR_COMM_RANK_ORDERED);
    own.seed = test.seed() % 100003;
    bool any = false;
    for (CollectiveCase one : all_cases(caps, comm.world())) {
      if (!change(caps, one)) continue;
      any = true;
      test.note(one.text());
      check_case(comm, one, own);
      ++own.seed;
    }
    if (!any) skip(missing);
  });
}

constexpr auto kAll = [](const zr_comm_caps&, CollectiveCase&) { return true; };

void results_are_right(Case& test) { check_cases(test, {1, 2, 3, 4}, {}, kAll, "it has no collectives"); }

void results_are_right_in_place(Case& test) {
  check_cases(
      test, {1, 2, 3}, {},
      [](const zr_comm_caps&, CollectiveCase& one) {
        one.in_place = true;
        return one.op != ZR_ALL_TO_ALL;
      },
      "it has no collectives");
}

void writes_only_its_views(Case& test) {
  check_cases(test, {3}, {.checks_source = true}, kAll, "it has no collectives");
}

void adds_in_rank_order(Case& test) {
  check_cases(
      test, {2, 3, 4}, {.exact = false},
      [](const zr_comm_caps& caps, const CollectiveCase& one) {
        return (caps.flags & ZR_COMM_RANK_ORDERED) && is_reduction(one.op);
      },
      "it does not announce ZR_COMM_RANK_ORDERED");
}

void accumulates(Case& test) {
  check_cases(
      test, {1, 2, 3}, {},
      [](const zr_comm_caps& caps, CollectiveCase& one) {
        one.flags = ZR_COLL_ACCUMULATE;
        return (caps.flags & ZR_COMM_ACCUMULATE) && is_reduction(one.op);
      },
      "it does not announce ZR_COMM_ACCUMULATE");
}

void upcasts(Case& test) {
  check_cases(
      test, {1, 2, 3}, {.exact = false},
      [](const zr_comm_caps& caps, CollectiveCase& one) {
        one.dst = ZR_F32;
        return (caps.flags & ZR_COMM_UPCAST) && is_reduction(one.op) && (one.src == ZR_BF16 || one.src == ZR_F16);
      },
      "it does not announce ZR_COMM_UPCAST");
}

void results_with_completions(Case& test) {
  check_cases(test, {2, 3}, {.completion = true}, kAll, "it has no collectives");
}

void memory_is_zeroed_and_aligned(Case& test) {
  on_comms(test, {2}, [&](OpenComm& comm, Instance& instance) {
    const auto& api = comm.api();
    if (!api.mem_alloc) skip("it has no mem_alloc");
    std::vector<zr_view> views;
    // Every rank allocates memory of its own sizes, and another number of times.
    for (int round = 0; round < 3 + comm.rank(); ++round)
      for (const uint64_t align : {0u, 64u, 256u, 4096u}) {
        const uint64_t bytes = 1 + static_cast<uint64_t>(round * 7001 + comm.rank() * 13);
        zr_view view{};
        must("mem_alloc()", [&](zr_error* error) { return api.mem_alloc(comm.comm(), bytes, align, 0, &view, error); });
        require(view.data && view.dtype == ZR_U8 && view.count >= static_cast<int64_t>(bytes) && view.flags == 0 &&
                    view.device.type == ZR_DEVICE_CPU,
                "mem_alloc() returned no U8 view of ", bytes, " bytes of CPU memory");
        require(reinterpret_cast<uintptr_t>(view.data) % std::max<uint64_t>(align, 64) == 0,
                "memory of mem_alloc() is not aligned to ", std::max<uint64_t>(align, 64), " bytes");
        for (uint64_t i = 0; i < bytes; ++i)
          require(static_cast<const char*>(view.data)[i] == 0, "memory of mem_alloc() is not zeroed");
        std::memset(view.data, 0x6b, bytes);
        views.push_back(view);
        if (views.size() % 3 == 0) {
          call_void("mem_free()", [&] { api.mem_free(comm.comm(), &views.front()); });
          views.erase(views.begin());
        }
      }
    for (const zr_view& view : views) call_void("mem_free()", [&] { api.mem_free(comm.comm(), &view); });
    static_cast<void>(instance);
  });
}

void results_in_allocated_memory(Case& test) {
  on_comms(test, {2, 3}, [&](OpenComm& comm, Instance& instance) {
    const auto& api = comm.api();
    if (!api.mem_alloc) skip("it has no mem_alloc");
    std::vector<zr_view> views;
    CaseOptions options;
    options.seed = test.seed() % 100003;
    options.allocate = [&](int64_t bytes) {
      zr_view& view = views.emplace_back();
      must("mem_alloc()", [&](zr_error* error) {
        return api.mem_alloc(comm.comm(), static_cast<uint64_t>(bytes), 64, 0, &view, error);
      });
      return static_cast<char*>(view.data);
    };
    for (CollectiveCase one : all_cases(caps_of(instance), comm.world())) {
      if (one.src != ZR_F32 && one.src != ZR_U8 && one.src != ZR_BF16) continue;
      for (const bool in_place : {false, true}) {
        one.in_place = in_place && one.op != ZR_ALL_TO_ALL;
        test.note(one.text(), ", in memory of mem_alloc()");
        check_case(comm, one, options);
        comm.run(comm.barrier());  // peers may still read this rank's memory
        for (const zr_view& view : views) api.mem_free(comm.comm(), &view);
        views.clear();
        ++options.seed;
      }
    }
  });
}

constexpr Rule kRules[] = {
    {"ZR-C01", "communicator", "caps() is valid before open(), has CPU memory and all_gather of bytes, and stays.",
     capabilities_are_valid},
    {"ZR-C02", "communicator", "Every announced operation gives the right result, for no, one, odd and many elements.",
     results_are_right},
    {"ZR-C03", "communicator", "The same holds for operations in place.", results_are_right_in_place},
    {"ZR-C04", "communicator", "An operation writes its dst and nothing else.", writes_only_its_views},
    {"ZR-C05", "communicator", "With ZR_COMM_RANK_ORDERED, sums are added in rank order.", adds_in_rank_order},
    {"ZR-C06", "communicator", "With ZR_COMM_ACCUMULATE, ZR_COLL_ACCUMULATE adds to the content of dst.", accumulates},
    {"ZR-C07", "communicator", "With ZR_COMM_UPCAST, bf16 and fp16 are reduced to fp32.", upcasts},
    {"ZR-C08", "communicator", "Submitted with a completion, every operation gives the right result.",
     results_with_completions},
    {"ZR-C09", "communicator", "mem_alloc() gives zeroed, aligned memory, and ranks need not call it equally often.",
     memory_is_zeroed_and_aligned},
    {"ZR-C10", "communicator", "Operations on memory of mem_alloc() give the right result.",
     results_in_allocated_memory},
};

}  // namespace

std::span<const Rule> communicator_rules() { return kRules; }

}  // namespace zr::conform

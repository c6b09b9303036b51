// ZR-C11 to C23: completions, abort, close, several communicators, optional functions.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>

#include "conform/communicator_run.hpp"
#include "conform/rule.hpp"
#include "zr/abi/communicator_extensions.h"
#include "zr/names.hpp"

namespace zr::conform {

namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kPeerIsLate = std::chrono::milliseconds(1200);
constexpr double kAtOnceSeconds = 0.8, kAbortSeconds = 5;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

// Memory and arguments of an all-gather of bytes.
struct Gather {
  Gather(int rank, int world, int64_t count = 1000)
      : src(static_cast<std::size_t>(count), static_cast<char>(rank + 1)),
        dst(static_cast<std::size_t>(count * world), 0),
        count(count),
        world(world) {}
  zr_coll coll() { return all_gather_of(src.data(), count, dst.data(), world, ZR_U8); }
  bool is_right() const {
    for (std::size_t i = 0; i < dst.size(); ++i)
      if (dst[i] != static_cast<char>(i / static_cast<std::size_t>(count) + 1)) return false;
    return true;
  }
  std::string src, dst;
  int64_t count;
  int world;
};

void completes_in_order(Case& test) {
  on_comms(test, {2, 3}, [&](OpenComm& comm, Instance&) {
    constexpr std::size_t kNumber = 12;
    std::vector<std::unique_ptr<Gather>> gathers;
    std::vector<Completion*> completions;
    for (std::size_t i = 0; i < kNumber; ++i) {
      gathers.push_back(std::make_unique<Gather>(comm.rank(), comm.world(), 1 + static_cast<int64_t>(i % 4) * 4000));
      completions.push_back(&comm.host().new_completion());
      const Answer answer = comm.submit(gathers.back()->coll(), completions.back());
      if (answer.code == ZR_UNSUPPORTED) skip("submit() does not support completions: ", answer.text);
      require(answer.ok(), "submit() with a completion ", answer.said());
    }
    test.note("waiting for ", kNumber, " completions");
    for (const auto deadline = Clock::now() + std::chrono::seconds(10); !completions.back()->is_resolved();) {
      comm.progress();
      // From the last to the first: one that is resolved later than a successor is seen.
      bool later_is_resolved = false;
      for (std::size_t i = kNumber; i-- > 0;) {
        const bool resolved = completions[i]->is_resolved();
        require(resolved || !later_is_resolved, "completion ", i, " is resolved after a later one");
        later_is_resolved |= resolved;
      }
      require(Clock::now() < deadline, "a completion is never resolved");
    }
    for (const auto& gather : gathers)
      require(gather->is_right(), "an operation is resolved before its dst is written");
    comm.run(comm.barrier());
    ::usleep(20000);
    for (const Completion* completion : completions) {
      require(completion->code() == ZR_OK, "a completion was resolved with ", code_text(completion->code()));
      require(completion->times_resolved() == 1, "a completion was resolved ", completion->times_resolved(), " times");
    }
  });
}

void async_submit_does_not_wait(Case& test) {
  on_comms(test, {2}, [&](OpenComm& comm, Instance& instance) {
    if (!(caps_of(instance).flags & ZR_COMM_ASYNC)) skip("it does not announce ZR_COMM_ASYNC");
    comm.run(comm.barrier());
    if (comm.rank() == 1) std::this_thread::sleep_for(kPeerIsLate);
    const auto begin = Clock::now();
    Gather gather(comm.rank(), comm.world());
    Completion& done = comm.host().new_completion();
    const Answer answer = comm.submit(gather.coll(), &done);
    require(answer.ok(), "submit() with a completion ", answer.said());
    require(seconds_since(begin) < kAtOnceSeconds, "submit() with a completion waits for a peer");
    comm.finish(done);
  });
}

void progress_does_not_wait(Case& test) {
  on_comms(test, {2}, [&](OpenComm& comm, Instance& instance) {
    if (!comm.api().progress) skip("progress is NULL");
    if (!(caps_of(instance).flags & ZR_COMM_ASYNC)) skip("it does not announce ZR_COMM_ASYNC");
    comm.run(comm.barrier());
    if (comm.rank() == 1) std::this_thread::sleep_for(kPeerIsLate);
    Gather gather(comm.rank(), comm.world());
    Completion& done = comm.host().new_completion();
    require(comm.submit(gather.coll(), &done).ok(), "submit() with a completion fails");
    const auto begin = Clock::now();
    comm.progress();
    require(seconds_since(begin) < kAtOnceSeconds, "progress() waits for a peer");
    comm.finish(done);
  });
}

// Rank 0 waits in `wait`, in which no peer takes part, until another thread calls abort().
void check_abort(Case& test, const char* what, const std::function<zr_coll(OpenComm&, Gather&)>& wait) {
  on_comms(test, {2}, [&](OpenComm& comm, Instance&) {
    comm.run(comm.barrier());
    if (comm.rank() == 0) {
      test.note("abort() while ", what, " waits");
      Gather gather(0, 2);
      const zr_coll coll = wait(comm, gather);
      std::thread aborts([&] {
        ::usleep(100000);
        comm.api().abort(comm.comm());
      });
      const Answer answer = comm.submit(coll);
      aborts.join();
      require(answer.code == ZR_CANCELLED, "after abort(), ", what, " ", answer.said(), "; expected ZR_CANCELLED");
      const auto begin = Clock::now();
      const Answer later = comm.submit(comm.barrier());
      require(later.code == ZR_CANCELLED, "a call after abort() ", later.said(), "; expected ZR_CANCELLED");
      require(seconds_since(begin) < kAbortSeconds, "a call after abort() waits");
      comm.host().options().store->put("aborted", "yes");
    } else {
      std::string value;
      require(comm.host().options().store->get("aborted", std::chrono::seconds(8), value),
              "abort() does not end the wait of ", what);
    }
  });
}

void abort_ends_waits(Case& test) {
  check_abort(test, "barrier", [](OpenComm& comm, Gather&) { return comm.barrier(); });
  check_abort(test, "all_gather", [](OpenComm&, Gather& gather) { return gather.coll(); });
}

void close_resolves_all(Case& test) {
  on_comms(test, {2}, [&](OpenComm& comm, Instance&) {
    comm.run(comm.barrier());
    if (comm.rank() == 0) {
      Gather first(0, 2), second(0, 2);
      Completion &one = comm.host().new_completion(), &two = comm.host().new_completion();
      std::vector<Completion*> accepted;
      std::thread aborts([&] {  // submit() may wait for its peer
        ::usleep(300000);
        comm.api().abort(comm.comm());
      });
      if (comm.submit(first.coll(), &one).ok()) accepted.push_back(&one);
      if (comm.submit(second.coll(), &two).ok()) accepted.push_back(&two);
      const bool waited = accepted.empty();
      aborts.join();
      test.note("close() with open completions");
      comm.close();
      for (const Completion* completion : accepted) {
        require(completion->is_resolved(), "close() returned, but a completion is not resolved");
        require(completion->code() == ZR_CANCELLED, "a completion that was open in close() was resolved with ",
                code_text(completion->code()), "; expected ZR_CANCELLED");
      }
      ::usleep(50000);
      for (const Completion* completion : accepted)
        require(completion->times_resolved() == 1, "a completion was resolved after close()");
      comm.host().options().store->put("closed", "yes");
      if (waited) skip("submit() with a completion waits for its peers");
    } else {
      std::string value;
      comm.host().options().store->get("closed", std::chrono::seconds(8), value);
    }
    call_void("close(NULL)", [&] { comm.api().close(nullptr); });
  });
}

// An all-gather of each communicator, submitted in this order and then completed together.
void gather_at_once(Case& test, const std::vector<OpenComm*>& comms, const std::vector<int64_t>& elements) {
  std::vector<std::unique_ptr<Gather>> gathers;
  std::vector<Completion*> completions;
  for (std::size_t i = 0; i < comms.size(); ++i) {
    OpenComm& comm = *comms[i];
    gathers.push_back(std::make_unique<Gather>(comm.rank(), comm.world(), elements[i]));
    completions.push_back(&comm.host().new_completion());
    const Answer answer = comm.submit(gathers.back()->coll(), completions.back());
    if (answer.code == ZR_UNSUPPORTED) skip("submit() does not support completions: ", answer.text);
    require(answer.ok(), "submit() with a completion ", answer.said());
  }
  test.note("three communicators at once");
  for (const auto deadline = Clock::now() + std::chrono::seconds(10);
       std::any_of(completions.begin(), completions.end(), [](Completion* one) { return !one->is_resolved(); });) {
    for (OpenComm* comm : comms) comm->progress();
    require(Clock::now() < deadline, "operations of three communicators at once do not end");
  }
  for (const auto& gather : gathers)
    require(gather->is_right(), "operations of three communicators at once give a wrong result");
}

void two_communicators(Case& test) {
  on_comms(test, {2, 3}, [&](OpenComm& first, Instance& instance) {
    OpenComm second(instance);
    TestHost other_host(instance.host().options());
    Instance other(test, other_host);
    OpenComm third(other);
    std::vector<OpenComm*> comms{&first, &second, &third};
    std::vector<int64_t> elements{100, 700, 700};
    const int turn = caps_of(instance).flags & ZR_COMM_ASYNC ? 1 : 0;  // ranks may use them in different orders
    std::rotate(comms.begin(), comms.begin() + turn * (first.rank() % 3), comms.end());
    std::rotate(elements.begin(), elements.begin() + turn * (first.rank() % 3), elements.end());
    for (int round = 0; round < 5; ++round) {
      gather_at_once(test, comms, elements);
      std::rotate(comms.begin(), comms.begin() + turn, comms.end());
      std::rotate(elements.begin(), elements.begin() + turn, elements.end());
    }
    third.close();
    Gather after(first.rank(), first.world());
    first.run(after.coll());
    require(after.is_right(), "after another communicator was closed, an operation gives a wrong result");
    first.run(first.barrier());
    second.close();
  });
}

void opened_again(Case& test) {
  on_comms(test, {2}, [&](OpenComm& first, Instance& instance) {
    first.run(first.barrier());
    first.close();
    for (int round = 0; round < 4; ++round) {
      test.note("opening communicator ", round + 2);
      OpenComm again(instance);
      Gather gather(again.rank(), again.world());
      again.run(gather.coll());
      require(gather.is_right(), "communicator ", round + 2, " of an instance gives a wrong result");
    }
  });
}

void mismatch_is_an_error_or_ignored(Case& test) {
  on_comms(test, {2}, [&](OpenComm& comm, Instance&) {
    comm.run(comm.barrier());
    test.note("ranks with different fingerprints");
    const Answer answer = comm.submit(comm.barrier(100 + static_cast<uint64_t>(comm.rank())));
    require(answer.ok() || answer.code == ZR_MISMATCH, "ranks with different fingerprints: submit() ", answer.said(),
            "; expected ZR_OK or ZR_MISMATCH");
    require(answer.ok() || !answer.text.empty(), "submit() returned ZR_MISMATCH without a text");
  });
}

void messages_match(Case& test) {
  on_comms(test, {2, 3}, [&](OpenComm& comm, Instance& instance) {
    const zr_comm_caps caps = caps_of(instance);
    if (!has(caps.ops, ZR_SEND) || !has(caps.ops, ZR_RECV)) skip("it has neither send nor recv");
    std::vector<std::string> memory;
    memory.reserve(32);
    const auto message = [&](uint32_t op, int peer, int tag, char content, std::size_t bytes) {
      std::string& data = memory.emplace_back(bytes, content);
      zr_coll coll{};
      coll.size = sizeof coll;
      coll.op = op;
      coll.peer = peer;
      coll.tag = tag;
      (op == ZR_SEND ? coll.src : coll.dst) = view_of(data.data(), static_cast<int64_t>(bytes), ZR_U8);
      const Answer answer = comm.submit(coll);
      require(answer.ok(), name_of_op(op), " ", answer.said());
      return data;
    };
    test.note("send and recv");
    if (comm.rank() == 0) {
      for (const std::size_t bytes : {std::size_t{1}, std::size_t{100000}}) {
        message(ZR_SEND, 1, 5, 'a', bytes);
        message(ZR_SEND, 1, 5, 'b', bytes);
      }
    } else if (comm.rank() == 1) {
      for (const std::size_t bytes : {std::size_t{1}, std::size_t{100000}})
        for (const char expected : {'a', 'b'})
          require(message(ZR_RECV, 0, 5, '?', bytes) == std::string(bytes, expected),
                  "messages with equal tags do not match in order");
    }
    comm.run(comm.barrier());
  });
}

void keys_begin_with_the_prefix(Case& test) {
  on_comms(test, {2}, [&](OpenComm& comm, Instance&) {
    comm.run(comm.barrier());
    for (const std::string& key : comm.host().options().store->keys())
      require(key.rfind(comm.prefix(), 0) == 0, "the key '", key, "' does not begin with the store_prefix '",
              comm.prefix(), "'");
    comm.run(comm.barrier());
  });
}

void weights_are_shared(Case& test) {
  on_comms(test, {2, 3}, [&](OpenComm& comm, Instance& instance) {
    const auto* api = extension_of<zr_shared_weights_api>(instance, "zr.communicator.shared_weights/1");
    if (!api) skip("it has no extension zr.communicator.shared_weights/1");
    require(api->size >= ZR_SIZE_0_9(zr_shared_weights_api) && api->alloc && api->free, "its table is incomplete");
    for (const uint64_t bytes : {uint64_t{1}, uint64_t{100000}, uint64_t{3} << 20}) {
      void* writer = nullptr;
      const void* reader = nullptr;
      must("alloc()", [&](zr_error* error) { return api->alloc(comm.comm(), bytes, &writer, &reader, error); });
      const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
      require(writer && reader && reinterpret_cast<uintptr_t>(writer) % page == 0 &&
                  reinterpret_cast<uintptr_t>(reader) % page == 0,
              "a mapping of shared weights is NULL, or does not begin at a page boundary");
      const auto* bytes_read = static_cast<const volatile char*>(reader);
      for (uint64_t i = 0; i < bytes; i += 997) require(bytes_read[i] == 0, "shared weights are not zeroed");
      comm.run(comm.barrier());
      const auto n = static_cast<uint64_t>(comm.world()), own = static_cast<uint64_t>(comm.rank());
      for (uint64_t i = bytes * own / n; i < bytes * (own + 1) / n; ++i)
        static_cast<char*>(writer)[i] = static_cast<char>(i * 7 + 1);
      comm.run(comm.barrier());
      for (uint64_t i = 0; i < bytes; ++i)
        require(bytes_read[i] == static_cast<char>(i * 7 + 1), "*reader does not show what a rank wrote");
      comm.run(comm.barrier());
      call_void("free()", [&] { api->free(comm.comm(), writer); });
    }
    call_void("free(NULL)", [&] { api->free(comm.comm(), nullptr); });
  });
}

void plans_its_memory(Case& test) {
  TestHost host;
  Instance instance(test, host);
  const auto* api = extension_of<zr_communicator_plan>(instance, "zr.communicator.plan/1");
  if (!api) skip("it has no extension zr.communicator.plan/1");
  require(api->size >= ZR_SIZE_0_9(zr_communicator_plan) && api->open_bytes, "its table is incomplete");
  const auto open_bytes = [&](int32_t world) {
    uint64_t bytes = 0;
    call_void("open_bytes()", [&] { bytes = api->open_bytes(instance.self(), world); });
    return bytes;
  };
  const uint64_t first = open_bytes(2), more = open_bytes(16), again = open_bytes(2);
  require(first == again, "open_bytes(2) is ", first, ", later ", again);
  require(more < uint64_t{1} << 40, "open_bytes(16) is ", more);
}

void failed_submit_changes_nothing(Case& test) {
  on_comms(test, {2}, [&](OpenComm& comm, Instance& instance) {
    const zr_comm_caps caps = caps_of(instance);
    zr_dtype missing = ZR_NONE;
    for (zr_dtype dtype = ZR_F32; dtype <= ZR_I64; ++dtype)
      if (!has(caps.dtypes, static_cast<uint64_t>(dtype))) missing = dtype;
    if (missing == ZR_NONE) missing = 60;  // of a newer version
    std::string src(800, 's'), dst(1600, 'd');
    zr_coll coll = all_gather_of(src.data(), 100, dst.data(), 2, missing);
    Completion& done = comm.host().new_completion();
    test.note("submit() of a dtype that it does not announce");
    const Answer answer = comm.submit(coll, &done);
    require(!answer.ok(), "submit() of dtype ", missing, ", which caps() does not announce, returns ZR_OK");
    done.forbid();
    require(!answer.text.empty(), "submit() of an unknown dtype ", answer.said(), ", without a text");
    ::usleep(20000);
    require(dst == std::string(1600, 'd'), "submit() failed, but changed dst");
    require(!done.is_resolved(), "submit() failed, but resolved its completion");
  });
}

constexpr Rule kRules[] = {
    {"ZR-C11", "communicator", "Operations complete in the order of submission, and resolve completions exactly once.",
     completes_in_order},
    {"ZR-C12", "communicator", "With ZR_COMM_ASYNC, submit() with a completion does not wait for peers.",
     async_submit_does_not_wait},
    {"ZR-C13", "communicator", "progress() does not wait for peers.", progress_does_not_wait},
    {"ZR-C14", "communicator", "After abort(), calls that wait return ZR_CANCELLED, and so do later ones.",
     abort_ends_waits},
    {"ZR-C15", "communicator", "close() resolves open completions with ZR_CANCELLED, and accepts NULL.",
     close_resolves_all},
    {"ZR-C16", "communicator", "Several communicators of one or two instances work at the same time.",
     two_communicators},
    {"ZR-C17", "communicator", "An instance can open a communicator after it has closed one.", opened_again},
    {"ZR-C18", "communicator", "Different fingerprints give ZR_MISMATCH, or are not compared; no rank waits forever.",
     mismatch_is_an_error_or_ignored},
    {"ZR-C19", "communicator", "Sends and receives with equal tags match in order.", messages_match},
    {"ZR-C20", "communicator", "Keys in the store begin with the store_prefix of open().", keys_begin_with_the_prefix},
    {"ZR-C21", "communicator", "Shared weights are zeroed, and *reader shows what any rank writes.",
     weights_are_shared},
    {"ZR-C22", "communicator", "open_bytes() of zr.communicator.plan/1 opens nothing and does not change.",
     plans_its_memory},
    {"ZR-C23", "communicator", "A submit() that fails has a text, writes nothing, and resolves nothing.",
     failed_submit_changes_nothing},
};

}  // namespace

std::span<const Rule> collective_rules() { return kRules; }

}  // namespace zr::conform

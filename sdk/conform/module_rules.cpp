// ZR-L11 and up: the life of instances. ZR-H..: structs of other versions, services that are absent.
#include <dirent.h>
#include <malloc.h>
#include <unistd.h>

#include <array>
#include <string>

#include "conform/library.hpp"
#include "conform/rule.hpp"
#include "conform/use.hpp"

namespace zr::conform {

namespace {

constexpr std::array kServices{"zr.host.config/1", "zr.host.async/1", "zr.host.memory/1", "zr.host.tasks/1",
                               "zr.host.store/1",  "zr.host.job/1",   "zr.host.machine/1"};

void instance_is_created(Case& test) {
  TestHost host;
  Instance instance(test, host);
  instance.destroy();
  call_void("destroy(NULL)", [&] { instance.component().destroy(nullptr); });
  instance.check_host();
}

void startup_may_be_repeated(Case& test) {
  const zr_module& module = *test.library().module();
  if (!module.startup && !module.shutdown) skip("the module has neither startup nor shutdown");
  const zr_component& component = test.library().component(test.role(), test.id());
  TestHost host;
  ConfigTable& table = host.new_table(Instance::values_for(test));
  for (int round = 1; round <= 3; ++round) {
    test.note("round ", round);
    if (module.startup) must(concat("startup() of round ", round), module.startup);
    void* self = nullptr;
    const Answer answer = create(component, host, table, &self);
    require(answer.ok() && self, "create() of round ", round, " ", answer.said());
    call_void("destroy()", [&] { component.destroy(self); });
    if (module.shutdown) call_void("shutdown()", module.shutdown);
  }
}

int entries_in(const char* folder) {
  int entries = 0;
  if (DIR* open = ::opendir(folder)) {
    while (::readdir(open)) ++entries;
    ::closedir(open);
  }
  return entries;
}

struct Resources {
  std::size_t heap_bytes = ::mallinfo2().uordblks + ::mallinfo2().hblkhd;
  int descriptors = entries_in("/proc/self/fd"), threads = entries_in("/proc/self/task");
};

// Instances that open communicators or tiers, or are used. Their memory is counted together with that of the checks.
void opening_leaks_nothing(Case& test) {
  constexpr int kRounds = 8;
  as_ranks(test, [&](const HostOptions& options) {
    TestHost host(options);
    const auto round = [&](int n) {
      for (int i = 0; i < n; ++i) {
        Instance instance(test, host);
        use_open_component(test, instance);
        instance.destroy();
      }
    };
    test.note("opening and closing communicators and tiers");
    round(2);  // what is opened once
    const int descriptors = entries_in("/proc/self/fd"), threads = entries_in("/proc/self/task");
    round(kRounds);
    const int left = entries_in("/proc/self/fd") - descriptors;
    require(left < kRounds, kRounds, " instances that were used leave ", left, " file descriptors open");
    for (int tries = 0; entries_in("/proc/self/task") - threads >= kRounds && tries < 100; ++tries) ::usleep(2000);
    const int running = entries_in("/proc/self/task") - threads;
    require(running < kRounds, kRounds, " instances that were used leave ", running, " threads");
  });
}

void creating_leaks_nothing(Case& test) {
  constexpr int kRounds = 200;
  const zr_component& component = test.library().component(test.role(), test.id());
  test.library().start();
  TestHost host;
  ConfigTable& table = host.new_table(Instance::values_for(test));
  const auto round = [&](int n) {
    for (int i = 0; i < n; ++i) {
      void* self = nullptr;
      if (const Answer answer = create(component, host, table, &self); !answer.ok()) fail("create() ", answer.said());
      call_void("destroy()", [&] { component.destroy(self); });
    }
  };
  round(20);  // what is allocated once
  const Resources before;
  round(kRounds);
  const Resources after;
  require(after.descriptors <= before.descriptors, kRounds, " instances leave ", after.descriptors - before.descriptors,
          " file descriptors open");
  require(after.threads <= before.threads, kRounds, " instances leave ", after.threads - before.threads, " threads");
  const auto leaked = static_cast<int64_t>(after.heap_bytes - before.heap_bytes) / kRounds;
  require(leaked < 16, "each create() leaks ", leaked, " bytes");
  require(host.allocated_bytes() == 0, "destroy() left ", host.allocated_bytes(),
          " bytes of zr.host.memory/1 allocated");
  if (const std::string problem = host.problem(); !problem.empty()) fail(problem);
  opening_leaks_nothing(test);
}

void unknown_extension_is_null(Case& test) {
  const zr_component& component = test.library().component(test.role(), test.id());
  if (!component.extension) skip("the component has no function extension()");
  for (const char* id : {"", "zr.conform.unknown/1", "zr.communicator.shared_weights/999", "zr"}) {
    const void* table = nullptr;
    call_void("extension()", [&] { table = component.extension(id); });
    require(!table, "extension(\"", id, "\") returned a table for an unknown id");
  }
}

void two_instances_at_once(Case& test) {
  as_ranks(test, [&](const HostOptions& options) {
    TestHost host(options);
    Instance first(test, host);
    Instance second(test, host);
    use_component(test, first, {});
    first.destroy();
    use_component(test, second, {});
    second.destroy();
    second.check_host();
  });
}

void failed_create_has_a_text(Case& test) {
  TestHost host;
  test.library().start();
  const zr_component& component = test.library().component(test.role(), test.id());
  int marker = 0;
  void* self = &marker;
  const Answer answer = create(component, host, host.new_table({}), &self);  // every key gives ZR_INVALID
  if (answer.ok()) {
    require(self != &marker, "create() returned ZR_OK without an instance");
    skip("create() reads no key that it needs");
  }
  require(!answer.text.empty(), "create() ", answer.said(), ", without a text");
  require(self == &marker, "create() changed *self, although it failed");
}

// ---- versions and services

void longer_structs(Case& test) {
  as_ranks(test, [&](const HostOptions& given) {
    HostOptions options = given;
    const Mode mode{.longer_structs = true};
    options.mode = mode;
    TestHost host(options);
    Instance instance(test, host);
    use_component(test, instance, mode);
    instance.destroy();
    instance.check_host();
  });
}

void arguments_are_not_kept(Case& test) {
  as_ranks(test, [&](const HostOptions& given) {
    HostOptions options = given;
    const Mode mode{.withdraw_arguments = true};
    options.mode = mode;
    TestHost host(options);
    test.note("using arguments that cannot be read after their call");
    Instance instance(test, host);
    use_component(test, instance, mode);
    instance.destroy();
    const std::string problem = host.problem(TestHost::Misuse::argument);
    require(problem.empty(), problem);
  });
}

void absent_services(Case& test) {
  for (const char* service : kServices) {
    test.note("the host does not offer ", service);
    TestHost host({.absent = {service}});
    test.library().start();
    const zr_component& component = test.library().component(test.role(), test.id());
    int marker = 0;
    void* self = &marker;
    const Answer answer = create(component, host, host.new_table(Instance::values_for(test)), &self);
    if (answer.ok()) {
      require(self && self != &marker, "without ", service, ", create() returned ZR_OK without an instance");
      call_void("destroy()", [&] { component.destroy(self); });
    } else {
      require(!answer.text.empty(), "without ", service, ", create() ", answer.said(), ", without a text");
      require(self == &marker, "without ", service, ", create() failed, but changed *self");
    }
    if (const std::string problem = host.problem(); !problem.empty()) fail("without ", service, ": ", problem);
  }
}

void tables_are_not_cached(Case& test) {
  as_ranks(test, [&](const HostOptions& options) {
    TestHost first(options);
    Instance before(test, first);
    use_component(test, before, {});
    before.destroy();
    first.withdraw_tables();
    test.note("using a second host after the first one has ended");
    TestHost second(options);
    Instance after(test, second);
    use_component(test, after, {});
    after.destroy();
    after.check_host();
  });
}

void outputs_have_their_size(Case& test) {
  TestHost host;
  Instance instance(test, host);
  const OutputSize output = output_size(instance, test.role());
  require(output.intact, output.function, " writes beyond the `size` bytes of its output");
}

void outputs_set_their_size(Case& test) {
  TestHost host;
  Instance instance(test, host);
  const OutputSize output = output_size(instance, test.role());
  require(output.size <= output.had, output.function, " sets size to ", output.size, ", but has only ", output.had,
          " bytes");
  require(output.size >= output.least, output.function, " sets size to ", output.size, ", but the struct has ",
          output.least, " bytes in ABI 0.9");
}

void no_exception_escapes(Case& test) {
  as_ranks(test, [&](const HostOptions& options) {
    find_exceptions([&] {
      TestHost host(options);
      Instance instance(test, host);
      test.note("calling every function");
      call_every_function(test, instance);
    });
  });
}

constexpr Rule kRules[] = {
    {"ZR-L11", "", "create() with default values makes an instance; destroy() accepts it, and NULL.",
     instance_is_created, Level::create, true},
    {"ZR-L12", "", "startup() and shutdown() may be called again, after each other.", startup_may_be_repeated},
    {"ZR-L13", "", "create() and destroy() leak no memory, and with open() and close() no file descriptors or threads.",
     creating_leaks_nothing},
    {"ZR-L14", "", "extension() returns NULL for an id that it does not know.", unknown_extension_is_null},
    {"ZR-L15", "", "Two instances of one component work at the same time.", two_instances_at_once},
    {"ZR-L16", "", "A create() that fails has a text and leaves *self unchanged.", failed_create_has_a_text},
    {"ZR-L17", "", "No exception leaves a function of the plug-in.", no_exception_escapes, Level::create},
    {"ZR-H01", "", "Sized structs of a newer host, with unknown members at their end, work as well.", longer_structs},
    {"ZR-H02", "", "Without any one of the services, create() works or fails with a text.", absent_services},
    {"ZR-H03", "", "An instance uses the service tables of its own host, not those of an earlier one.",
     tables_are_not_cached},
    {"ZR-H04", "", "Arguments are not read after the call that got them has returned.", arguments_are_not_kept},
    {"ZR-H05", "", "A function that fills a sized struct writes at most the struct's `size` bytes.",
     outputs_have_their_size},
    {"ZR-H06", "", "A function that fills a sized struct sets its size, to at least that of ABI 0.9.",
     outputs_set_their_size},
};

}  // namespace

std::span<const Rule> module_rules() { return kRules; }

}  // namespace zr::conform

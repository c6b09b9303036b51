// Classes that nearly meet the requirements of the C++ layer do not compile, and the compiler says why in one sentence.
#include <gtest/gtest.h>

#include "support/scratch.hpp"
#include "support/shell.hpp"

namespace zr::testing {
namespace {

constexpr const char* kUpdate = "void update(const zr::Update& u) const { u.weight[0] = 0; }";

// Compiles with the flags of a plain build: g++ -std=c++17 -shared -fPIC.
Outcome compile(const std::string& compiler, const std::string& source) {
  const test::Scratch scratch;
  scratch.write("plugin.cpp", source);
  return shell(compiler + " -std=c++17 -fPIC -Wall -Wextra -Wshadow -fsyntax-only -I" ZR_SOURCE_DIR "/sdk/include " +
               scratch.path("plugin.cpp"));
}
std::string optimizer(const std::string& members) {
  return "#include <mutex>\n#include \"zr/optimizer.hpp\"\nnamespace {\nstruct Mine : zr::Optimizer<Mine> {\n" +
         members + "\n};\n}\nZR_OPTIMIZER(Mine, \"mine\", \"example\", \"1.0\");\n";
}
std::string strategy(const std::string& members) {
  return "#include \"zr/strategy.hpp\"\nnamespace {\nstruct Mine : zr::Strategy<Mine> {\n"
         "void plan(const zr_plan_in&, zr::PlanBuilder&) const {}\n"
         "void bind(const zr_plan_in&, const zr::Binding&) {}\n"
         "zr_view grad_destination(uint32_t, int64_t, const zr_use&) { return {}; }\n"
         "void grad_ready(uint32_t, int64_t, int64_t, const zr_use&) {}\nvoid grads_finish(const zr_use&) {}\n"
         "void updated(const zr_use&) {}\n" +
         members + "\n};\n}\nZR_STRATEGY(Mine, \"mine\", \"example\", \"1.0\");\n";
}
std::string communicator(const std::string& members) {
  return "#include \"zr/communicator.hpp\"\nnamespace {\nstruct Ring {\n" + members +
         "\n};\nstruct Mine : zr::Communicator<Mine, Ring> {\nzr_comm_caps caps() const { return {}; }\n"
         "std::unique_ptr<Ring> open(const zr_comm_open&) { return nullptr; }\n};\n}\n"
         "ZR_COMMUNICATOR(Mine, \"mine\", \"example\", \"1.0\");\n";
}
std::string tier(const std::string& members) {
  return "#include \"zr/offload.hpp\"\nnamespace {\nstruct Mine : zr::Offload<Mine> {\n"
         "zr_offload_caps caps() const { return {}; }\nuint64_t reserve(uint64_t, const char*) { return 0; }\n"
         "void write(const zr_transfer*, uint32_t, zr_stream*, zr_done*) {}\n" +
         members + "\n};\n}\nZR_OFFLOAD(Mine, \"mine\", \"example\", \"1.0\");\n";
}

struct NearMiss {
  std::string source, message;
};
std::vector<NearMiss> optimizers() {
  const std::string update = kUpdate,
                    no_update = "an optimizer has the public method: void update(const zr::Update&) const";
  return {
      {optimizer("void updates(const zr::Update&) const {}"), no_update},
      {optimizer("void update(const zr::Update&) {}"), no_update},
      {optimizer("private: " + update), no_update},
      {optimizer(update + "static constexpr std::array<zr_slot, 1> slots{zr::slot(\"v\")};"), "slots is an array: "},
      {optimizer(update + "static constexpr zr_slot slot[] = {zr::slot(\"v\")};"),
       "the array of an optimizer's states is named `slots`"},
      {optimizer(update + "static constexpr zr_key key[] = {zr::key_bool(\"v\", \"true\", \"a key\")};"),
       "the array of a component's keys is named `keys`"},
      {optimizer(update + "uint32_t n_slots() const { return 1; }"),
       "an optimizer with n_slots() has the array `slots`"},
      {optimizer(update + "~Mine() noexcept(false) {}"), "a destructor must not throw"},
      {optimizer(update + "uint32_t gradients(int64_t) { return 0; }"), "gradients() needs zr/local_gradients.hpp"},
      {optimizer(update + "void bind(int) {}"), "an optimizer with bind() has gradients()"},
      {optimizer(update + "const char* description() const;"), "description is: static constexpr const char* "},
      {optimizer(update + "static constexpr int license = 3;"), "license is: static constexpr const char* license"},
      {optimizer(update + "void save_globals(int) const {}"), "both save_globals and load_global, or neither"},
      {optimizer(update + "void save_globals(int) const {} void load_global(const char*, const void*, uint64_t) {}"),
       "save_globals() needs zr/optimizer_globals.hpp"},
      {optimizer(update + "static const void* extension(const char*) { return nullptr; }"),
       "extension is: static const void* extension(const char* id) noexcept"},
      {optimizer(update + "static const void* extensions(const char*) noexcept { return nullptr; }"),
       "the member is named `extension`"},
      {optimizer(update + "static void start_up() {}"), "the members are named `startup` and `shutdown`"},
      {optimizer(update + "static constexpr const char* licence = \"MIT\";"), "the member is named `license`"},
      {optimizer(update + "void descibe(const zr_param&, zr::Description&) const {}"),
       "the method is named `describe`"},
      {optimizer(update + "static constexpr uint32_t granularty = 1;"), "the member is named `granularity`"},
      {optimizer(update + "void save_global(int) const {}"), "the methods are named `save_globals` and `load_global`"},
      {optimizer(update + "static void shutdown() {}"), "shutdown is: static void shutdown() noexcept"},
      {"#include \"zr/optimizer.hpp\"\nnamespace {\nstruct Mine : zr::Optimizer<Mine> { static void startup() {} " +
           update + " };\n}\nZR_MODULE(\"mine\", \"example\", \"1.0\", zr::component<Mine>(\"mine\", \"1.0\"));\n",
       "startup and shutdown belong to the module: ZR_MODULE_WITH"},
  };
}
std::vector<NearMiss> other_roles() {
  const std::string event = "void event(uint32_t, const zr_use&) {}", abort = "void abort() noexcept {}",
                    submit = "void submit(const zr_coll&, zr_stream*, zr_done*) {}",
                    read = "void read(const zr_transfer*, uint32_t, zr_stream*, zr_done*) {}",
                    release = "void release(uint64_t) noexcept {}";
  return {
      {strategy("void events(uint32_t, const zr_use&) {}"),
       "a strategy has the public method: void event(uint32_t kind, const zr_use&)"},
      {strategy(event + "void release(const uint32_t*, uint32_t, const zr_use&) {}"),
       "a strategy has both acquire and release, or neither"},
      {communicator(submit), "an open communicator has the public method: void abort() noexcept"},
      {communicator(submit + "void abort() {}"), "abort must be noexcept"},
      {communicator(submit + abort + "void mem_free(const zr_view&) noexcept {}"),
       "a communicator has both mem_alloc and mem_free, or neither"},
      {tier(release), "a tier has the public method: void read("},
      {tier(read + "void release(uint64_t) {}"), "release must be noexcept"},
      {tier(read + release + "void unmap(uint64_t) noexcept {}"), "a tier has both map and unmap, or neither"},
  };
}

class NearMissTest : public ::testing::TestWithParam<const char*> {
 protected:
  void expect_rejected(const std::vector<NearMiss>& all) {
    for (const NearMiss& one : all) {
      const Outcome outcome = compile(GetParam(), one.source);
      EXPECT_NE(outcome.code, 0) << one.source;
      EXPECT_NE(outcome.output.find(one.message), std::string::npos) << one.source << outcome.output;
      EXPECT_LE(outcome.lines().size(), 40u) << outcome.output;
    }
  }
};

TEST_P(NearMissTest, SLOW_NamesWhatAnOptimizerLacks) { expect_rejected(optimizers()); }

TEST_P(NearMissTest, NamesWhatOtherRolesLack) { expect_rejected(other_roles()); }

TEST_P(NearMissTest, PointsToCWithoutExceptions) {
  const Outcome outcome = compile(std::string(GetParam()) + " -fno-exceptions", optimizer(kUpdate));
  EXPECT_NE(outcome.code, 0);
  EXPECT_NE(outcome.output.find("needs exceptions; without them, write the plug-in in C"), std::string::npos)
      << outcome.output;
}

// Also outside of an anonymous namespace, without -fvisibility=hidden.
TEST_P(NearMissTest, AcceptsCompleteClassesWithoutWarnings) {
  const std::string update = kUpdate;
  for (const std::string& source :
       {optimizer(update), optimizer(update + "mutable std::mutex mutex;"),
        "#include \"zr/optimizer.hpp\"\nstruct Mine : zr::Optimizer<Mine> {\n"
        "explicit Mine(const zr::Config& c) : rate(c.number(\"rate\")) {}\n" +
            update + "\ndouble rate;\n};\nZR_OPTIMIZER(Mine, \"mine\", \"example\", \"1.0\");\n",
        strategy("void event(uint32_t, const zr_use&) {}"),
        communicator("void submit(const zr_coll&, zr_stream*, zr_done*) {} void abort() noexcept {}"),
        tier("void release(uint64_t) noexcept {} void read(const zr_transfer*, uint32_t, zr_stream*, zr_done*) {}")}) {
    const Outcome outcome = compile(GetParam(), source);
    EXPECT_EQ(outcome.code, 0) << source;
    EXPECT_EQ(outcome.output, "") << source;
  }
}

const auto compiler_of = [](const auto& info) { return info.param[0] == 'g' ? "gcc" : "clang"; };
INSTANTIATE_TEST_SUITE_P(Compilers, NearMissTest, ::testing::Values("g++"), compiler_of);
INSTANTIATE_TEST_SUITE_P(SLOW_Compilers, NearMissTest, ::testing::Values("clang++"), compiler_of);

}  // namespace
}  // namespace zr::testing

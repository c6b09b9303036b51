// The table of the commands that the documentation shows.
#include "golden/documented_commands.hpp"

#include <regex>
#include <sstream>

namespace zr::documented {

namespace {

const std::string kQuick = " {root}/examples/quickstart/quickstart.toml";
const std::string kBrief = " train.steps=2 job.threads=1";
const std::string kSaved = "cp -r {trained}/checkpoints c && ";
Try make(const std::string& target, const std::string& does) {
  return {"make -C {root} -n " + target, does};  // -n: only prints the commands
}
Try overridden(const std::string& overrides) {
  return {"{bin}/zeroth explain {root}/examples/gpt/gpt.toml " + overrides, "command line"};
}
Try in_file(const std::string& file, const std::string& says) { return {"cat {root}/" + file, says}; }
const std::string kPackage = "tests/package/package.cmake";  // is itself a test
// A program with its TOML file, as ./app and job.toml; and a checkpoint of it in the folder `checkpoints`.
const std::string kJob = "cp" + kQuick + " job.toml && ";
const std::string kApp = "cp {bin}/quickstart app && " + kJob;
const std::string kCheckpoint = "cp -r {trained}/* . && ";
// The optimizer of docs/writing-an-optimizer.md, built by the command that docs/writing-a-plugin.md shows.
const std::string kPkgConfig = "$(pkg-config --cflags --libs zeroth-sdk)";
const std::string kGcc = "g++ -std=c++17 -O2 descent.cpp -o zr_optimizer_descent.so " + kPkgConfig;
const std::string kFlags =  // what pkg-config prints, for the sources
    "-I{root}/sdk/include -fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno -shared "
    "-Wl,--version-script={root}/sdk/cmake/zr.map -Wl,--exclude-libs,ALL -Wl,-z,defs -Wl,-z,now";
std::string replaced(std::string text, const std::string& what, const std::string& with) {
  return text.replace(text.find(what), what.size(), with);
}
const std::string kDescent = "cp {descent}/descent.cpp {descent}/zr_optimizer_descent.so . && ";
const std::string kBuildDescent =
    "sed '1,/^`descent.cpp`/d' {root}/docs/writing-an-optimizer.md | sed '1,/^```cpp/d; /^```/,$d' > descent.cpp && " +
    replaced(kGcc, kPkgConfig, kFlags) + " && chmod go-w zr_optimizer_descent.so";
// The strategy of docs/writing-a-strategy.md, which must have the weights of zero1, on several ranks.
const std::string kGccSharded = "g++ -std=c++17 -O2 sharded.cpp -o zr_strategy_acme.sharded.so " + kPkgConfig;
Try as_zero1() {
  const std::string train = "ZR_PLUGIN_PATH=$PWD {bin}/zeroth train" + kQuick + kBrief + " job.ranks=4 ";
  const std::string hash = "grep -h weights_hash runs/*/summary.json | sort -u | wc -l";
  return {
      "sed '1,/`sharded.cpp`/d' {root}/docs/writing-a-strategy.md | sed '1,/^```cpp/d; /^```/,$d' > sharded.cpp && " +
          replaced(kGccSharded, kPkgConfig, kFlags) + " && chmod go-w *.so && {bin}/zeroth conform ./*.so && " + train +
          "job.runs=runs job.name=one strategy=zero1 && " + train +
          "job.runs=runs job.name=own strategy=acme.sharded && echo $(" + hash + ") hash",
      "passed, 0 failed[^]*\\n1 hash"};
}
// Writes a project as the shown command does, builds its plug-in, and leaves the shell in its folder.
std::string project(const std::string& role, const std::string& id, const std::string& folder, bool in_c = false) {
  const std::string file = "build/plugins/zr_" + role + "_" + id + ".so";
  return "{bin}/zeroth new " + std::string(in_c ? "--c " : "") + role + " " + id + " " + folder + " > log && cd " +
         folder + " && umask 022 && mkdir -p build/plugins && " +
         (in_c ? "gcc -std=c11 -O1 plugin.c " : "g++ -std=c++17 -O1 plugin.cpp ") + kFlags + " -o " + file + " && ";
}
const std::string kTrainProject = "ZR_PLUGIN_PATH=$PWD/build/plugins {bin}/zeroth train job.toml" + kBrief;
Try trained(const std::string& role, const std::string& id, const std::string& folder, bool in_c = false) {
  return {project(role, id, folder, in_c) + kTrainProject, "step 2/2"};
}

}  // namespace

const std::map<std::string, std::string> kPrepared{
    {"{trained}",
     kJob + "{bin}/zeroth train job.toml" + kBrief + " checkpoint.dir=checkpoints checkpoint.every=2 > log"},
    {"{descent}", kBuildDescent},
};

const std::map<std::string, Try> kTries{
    {"make", {"make -C {root}", "train +builds what training needs"}},
    {"make setup", make("setup", "\\.ci/setup")},
    {"make build", make("build", "cmake --build build")},
    {"make train", make("train", "cmake --build [^]*build/bin/zeroth train examples/gpt/gpt\\.toml")},
    {"make test", make("test", "cmake --build [^]*\\.ci/test")},
    {"make test-all", make("test-all", "cmake --build [^]*\\.ci/test all")},
    {"make test-hosts", make("test-hosts", "cmake --build [^]*\\.ci/test hosts")},
    // One test of each label that compares golden files.
    {"ZR_UPDATE_GOLDEN=1 ctest --test-dir build -LE 'slow$'",
     {"ctest --test-dir {bin}/.. -N -LE 'slow$' | grep -c -e LayoutTest.MatchesTheGoldenFile "
      "-e PluginTrustTest.RejectsUntrustedFilesWithTheMessagesOfTheGoldenFile -e ConfigErrorsTest.MatchTheGoldenFile "
      "-e JobSecretTest.ErrorsMatchGoldenFile",
      "^4\n"}},
    {"ZR_UPDATE_GOLDEN=1 ctest --test-dir build -R Layout",
     {"ctest --test-dir {bin}/.. -N -R Layout", "Total Tests: [1-9]"}},
    {"cmake --build build && ctest --test-dir build -L unit",
     {"ctest --test-dir {bin}/.. -N -L unit", "Total Tests: [1-9]"}},
    {"ctest --test-dir build -R NAME --output-on-failure",
     {"ctest --test-dir {bin}/.. -N -R Readme --output-on-failure", "Total Tests: [1-9]"}},
    {"build/tests/engine_test --rank EngineTest.EvaluationPreservesRandomState tests/multirank/parity/parity.toml",
     {"{bin}/../tests/engine_test --rank EngineTest.EvaluationPreservesRandomState "
      "{root}/tests/multirank/parity/parity.toml && grep -c . runs/parity/metrics.jsonl",
      "^1\n"}},
    {"cmake --install build --component sdk --prefix DIR", in_file(kPackage, "--component sdk --prefix")},
    {"make matrix", make("matrix", "cmake --build [^]*build/tests/parity_matrix")},
    {"make faults", make("faults", "tests/faults/faults\\.py")},
    {"make bench", make("bench", "ZR_BENCHMARKS=ON[^]*\\.ci/bench")},
    {"make peers", make("peers", "cmake --build [^]*\\.ci/peers")},
    {"make peers HOSTS=2", make("peers HOSTS=2", "\\.ci/peers --hosts 2")},
    {"make gpu", make("gpu", "gpu_collectives gpu_largest[^]*tests/gpu/pack build/gpu && build/gpu/run all")},
    {"make format", make("format", "clang-format -i")},
    {"make lint", make("lint", "run-clang-tidy-19")},
    {"make train ARGS=\"strategy=zero0 train.steps=200\"",
     make("train ARGS=\"strategy=zero0 train.steps=200\"", "gpt\\.toml strategy=zero0 train\\.steps=200")},
    {"make train ARGS=\"train.dtype=bf16 job.name=bf16\"", overridden("train.dtype=bf16 job.name=bf16")},
    {"cmake --preset asan && cmake --build --preset asan && ctest --preset asan",
     {"cd {root} && cmake --list-presets=all .", "\"asan\"[^]*\"asan\"[^]*\"asan\""}},
    {"cmake --preset tsan && cmake --build --preset tsan && ctest --preset tsan",
     {"cd {root} && cmake --list-presets=all .", "\"tsan\"[^]*\"tsan\"[^]*\"tsan\""}},
    {"cmake --preset release && cmake --build --preset release",
     {"cd {root} && cmake --list-presets=all .", "\"release\"[^]*\"release\""}},
    {"cmake --install build --prefix DIR", in_file(kPackage, "--install \\$\\{BUILD\\} --prefix")},
    {"cmake -S examples/quickstart -B /tmp/quickstart -DCMAKE_PREFIX_PATH=DIR -DTORCH_ROOT=/path/to/libtorch",
     in_file(kPackage,
             "-DCMAKE_PREFIX_PATH=[^]*-DTORCH_ROOT=\\$\\{SCRATCH\\}/torch -S "
             "\\$\\{prefix\\}/share/zeroth/examples/quickstart -B")},
    {"cmake --build /tmp/quickstart", in_file(kPackage, "--build \\$\\{SCRATCH\\}/quickstart")},
    {"./app job.toml", {"cp {bin}/quickstart app && cp" + kQuick + " job.toml && ./app job.toml" + kBrief}},
    {"zeroth launch -n 4 -- ./app job.toml",
     {"cp {bin}/quickstart app && cp" + kQuick + " job.toml && {bin}/zeroth launch -n 4 -- ./app job.toml" + kBrief +
          " && cat runs/job/summary.json",
      "\"ranks\": 4"}},
    {"zeroth train FILE [key=value ...]", {"{bin}/zeroth train" + kQuick + kBrief, "step 2/2"}},
    {"zeroth train --resume FILE",
     {"for i in 2 4; do {bin}/zeroth train --resume" + kQuick +
          " train.steps=$i job.threads=1 checkpoint.dir=c checkpoint.every=2; done",
      "step 2 loaded[^]*step 4/4"}},
    {"zeroth new ROLE ID DIR",
     {"{bin}/zeroth new optimizer acme.lion lion && ls lion", "lion; its README\\.md[^]*plugin\\.cpp"}},
    {"zeroth verify DIR", {kSaved + "{bin}/zeroth verify c && {bin}/zeroth show c", "step-00000002: intact, step 2"}},
    {"zeroth export DIR OUT.safetensors",
     {kSaved + "{bin}/zeroth export c out.safetensors --dtype bf16 && head -c 200 out.safetensors",
      "\"dtype\":\"BF16\""}},
    {"make fuzz", make("fuzz", "fsanitize=fuzzer")},
    {"zeroth plan FILE", {"{bin}/zeroth plan" + kQuick, "plan: zero1 \\+ adamw: .* bytes of rank 0"}},
    {"zeroth plan --params 7.5e9 --ranks 64 --compare",
     {"{bin}/zeroth plan --params 7.5e9 --ranks 64 --compare", "zero3 [^]*activations \\(unknown"}},
    {"zeroth tune --path FOLDER",
     {"ZR_MACHINE_PROFILE=machine.json {bin}/zeroth tune --path . --seconds 1 --bytes 32MiB", "chosen[^]*stored in"}},
    {"zeroth explain FILE", {"{bin}/zeroth explain" + kQuick, "steps +500 .*quickstart\\.toml:\\d+.*optimizer steps"}},
    {"zeroth explain FILE train.gradient_clipping",
     {"{bin}/zeroth explain" + kQuick + " train.gradient_clipping", "range +at least 0[^]*default +0\\.0"}},
    {"zeroth completion bash", {"{bin}/zeroth completion bash", "complete -F _zeroth zeroth"}},
    {"zeroth plugins [FILE.so]",
     {"{bin}/zeroth plugins && {bin}/zeroth plugins {bin}/../plugins/zr_strategy_zero1.so",
      "looked in [^]*strategy 'zero1'"}},
    {"zeroth doctor [FILE]",
     {"{bin}/zeroth doctor" + kQuick + " || test $? = 3", "quickstart\\.toml: valid for[^]*strategy 'zero1': loads"}},
    {"zeroth doctor job.toml",
     {kJob + "{bin}/zeroth doctor job.toml || test $? = 3", "job\\.toml: valid for [^]*folder of the run"}},
    {"build/bin/zeroth doctor", {"{bin}/zeroth doctor || test $? = 3", "strategy 'zero1': loads[^]*io_uring: "}},
    {"zeroth conform FILE.so", {"{bin}/zeroth conform {bin}/../plugins/zr_offload_cpu.so", "passed, 0 failed"}},
    {"zeroth conform build/plugins/zr_optimizer_descent.so",
     {kDescent + "{bin}/zeroth conform ./zr_optimizer_descent.so", "passed, 0 failed"}},
    {"zeroth-conform build/plugins/zr_optimizer_descent.so",
     {kDescent + "{bin}/zeroth-conform ./zr_optimizer_descent.so", "passed, 0 failed"}},
    {"zeroth explain examples/gpt/gpt.toml", {"{bin}/zeroth explain {root}/examples/gpt/gpt.toml", "learning rate"}},
    {"build/bin/zeroth train examples/quickstart/quickstart.toml",
     {"{bin}/zeroth train" + kQuick + kBrief, "step 2/2"}},
    {"build/bin/zeroth train examples/quickstart/quickstart.toml strategy=zero0 job.ranks=4",
     {"{bin}/zeroth train" + kQuick + " strategy=zero0 job.ranks=4" + kBrief, "step 2/2"}},
    {"build/bin/zeroth launch -n 2 -- build/bin/quickstart examples/quickstart/quickstart.toml",
     {"{bin}/zeroth launch -n 2 -- {bin}/quickstart" + kQuick + " train.steps=100", "step 100 loss"}},
    {"build/bin/zeroth train examples/torchscript/torchscript.toml",
     {"{bin}/zeroth train {root}/examples/torchscript/torchscript.toml train.steps=100", "step 100 loss 0\\.5"}},
    {"build/bin/gpt", {"ZR_REQUEST=schema {bin}/gpt", "zeroth_schema"}},
    {"build/bin/gpt_plain", {"OMP_NUM_THREADS=1 {bin}/gpt_plain --layers 1 --steps 1 --sample 0", "step 1 loss \\d"}},
    // docs/
    {"zeroth show DIR", {kCheckpoint + "{bin}/zeroth show checkpoints", "step-00000002[^]*exp_avg"}},
    {"zeroth export checkpoints weights.safetensors --dtype bf16",
     {kCheckpoint +
          "{bin}/zeroth export checkpoints weights.safetensors --dtype bf16 && head -c 200 weights.safetensors",
      "\"dtype\":\"BF16\""}},
    {"zeroth export DIR OUT",
     {kCheckpoint + "{bin}/zeroth export checkpoints out && ls out",
      "model-00001-of-00001\\.safetensors\nmodel\\.safetensors\\.index\\.json"}},
    {"zeroth export DIR OUT.safetensors --dtype fp32",
     {kCheckpoint + "{bin}/zeroth export checkpoints out.safetensors --dtype fp32 && head -c 200 out.safetensors",
      "\"dtype\":\"F32\""}},
    {"zeroth train job.toml", {kJob + "{bin}/zeroth train job.toml" + kBrief, "step 2/2"}},
    {"zeroth train job.toml train.steps=10",
     {kJob + "{bin}/zeroth train job.toml train.steps=10 job.threads=1", "step 10/10"}},
    {"zeroth train job.toml job.ranks=4",
     {kJob + "{bin}/zeroth train job.toml job.ranks=4" + kBrief + " && cat runs/job/summary.json", "\"ranks\": 4"}},
    {"zeroth train --resume job.toml",
     {kCheckpoint + "{bin}/zeroth train --resume job.toml train.steps=4 job.threads=1 checkpoint.dir=checkpoints",
      "step 2 loaded[^]*step 4/4"}},
    {"zeroth launch -n N -- PROGRAM", {kApp + "{bin}/zeroth launch -n 2 -- ./app job.toml" + kBrief}},
    {"zeroth launch -n 2 -- ./app",
     in_file("tests/multirank/engine/configuration_test.cpp", "zr::Program\\(config\\)")},
    {"zeroth launch -n 2 -- python train.py",
     in_file("tests/python/programs_test.py", "test_every_launcher_gives_the_same_bits")},
    {"torchrun --nproc-per-node 2 train.py",
     in_file("tests/python/programs_test.py", "test_every_launcher_gives_the_same_bits")},
    {"zeroth launch --hosts node01:4,node02:4 -- ./app job.toml communicator=auto",
     in_file("tests/multirank/comm/mpi_training_test.cpp", "TEST\\(CommMpiHostsTest, TrainTheBitsOfOneHost\\)")},
    {"mpirun -n 4 ./app job.toml",
     {kApp +
          "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 mpirun.openmpi --oversubscribe -n 4 ./app "
          "job.toml" +
          kBrief + " && cat runs/job/summary.json",
      "\"ranks\": 4"}},
    {"mpirun -n 4 zeroth train job.toml",
     in_file("tests/multirank/comm/mpi_losses_test.cpp",
             "TEST_F\\(ZerothTrainUnderMpirunTest, SLOW_RanksOfMpirunAreTheRanksOfTheJob\\)")},
    {"mpirun --bind-to none -n 1 zeroth train job.toml",
     in_file("tests/multirank/comm/mpi_losses_test.cpp",
             "TEST_F\\(ZerothTrainUnderMpirunTest, SLOW_OneProcessStartsTheRanksItself\\)")},
    {"mpirun --bind-to none -H node01:4,node02:4 -x ZR_STORE=node01:29600 ./app job.toml communicator=auto",
     in_file("tests/multirank/comm/mpi_training_test.cpp", "TEST\\(CommMpiHostsTest, TrainTheBitsOfOneHost\\)")},
    {"torchrun --nproc-per-node 4 --no-python ./app job.toml",
     in_file("tests/multirank/launch/join_test.cpp", "TEST\\(Torchrun, RanksTrainAndExit\\)")},
    {"zeroth explain job.toml", {kJob + "{bin}/zeroth explain job.toml", "steps +500 .*job\\.toml:\\d+"}},
    {"zeroth explain job.toml train.gradient_clipping",
     {kJob + "{bin}/zeroth explain job.toml train.gradient_clipping", "range +at least 0[^]*default +0\\.0"}},
    {"zeroth plan job.toml", {kJob + "{bin}/zeroth plan job.toml", "plan: zero1 \\+ adamw: .* bytes of rank 0"}},
    {"zeroth plan --params 1e9 --ranks 8 --dtype bf16 --compare",
     {"{bin}/zeroth plan --params 1e9 --ranks 8 --dtype bf16 --compare", "zero3 [^]*2\\.5 +42\\.0"}},
    {"zeroth plan --params 1e9 --ranks 8 --compare",
     {"{bin}/zeroth plan --params 1e9 --ranks 8 --compare",
      "zero0 .* 16\\.2 +56\\.0\n +zero1 .* 9\\.1 +56\\.0\n +zero2 .* 5\\.7 +56\\.0\n +zero3 .* 2\\.4 +84\\.0\n"}},
    {"zeroth plan FILE --hosts 16x8 --link 10Gbit",
     {"{bin}/zeroth plan --hosts 16x8 --link 10Gbit communicator=auto" + kQuick,
      "16 hosts with 8 ranks each: zero1, mpi"}},
    {"zeroth plan --params 1e9 --hosts 4x8 --dtype bf16 --link 25Gbit strategy=zero3",
     {"{bin}/zeroth plan --params 1e9 --hosts 4x8 --dtype bf16 --link 25Gbit strategy=zero3",
      "4 hosts with 8 ranks each: zero3, mpi[^]*gradients, weights = \"int8\""}},
    {"zeroth plan --params 1e9 --ranks 8 --dtype bf16 strategy=zero3",
     {"{bin}/zeroth plan --params 1e9 --ranks 8 --dtype bf16 strategy=zero3", "plan: zero3 \\+ adamw"}},
    {"zeroth plan --safetensors model.safetensors --ranks 16 --compare",
     {kCheckpoint + "{bin}/zeroth export checkpoints model.safetensors > log && "
                    "{bin}/zeroth plan --safetensors model.safetensors --ranks 16 --compare",
      "16 ranks[^]*zero3 "}},
    {"zeroth tune --path /mnt/disk job.toml",
     {kJob + "ZR_MACHINE_PROFILE=machine.json {bin}/zeroth tune --path . job.toml --seconds 1 --bytes 32MiB",
      "chosen[^]*stored in"}},
    {"source <(zeroth completion bash)",
     {"bash -c 'PATH={bin}:$PATH; source <(zeroth completion bash); complete -p zeroth'", "-F _zeroth zeroth"}},
    {"apt-get install git make g++ python3-pip",
     in_file(".github/workflows/ci.yml", "apt-get install [^\n]* git make g\\+\\+ python3-pip\n")},
    {"make train TORCH_ROOT=/path/to/libtorch",
     make("train TORCH_ROOT=/path/to/libtorch", "-DTORCH_ROOT=\"/path/to/libtorch\"")},
    {"ZR_NO_APT=1 make train", in_file(".ci/setup", "ZR_NO_APT is set: not installing")},
    {"make train CONFIG=job.toml", make("train CONFIG=job.toml", "build/bin/zeroth train job\\.toml")},
    {"cmake --install build --prefix $HOME/zeroth", in_file(kPackage, "--install \\$\\{BUILD\\} --prefix")},
    {"cmake -S . -B build -DCMAKE_PREFIX_PATH=$HOME/zeroth -DTORCH_ROOT=/path/to/libtorch",
     in_file(kPackage, "\\$\\{project\\} -DTORCH_ROOT=\\$\\{SCRATCH\\}/torch -S \\$\\{page\\} -B")},
    {"cmake --build build && cp build/app .", in_file(kPackage, "--build \\$\\{page\\}/build")},
    {"$HOME/zeroth/bin/zeroth train job.toml", in_file(kPackage, "/bin/zeroth train \\$\\{page\\}/job\\.toml")},
    {"make docs", make("docs", "\\.ci/setup docs[^]*\\.ci/docs")},
    {"pkg-config --cflags --libs zeroth-sdk", in_file(kPackage, "\\$\\{pc\\} --cflags --libs zeroth-sdk")},
    {"pkg-config --cflags --libs zeroth",
     in_file(kPackage, "--define-variable=torch_root=\\$\\{TORCH\\} --cflags --libs zeroth")},
    {"export ZR_PLUGIN_PATH=$PWD/build/plugins",
     in_file("tests/package/plugins.cmake", "ZR_PLUGIN_PATH=\\$\\{lion\\}/plugins")},
    {"zeroth train job.toml optimizer.use=lion optimizer.lr=1e-4",
     in_file("tests/package/plugins.cmake", "/bin/zeroth train [^]*optimizer\\.use=lion")},
    {"cmake -S . -B build -DCMAKE_PREFIX_PATH=DIR && cmake --build build",
     in_file(kPackage, "-DCMAKE_PREFIX_PATH=\\$\\{SCRATCH\\}/sdk -S \\$\\{page\\} -B \\$\\{page\\}/build")},
    {kGcc, {kDescent + "ls", "zr_optimizer_descent\\.so"}},
    {kGccSharded, as_zero1()},
    {"chmod go-w zr_optimizer_descent.so", {kDescent + "stat -c %A zr_optimizer_descent.so", "^-....-..-"}},
    {"zeroth new optimizer acme.lion lion", trained("optimizer", "acme.lion", "lion")},
    {"zeroth new --c optimizer acme.lion lion", trained("optimizer", "acme.lion", "lion", true)},
    {"zeroth new strategy acme.even even", trained("strategy", "acme.even", "even")},
    {"zeroth new --c strategy acme.even even", trained("strategy", "acme.even", "even", true)},
    {"zeroth new communicator acme.sockets sockets", trained("communicator", "acme.sockets", "sockets")},
    {"zeroth new --c communicator acme.sockets sockets", trained("communicator", "acme.sockets", "sockets", true)},
    {"zeroth new offload acme.heap heap", trained("offload", "acme.heap", "heap")},
    {"zeroth new --c offload acme.heap heap", trained("offload", "acme.heap", "heap", true)},
    {"zeroth plugins build/plugins/zr_optimizer_acme.lion.so",
     {project("optimizer", "acme.lion", "lion") + "{bin}/zeroth plugins build/plugins/zr_optimizer_acme.lion.so",
      "optimizer 'acme.lion'[^]*momentum"}},
    {"ZR_PLUGIN_PATH=$PWD/build/plugins zeroth train job.toml", trained("optimizer", "acme.lion", "lion")},
    {"export ZR_PLUGIN_PATH=/absolute/path/build/plugins",
     {kDescent + "export ZR_PLUGIN_PATH=$PWD && {bin}/zeroth train" + kQuick + kBrief + " optimizer=descent",
      "zero1 \\+ descent[^]*step 2/2"}},
    {"make fuzz SECONDS=600", make("fuzz SECONDS=600", "-max_total_time=600")},
    {"cmake --preset release && cmake --build --preset release && cmake --install build/release --prefix DIR",
     {"cd {root} && cmake --list-presets=all . && grep binaryDir CMakePresets.json",
      "\"release\"[^]*\"release\"[^]*build/\\$\\{presetName\\}"}},
};

// Commands that no test can run, and why.
const std::map<std::string, std::string> kNotTried{
    {"make wheel", "builds everything again; Python.SLOW_WheelTrains runs it"},
    {"zeroth train job.toml job.device=NAME job.device_library=PATH",
     "needs a backend; DeviceTest has the simulated one"},
    {"ZR_PARITY_DEVICE=NAME ZR_PARITY_LIBRARY=PATH build/tests/parity_matrix bf16-adamw",
     "needs a backend; DeviceParityTest has the simulated one"},
    {"srun -n 4 ./app job.toml", "needs a Slurm cluster; SrunTest starts one"},
    {"srun --nodes=2 --ntasks-per-node=4 --mpi=pmix ./app job.toml communicator=auto", "as above, of two nodes"},
    {"srun --mpi=pmix", "as above, of two nodes"},
    {"srun --mpi=list", "needs a Slurm cluster"},
    {"srun --mpi=pmi2", "needs a Slurm cluster; SrunTest runs it"},
    {"srun --distribution=arbitrary", "needs a Slurm cluster; SrunTest runs it"},
    {"export ZR_TOKEN=$(openssl rand -hex 16)", "needs openssl; SrunTest sets a token"},
    {"zeroth launch --hosts $(scontrol show hostnames | sed 's/$/:4/' | paste -sd,) -- ./app job.toml",
     "needs an allocation of Slurm; SrunTest runs it in a batch script"},
    {"docker build -t zeroth . && docker run --rm zeroth", "needs Docker, and downloads a system"},
    {"docker run --rm zeroth make test", "needs Docker, and downloads a system"},
    {"git diff vPREVIOUS -- sdk/include/zr/abi", "needs the tag of a release"},
    {"git tag -s vX.Y.Z -m \"Zeroth X.Y.Z\"", "publishes a release"},
    {"git push origin main vX.Y.Z", "publishes a release"},
};

namespace {

std::string trimmed(std::string text) {
  text.erase(0, text.find_first_not_of(' '));
  text.erase(text.find_last_not_of(' ') + 1);
  return text;
}

bool is_command(const std::string& text) {
  static const std::regex begins(
      R"(^(make|cmake|ctest|git|apt-get|zeroth|torchrun|mpirun|srun|docker|g\+\+|pkg-config|source|export)( |$))"
      R"(|^ZR_\w+=\S+ (make|ctest|zeroth)( |$)|^\$HOME/\S+ |^(\./\w+|build/(bin|tests)/\w+)( |$))");
  return std::regex_search(text, begins);
}

// A command without its explanation, which two spaces separate.
std::string command_in(const std::string& line) {
  std::string text = trimmed(line);
  if (const auto end = text.find("  "); end != text.npos) text.resize(end);
  return text;
}

// True for text that names a program, or a command of zeroth, without arguments.
bool is_mention(const std::string& text) {
  static const std::regex bare(
      "zeroth( \\w+)?|git|apt-get|cmake|ctest|make|torchrun|mpirun|srun|zeroth COMMAND --help");
  return std::regex_match(text, bare);
}

}  // namespace

std::vector<std::string> commands_of(const std::string& text, bool every_line) {
  std::vector<std::string> all;
  std::istringstream lines(text);
  std::string fence;
  bool in_fence = false, after_blank = true, in_block = false;
  for (std::string line; std::getline(lines, line);) {
    if (const std::string start = trimmed(line); start.rfind("```", 0) == 0) {
      in_fence = !in_fence;
      fence = start.substr(3);
      continue;
    }
    const bool indented = line.rfind("    ", 0) == 0, blank = trimmed(line).empty();
    in_block = indented && (after_blank || in_block) && !in_fence;
    after_blank = blank;
    const bool shell = in_fence && (fence == "sh" || fence == "bash" || fence == "console");
    if ((in_block && every_line) || shell || (indented && !in_fence && is_command(command_in(line)))) {
      std::string command = command_in(line);
      for (std::string more; !command.empty() && command.back() == '\\' && std::getline(lines, more);)
        command = command.substr(0, command.size() - 1) + command_in(more);
      all.push_back(command);
      continue;
    }
    static const std::regex quoted("`([^`]+)`");
    for (std::sregex_iterator at(line.begin(), line.end(), quoted), none; !in_fence && at != none; ++at)
      if (is_command((*at)[1]) && !(every_line && is_mention((*at)[1]))) all.push_back((*at)[1]);
  }
  return all;
}

}  // namespace zr::documented

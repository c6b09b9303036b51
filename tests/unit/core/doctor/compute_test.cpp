#include "doctor/compute.hpp"

#include <gtest/gtest.h>

#include "support/environment_variable.hpp"
#include "support/scratch.hpp"
#include "unit/core/doctor/text.hpp"

namespace zr::host::doctor {
namespace {

TEST(DoctorCoresTest, ReportsTheCoresThatThisProcessMayUse) {
  EXPECT_EQ(lines_of(core_checks({8, 8}, {})), "ok cores/cores: 8 cores\n");
  EXPECT_EQ(lines_of(core_checks({8, 2}, {})), "ok cores/cores: 2 of 8 cores (CPU affinity)\n");
  EXPECT_EQ(lines_of(core_checks({1, 1}, {})), "ok cores/cores: 1 core\n");
}

TEST(DoctorCoresTest, WarnsAboutAQuotaBelowTheCores) {
  EXPECT_EQ(lines_of(core_checks({8, 8, 2.5, "/sys/fs/cgroup/x"}, {})),
            "ok cores/cores: 8 cores, and the time of 2.5 of them (quota of control group /sys/fs/cgroup/x)\n");
  EXPECT_EQ(
      lines_of(core_checks({8, 8, 2.5, "/sys/fs/cgroup/x"}, {.threads = 8})),
      "warning cores/cores: 8 cores, and the time of 2.5 of them (quota of control group /sys/fs/cgroup/x); a job "
      "of 1 rank starts 8 threads, which will wait for each other\n"
      "  fix: zeroth train FILE.toml job.threads=2\n");
  EXPECT_EQ(
      lines_of(core_checks({8, 8, 0.5, "/sys/fs/cgroup"}, {.file = "my job.toml", .ranks = 2})),
      "warning cores/cores: 8 cores, and the time of 0.5 of them (quota of control group /sys/fs/cgroup); the job "
      "starts 2 ranks, which will wait for each other\n"
      "  fix: zeroth train 'my job.toml' job.ranks=1\n");
  EXPECT_EQ(lines_of(core_checks({8, 8, 8, "/sys/fs/cgroup"}, {})),
            "ok cores/cores: 8 cores, and the time of 8 of them (quota of control group /sys/fs/cgroup)\n");
}

TEST(DoctorCoresTest, AcceptsHalfACoreForOneThread) {
  EXPECT_EQ(core_checks({1, 1, 0.5, "/sys/fs/cgroup"}, {}).front().verdict, Verdict::ok);
}

TEST(DoctorCoresTest, WarnsAboutMoreRanksOrThreadsThanCores) {
  EXPECT_EQ(lines_of(core_checks({4, 4}, {.file = "a.toml", .ranks = 6})),
            "warning cores/cores: 4 cores; the job starts 6 ranks, which will wait for each other\n"
            "  fix: zeroth train a.toml job.ranks=4\n");
  EXPECT_EQ(lines_of(core_checks({4, 4}, {.file = "a.toml", .ranks = 2, .threads = 4})),
            "warning cores/cores: 4 cores; a job of 2 ranks starts 8 threads, which will wait for each other\n"
            "  fix: zeroth train a.toml job.threads=2\n");
  EXPECT_EQ(core_checks({4, 4}, {.file = "a.toml", .ranks = 4}).front().verdict, Verdict::ok);
}

TEST(DoctorCoresTest, ReadsTheSmallestQuotaOfBothVersionsOfControlGroups) {
  const test::Scratch root;
  const std::string path = root.folder().string();
  EXPECT_EQ(core_facts(path).quota, -1);
  root.write("proc/self/cgroup", "0::/a/b\n");
  root.write("sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
  root.write("sys/fs/cgroup/a/cpu.max", "150000 100000\n");
  EXPECT_EQ(core_facts(path).quota, 1.5);
  EXPECT_EQ(core_facts(path).group, "/sys/fs/cgroup/a");
  root.write("proc/self/cgroup", "3:cpu,cpuacct:/c\n2:cpuset:/c\n");
  root.write("sys/fs/cgroup/cpu,cpuacct/c/cpu.cfs_quota_us", "50000\n");
  root.write("sys/fs/cgroup/cpu,cpuacct/c/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(core_facts(path).quota, 0.5);
  root.write("sys/fs/cgroup/cpu,cpuacct/c/cpu.cfs_quota_us", "-1\n");
  EXPECT_EQ(core_facts(path).quota, -1);
}

TEST(DoctorProcessorTest, NamesTheKernelsThatRun) {
  EXPECT_EQ(lines_of(cpu_checks({"AMD EPYC", "x86_64", "AVX2"})),
            "ok cores/processor: AMD EPYC (x86_64); kernels use AVX2\n");
  EXPECT_EQ(lines_of(cpu_checks({"", "aarch64", "portable"})),
            "ok cores/processor: unknown model (aarch64); kernels use no vector extension\n");
}

TEST(DoctorProcessorTest, ReportsTheVariableThatLimitsThem) {
  EXPECT_EQ(
      lines_of(cpu_checks({"AMD EPYC", "x86_64", "AVX-512", "avx2"})),
      "warning cores/processor: AMD EPYC (x86_64); kernels use AVX-512; the environment variable ZR_ISA limits them "
      "to avx2\n  fix: unset ZR_ISA\n");
  EXPECT_EQ(
      lines_of(cpu_checks({"AMD EPYC", "x86_64", "AVX2", "sse"})),
      "problem cores/processor: AMD EPYC (x86_64); kernels use AVX2; the environment variable ZR_ISA is \"sse\", not "
      "portable, avx2 or avx512\n  fix: unset ZR_ISA\n");
  EXPECT_EQ(cpu_checks({"", "x86_64", "AVX2", "avx512"}).front().verdict, Verdict::ok);
}

TEST(DoctorDevicesTest, SaysPlainlyThatThereAreNone) {
  EXPECT_EQ(lines_of(device_checks({})), "ok devices/devices: no NVIDIA device; jobs train on CPU cores\n");
}

TEST(DoctorDevicesTest, ChecksTheDeviceOfTheJob) {
  const auto of = [](const std::string& device, const std::string& library, const DeviceFacts& facts) {
    JobNeeds needs;
    needs.device = device;
    needs.device_library = library;
    return lines_of({device_checks(facts, needs).back()});
  };
  const DeviceFacts gpu{{"/dev/nvidia0"}, {}, "550.54", "/usr/lib64/libcuda.so.1"};
  EXPECT_EQ(of("cuda", "", gpu), "ok devices/device of the job: job.device = \"cuda\"\n");
  EXPECT_EQ(of("cuda:1", "", {}),
            "problem devices/device of the job: job.device = \"cuda:1\"; this machine has no NVIDIA device, or no "
            "driver: install it, or set job.device = \"cpu\"\n");
  EXPECT_EQ(of("cuda", "", {{"/dev/nvidia0"}, {}, "550.54", ""}),
            "problem devices/device of the job: job.device = \"cuda\"; libcuda.so.1 was not found: install the "
            "user-space part of the NVIDIA driver\n");
  DeviceFacts facts = gpu;
  facts.torch_folder = "/opt/libtorch/lib";
  EXPECT_EQ(of("cuda", "", facts),
            "problem devices/device of the job: job.device = \"cuda\"; this libtorch was built for the CPU only, "
            "/opt/libtorch/lib has no libtorch_cuda.so: use one that was built for CUDA, or set job.device = "
            "\"cpu\"\n");
  facts.torch_has_cuda = true;
  EXPECT_EQ(of("cuda", "", facts), "ok devices/device of the job: job.device = \"cuda\"\n");
  facts.torch_cuda = 13;
  EXPECT_EQ(of("cuda", "", facts),
            "warning devices/device of the job: job.device = \"cuda\"; the NVIDIA driver 550.54 is too old for the "
            "CUDA 13 of this libtorch, which needs driver 580 or newer: update it, install NVIDIA's package "
            "cuda-compat, or use a libtorch for an older CUDA\n");
  facts.torch_cuda = 12;
  EXPECT_EQ(of("cuda", "", facts), "ok devices/device of the job: job.device = \"cuda\"\n");
  EXPECT_EQ(of("npu", "/none/such.so", {}),
            "problem devices/device of the job: job.device = \"npu\", with the library /none/such.so, which does not "
            "exist; correct job.device_library\n");
  EXPECT_EQ(of("npu", "/dev/null", {}),
            "ok devices/device of the job: job.device = \"npu\", with the library /dev/null\n");
  EXPECT_EQ(device_checks({}, {}).size(), 1u);
}

TEST(DoctorDevicesTest, ReportsTheVariableThatHidesAllDevicesFromTheJob) {
  DeviceFacts facts{{"/dev/nvidia0", "/dev/nvidia1"}, {}, "550.54", "/usr/lib64/libcuda.so.1"};
  JobNeeds needs;
  needs.device = "cuda";
  const auto of = [&](const char* value) {
    facts.visible = value;
    return lines_of({device_checks(facts, needs).back()});
  };
  const auto hidden = [](const std::string& value) {
    return "problem devices/device of the job: job.device = \"cuda\"; the environment variable CUDA_VISIBLE_DEVICES is "
           "\"" +
           value + "\", which hides all devices\n  fix: unset CUDA_VISIBLE_DEVICES\n";
  };
  for (const char* const value : {"", " ", "-1", "-1,0", "2", "NoDevFiles"}) EXPECT_EQ(of(value), hidden(value));
  for (const char* const value : {"0", "1,0", " 1", "0,-1", "GPU-8932f937", "MIG-7b5f2c"})
    EXPECT_EQ(of(value), "ok devices/device of the job: job.device = \"cuda\"\n") << value;
  facts.in_slurm_job = true;
  EXPECT_EQ(
      of(""),
      "problem devices/device of the job: job.device = \"cuda\"; the environment variable CUDA_VISIBLE_DEVICES is "
      "\"\", which hides all devices; Slurm sets it to the GPUs of the job's allocation: request one, with srun "
      "--gres=gpu:1 or --gpus=1\n");
  needs.device = "";  // of another job it is the program's own matter
  EXPECT_EQ(of("").find("CUDA_VISIBLE_DEVICES"), std::string::npos);
}

TEST(DoctorDevicesTest, ReadsCudaVisibleDevices) {
  const test::EnvironmentVariable variable("CUDA_VISIBLE_DEVICES");
  variable.set("");
  EXPECT_EQ(device_facts().visible, "");
  variable.unset();
  EXPECT_EQ(device_facts().visible, std::nullopt);
}

TEST(DoctorDevicesTest, ReadsWhetherItRunsInASlurmJob) {
  const test::EnvironmentVariable variable("SLURM_JOB_ID");
  variable.set("7");
  EXPECT_TRUE(device_facts().in_slurm_job);
  variable.unset();
  EXPECT_FALSE(device_facts().in_slurm_job);
}

TEST(DoctorDevicesTest, FindsTheCudaOfLibtorch) {
  const test::Scratch root;
  root.write("torch/lib/libtorch_cpu.so", "");
  root.write("torch/version.py", "import os\n__version__ = '2.11.0+cu130'\n");
  const std::string libtorch = root.folder().string() + "/torch/lib/libtorch_cpu.so";
  EXPECT_EQ(device_facts("", libtorch).torch_cuda, 13);
  EXPECT_FALSE(device_facts("", libtorch).torch_has_cuda);
  root.write("torch/lib/libtorch_cuda.so", "");
  EXPECT_TRUE(device_facts("", libtorch).torch_has_cuda);
  root.write("torch/build-version", "2.6.0+cu118\n");
  EXPECT_EQ(device_facts("", libtorch).torch_cuda, 11);
  root.write("torch/build-version", "2.6.0+cpu\n");
  root.write("torch/version.py", "__version__ = '2.6.0+cpu'\n");
  EXPECT_EQ(device_facts("", libtorch).torch_cuda, 0);
}

TEST(DoctorDevicesTest, FindsDevicesDriverAndLibrary) {
  const test::Scratch root;
  for (const char* name : {"dev/nvidia0", "dev/nvidia1", "dev/nvidiactl", "dev/nvidia-uvm"}) root.write(name, "");
  root.write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar\nGCC\n");
  const DeviceFacts facts = device_facts(root.folder().string());
  EXPECT_EQ(
      lines_of(device_checks(facts)),
      "ok devices/devices: 2 NVIDIA devices (/dev/nvidia0, /dev/nvidia1), driver 550.54.15; job.device = \"cuda\" "
      "trains "
      "on them\n"
      "warning devices/driver library: libcuda.so.1 was not found, so programs cannot use the device; install the "
      "user-space part of the NVIDIA driver, or start the container with its GPUs\n");
  root.write("usr/lib64/libcuda.so.1", "");
  EXPECT_EQ(device_checks(device_facts(root.folder().string())).size(), 1u);
  EXPECT_EQ(lines_of(device_checks({{"/dev/nvidia0"}, {"/dev/nvidia0"}, "550.54", "/usr/lib64/libcuda.so.1"})),
            "ok devices/devices: 1 NVIDIA device (/dev/nvidia0), driver 550.54; job.device = \"cuda\" trains on it\n"
            "warning devices/access: this user cannot open /dev/nvidia0\n  fix: sudo chmod a+rw /dev/nvidia0\n");
}

}  // namespace
}  // namespace zr::host::doctor

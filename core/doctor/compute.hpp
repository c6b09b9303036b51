// Cores, instruction sets and devices.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "doctor/check.hpp"
#include "doctor/needs.hpp"

namespace zr::host::doctor {

/// The cores that this process may use.
struct CoreFacts {
  int online = 1;       // of the machine
  int usable = 1;       // by the CPU affinity of this process
  double quota = -1;    // of the control groups, in cores; -1: no limit
  std::string group{};  // the control group with that quota
};
/// Reads the affinity, and the quota of the control groups below `root`.
CoreFacts core_facts(const std::string& root = "");
/// One line: the cores, and whether the job has more ranks or threads than cores.
Checks core_checks(const CoreFacts& facts, const JobNeeds& needs);

/// The processor.
struct CpuFacts {
  std::string model;           // "AMD EPYC 7763"; "" if unknown
  std::string machine;         // "x86_64"
  std::string widest;          // instruction set of the widest kernels that it can run: "AVX-512", "AVX2" or "portable"
  std::string isa_variable{};  // of ZR_ISA; "" if it is not set
};
/// Reads /proc/cpuinfo and the flags of the processor.
CpuFacts cpu_facts(const std::string& root = "");
/// One line: which of the kernels, which are compiled per instruction set, run here.
Checks cpu_checks(const CpuFacts& facts);

/// NVIDIA devices and what their users need.
struct DeviceFacts {
  std::vector<std::string> devices{};    // "/dev/nvidia0"
  std::vector<std::string> closed{};     // those that this user cannot open
  std::string driver{};                  // version of the kernel module; "" if it is not loaded
  std::string libcuda{};                 // path of libcuda.so.1; "" if it was not found
  std::string torch_folder{};            // of the libtorch that libzeroth.so uses; "" if it is not known
  bool torch_has_cuda = false;           // that folder has libtorch_cuda.so
  int torch_cuda = 0;                    // major version of the CUDA that libtorch was built with; 0 if unknown
  std::optional<std::string> visible{};  // CUDA_VISIBLE_DEVICES, if it is set
  bool in_slurm_job = false;             // Slurm sets that variable to the GPUs of its allocation
};
/// Looks for devices, the driver and its library; loads nothing. libtorch: path of libtorch_cpu.so; "" if unknown.
DeviceFacts device_facts(const std::string& root = "", const std::string& libtorch = "");
/// One line about the devices; more for devices that cannot be used, and for those that the job needs. A job finds out
/// itself whether libtorch can use its device.
Checks device_checks(const DeviceFacts& facts, const JobNeeds& needs = {});

}  // namespace zr::host::doctor

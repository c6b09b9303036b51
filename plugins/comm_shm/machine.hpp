// What identifies the machine and the container of a process.
#pragma once

#include <string>

namespace shm {

/// Each of these is "unknown" if the system does not tell. [any]
std::string host_name();
std::string boot_id();        // of the running kernel
std::string pid_namespace();  // processes in other ones cannot open each other's memory

/// "" if the system does not tell. [any]
std::string network_namespace();

}  // namespace shm

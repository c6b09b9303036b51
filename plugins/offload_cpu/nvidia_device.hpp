#pragma once

namespace cpu {

/// Whether `folder` has the file of an NVIDIA device: "nvidia" and a number, which in a container need not be 0.
bool has_nvidia_device(const char* folder = "/dev");

}  // namespace cpu

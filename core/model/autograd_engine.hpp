// libtorch's autograd engine, with saved-tensor hooks from SavedTensorScope and threads for every device.
#pragma once

namespace zr::host::model {

/// From now on, backward runs on an autograd engine that takes the hooks for saved tensors from SavedTensorScope and is
/// otherwise libtorch's. It has threads for the devices that libtorch knows at the first call. Idempotent. No backward
/// may run on another thread at the first call.
void install_autograd_engine();
/// Installs the engine and starts its threads for the devices that libtorch knows now. Call it once, when the backend
/// of a device has been loaded, while no backward runs.
void start_autograd_threads();

}  // namespace zr::host::model

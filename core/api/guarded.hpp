// What zr::guarded needs to know about the process.
#pragma once

namespace zr {

/// After a failure, zr::guarded's process, if it exits with another code than 0, then ends without exit handlers and
/// destructors of static objects: those of the device's library may wait for streams that never continue. Any thread.
void note_device_in_use();

}  // namespace zr

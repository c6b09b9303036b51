// Whether the process is exiting.
#pragma once

namespace zr::host {

/// True after note_process_exit(). [any]
bool process_exits();
/// Call it in the first function that the C library calls when the process exits. [any]
void note_process_exit();

}  // namespace zr::host

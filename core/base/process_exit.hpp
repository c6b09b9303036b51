// Whether the process is exiting or has failed, and how to end it.
#pragma once

namespace zr::host {

/// True after note_process_exit(). [any]
bool process_exits();
/// Call it in the first function that the C library calls when the process exits. [any]
void note_process_exit();

/// True after note_failure(): zr::report_failure() was called. [any]
bool has_failed();
void note_failure();

/// zr::note_interrupt(): the user wants this process to stop waiting. Also in a signal handler. [any]
void note_interrupt();
/// Whether it was called since the last take_interrupt(), which forgets it. [any]
bool take_interrupt();

using ExitFunction = void (*)(int exit_code);
/// Sets the function that ends this process with the given exit code, for another thread while the program's thread
/// computes or blocks. Returns the previous one. Null, the initial value: the process cannot be ended. [any]
ExitFunction set_exit_function(ExitFunction end);
/// The current one. [any]
ExitFunction exit_function();

/// Call it if a file of the job could not be written at a place that cannot throw: zr::guarded() then returns 3 instead
/// of 0. [any]
void note_unwritten_file();
/// Whether it was called since the last take_unwritten_file(), which forgets it. [any]
bool has_unwritten_file();
bool take_unwritten_file();

}  // namespace zr::host

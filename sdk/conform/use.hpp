// A short use of a component, as the engine uses it: for rules that apply to every role.
#pragma once

#include <functional>

#include "conform/library.hpp"

namespace zr::conform {

/// Uses the instance: an update, a step, some collectives or some transfers. Fails if a call fails. `mode`: of the
/// arguments; the mode of services is that of the instance's host.
void use_component(Case& test, Instance& instance, const Mode& mode);
/// Each uses an instance of one role, and fails if a call fails.
void use_optimizer(Instance& instance, const Mode& mode);
void use_strategy(Instance& instance, const Mode& mode);
void use_communicator(Instance& instance, const Mode& mode);
void use_offload(Instance& instance, const Mode& mode);

/// Opens a communicator of the instance and closes it, or uses an instance of another role; calls `check` while the
/// communicator, the tier or the strategy is open.
void use_open_component(Case& test, Instance& instance, const std::function<void()>& check = {});

/// What the function that describes a component did with its output.
struct OutputSize {
  std::string function;    // "caps()"
  bool intact;             // it wrote within the `size` bytes that it got
  uint32_t size;           // as it set it
  std::size_t had, least;  // bytes of the output, and of the struct in ABI 0.9
};
/// Calls the function that describes the component; fails if the call fails.
OutputSize output_size(Instance& instance, const std::string& role);

/// Calls fn. Ignores what it throws, except an EscapedException.
void find_exceptions(const std::function<void()>& fn);
/// Uses the instance and calls the functions that use_component() does not call. Failures other than exceptions that
/// leave a function of the plug-in are ignored: they are the subjects of other rules.
void call_every_function(Case& test, Instance& instance);

/// Runs `body` as the ranks of a job: in two processes for a communicator, else in this one. `options` has rank, world
/// and store.
void as_ranks(Case& test, const std::function<void(const HostOptions& options)>& body);

}  // namespace zr::conform

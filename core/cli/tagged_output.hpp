// Splits the output of `mpirun --tag-output` into that of the ranks and mpirun's own.
#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace zr::host::cli {

/// Takes the bytes of one stream of mpirun: "[1,3]<stdout>:" begins each part of rank 3's output, a line or less. What
/// follows the end of a line without a tag is mpirun's own. Not thread-safe.
class TaggedOutput {
 public:
  /// `rank`: -1 for mpirun itself, whose lines are complete. `error`: the rank wrote it to stderr.
  using Sink = std::function<void(int rank, bool error, std::string_view text)>;
  explicit TaggedOutput(Sink sink) : sink_(std::move(sink)) {}

  /// Calls the sink for what is complete.
  void bytes(std::string_view text);
  /// The stream has ended: calls the sink for what is left.
  void end();

 private:
  void pass(std::string_view text);
  void end_own_line();

  const Sink sink_;
  std::string maybe_tag_;  // what may be the begin of a tag
  std::string own_line_;   // an unfinished line of mpirun
  int rank_ = -1;
  bool error_ = false;
};

}  // namespace zr::host::cli

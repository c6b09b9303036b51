// Splits the output of `mpirun --tag-output` (OpenMPI 4) into that of the ranks and mpirun's own.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

namespace zr::host::cli {

/// Takes one stream of mpirun in packets (ProcessOptions::packets). mpirun writes each part of a rank's output at once:
/// every line of the part begins with a tag such as "[1,3]<stdout>:", and its last line may be unfinished. So only the
/// begin of a packet or of a line can be a tag, and the same text elsewhere is the program's. A line without a tag is
/// mpirun's own. Not thread-safe.
class TaggedOutput {
 public:
  /// `rank`: -1 for mpirun itself, whose lines are complete. `error`: the rank wrote it to stderr.
  using Sink = std::function<void(int rank, bool error, std::string_view text)>;
  /// max_packet: packet_bytes(). A packet of this size may be continued by the next one.
  TaggedOutput(std::size_t max_packet, Sink sink) : max_packet_(max_packet), sink_(std::move(sink)) {}

  /// Calls the sink for what is complete.
  void packet(std::string_view text);
  /// The stream has ended: calls the sink for what is left.
  void end();

 private:
  std::string_view begin_line(std::string_view text, bool continues);
  void pass(std::string_view part);
  void end_own_line();

  const std::size_t max_packet_;
  const Sink sink_;
  bool may_continue_ = false;  // the last packet had the maximum size
  bool line_ended_ = true;     // its last line is complete
  std::string maybe_tag_;      // its end, which may be the begin of a tag
  std::string own_line_;       // an unfinished line of mpirun
  int rank_ = -1;
  bool error_ = false;
};

}  // namespace zr::host::cli

// The messages of the control plane: length (4 bytes, little endian), type (1 byte), body.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "control/control.hpp"

namespace zr::host::control::protocol {

enum class Type : uint8_t {
  // To the store:
  join_request = 1,  // JoinRequest
  put,               // key, value
  get,               // id, key
  heartbeat,         // Heartbeat, every 200 ms
  final_status,      // Heartbeat: the final status of a rank, its answer to failure_notice
  report,            // text: what a rank observed; makes the job fail
  drop,              // key; the store removes the key and its value
  // From the store:
  welcome = 65,    // empty
  reject,          // exit code (0: another address may have the right store), text
  start,           // Start: all ranks have joined
  value,           // id, value
  pong,            // answers a heartbeat: for how many ms the most silent rank has sent none
  failure_notice,  // headline: the job has failed
  failure_report,  // text
  goodbye,         // Heartbeat of the rank that runs the store: it leaves normally
  stop,            // number of a signal: save a checkpoint and end, as after that signal
};

inline constexpr std::string_view kProtocolName = "zeroth-control/4";
inline constexpr uint32_t kHeaderBytes = 5;
inline constexpr uint32_t kMaxJoinRequestBytes = 4096;  // limit until a connection has presented the token
inline constexpr uint32_t kMaxBytes = 4u << 20;
inline constexpr uint32_t kMaxValueBytes = 1u << 20;
inline constexpr uint32_t kMaxKeyBytes = 4096;
inline constexpr uint32_t kMaxWhatBytes = 300;          // of the text of an activity
inline constexpr uint32_t kMaxReportBytes = 64u << 10;  // of the text of a report
inline constexpr uint32_t kMaxCollectives = 64;         // per heartbeat

struct Malformed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Builds the body of a message: numbers in little endian, each text preceded by its length.
class Writer {
 public:
  Writer& u8(uint8_t value);
  Writer& u64(uint64_t value);
  Writer& i64(int64_t value) { return u64(static_cast<uint64_t>(value)); }
  Writer& text(std::string_view value);
  /// The complete message, including the header.
  std::string message(Type type) const;

 private:
  std::string bytes_;
};

/// Reads a body that Writer built; throws Malformed if the bytes end early.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : rest_(bytes) {}

  /// The next value.
  uint8_t u8();
  uint64_t u64();
  int64_t i64() { return static_cast<int64_t>(u64()); }
  std::string text();
  /// The next text; throws Malformed if it has more than `max_bytes` bytes.
  std::string text(std::size_t max_bytes);
  /// Throws Malformed if bytes are left.
  void end() const;

 private:
  std::string_view take(std::size_t n);
  std::string_view rest_;
};

struct Peer {
  int64_t pid = 0;
  std::string host;     // host name, for messages
  std::string machine;  // equal for processes that see each other in /proc
  std::string node;     // equal for processes that can share memory and have one network; see this_peer()
};

/// All ranks, in rank order, and the id of the job, which is unique per launch.
struct Start {
  std::string job;
  std::vector<Peer> peers;
};

struct JoinRequest {
  std::string job, token;
  int64_t rank = 0, world = 0;
  Peer peer;
};

/// One collective that a rank issued.
struct IssuedCollective {
  uint64_t sequence = 0, fingerprint = 0;
  std::string what;
};

/// The state of a rank. `leaves` counts how often the rank has left the job; collectives are compared only between
/// ranks with equal `leaves`.
struct Heartbeat {
  Activity activity;
  int64_t age_ms = 0;       // since the activity was set
  bool awaits_key = false;  // the activity is a get of a key
  uint64_t leaves = 0, left_sequence = 0;
  int64_t left_step = 0;
  bool left = false;                     // the rank has left and not joined in again
  bool failed = false;                   // it left because of an exception
  bool exited = false;                   // it left because its process ended
  std::vector<IssuedCollective> recent;  // since the previous heartbeat, at most 64
};

/// The complete message, including the header.
std::string encode(const JoinRequest& request);
std::string encode(Type type, const Heartbeat& heartbeat);
std::string encode(const Start& start);
/// Decodes a body; throws Malformed.
JoinRequest decode_join_request(std::string_view body);
Heartbeat decode_heartbeat(std::string_view body);
Start decode_start(std::string_view body);

/// Why the store does not accept this key, or a value of `bytes` bytes under it; "" if it does.
std::string key_problem(std::string_view key);
std::string value_problem(std::string_view key, std::size_t bytes);

/// This process. Its node is the running kernel, the PID namespace, and ZR_HOST_ID or else the network namespace.
Peer this_peer();
/// State letter of a process on this node from /proc/<pid>/stat; 0 if the process does not exist.
char state_of(int64_t pid);
/// True if the process does not exist on this node, or is a zombie.
bool is_dead(int64_t pid);

}  // namespace zr::host::control::protocol

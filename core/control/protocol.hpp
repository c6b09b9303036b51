// The control plane's messages: a length (4 bytes, little endian), a type (1 byte), the body.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "control/control.hpp"

namespace zr::host::protocol {

enum class Type : uint8_t {
  hello = 1,       // to the store: Hello
  put,             // key, value
  get,             // id, key
  heartbeat,       // Heartbeat, every 200 ms
  final_status,    // Heartbeat: a rank's last words, the answer to news
  report,          // text: what a rank saw; breaks the job
  drop,            // key, which the store forgets with its value
  welcome = 65,    // from the store: nothing
  reject,          // exit code, or 0: another store may be the right one; text
  start,           // Start: all have joined
  value,           // id, value
  pong,            // nothing, answers a heartbeat
  failure_notice,  // headline: the job broke
  failure_report,  // text
  goodbye,         // Heartbeat of the rank that keeps the store: it leaves in order
};

inline constexpr std::string_view kGreeting = "zeroth-control/1";
inline constexpr uint32_t kHeaderBytes = 5;
inline constexpr uint32_t kMaxHelloBytes = 4096;  // before a connection has shown the token
inline constexpr uint32_t kMaxBytes = 4u << 20;
inline constexpr uint32_t kMaxValueBytes = 1u << 20;
inline constexpr uint32_t kMaxKeyBytes = 4096;
inline constexpr uint32_t kMaxWhatBytes = 300;          // of an activity's text
inline constexpr uint32_t kMaxReportBytes = 64u << 10;  // of what a rank reports
inline constexpr uint32_t kMaxCalls = 64;               // in a heartbeat

struct Malformed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Gathers a message's body: numbers little-endian, text behind its length.
class Writer {
 public:
  Writer& u8(uint8_t value);
  Writer& u64(uint64_t value);
  Writer& i64(int64_t value) { return u64(static_cast<uint64_t>(value)); }
  Writer& text(std::string_view value);
  /// The whole message, header included.
  std::string message(Type type) const;

 private:
  std::string bytes_;
};

/// Reads what Writer wrote; throws Malformed where the bytes end early.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : rest_(bytes) {}

  /// The next value.
  uint8_t u8();
  uint64_t u64();
  int64_t i64() { return static_cast<int64_t>(u64()); }
  std::string text();
  /// The same; throws Malformed if it has more than `most` bytes.
  std::string text(std::size_t most);
  /// Throws Malformed if bytes are left.
  void end() const;

 private:
  std::string_view take(std::size_t n);
  std::string_view rest_;
};

struct Peer {
  int64_t pid = 0;
  std::string host;     // name, for people
  std::string machine;  // equal for processes that see one another in /proc
};

/// Everybody, in rank order, and the job's id, which is unique per launch.
struct Start {
  std::string job;
  std::vector<Peer> peers;
};

struct Hello {
  std::string job, token;
  int64_t rank = 0, world = 0;
  Peer peer;
};

/// One collective a rank issued.
struct Call {
  uint64_t sequence = 0, fingerprint = 0;
  std::string what;
};

/// A rank's state. `leaves` counts how often it left in order; sequences count anew after each.
struct Heartbeat {
  Activity activity;
  int64_t age_ms = 0;  // since the activity was set
  uint64_t leaves = 0, left_sequence = 0;
  int64_t left_step = 0;
  bool left = false;         // and has not come back
  bool failed = false;       // it left because of an exception
  std::vector<Call> recent;  // since the heartbeat before, at most 64
};

/// The whole message, header included.
std::string encode(const Hello& hello);
std::string encode(Type type, const Heartbeat& heartbeat);
std::string encode(const Start& start);
/// The value of a body; throws Malformed.
Hello decode_hello(std::string_view body);
Heartbeat decode_heartbeat(std::string_view body);
Start decode_start(std::string_view body);

/// This process: pid, host name, machine.
Peer this_peer();
/// State letter of a process of this machine from /proc/<pid>/stat; 0 if there is none.
char state_of(int64_t pid);
/// There is no such process of this machine, or only what its parent has not yet collected.
bool is_dead(int64_t pid);

}  // namespace zr::host::protocol

#include "control/protocol.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <fstream>

#include "base/text.hpp"

namespace zr::host::control::protocol {

Writer& Writer::u8(uint8_t value) {
  bytes_.push_back(static_cast<char>(value));
  return *this;
}

Writer& Writer::u64(uint64_t value) {
  for (int shift = 0; shift < 64; shift += 8) bytes_.push_back(static_cast<char>(value >> shift));
  return *this;
}

Writer& Writer::text(std::string_view value) {
  u64(value.size());
  bytes_.append(value);
  return *this;
}

std::string Writer::message(Type type) const {
  std::string framed;
  framed.reserve(kHeaderBytes + bytes_.size());
  for (int shift = 0; shift < 32; shift += 8) framed.push_back(static_cast<char>(bytes_.size() >> shift));
  framed.push_back(static_cast<char>(type));
  return framed += bytes_;
}

std::string_view Reader::take(std::size_t n) {
  if (n > rest_.size()) throw Malformed("the message ends early");
  const auto part = rest_.substr(0, n);
  rest_.remove_prefix(n);
  return part;
}

uint8_t Reader::u8() { return static_cast<uint8_t>(take(1)[0]); }

uint64_t Reader::u64() {
  const auto bytes = take(8);
  uint64_t value = 0;
  for (std::size_t i = 0; i < 8; ++i) value |= uint64_t{static_cast<uint8_t>(bytes[i])} << (8 * i);
  return value;
}

std::string Reader::text() { return std::string(take(u64())); }

std::string Reader::text(std::size_t max_bytes) {
  const uint64_t bytes = u64();
  if (bytes > max_bytes) throw Malformed("a text is too long");
  return std::string(take(bytes));
}

void Reader::end() const {
  if (!rest_.empty()) throw Malformed("the message has trailing bytes");
}

std::string encode(const JoinRequest& request) {
  return Writer()
      .text(kProtocolName)
      .text(request.job)
      .text(request.token)
      .i64(request.rank)
      .i64(request.world)
      .i64(request.peer.pid)
      .text(request.peer.host)
      .text(request.peer.machine)
      .text(request.peer.node)
      .message(Type::join_request);
}

JoinRequest decode_join_request(std::string_view body) {
  Reader reader(body);
  if (reader.text() != kProtocolName) throw Malformed("another protocol or version");
  JoinRequest request;
  request.job = reader.text();
  request.token = reader.text();
  request.rank = reader.i64();
  request.world = reader.i64();
  request.peer.pid = reader.i64();
  request.peer.host = printable(reader.text());
  request.peer.machine = reader.text();
  request.peer.node = reader.text();
  reader.end();
  return request;
}

std::string encode(Type type, const Heartbeat& heartbeat) {
  Writer writer;
  writer.u64(heartbeat.activity.sequence).u64(heartbeat.activity.fingerprint).text(heartbeat.activity.what);
  writer.u8(heartbeat.activity.waiting).i64(heartbeat.activity.step).i64(heartbeat.age_ms);
  writer.u8(heartbeat.awaits_key);
  writer.u64(heartbeat.leaves)
      .u64(heartbeat.left_sequence)
      .i64(heartbeat.left_step)
      .u8(heartbeat.left)
      .u8(heartbeat.failed)
      .u8(heartbeat.exited)
      .u64(heartbeat.recent.size());
  for (const auto& collective : heartbeat.recent)
    writer.u64(collective.sequence).u64(collective.fingerprint).text(collective.what);
  return writer.message(type);
}

Heartbeat decode_heartbeat(std::string_view body) {
  Reader reader(body);
  Heartbeat heartbeat;
  heartbeat.activity.sequence = reader.u64();
  heartbeat.activity.fingerprint = reader.u64();
  heartbeat.activity.what = printable(reader.text(kMaxWhatBytes));
  heartbeat.activity.waiting = reader.u8() != 0;
  heartbeat.activity.step = reader.i64();
  heartbeat.age_ms = reader.i64();
  heartbeat.awaits_key = reader.u8() != 0;
  heartbeat.leaves = reader.u64();
  heartbeat.left_sequence = reader.u64();
  heartbeat.left_step = reader.i64();
  heartbeat.left = reader.u8() != 0;
  heartbeat.failed = reader.u8() != 0;
  heartbeat.exited = reader.u8() != 0;
  const uint64_t collectives = reader.u64();
  if (collectives > kMaxCollectives) throw Malformed("a heartbeat has too many calls");
  for (uint64_t n = collectives; n > 0; --n) {
    IssuedCollective collective;
    collective.sequence = reader.u64();
    collective.fingerprint = reader.u64();
    collective.what = printable(reader.text(kMaxWhatBytes));
    heartbeat.recent.push_back(std::move(collective));
  }
  reader.end();
  return heartbeat;
}

std::string encode(const Start& start) {
  Writer writer;
  writer.text(start.job).u64(start.peers.size());
  for (const auto& peer : start.peers) writer.i64(peer.pid).text(peer.host).text(peer.machine).text(peer.node);
  return writer.message(Type::start);
}

Start decode_start(std::string_view body) {
  Reader reader(body);
  Start start;
  start.job = reader.text();
  for (uint64_t n = reader.u64(); n > 0; --n) {
    Peer peer;
    peer.pid = reader.i64();
    peer.host = printable(reader.text());
    peer.machine = reader.text();
    peer.node = reader.text();
    start.peers.push_back(std::move(peer));
  }
  reader.end();
  return start;
}

std::string key_problem(std::string_view key) {
  if (key.size() <= kMaxKeyBytes) return "";
  return fmt::format("the job's store accepts keys of at most {} bytes, but '{}...' has {}", kMaxKeyBytes,
                     key.substr(0, 60), key.size());
}

std::string value_problem(std::string_view key, std::size_t bytes) {
  if (bytes <= kMaxValueBytes) return "";
  return fmt::format("the job's store accepts values of at most {} bytes (1 MiB), but the value of '{}{}' has {}",
                     kMaxValueBytes, key.substr(0, 60), key.size() > 60 ? "..." : "", bytes);
}

namespace {
std::string namespace_of_this_process(const char* kind) {
  std::array<char, 256> name{};
  const auto n = readlink(fmt::format("/proc/self/ns/{}", kind).c_str(), name.data(), name.size() - 1);
  return n > 0 ? name.data() : "";
}
}  // namespace

Peer this_peer() {
  std::array<char, 256> name{};
  gethostname(name.data(), name.size() - 1);
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  const std::string space = namespace_of_this_process("pid");
  const char* const given = std::getenv("ZR_HOST_ID");
  const std::string network = given && *given ? fmt::format("id {}", given) : namespace_of_this_process("net");
  return {getpid(), name.data(), fmt::format("{}/{}/{}", name.data(), boot, space),
          fmt::format("{}/{}/{}", boot.empty() ? name.data() : boot, space, network)};
}

char state_of(int64_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string text;
  std::getline(file, text, '\0');  // fails if the process ends meanwhile; an istreambuf_iterator would throw
  const auto name_end = text.rfind(')');
  return name_end == std::string::npos || name_end + 2 >= text.size() ? char{0} : text[name_end + 2];
}

bool is_dead(int64_t pid) {
  const char state = state_of(pid);
  return state == 0 || state == 'Z' || state == 'X';
}

}  // namespace zr::host::control::protocol

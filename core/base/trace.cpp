#include "base/trace.hpp"

#include "base/failure.hpp"

namespace zr::host {

namespace {
std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return out + '"';
}

double microseconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration<double, std::micro>(duration).count();
}
}  // namespace

Trace::Trace(const std::string& path, int rank) : file_(path, std::ios::trunc), rank_(rank) {
  if (!file_) fail_environment("cannot write " + path + "; set job.runs to a folder that can be written");
  file_.setf(std::ios::fixed);
  file_.precision(3);
  file_ << "[{\"ph\": \"M\", \"name\": \"process_name\", \"pid\": " << rank << ", \"args\": {\"name\": \"rank " << rank
        << "\"}}";
}

Trace::~Trace() { file_ << "]\n"; }

void Trace::span(const std::string& track, const std::string& name, Time begin, Time end) {
  const std::lock_guard lock(mutex_);
  const auto [at, fresh] = tracks_.emplace(track, static_cast<int>(tracks_.size()) + 1);
  if (fresh)
    file_ << ",\n{\"ph\": \"M\", \"name\": \"thread_name\", \"pid\": " << rank_ << ", \"tid\": " << at->second
          << ", \"args\": {\"name\": " << quoted(track) << "}}";
  file_ << ",\n{\"ph\": \"X\", \"name\": " << quoted(name) << ", \"pid\": " << rank_ << ", \"tid\": " << at->second
        << ", \"ts\": " << microseconds(begin.time_since_epoch()) << ", \"dur\": " << microseconds(end - begin) << "}";
}

}  // namespace zr::host

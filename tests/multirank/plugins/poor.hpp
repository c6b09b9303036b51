// A communicator with few operations, for plug-ins of the tests: an all_gather of bytes, a barrier, and optionally an
// all_to_all.
#pragma once

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "zr/communicator.hpp"

namespace poor {

inline constexpr int64_t kSlot = 8192;

struct Shared {
  std::atomic<uint64_t> arrived[16];
  char slot[16][kSlot];
};

class Poor {
 public:
  Poor(const zr::Host& host, const zr_comm_open& how) : rank_(how.rank), world_(how.world) {
    const auto& store = host.need<zr_store_service>();
    const std::string key = std::string(how.store_prefix) + "poor";
    zr_error error = zr::no_error();
    char path[64] = {};
    uint64_t bytes = sizeof path;
    if (rank_ == 0) {
      fd_ = ::memfd_create("poor", 0);
      if (::ftruncate(fd_, sizeof(Shared)) != 0) throw zr::PluginError(ZR_IO, "cannot allocate the shared memory");
      const std::string where = "/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(fd_);
      zr::check(store.put(host.abi(), key.c_str(), where.c_str(), where.size() + 1, &error), error);
    } else {
      zr::check(store.get(host.abi(), key.c_str(), 10000000000, path, &bytes, &error), error);
      fd_ = ::open(path, O_RDWR);
    }
    shared_ = static_cast<Shared*>(::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0));
    if (shared_ == MAP_FAILED) throw zr::PluginError(ZR_IO, "cannot map the shared memory");
    meet();
  }
  ~Poor() {
    ::munmap(shared_, sizeof(Shared));
    ::close(fd_);
  }
  Poor(const Poor&) = delete;

  void submit(const zr_coll& c, zr_stream*, zr_done* done) {
    if (done) throw zr::PluginError(ZR_UNSUPPORTED, "poor runs collectives only on the thread that submits them");
    const int64_t size = c.src.dtype == ZR_F32 ? 4 : 1;
    if (c.op == ZR_ALL_GATHER) {
      std::vector<int64_t> counts = parts(c.counts, c.src.count, size);
      gather(static_cast<const char*>(c.src.data), counts, static_cast<char*>(c.dst.data));
    } else if (c.op == ZR_ALL_TO_ALL) {
      exchange(c, size);
    } else if (c.op == ZR_BARRIER) {
      meet();
    } else {
      throw zr::PluginError(ZR_UNSUPPORTED, "poor does not offer this collective");
    }
  }
  void abort() noexcept { aborted_ = true; }

 protected:
  // Bytes of each rank's part.
  std::vector<int64_t> parts(const int64_t* counts, int64_t equal, int64_t size) const {
    std::vector<int64_t> bytes;
    for (int r = 0; r < world_; ++r) bytes.push_back((counts ? counts[r] : equal) * size);
    return bytes;
  }

  void meet() {
    ++meetings_;
    shared_->arrived[rank_].store(meetings_, std::memory_order_release);
    for (int r = 0; r < world_; ++r)
      while (shared_->arrived[r].load(std::memory_order_acquire) < meetings_) {
        if (aborted_) throw zr::PluginError(ZR_CANCELLED, "aborted");
        ::sched_yield();
      }
  }

  // Copies the bytes of every rank to all ranks.
  void gather(const char* src, const std::vector<int64_t>& bytes, char* dst) {
    int64_t longest = 0;
    for (const int64_t n : bytes) longest = n > longest ? n : longest;
    for (int64_t done = 0; done < longest; done += kSlot) {
      const auto piece = [&](int r) {
        return bytes[r] <= done ? 0 : bytes[r] - done < kSlot ? bytes[r] - done : kSlot;
      };
      std::memcpy(shared_->slot[rank_], src + done, static_cast<size_t>(piece(rank_)));
      meet();
      int64_t start = 0;
      for (int r = 0; r < world_; start += bytes[r++])
        std::memmove(dst + start + done, shared_->slot[r], static_cast<size_t>(piece(r)));
      meet();
    }
  }

  const int rank_, world_;

 private:
  // Gathers all data from all ranks, and copies the part for this rank.
  void exchange(const zr_coll& c, int64_t size) {
    const std::vector<int64_t> to = parts(c.counts, c.src.count / world_, size);
    std::vector<int64_t> all(static_cast<size_t>(world_ * world_)), eights(static_cast<size_t>(world_), world_ * 8),
        totals;
    gather(reinterpret_cast<const char*>(to.data()), eights, reinterpret_cast<char*>(all.data()));
    int64_t everything = 0;
    for (int p = 0; p < world_; ++p) {
      totals.push_back(0);
      for (int r = 0; r < world_; ++r) totals.back() += all[p * world_ + r];
      everything += totals.back();
    }
    std::vector<char> gathered(static_cast<size_t>(everything));
    gather(static_cast<const char*>(c.src.data), totals, gathered.data());
    int64_t start = 0, at = 0;
    for (int p = 0; p < world_; start += totals[p++]) {
      int64_t first = 0;
      for (int r = 0; r < rank_; ++r) first += all[p * world_ + r];
      std::memcpy(static_cast<char*>(c.dst.data) + at, gathered.data() + start + first,
                  static_cast<size_t>(all[p * world_ + rank_]));
      at += all[p * world_ + rank_];
    }
  }

  int fd_ = -1;
  Shared* shared_ = nullptr;
  uint64_t meetings_ = 0;
  std::atomic<bool> aborted_{false};
};

}  // namespace poor

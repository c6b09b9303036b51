#include "exchange.hpp"

#include <algorithm>
#include <numeric>
#include <string>

namespace onebit {

namespace {

constexpr int64_t kWordBytes = 4;
constexpr int64_t kBlocksPerThread = 16;  // the smallest number that is worth a thread
constexpr int64_t kPartWords = 1 << 15;   // of a message with several parts, at least: 1 M elements
constexpr int64_t kParts = 12;            // of a message, at most

// One block of a parameter, and where its words are.
struct Block {
  const Parameter* parameter;
  int64_t first, count;  // elements of the parameter
  int64_t word;          // in the message
  int64_t served;        // element in the states of this rank's ranges; -1: another rank serves it
  std::size_t server;    // the rank that serves it
  float* elements(const zr_view& view) const { return zr::data<float>(view) + first; }
};

// A part of the message has its own collectives, which run while other parts are computed. Its words are those for
// rank 0, then those for rank 1 and so on; for a rank, blocks are in the order of the parameters.
struct MessagePart {
  std::vector<Block> blocks, own;  // all; those that this rank serves
  std::vector<int64_t> bytes;      // by the rank that serves them
  int64_t first = 0, words = 0;    // in the message
  int64_t own_first = 0;           // of the words that this rank serves, in the message
  int64_t own_words = 0;
  int64_t received = 0;  // where the words from all ranks for this rank begin, in the memory for them
};

// All blocks, in the order of the parameters, without words.
std::vector<Block> blocks_of(const std::vector<Parameter>& parameters, int32_t rank, int32_t world) {
  std::vector<Block> blocks;
  int64_t elements = 0;
  for (const Parameter& parameter : parameters) elements += parameter.gradient->count + kBlock;
  blocks.reserve(static_cast<std::size_t>(elements / kBlock));
  for (const Parameter& parameter : parameters) {
    const zr_local_gradient& gradient = *parameter.gradient;
    int64_t served = 0, at = 0;
    for (uint32_t r = 0; r < gradient.n_ranges; ++r) {
      const zr_served_range& range = gradient.ranges[r];
      if (range.first != at || range.first % kBlock || range.rank < 0 || range.rank >= world) {
        throw zr::PluginError(ZR_INVALID, std::string("parameter ") + gradient.name + ": element " +
                                              std::to_string(range.first) + " begins an invalid range");
      }
      const auto server = static_cast<std::size_t>(range.rank);
      for (int64_t first = 0; first < range.count; first += kBlock)
        blocks.push_back({&parameter, range.first + first, std::min(kBlock, range.count - first), 0,
                          range.rank == rank ? served + first : -1, server});
      if (range.rank == rank) served += range.count;
      at += range.count;
    }
  }
  return blocks;
}

// Each part has the same share of the blocks that a rank serves, so that all ranks work on all parts.
std::vector<MessagePart> parts_of(const std::vector<Block>& blocks, std::size_t rank, std::size_t world) {
  std::vector<int64_t> total(world, 0), before(world, 0);  // blocks, by the rank that serves them
  int64_t words = 0;
  for (const Block& block : blocks) ++total[block.server], words += words_of(block.count);
  const int64_t n = std::clamp<int64_t>(words / kPartWords, 1, kParts);
  std::vector<MessagePart> parts(static_cast<std::size_t>(n));
  for (MessagePart& part : parts) part.bytes.assign(world, 0);
  for (Block block : blocks) {
    MessagePart& part = parts[static_cast<std::size_t>(before[block.server]++ * n / total[block.server])];
    block.word = part.bytes[block.server] / kWordBytes;
    part.bytes[block.server] += words_of(block.count) * kWordBytes;
    part.blocks.push_back(block);
  }
  int64_t at = 0, received = 0;
  for (MessagePart& part : parts) {
    std::vector<int64_t> first(world, at);  // word, by the rank that serves it
    for (std::size_t r = 1; r < world; ++r) first[r] = first[r - 1] + part.bytes[r - 1] / kWordBytes;
    for (Block& block : part.blocks) {
      block.word += first[block.server];
      if (block.served >= 0) part.own.push_back(block);
    }
    part.first = at;
    part.words = std::accumulate(part.bytes.begin(), part.bytes.end(), int64_t{0}) / kWordBytes;
    part.own_first = first[rank];
    part.own_words = part.bytes[rank] / kWordBytes;
    part.received = received;
    at += part.words;
    received += part.own_words * static_cast<int64_t>(world);
  }
  return parts;
}

zr_view bytes_at(uint32_t* words, int64_t count) { return {words, count * kWordBytes, ZR_U8, 0, {ZR_DEVICE_CPU, 0}}; }

// The steps of the exchange, each for one part.
class Steps {
 public:
  Steps(const zr::Comm& comm, const zr::Tasks& tasks, const Kernels& kernels, uint32_t* message, uint32_t* received)
      : comm_(comm), tasks_(tasks), kernels_(kernels), message_(message), received_(received) {}

  // Compresses this rank's momentum, and sends it to the ranks that serve it.
  zr::Done send(const MessagePart& part) const {
    for_each(part.blocks, [&](const Block& block) {
      const zr_local_gradient& gradient = *block.parameter->gradient;
      kernels_.compress(block.parameter->factors, block.elements(gradient.grad), block.elements(gradient.slots[0]),
                        block.count, message_ + block.word);
    });
    const std::vector<int64_t> own(part.bytes.size(), part.own_words * kWordBytes);
    return comm_.start(zr::all_to_all(bytes_at(message_ + part.first, part.words),
                                      bytes_at(received_ + part.received, part.own_words * comm_.world()), "momentum",
                                      part.bytes.data(), own.data()));
  }
  // Averages what the ranks have sent, and sends it to all ranks.
  zr::Done serve(const MessagePart& part) const {
    for_each(part.own, [&](const Block& block) {
      float* const error = zr::data<float>(block.parameter->gradient->slots[1]) + block.served;
      kernels_.serve(received_ + part.received + (block.word - part.own_first), part.own_words, comm_.world(), error,
                     block.count, message_ + block.word);
    });
    return comm_.start(zr::all_gather(bytes_at(message_ + part.own_first, part.own_words),
                                      bytes_at(message_ + part.first, part.words), "mean momentum", part.bytes.data()));
  }
  // Replaces the gradients by the common momentum.
  void decode(const MessagePart& part) const {
    for_each(part.blocks, [&](const Block& block) {
      const zr_local_gradient& gradient = *block.parameter->gradient;
      kernels_.decode(message_ + block.word, block.parameter->factors.beta1, block.elements(gradient.grad),
                      block.elements(gradient.slots[0]), block.count);
    });
  }

 private:
  template <class F>
  void for_each(const std::vector<Block>& blocks, const F& fn) const {
    tasks_.parallel_for(static_cast<int64_t>(blocks.size()), kBlocksPerThread, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) fn(blocks[static_cast<std::size_t>(i)]);
    });
  }
  const zr::Comm& comm_;
  const zr::Tasks& tasks_;
  const Kernels& kernels_;
  uint32_t *const message_, *const received_;
};

}  // namespace

void plan_exchange(zr_exchange_plan& plan) {
  int64_t all = 0, own = 0;
  for (uint32_t i = 0; i < plan.n_counts; ++i) all += words_of_blocks(plan.counts[i]);
  for (uint32_t i = 0; i < plan.n_served; ++i) own += words_of_blocks(plan.served[i]);
  plan.scratch = static_cast<uint64_t>((all + own * plan.world) * kWordBytes);
  plan.received = static_cast<uint64_t>(2 * all * (plan.world - 1) * kWordBytes);
}

void exchange(const zr::Comm& comm, const zr::Tasks& tasks, const Kernels& kernels,
              const std::vector<Parameter>& parameters, const zr_view& scratch) {
  const std::vector<MessagePart> parts =
      parts_of(blocks_of(parameters, comm.rank(), comm.world()), static_cast<std::size_t>(comm.rank()),
               static_cast<std::size_t>(comm.world()));
  int64_t all = 0, own = 0;
  for (const MessagePart& part : parts) all += part.words, own += part.own_words;
  if ((all + own * comm.world()) * kWordBytes > scratch.count)
    throw zr::PluginError(ZR_INVALID, "the memory for messages has " + std::to_string(scratch.count) +
                                          " bytes, fewer "
                                          "than the plan");
  uint32_t* const message = zr::data<uint32_t>(scratch);
  const Steps steps(comm, tasks, kernels, message, message + all);
  std::vector<zr::Done> sent, gathered;
  for (const MessagePart& part : parts) sent.push_back(steps.send(part));
  for (std::size_t i = 0; i < parts.size(); ++i) {
    sent[i].wait();
    gathered.push_back(steps.serve(parts[i]));
  }
  for (std::size_t i = 0; i < parts.size(); ++i) {
    gathered[i].wait();
    steps.decode(parts[i]);
  }
}

}  // namespace onebit

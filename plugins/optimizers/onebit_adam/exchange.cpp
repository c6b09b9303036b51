#include "exchange.hpp"

#include <algorithm>
#include <string>

namespace onebit {

namespace {

constexpr int64_t kWordBytes = 4;
constexpr int64_t kBlocksPerThread = 16;  // the smallest number that is worth a thread

// One block of a parameter, and where its words are in the part of the message of the rank that serves it.
struct Block {
  const Parameter* parameter;
  int64_t first, count;  // elements of the parameter
  int64_t word;          // in the message of all ranks' parts
  int64_t served;        // element in the states of this rank's ranges; -1: another rank serves it
};

struct Message {
  std::vector<Block> blocks, own;       // all; those that this rank serves
  std::vector<int64_t> words, offsets;  // by rank: of its part
};

// The parts of the message follow each other in rank order; in a part, blocks are in the order of the parameters.
Message message_of(const std::vector<Parameter>& parameters, int32_t rank, int32_t world) {
  Message message;
  message.words.assign(static_cast<std::size_t>(world), 0);
  message.offsets.assign(static_cast<std::size_t>(world), 0);
  std::vector<std::size_t> ranks;  // by block
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
      for (int64_t first = 0; first < range.count; first += kBlock) {
        const int64_t count = std::min(kBlock, range.count - first);
        message.blocks.push_back(
            {&parameter, range.first + first, count, message.words[server], range.rank == rank ? served + first : -1});
        ranks.push_back(server);
        message.words[server] += words_of(count);
      }
      if (range.rank == rank) served += range.count;
      at += range.count;
    }
  }
  for (std::size_t r = 1; r < message.offsets.size(); ++r)
    message.offsets[r] = message.offsets[r - 1] + message.words[r - 1];
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    message.blocks[i].word += message.offsets[ranks[i]];
    if (message.blocks[i].served >= 0) message.own.push_back(message.blocks[i]);
  }
  return message;
}

zr_view bytes_at(uint32_t* words, int64_t count) { return {words, count * kWordBytes, ZR_U8, 0, {ZR_DEVICE_CPU, 0}}; }

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
  const int32_t world = comm.world();
  const auto rank = static_cast<std::size_t>(comm.rank());
  const Message message = message_of(parameters, comm.rank(), world);
  const int64_t all = message.offsets.back() + message.words.back(), own = message.words[rank];
  if ((all + own * world) * kWordBytes > scratch.count)
    throw zr::PluginError(ZR_INVALID, "the memory for messages has " + std::to_string(scratch.count) +
                                          " bytes, fewer "
                                          "than the plan");
  uint32_t* const sent = zr::data<uint32_t>(scratch);
  uint32_t* const received = sent + all;
  const auto for_each = [&](const std::vector<Block>& blocks, auto&& fn) {
    tasks.parallel_for(static_cast<int64_t>(blocks.size()), kBlocksPerThread, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) fn(blocks[static_cast<std::size_t>(i)]);
    });
  };
  const auto carry_of = [](const Block& block) {
    return zr::data<float>(block.parameter->gradient->slots[0]) + block.first;
  };
  const auto gradient_of = [](const Block& block) {
    return zr::data<float>(block.parameter->gradient->grad) + block.first;
  };
  for_each(message.blocks, [&](const Block& block) {
    kernels.compress(block.parameter->factors, gradient_of(block), carry_of(block), block.count, sent + block.word);
  });

  std::vector<int64_t> send_bytes, receive_bytes(static_cast<std::size_t>(world), own * kWordBytes);
  for (const int64_t words : message.words) send_bytes.push_back(words * kWordBytes);
  comm.run(zr::all_to_all(bytes_at(sent, all), bytes_at(received, own * world), "momentum", send_bytes.data(),
                          receive_bytes.data()));
  for_each(message.own, [&](const Block& block) {
    float* const error = zr::data<float>(block.parameter->gradient->slots[1]) + block.served;
    kernels.serve(received + (block.word - message.offsets[rank]), own, world, error, block.count, sent + block.word);
  });
  comm.run(zr::all_gather(bytes_at(sent + message.offsets[rank], own), bytes_at(sent, all), "mean momentum",
                          send_bytes.data()));
  for_each(message.blocks, [&](const Block& block) {
    kernels.decode(sent + block.word, block.parameter->factors.beta1, gradient_of(block), carry_of(block), block.count);
  });
}

}  // namespace onebit

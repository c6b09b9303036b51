#include "engine/partial_sums.hpp"

#include <algorithm>

namespace zr::host::engine {

namespace {
constexpr const char* kSumsTag = "partial sums";

int64_t blocks_of(const plan::PlanInput& input, uint32_t param, int64_t count) {
  const int64_t block = input.cut_block(param);
  return (count + block - 1) / block;
}
}  // namespace

PartialSums::PartialSums(const job::RankContext& context, int64_t batch) : context_(context), batch_(batch) {
  const plan::MemoryPlan& plan = context.plan;
  for (const plan::OptimizerDescription& description : plan.input.descriptions)
    passes_ = std::max(passes_, static_cast<uint32_t>(description.sums.size()));
  if (passes_ == 0) return;
  const plan::MemoryPlan::SumCounts counts = plan.sum_counts();
  own_.resize(static_cast<std::size_t>(counts.own));
  totals_.resize(static_cast<std::size_t>(counts.totals));
  first_total_.assign(plan.input.parameters.size(), -1);
  int64_t own = 0, totals = 0;
  for (const plan::Piece& piece : plan.rank_plan.reduced_gradients) {
    const plan::OptimizerDescription& description = plan.input.description(piece.param);
    if (description.sums.empty()) continue;
    parts_.push_back({piece.param, piece.first, piece.count, own});
    own += blocks_of(plan.input, piece.param, piece.count) * description.most_sums();
    if (first_total_[piece.param] >= 0) continue;
    first_total_[piece.param] = totals;
    totals += description.all_sums();
  }
  context_.ledger.add(Tier::device, MemoryKind::other, kSumsTag, 8 * (counts.own + counts.totals));
  if (counts.batch == 0) return;
  for (double** memory : {&sent_, &received_})
    *memory =
        static_cast<double*>(context_.comm.allocate(8 * counts.batch, 64, Tier::device, MemoryKind::other, kSumsTag));
}

PartialSums::~PartialSums() {
  context_.ledger.add(Tier::device, MemoryKind::other, kSumsTag,
                      -8 * static_cast<int64_t>(own_.size() + totals_.size()));
  if (sent_) context_.comm.free(sent_);
  if (received_) context_.comm.free(received_);
}

int64_t PartialSums::width(uint32_t param) const {
  const std::vector<uint32_t>& sums = context_.plan.input.description(param).sums;
  return pass_ < sums.size() ? sums[pass_] : 0;
}

void PartialSums::begin(uint32_t pass) {
  pass_ = pass;
  std::fill(own_.begin(), own_.end(), 0.0);
  if (pass == 0) std::fill(totals_.begin(), totals_.end(), 0.0);
}

double* PartialSums::partial(uint32_t param, int64_t first) {
  auto part = std::upper_bound(parts_.begin(), parts_.end(), std::pair(param, first),
                               [](const std::pair<uint32_t, int64_t>& element, const OwnPart& p) {
                                 return element < std::pair(p.param, p.first);
                               }) -
              1;
  return own_.data() + part->offset + (first - part->first) / context_.plan.input.cut_block(param) * width(param);
}

// Adds consecutive blocks to the totals of this pass.
void PartialSums::add_blocks(uint32_t param, const double* blocks, int64_t count) {
  if (first_total_[param] < 0) return;
  const std::vector<uint32_t>& sums = context_.plan.input.description(param).sums;
  double* totals = totals_.data() + first_total_[param];
  for (uint32_t pass = 0; pass < pass_; ++pass) totals += sums[pass];
  const int64_t n = width(param);
  for (int64_t b = 0; b < count; ++b)
    for (int64_t s = 0; s < n; ++s) totals[s] += blocks[b * n + s];
}

void PartialSums::end(const std::vector<char>& touched) {
  const plan::MemoryPlan& plan = context_.plan;
  if (!sent_) {  // this rank has all blocks
    for (const OwnPart& part : parts_)
      if (touched[part.param] && width(part.param) > 0)
        add_blocks(part.param, partial(part.param, part.first), blocks_of(plan.input, part.param, part.count));
    return;
  }
  std::vector<uint32_t> batch;
  int64_t values = 0;
  for (uint32_t i = 0; i < plan.input.parameters.size(); ++i) {
    if (plan.input.parameters[i].frozen || !touched[i] || width(i) == 0) continue;
    const int64_t of_parameter = blocks_of(plan.input, i, plan.input.parameters[i].count) * width(i);
    if (!batch.empty() && values + of_parameter > batch_) {
      exchange(batch);
      batch.clear();
      values = 0;
    }
    batch.push_back(i);
    values += of_parameter;
  }
  if (!batch.empty()) exchange(batch);
}

// Gathers the blocks of these parameters from the ranks that own them, and adds them up.
void PartialSums::exchange(const std::vector<uint32_t>& params) {
  const plan::MemoryPlan& plan = context_.plan;
  std::vector<int64_t> counts(static_cast<std::size_t>(plan.input.world), 0);
  int64_t total = 0;
  double* to = sent_;
  for (const uint32_t param : params)
    for (const plan::Segment& segment : plan.segments[param]) {
      const int64_t values = blocks_of(plan.input, param, segment.count) * width(param);
      counts[static_cast<std::size_t>(segment.owners.front())] += values;
      total += values;
      if (segment.owners.front() != plan.rank) continue;
      std::copy_n(partial(param, segment.first), values, to);
      to += values;
    }
  zr_coll gather{};
  gather.op = ZR_ALL_GATHER;
  gather.src = {sent_, to - sent_, ZR_F64, 0, {1, 0}};
  gather.dst = {received_, total, ZR_F64, 0, {1, 0}};
  gather.counts = counts.data();
  gather.label = kSumsTag;
  context_.comm.run_control(gather);
  std::vector<const double*> from;  // by rank
  for (const double* at = received_; const int64_t count : counts) {
    from.push_back(at);
    at += count;
  }
  for (const uint32_t param : params)
    for (const plan::Segment& segment : plan.segments[param]) {
      const double*& at = from[static_cast<std::size_t>(segment.owners.front())];
      const int64_t blocks = blocks_of(plan.input, param, segment.count);
      add_blocks(param, at, blocks);
      at += blocks * width(param);
    }
}

}  // namespace zr::host::engine

#include "engine/agreement.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "base/dtype.hpp"
#include "base/failure.hpp"
#include "shard/norm.hpp"

namespace zr::host {

namespace {
constexpr const char* kTag = "norm leaves";
}  // namespace

Agreement::Agreement(Communicator& comm, Pool& pool, const Plan& plan, const std::vector<Unit>& units, Ledger& ledger)
    : comm_(comm), pool_(pool), plan_(plan), units_(units), ledger_(ledger), leaves_(plan.leaves) {
  provides_.resize(leaves_.everywhere ? 0 : leaves_.provided.size());
  int64_t first = 0;
  for (std::size_t i = 0; i < plan.input.parameters.size(); ++i) {
    first_leaf_.push_back(first);
    const Parameter& parameter = plan.input.parameters[i];
    if (parameter.frozen) continue;
    for (const Segment& segment : plan.segments[i])
      if (!leaves_.everywhere)
        provides_[static_cast<std::size_t>(segment.owners.front())].push_back(
            {first + segment.first / kLeaf, leaves_of(segment.count)});
    first += leaves_of(parameter.count);
  }
  all_.assign(static_cast<std::size_t>(leaves_.total), 0.0);
  ledger_.add(Tier::device, Kind::other, kTag, leaves_.total * 8);
  if (leaves_.everywhere) return;
  const int64_t mine = leaves_.provided[static_cast<std::size_t>(plan.rank)];
  sent_ = static_cast<double*>(comm_.allocate(std::max<int64_t>(mine, 1) * 8, 64, Tier::device, Kind::other, kTag));
  received_ = static_cast<double*>(comm_.allocate(leaves_.total * 8, 64, Tier::device, Kind::other, kTag));
}

Agreement::~Agreement() {
  comm_.free(sent_);
  comm_.free(received_);
  ledger_.add(Tier::device, Kind::other, kTag, -leaves_.total * 8);
}

void Agreement::exchange_leaves() {
  if (provides_.empty()) return;
  const auto rank = static_cast<std::size_t>(plan_.rank);
  double* at = sent_;
  for (const Run& run : provides_[rank]) {
    std::copy_n(all_.data() + run.leaf, run.count, at);
    at += run.count;
  }
  zr_coll gather{};
  gather.op = ZR_ALL_GATHER;
  gather.src = {sent_, leaves_.provided[rank], ZR_F64, 0, {1, 0}};
  gather.dst = {received_, leaves_.total, ZR_F64, 0, {1, 0}};
  gather.counts = leaves_.provided.data();
  gather.label = kTag;
  comm_.run_control(gather);
  const double* from = received_;
  for (const auto& runs : provides_)
    for (const Run& run : runs) {
      std::copy_n(from, run.count, all_.data() + run.leaf);
      from += run.count;
    }
}

namespace {
// One rank's words, as bytes: the same length on all ranks.
struct Header {
  int64_t non_finite, tokens, first_non_finite;
};

std::string encode(const Agreement::Mine& mine, int64_t non_finite) {
  const Header header{non_finite, mine.tokens, mine.first_non_finite};
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof header);
  for (const auto* list : {&mine.losses, &mine.weights})
    bytes.append(reinterpret_cast<const char*>(list->data()), list->size() * sizeof(double));
  bytes.append(mine.touched->data(), mine.touched->size());
  return bytes;
}
}  // namespace

int64_t Agreement::first_non_finite_param() const {
  for (std::size_t i = 0; i < first_leaf_.size(); ++i) {
    if (plan_.input.parameters[i].frozen) continue;
    const auto first = all_.begin() + first_leaf_[i];
    if (std::any_of(first, first + leaves_of(plan_.input.parameters[i].count),
                    [](double leaf) { return !std::isfinite(leaf); }))
      return static_cast<int64_t>(i);
  }
  return -1;
}

Agreed Agreement::reach(const Mine& mine) {
  std::vector<LeafRun> runs;
  for (const Unit& unit : units_)
    runs.push_back({unit.sum, all_.data() + first_leaf_[unit.param] + unit.first / kLeaf});
  leaf_sums(pool_, runs);
  int64_t non_finite = 0;
  for (const LeafRun& run : runs)
    for (int64_t leaf = 0; leaf < leaves_of(run.values.count); ++leaf)
      if (!std::isfinite(run.out[leaf]))
        non_finite +=
            count_non_finite(part_of(run.values, leaf * kLeaf, std::min(kLeaf, run.values.count - leaf * kLeaf)));

  const auto words = comm_.all_gather_bytes(encode(mine, non_finite), "agreement");
  Agreed agreed;
  agreed.touched.assign(mine.touched->size(), 0);
  const std::size_t micros = mine.losses.size();
  double loss = 0;
  for (std::size_t a = 0; a < micros; ++a)
    for (std::size_t r = 0; r < words.size(); ++r) {  // m = a N + r, ascending
      const std::string& word = words[r];
      double value, weight;
      std::memcpy(&value, word.data() + sizeof(Header) + a * 8, 8);
      std::memcpy(&weight, word.data() + sizeof(Header) + (micros + a) * 8, 8);
      if (!std::isfinite(value) && agreed.loss_rank < 0) agreed.loss_rank = static_cast<int>(r);
      loss += weight == 1 ? value : value * weight;
      agreed.weight += weight;
    }
  for (std::size_t r = 0; r < words.size(); ++r) {
    const std::string& word = words[r];
    Header header;
    std::memcpy(&header, word.data(), sizeof header);
    // Ranks that hold the same sums count the same elements.
    agreed.non_finite =
        provides_.empty() ? std::max(agreed.non_finite, header.non_finite) : agreed.non_finite + header.non_finite;
    agreed.tokens += header.tokens;
    if (header.first_non_finite >= 0 && (agreed.giver < 0 || header.first_non_finite < agreed.first_given)) {
      agreed.giver = static_cast<int>(r);
      agreed.first_given = header.first_non_finite;
    }
    const char* touched = word.data() + sizeof(Header) + 2 * micros * 8;
    for (std::size_t i = 0; i < agreed.touched.size(); ++i) agreed.touched[i] |= touched[i];
  }
  agreed.loss = loss / agreed.weight;
  exchange_leaves();
  if (agreed.non_finite > 0) agreed.first_param = first_non_finite_param();
  agreed.sum_of_squares = std::accumulate(all_.begin(), all_.end(), 0.0);
  return agreed;
}

}  // namespace zr::host

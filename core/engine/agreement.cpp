#include "engine/agreement.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace zr::host {

Agreement::Agreement(Communicator& comm, Pool& pool, const Plan& plan, const std::vector<Unit>& units, Ledger& ledger,
                     Pages* pages)
    : comm_(comm), norm_(comm, pool, plan, units, ledger, pages) {}

namespace {
// One rank's words, as bytes: the same length on all ranks.
struct Header {
  int64_t non_finite, tokens, first_non_finite;
  int32_t stop, save_failed;
  WeightDigest::Word digest;
};

std::string encode(const Agreement::Mine& mine, int64_t non_finite) {
  const Header header{non_finite, mine.tokens, mine.first_non_finite, mine.stop, mine.save_failed, mine.digest};
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof header);
  for (const auto* list : {&mine.losses, &mine.weights})
    bytes.append(reinterpret_cast<const char*>(list->data()), list->size() * sizeof(double));
  bytes.append(mine.touched->data(), mine.touched->size());
  return bytes;
}
}  // namespace

Agreed Agreement::reach(const Mine& mine) {
  const int64_t non_finite = norm_.sum();
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
      if (weight == 0) continue;  // it counts for nothing, whatever its loss
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
        norm_.everywhere() ? std::max(agreed.non_finite, header.non_finite) : agreed.non_finite + header.non_finite;
    agreed.tokens += header.tokens;
    agreed.stop = std::max(agreed.stop, header.stop);
    agreed.save_failed |= header.save_failed != 0;
    agreed.digests.push_back(header.digest);
    if (header.first_non_finite >= 0 && (agreed.giver < 0 || header.first_non_finite < agreed.first_given)) {
      agreed.giver = static_cast<int>(r);
      agreed.first_given = header.first_non_finite;
    }
    const char* touched = word.data() + sizeof(Header) + 2 * micros * 8;
    for (std::size_t i = 0; i < agreed.touched.size(); ++i) agreed.touched[i] |= touched[i];
  }
  agreed.loss = loss / agreed.weight;
  const NormLeaves::Folded folded = norm_.fold();
  agreed.first_param = folded.first_non_finite;
  agreed.sum_of_squares = folded.sum_of_squares;
  return agreed;
}

}  // namespace zr::host

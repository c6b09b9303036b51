#include "operation.hpp"

namespace shm {

void Operation::assign(const zr_coll& given, int own_rank, int ranks) {
  done = zr::Done();
  state = State::waiting;
  message = nullptr;
  finish = Finish::no_rank;
  staged = round_filled = false;
  round = rounds = 0;
  CollectiveParts::assign(given, own_rank, ranks);
}

}  // namespace shm

// Sends and receives: a letter lies in the sender's pages until the receiver takes it.
#include <algorithm>
#include <cstdio>

#include "wire.hpp"

namespace shm {

bool Wire::announce_letter(Operation& op) {
  Letter* letters = arena_.letters(rank_, op.coll.peer);
  Letter* const end = letters + kLetters;
  Letter* const free = std::find_if(
      letters, end, [](const Letter& l) { return l.state.load(std::memory_order_acquire) == Letter::empty; });
  if (free == end) {
    blocked_on_ = op.coll.peer;
    return false;
  }
  const Place place = arena_.place(op.coll.src.data, op.src_bytes());
  free->tag = op.coll.tag;
  free->dtype = op.coll.src.dtype;
  free->traits = place.segment != kNowhere || op.coll.src.count == 0 ? kSrcShared : 0u;
  free->number = ++letters_sent_[static_cast<size_t>(op.coll.peer)];
  free->count = op.coll.src.count;
  free->src = place;
  std::snprintf(free->label, sizeof free->label, "%s", op.label.c_str());
  op.letter = free;
  turn(*free, Letter::sent);
  return true;
}

void Wire::turn(Letter& letter, Letter::State state) {
  letter.state.store(state, std::memory_order_release);
  ring();
}

bool Wire::send(Operation& op) {
  Letter& letter = *op.letter;
  switch (letter.state.load(std::memory_order_acquire)) {
    case Letter::taken:
      letter.state.store(Letter::empty, std::memory_order_relaxed);
      if (lends_room_to_ == &op) lends_room_to_ = nullptr;
      op.state = Operation::State::complete;
      return true;
    case Letter::refused: fail(ZR_MISMATCH, letter.refusal);
    case Letter::wanted: {
      if (lends_room_to_ && lends_room_to_ != &op) break;
      lends_room_to_ = &op;
      const int64_t first = static_cast<int64_t>(op.load++) * arena_.room();
      copy(arena_.letter_staging(rank_), static_cast<const char*>(op.coll.src.data) + first,
           std::min(arena_.room(), op.src_bytes() - first));
      turn(letter, Letter::filled);
      return true;
    }
    default: break;
  }
  blocked_on_ = lends_room_to_ ? lends_room_to_->coll.peer : op.coll.peer;
  return false;
}

Letter* Wire::matching(const Operation& op) {
  // Equal tags are received in order.
  for (const auto& earlier : queue_) {
    if (earlier.get() == &op) break;
    if (earlier->coll.op == ZR_RECV && earlier->coll.peer == op.coll.peer && earlier->coll.tag == op.coll.tag &&
        !earlier->letter && earlier->state != Operation::State::complete)
      return nullptr;
  }
  Letter* first = nullptr;
  Letter* letters = arena_.letters(op.coll.peer, rank_);
  for (Letter* letter = letters; letter < letters + kLetters; ++letter)
    if (letter->state.load(std::memory_order_acquire) == Letter::sent && letter->tag == op.coll.tag &&
        (!first || letter->number < first->number))
      first = letter;
  return first;
}

bool Wire::receive(Operation& op) {
  if (op.letter) return take_load(op);
  Letter* const letter = matching(op);
  if (!letter) {
    blocked_on_ = op.coll.peer;
    return false;
  }
  if (letter->dtype != op.coll.dst.dtype || letter->count != op.coll.dst.count) {
    std::snprintf(letter->refusal, sizeof letter->refusal, "rank %d sends '%s'%s with tag %d, rank %d receives '%s'%s",
                  op.coll.peer, letter->label, shape_text(letter->dtype, letter->count).c_str(), letter->tag, rank_,
                  op.label.c_str(), shape_text(op.dtype(), op.elements()).c_str());
    const std::string text = letter->refusal;
    turn(*letter, Letter::refused);
    fail(ZR_MISMATCH, text);
  }
  if (letter->traits & kSrcShared) {
    if (letter->count > 0) copy(op.coll.dst.data, arena_.at(op.coll.peer, letter->src), op.dst_bytes());
    op.state = Operation::State::complete;
    turn(*letter, Letter::taken);
  } else {
    op.letter = letter;
    turn(*letter, Letter::wanted);
  }
  return true;
}

bool Wire::take_load(Operation& op) {
  if (op.letter->state.load(std::memory_order_acquire) != Letter::filled) {
    blocked_on_ = op.coll.peer;
    return false;
  }
  const int64_t first = static_cast<int64_t>(op.load++) * arena_.room();
  const int64_t bytes = std::min(arena_.room(), op.dst_bytes() - first);
  copy(static_cast<char*>(op.coll.dst.data) + first, arena_.letter_staging(op.coll.peer), bytes);
  const bool last = first + bytes == op.dst_bytes();
  if (last) op.state = Operation::State::complete;
  turn(*op.letter, last ? Letter::taken : Letter::wanted);
  return true;
}

}  // namespace shm

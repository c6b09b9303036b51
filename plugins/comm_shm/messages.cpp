// Sends and receives: a message stays in the sender's control block until the receiver has taken it.
#include <algorithm>
#include <cstdio>

#include "shm_communicator.hpp"

namespace shm {

bool ShmCommunicator::announce_message(Operation& op) {
  Message* messages = arena_.messages(rank_, op.coll.peer);
  Message* const end = messages + kMessages;
  Message* const free = std::find_if(
      messages, end, [](const Message& l) { return l.state.load(std::memory_order_acquire) == Message::empty; });
  if (free == end) {
    blocked_on_ = op.coll.peer;
    return false;
  }
  const ShmAddress address = arena_.address_of(op.coll.src.data, op.src_bytes());
  free->tag = op.coll.tag;
  free->dtype = op.coll.src.dtype;
  free->traits = address.segment != kNowhere || op.coll.src.count == 0 ? kSrcShared : 0u;
  free->number = ++messages_sent_[static_cast<size_t>(op.coll.peer)];
  free->count = op.coll.src.count;
  free->src = address;
  std::snprintf(free->label, sizeof free->label, "%s", op.label.c_str());
  op.message = free;
  set_state(*free, Message::sent);
  return true;
}

void ShmCommunicator::set_state(Message& message, Message::State state) {
  message.state.store(state, std::memory_order_release);
  notify_peers();
}

bool ShmCommunicator::send(Operation& op) {
  Message& message = *op.message;
  switch (message.state.load(std::memory_order_acquire)) {
    case Message::received:
      message.state.store(Message::empty, std::memory_order_relaxed);
      if (staging_user_ == &op) staging_user_ = nullptr;
      op.state = Operation::State::complete;
      return true;
    case Message::rejected: fail(ZR_MISMATCH, message.rejection);
    case Message::requested: {
      if (staging_user_ && staging_user_ != &op) break;
      staging_user_ = &op;
      const int64_t first = static_cast<int64_t>(op.round++) * arena_.staging_capacity();
      copy(arena_.message_staging(rank_), static_cast<const char*>(op.coll.src.data) + first,
           std::min(arena_.staging_capacity(), op.src_bytes() - first));
      set_state(message, Message::filled);
      return true;
    }
    default: break;
  }
  blocked_on_ = staging_user_ ? staging_user_->coll.peer : op.coll.peer;
  return false;
}

Message* ShmCommunicator::matching(const Operation& op) {
  // Equal tags are received in order.
  for (const auto& earlier : queue_) {
    if (earlier.get() == &op) break;
    if (earlier->coll.op == ZR_RECV && earlier->coll.peer == op.coll.peer && earlier->coll.tag == op.coll.tag &&
        !earlier->message && earlier->state != Operation::State::complete)
      return nullptr;
  }
  Message* first = nullptr;
  Message* messages = arena_.messages(op.coll.peer, rank_);
  for (Message* message = messages; message < messages + kMessages; ++message)
    if (message->state.load(std::memory_order_acquire) == Message::sent && message->tag == op.coll.tag &&
        (!first || message->number < first->number))
      first = message;
  return first;
}

bool ShmCommunicator::receive(Operation& op) {
  if (op.message) return take_round(op);
  Message* const message = matching(op);
  if (!message) {
    blocked_on_ = op.coll.peer;
    return false;
  }
  if (message->dtype != op.coll.dst.dtype || message->count != op.coll.dst.count) {
    std::snprintf(message->rejection, sizeof message->rejection,
                  "rank %d sends '%s'%s with tag %d, rank %d receives '%s'%s", op.coll.peer, message->label,
                  shape_text(message->dtype, message->count).c_str(), message->tag, rank_, op.label.c_str(),
                  shape_text(op.dtype(), op.elements()).c_str());
    const std::string text = message->rejection;
    set_state(*message, Message::rejected);
    fail(ZR_MISMATCH, text);
  }
  if (message->traits & kSrcShared) {
    if (message->count > 0) copy(op.coll.dst.data, arena_.at(op.coll.peer, message->src), op.dst_bytes());
    op.state = Operation::State::complete;
    set_state(*message, Message::received);
  } else {
    op.message = message;
    set_state(*message, Message::requested);
  }
  return true;
}

bool ShmCommunicator::take_round(Operation& op) {
  if (op.message->state.load(std::memory_order_acquire) != Message::filled) {
    blocked_on_ = op.coll.peer;
    return false;
  }
  const int64_t first = static_cast<int64_t>(op.round++) * arena_.staging_capacity();
  const int64_t bytes = std::min(arena_.staging_capacity(), op.dst_bytes() - first);
  copy(static_cast<char*>(op.coll.dst.data) + first, arena_.message_staging(op.coll.peer), bytes);
  const bool last = first + bytes == op.dst_bytes();
  if (last) op.state = Operation::State::complete;
  set_state(*op.message, last ? Message::received : Message::requested);
  return true;
}

}  // namespace shm

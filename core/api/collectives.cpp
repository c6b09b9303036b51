// zr::Engine: collectives over the program's tensors.
#include <algorithm>
#include <cstring>

#include "api/engine_state.hpp"

namespace zr {

namespace {

constexpr int64_t kPieceBytes = int64_t{4} << 20;  // of a tensor per collective, which bounds the memory for copies

// Ranks compare the text, so tensors of different dtypes or shapes are an error on all ranks.
std::string signature(const torch::Tensor& tensor, bool holds) {
  if (!tensor.defined()) return "undefined tensor";
  return c10::str(c10::toString(tensor.scalar_type()), " ", tensor.sizes(),
                  holds && tensor.layout() == torch::kStrided ? "" : ", not dense or on another device");
}

// On any number of ranks, although libtorch adds nothing on one.
void check_addable(const std::string& call, torch::ScalarType type) {
  if (type == torch::kBool)
    host::fail_user(call + ": booleans cannot be added; convert the tensor to an integer dtype");
  for (const torch::ScalarType addable :
       {torch::kFloat, torch::kDouble, torch::kBFloat16, torch::kHalf, torch::kByte, torch::kChar, torch::kShort,
        torch::kInt, torch::kLong, torch::kComplexHalf, torch::kComplexFloat, torch::kComplexDouble})
    if (type == addable) return;
  host::fail_user(call + ": libtorch cannot add values of this dtype; convert the tensor to another one, such as " +
                  (c10::isIntegralType(type, /*includeBool=*/false) ? "torch::kLong" : "torch::kFloat"));
}

// The values in CPU memory.
torch::Tensor checked(const std::string& call, const torch::Tensor& tensor, bool holds) {
  if (!tensor.defined()) host::fail_user(call + ": pass a tensor with values");
  if (!holds || tensor.layout() != torch::kStrided || tensor.is_quantized())
    host::fail_user(call + ": the tensor must be a dense tensor in CPU memory or on engine.device()");
  return tensor.detach().resolve_conj().resolve_neg().to(torch::kCPU).contiguous();
}

// Calls fn(offset, bytes, data of all ranks by rank) for each piece of the tensors.
template <class Fn>
void for_each_gathered_piece(host::engine::Session& session, const torch::Tensor& local, const char* label, Fn&& fn) {
  const auto total = static_cast<int64_t>(local.nbytes());
  for (int64_t at = 0; at < total; at += kPieceBytes) {
    const int64_t bytes = std::min(kPieceBytes, total - at);
    const char* data = static_cast<const char*>(local.data_ptr()) + at;
    fn(at, bytes, session.comm().all_gather_bytes(std::string(data, static_cast<std::size_t>(bytes)), label));
  }
}

}  // namespace

torch::Tensor Engine::sum(const torch::Tensor& tensor) {
  const bool holds = state_->holds(tensor);
  return state_->collective(
      "sum", signature(tensor, holds), [&](host::engine::Session& session, const State::Call& call) {
        const torch::Tensor local = checked(call.text(), tensor, holds);
        check_addable(call.text(), local.scalar_type());
        const torch::NoGradGuard no_grad;
        torch::Tensor result = torch::empty_like(local, torch::MemoryFormat::Contiguous);
        torch::Tensor flat = result.view({-1});
        const bool upcasts = local.scalar_type() == torch::kBFloat16 || local.scalar_type() == torch::kHalf;
        const auto size = static_cast<int64_t>(local.element_size());
        for_each_gathered_piece(
            session, local, "sum", [&](int64_t at, int64_t bytes, std::vector<std::string> data_of_ranks) {
              torch::Tensor sum;
              for (std::string& data : data_of_ranks) {
                torch::Tensor values = torch::from_blob(data.data(), {bytes / size}, local.options());
                if (upcasts) values = values.to(torch::kFloat);
                sum = sum.defined() ? sum.add_(values) : values.clone();
              }
              flat.narrow(0, at / size, bytes / size).copy_(sum);
            });
        return result.to(tensor.device());
      });
}

torch::Tensor Engine::all_gather(const torch::Tensor& tensor) {
  const bool holds = state_->holds(tensor);
  return state_->collective(
      "all_gather", signature(tensor, holds), [&](host::engine::Session& session, const State::Call& call) {
        const torch::Tensor local = checked(call.text(), tensor, holds);
        std::vector<int64_t> shape = local.sizes().vec();
        shape.insert(shape.begin(), session.world());
        torch::Tensor result = torch::empty(shape, local.options());
        char* out = static_cast<char*>(result.data_ptr());
        for_each_gathered_piece(session, local, "all_gather",
                                [&](int64_t at, int64_t bytes, const std::vector<std::string>& data_of_ranks) {
                                  for (std::size_t rank = 0; rank < data_of_ranks.size(); ++rank)
                                    std::memcpy(out + rank * local.nbytes() + static_cast<std::size_t>(at),
                                                data_of_ranks[rank].data(), static_cast<std::size_t>(bytes));
                                });
        return result.to(tensor.device());
      });
}

torch::Tensor Engine::broadcast(const torch::Tensor& tensor, int root) {
  const bool holds = state_->holds(tensor);
  const std::string arguments = signature(tensor, holds) + ", " + std::to_string(root);
  return state_->collective("broadcast", arguments, [&](host::engine::Session& session, const State::Call& call) {
    const torch::Tensor local = checked(call.text(), tensor, holds);
    if (root < 0 || root >= session.world())
      host::fail_user(call.text() + ": the root must be a rank from 0 to " + std::to_string(session.world() - 1));
    torch::Tensor result = torch::empty_like(local, torch::MemoryFormat::Contiguous);
    const auto total = static_cast<int64_t>(local.nbytes());
    for (int64_t at = 0; at < total; at += kPieceBytes) {
      const auto bytes = static_cast<std::size_t>(std::min(kPieceBytes, total - at));
      const bool sends = session.rank() == root;
      const std::string piece = session.comm().broadcast_bytes(
          sends ? std::string(static_cast<const char*>(local.data_ptr()) + at, bytes) : "", root, "broadcast");
      std::memcpy(static_cast<char*>(result.data_ptr()) + at, piece.data(), bytes);
    }
    return result.to(tensor.device());
  });
}

void Engine::barrier() {
  state_->collective("barrier", "", [](host::engine::Session&, const State::Call&) {});
}

}  // namespace zr

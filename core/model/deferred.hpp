// Builds models that are never in memory as a whole: records the operators of their constructors and runs them later,
// with one parameter in memory at a time.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "model/intercept.hpp"
#include "model/model.hpp"
#include "model/pointer_writes.hpp"
#include "model/recorded_operator.hpp"
#include "model/replay.hpp"
#include "model/shape_call.hpp"

namespace zr::host::model {

/// The recorded operators of a constructor. This class is the provider of every tensor that the constructor makes, a
/// placeholder. Operators that compute are recorded with the shapes that their tensors have then; views and changes of
/// shape happen at once. Random generators advance as in an ordinary construction. Used on the thread that builds the
/// model.
class Construction final : public MemoryProvider, public std::enable_shared_from_this<Construction> {
 public:
  /// Whether the tensors will get values. Shapes alone need neither records nor random numbers.
  enum class Purpose { values, shapes };
  /// Records the operators of this thread during its lifetime. A scope within another one records for the outer one.
  class RecordingScope final : public OperatorRecorder {
   public:
    explicit RecordingScope(Purpose purpose = Purpose::values);
    ~RecordingScope() override;
    void record(const c10::OperatorHandle& op, c10::DispatchKeySet remaining_keys, Stack* stack) override;

   private:
    std::shared_ptr<Construction> construction_;
    bool outermost_;
  };
  explicit Construction(Purpose purpose) : purpose_(purpose) {}
  ~Construction() override;
  /// The construction that will give the tensor its values; null for an ordinary tensor.
  static std::shared_ptr<Construction> of(const at::Tensor& tensor);
  /// Number of constructions whose model has no engine yet. Frees those without tensors outside their records. [any]
  static std::size_t pending();

  /// Number of operators that made or changed placeholders: equal on ranks that build the same model.
  std::size_t size() const { return size_; }
  /// Number of tensors of the record that use the storage.
  int64_t references(const c10::StorageImpl* storage) const;
  /// If `runs_operators`, runs the recorded operators in their order and with their random numbers. Gives memory to all
  /// tensors, except that the values of parameters are passed to memory.store(). Values of tensors that are not
  /// registered are the same on all ranks. Clears the record. Throws UserError, which names an operator that fails and
  /// its parameter. Collective.
  void replay(const Replay::Registered& registered, const Model::ConstructMemory& memory, bool runs_operators);

  /// Called for operators outside the scope; throws UserError.
  void enter(const ParamUse* param_uses, std::size_t n) override;
  void leave(const ParamUse*, std::size_t, bool) override {}
  std::string remedy() const override;

 private:
  struct Traits;  // properties of an operator
  struct Call;    // one call of an operator
  void record(Call& call);
  // Changes the shape or storage of a tensor at once.
  void change_metadata(Call& call);
  void set_storage(Call& call, const at::Tensor& self);
  static std::size_t bytes_of_set(const Call& call, const at::Tensor& self);
  // A question about shapes or types, which needs no values.
  void query(Call& call);
  void add(Call& call);
  ShapeCall shape_of(const Call& call) const;
  static bool converts(const Call& call);
  // Replaces the arguments on the stack by the results; returns those that are new.
  std::vector<at::Tensor> infer(Call& call);
  // Copies ordinary tensors among the arguments, and makes snapshots of the others.
  Stack keep_arguments(const Call& call) const;
  at::Tensor placeholder(const at::Tensor& like, const Call& call);
  std::string reason_for(const at::Tensor& like, const Call& call) const;
  bool provides(const at::TensorBase& tensor) const;
  bool provides(c10::StorageImpl& storage) const;
  // Records what the program wrote through pointers: before an operator uses the storage.
  void close_pointers(c10::StorageImpl& storage);
  void record_bytes(c10::StorageImpl& storage, std::shared_ptr<const std::string> bytes);
  [[noreturn]] void fail_values(const Call& call) const;
  void finish_recording();
  bool is_abandoned() const;

  const Purpose purpose_;
  std::vector<RecordedOperator> operators_;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages_;  // of all placeholders, in their order
  RandomRecorder random_;
  PointerWrites pointers_;
  std::string composite_;  // the operator that calls the current ones
  std::size_t size_ = 0;
  bool recording_ = true;
  bool written_late_ = false;  // through a pointer, after an operator had used the tensor
};

}  // namespace zr::host::model

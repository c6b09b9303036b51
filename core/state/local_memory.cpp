#include "state/local_memory.hpp"

#include <tuple>

#include "base/dtype.hpp"

namespace zr::host::state {

LocalMemory::LocalMemory(const job::RankContext& context, const plan::LocalPlan& plan)
    : context_(context), plan_(plan), memory_(plan.arrays.size()) {
  for (const plan::LocalArray& array : plan_.arrays) context_.ledger.reserve(Tier::device, array.bytes());
}

LocalMemory::~LocalMemory() {
  for (std::size_t i = 0; i < memory_.size(); ++i)
    memory_[i].address ? context_.comm.free(memory_[i].address)
                       : context_.ledger.reserve(Tier::device, -plan_.arrays[i].bytes());
}

void LocalMemory::allocate(std::size_t array) {
  const plan::LocalArray& planned = plan_.arrays[array];
  Memory& memory = memory_[array];
  if (planned.elements == 0 || memory.address) return;
  const int64_t bytes = planned.elements * size_of(planned.dtype);
  context_.ledger.reserve(Tier::device, -planned.bytes());
  try {
    if (planned.shared)
      std::tie(memory.address, memory.reader) =
          context_.comm.allocate_shared(bytes, planned.bytes(), Tier::device, planned.kind, planned.tag);
    else
      memory.address = context_.comm.allocate(bytes, 64, Tier::device, planned.kind, planned.tag);
  } catch (...) {
    context_.ledger.reserve(Tier::device, planned.bytes());
    throw;
  }
}

void LocalMemory::allocate_own() {
  for (std::size_t i = 0; i < memory_.size(); ++i)
    if (!is_shared(i)) allocate(i);
}

void LocalMemory::free_all(bool shared) {
  for (std::size_t i = 0; i < memory_.size(); ++i) {
    if (is_shared(i) != shared || !memory_[i].address) continue;
    context_.comm.free(memory_[i].address);
    memory_[i] = {};
    context_.ledger.reserve(Tier::device, plan_.arrays[i].bytes());
  }
}

void LocalMemory::free_own() { free_all(false); }

void LocalMemory::free() {
  free_all(false);
  free_all(true);
}

zr_view LocalMemory::view_at(void* begin, Elements elements, uint32_t param) const {
  int64_t first = plan_.offsets[param], count = context_.plan.input.parameters[param].count;
  if (elements == Elements::served) {
    first = plan_.served_offsets[param];
    count = 0;
    for (const plan::ServedRange& range : plan_.ranges[param])
      if (range.rank == context_.comm.rank()) count += range.count;
  }
  return {begin ? static_cast<float*>(begin) + first : nullptr, count, ZR_F32, 0, kHostMemory};
}

zr_view LocalMemory::view(std::size_t array, Elements elements, uint32_t param) const {
  const Memory& memory = memory_[array];
  return view_at(memory.reader ? const_cast<void*>(memory.reader) : memory.address, elements, param);
}

zr_view LocalMemory::writable(std::size_t array, uint32_t param) const {
  return view_at(memory_[array].address, Elements::all, param);
}

zr_view LocalMemory::scratch() const {
  return {memory_.back().address, plan_.arrays.back().elements, ZR_U8, 0, kHostMemory};
}

}  // namespace zr::host::state

// For libFuzzer (`make fuzz`): the first byte selects the parser for the rest.
#include "fuzz_target.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  if (size > 0)
    zr::test::feed(static_cast<zr::test::Fed>(data[0] % zr::test::kFed),
                   std::string(reinterpret_cast<const char*>(data) + 1, size - 1));
  return 0;
}

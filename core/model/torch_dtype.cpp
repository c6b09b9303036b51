#include "model/torch_dtype.hpp"

#include "base/dtype.hpp"
#include "base/error.hpp"

namespace zr::host::model {

namespace {
struct NamedType {
  std::string_view name;
  at::ScalarType type;
};
constexpr NamedType kTypes[]{{"F32", at::kFloat},
                             {"F64", at::kDouble},
                             {"F16", at::kHalf},
                             {"BF16", at::kBFloat16},
                             {"I64", at::kLong},
                             {"I32", at::kInt},
                             {"I16", at::kShort},
                             {"I8", at::kChar},
                             {"U8", at::kByte},
                             {"BOOL", at::kBool},
                             {"C64", at::kComplexFloat},
                             {"U16", at::kUInt16},
                             {"U32", at::kUInt32},
                             {"U64", at::kUInt64},
                             {"F8_E5M2", at::kFloat8_e5m2},
                             {"F8_E4M3", at::kFloat8_e4m3fn}};
}  // namespace

at::ScalarType torch_type(zr_dtype dtype) {
  switch (dtype) {
    case ZR_F32: return at::kFloat;
    case ZR_BF16: return at::kBFloat16;
    case ZR_F16: return at::kHalf;
    default: fail_internal("weights are fp32, bf16 or fp16, not dtype " + std::to_string(dtype));
  }
}

std::string safetensors_name(at::ScalarType type) {
  for (const NamedType& named : kTypes)
    if (named.type == type) return std::string(named.name);
  return c10::toString(type);
}

at::ScalarType torch_type_named(std::string_view name) {
  for (const NamedType& named : kTypes)
    if (named.name == name) return named.type;
  fail_internal("libtorch has no type for the safetensors type '" + std::string(name) + "'");
}

std::string type_name(at::ScalarType type) {
  switch (type) {
    case at::kDouble: return "double";
    case at::kFloat: return std::string(name_of(ZR_F32));
    case at::kHalf: return std::string(name_of(ZR_F16));
    case at::kBFloat16: return std::string(name_of(ZR_BF16));
    default: return c10::toString(type);
  }
}

}  // namespace zr::host::model

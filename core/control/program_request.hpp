// What `zeroth` requests of a job's program when it starts it as one process without a job: the protocol of both ends.
// The program prints the answer, one line of JSON, and ends with code 0.
#pragma once

#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>

#include "base/error.hpp"
#include "base/text.hpp"

namespace zr::host::control {

/// The value of ZR_REQUEST.
enum class ProgramRequest {
  schema,                // the program's keys (config/key_json.hpp), printed by the constructor of zr::Program
  parameters,            // the model's parameters (plan/parameter_list.hpp), printed by the constructor of zr::Engine;
                         // the model is built without memory
  parameters_in_memory,  // the same, for programs that need the values
};

inline constexpr const char* kRequestVariable = "ZR_REQUEST";
/// How many seconds `zeroth` waits for an answer.
inline constexpr const char* kRequestSecondsVariable = "ZR_REQUEST_SECONDS";

/// The value of the variable.
constexpr std::string_view text_of(ProgramRequest request) {
  switch (request) {
    case ProgramRequest::schema: return "schema";
    case ProgramRequest::parameters: return "parameters";
    default: return "parameters_in_memory";
  }
}
/// The entry of the environment that makes a program answer: "ZR_REQUEST=schema".
inline std::string environment_of(ProgramRequest request) {
  return std::string(kRequestVariable) + "=" + std::string(text_of(request));
}
/// What was requested of this process; nullopt if it is a rank of a job. Throws UserError for a request that this
/// version does not know: the process must not train instead.
inline std::optional<ProgramRequest> request_of_process() {
  const char* value = std::getenv(kRequestVariable);
  for (const auto request : {ProgramRequest::schema, ProgramRequest::parameters, ProgramRequest::parameters_in_memory})
    if (value && text_of(request) == value) return request;
  if (value && *value)
    fail_user(std::string(kRequestVariable) + " is \"" + printable(value) +
              "\", which this program cannot answer; run it with the zeroth of the version that it was built with, or "
              "unset " +
              kRequestVariable + " to train");
  return {};
}

}  // namespace zr::host::control

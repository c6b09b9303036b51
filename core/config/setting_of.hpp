// Entry -> Setting, for the types of fields of host_config.hpp. Internal to core/config.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <type_traits>

#include "config/config.hpp"

namespace zr::host::config {

/// A value of an enum in TOML.
template <class T>
struct Choice {
  std::string_view text;
  T value;
};

/// All values of an enum, in the order in which messages list them. The argument only selects the overload.
constexpr std::array<Choice<ParamDtypeRule>, 2> choices_of(ParamDtypeRule) {
  return {{{"convert", ParamDtypeRule::convert}, {"reject", ParamDtypeRule::reject}}};
}
constexpr std::array<Choice<NonFiniteRule>, 2> choices_of(NonFiniteRule) {
  return {{{"skip", NonFiniteRule::skip}, {"stop", NonFiniteRule::stop}}};
}
constexpr std::array<Choice<ValueForm>, 3> choices_of(ValueForm) {
  return {{{"exact", ValueForm::exact}, {"int8", ValueForm::int8}, {"int4", ValueForm::int4}}};
}
constexpr std::array<Choice<BufferRule>, 3> choices_of(BufferRule) {
  return {{{"rank0", BufferRule::rank0}, {"mean", BufferRule::mean}, {"per_rank", BufferRule::per_rank}}};
}
constexpr std::array<Choice<GradientReduction>, 2> choices_of(GradientReduction) {
  return {{{"each_micro_step", GradientReduction::each_micro_step},
           {"last_micro_step", GradientReduction::last_micro_step}}};
}
constexpr std::array<Choice<GradientDivisor>, 2> choices_of(GradientDivisor) {
  return {{{"ranks_and_micro_steps", GradientDivisor::ranks_and_micro_steps}, {"ranks", GradientDivisor::ranks}}};
}
constexpr std::array<Choice<OnSignal>, 2> choices_of(OnSignal) {
  return {{{"end", OnSignal::end}, {"save", OnSignal::save}}};
}
constexpr std::array<Choice<ScheduleKind>, 5> choices_of(ScheduleKind) {
  return {{{"constant", ScheduleKind::constant},
           {"linear", ScheduleKind::linear},
           {"cosine", ScheduleKind::cosine},
           {"one_cycle", ScheduleKind::one_cycle},
           {"range_test", ScheduleKind::range_test}}};
}
constexpr std::array<Choice<WarmupType>, 2> choices_of(WarmupType) {
  return {{{"linear", WarmupType::linear}, {"log", WarmupType::log}}};
}

/// Writes the value of an entry. InternalError if the key has another type, or a value that the field does not have.
void convert(const Entry& entry, bool& to);
void convert(const Entry& entry, int64_t& to);
void convert(const Entry& entry, int& to);
void convert(const Entry& entry, double& to);
void convert(const Entry& entry, std::string& to);
void convert(const Entry& entry, std::vector<std::string>& to);
void convert(const Entry& entry, std::chrono::milliseconds& to);
void convert(const Entry& entry, TierChoice& to);
/// The dtype that a string key names; ZR_NONE for "auto".
zr_dtype dtype_in(const Entry& entry);
/// The number of the choice that a string key has.
std::size_t choice_in(const Entry& entry, const std::string_view* choices, std::size_t count);

/// One entry with a value of type T. InternalError as for convert().
template <class T>
Setting<T> setting_of(const Entry& entry) {
  Setting<T> setting{T{}, entry.key.path(), entry.written, entry.origin, entry.given_path};
  if constexpr (std::is_enum_v<T>) {
    constexpr auto choices = choices_of(T{});
    std::array<std::string_view, choices.size()> texts;
    for (std::size_t i = 0; i < choices.size(); ++i) texts[i] = choices[i].text;
    setting.value = choices[choice_in(entry, texts.data(), texts.size())].value;
  } else {
    convert(entry, setting.value);
  }
  return setting;
}

}  // namespace zr::host::config

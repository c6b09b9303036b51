// Tests that measure or limit the memory of a process skip under sanitizers, which add shadow memory, redzones and
// blocks that stay allocated after they are freed:
//
//     if (zr::test::kSanitized) GTEST_SKIP() << zr::test::kSanitizerMemory;
#pragma once

namespace zr::test {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif
#else
inline constexpr bool kSanitized = false;
#endif

inline constexpr const char* kSanitizerMemory = "the process also contains the memory of a sanitizer";

}  // namespace zr::test

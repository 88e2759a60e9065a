// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_SUPPORT_SANITIZED_H_
#define TENSORMOUNT_TESTS_SUPPORT_SANITIZED_H_

namespace tensormount {

// Whether a sanitizer is in this build, GCC's or clang's: memory that was freed stays taken then,
// and what a test counts of it is the sanitizer's.
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

// An amount of data that a test goes over: under a sanitizer, which takes five to thirty times as
// long, what still shows every way through the code. The whole amount runs where the program is
// built plainly.
template <typename T>
constexpr T Amount(T plain, T sanitized) {
  return kSanitized ? sanitized : plain;
}

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_SUPPORT_SANITIZED_H_

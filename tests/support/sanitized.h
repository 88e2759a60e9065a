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

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_SUPPORT_SANITIZED_H_

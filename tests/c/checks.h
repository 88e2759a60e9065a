// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_C_CHECKS_H_
#define TENSORMOUNT_TESTS_C_CHECKS_H_

// Checks of a test program in C, from any thread: what does not hold is printed and counted.

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include <tensormount/c.h>

static int failures = 0;
static pthread_mutex_t failures_mutex = PTHREAD_MUTEX_INITIALIZER;

static inline void complain(const char* file, int line, const char* what) {
  pthread_mutex_lock(&failures_mutex);
  ++failures;
  fprintf(stderr, "%s:%d: %s: %s\n", file, line, what, tm_last_error());
  pthread_mutex_unlock(&failures_mutex);
}

#define CHECK(condition)                                        \
  do {                                                          \
    if (!(condition)) complain(__FILE__, __LINE__, #condition); \
  } while (0)
#define OK(call) CHECK((call) == TM_OK)
// A failure of that status whose message contains the text.
#define FAILS(call, status, text)                   \
  do {                                              \
    const tm_status failed_with = (call);           \
    CHECK(failed_with == (status));                 \
    CHECK(strstr(tm_last_error(), (text)) != NULL); \
  } while (0)

#endif  // TENSORMOUNT_TESTS_C_CHECKS_H_

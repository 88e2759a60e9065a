// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_C_MAIL_HOST_H_
#define TENSORMOUNT_TESTS_C_MAIL_HOST_H_

// A process group for threads, as a host of tm_communicator_from_callbacks might have one: posts
// wait in a list until the other side's post is there too.

#include <stdint.h>

#include <tensormount/c.h>

typedef struct mail_host mail_host;

mail_host* mail_host_new(void);
// Posts that nobody met, and how many were cancelled.
int mail_host_left(mail_host* host);
void mail_host_free(mail_host* host);

typedef struct mail_seat {
  mail_host* host;
  int32_t rank;
} mail_seat;
// `seat` must outlive their use.
tm_callbacks mail_host_callbacks(mail_seat* seat, uint32_t tag);

#endif  // TENSORMOUNT_TESTS_C_MAIL_HOST_H_

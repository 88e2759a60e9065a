// SPDX-License-Identifier: Apache-2.0
// Flips one bit of what a program sends to others through sockets, as a machine with bad memory or a
// broken switch does: LD_PRELOAD. By the environment:
//   TORTURE_WIRE_COUNT  a file that gets, as text, how many bytes were sent in all
//   TORTURE_WIRE_FLIP   "BYTE BIT": of the bytes that are sent, over all sockets in the order of the calls
// The flipped byte is sent as such if the call sends it; a call that sends less is repeated by the program,
// and flips it again.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

static uint64_t sent;
static uint64_t flip_byte = UINT64_MAX;
static int flip_bit;
static const char* count_file;
static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;

__attribute__((constructor)) static void Begin(void) {
  const char* flip = getenv("TORTURE_WIRE_FLIP");
  unsigned long long byte;
  if (flip != NULL && sscanf(flip, "%llu %d", &byte, &flip_bit) == 2) flip_byte = byte;
  count_file = getenv("TORTURE_WIRE_COUNT");
}

__attribute__((destructor)) static void End(void) {
  if (count_file == NULL || sent == 0) return;
  char text[32];
  const int size = snprintf(text, sizeof text, "%llu\n", (unsigned long long)sent);
  const int fd = open(count_file, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd < 0 || write(fd, text, (size_t)size) != size) abort();
  close(fd);
}

// The byte to be flipped, if it is among the next `size`: at which of them.
static size_t Among(size_t size) {
  return flip_byte >= sent && flip_byte - sent < size ? (size_t)(flip_byte - sent) : SIZE_MAX;
}

// Under the mutex, which it leaves.
static ssize_t Sent(ssize_t n) {
  if (n > 0) sent += (uint64_t)n;
  pthread_mutex_unlock(&one_at_a_time);
  return n;
}

ssize_t send(int fd, const void* data, size_t size, int flags) {
  static ssize_t (*real)(int, const void*, size_t, int);
  if (real == NULL) real = (ssize_t(*)(int, const void*, size_t, int))dlsym(RTLD_NEXT, "send");
  pthread_mutex_lock(&one_at_a_time);
  const size_t at = Among(size);
  if (at == SIZE_MAX) return Sent(real(fd, data, size, flags));
  char* other = malloc(size);
  if (other == NULL) abort();
  memcpy(other, data, size);
  other[at] ^= (char)(1 << flip_bit);
  const ssize_t n = real(fd, other, size, flags);
  free(other);
  return Sent(n);
}

ssize_t sendmsg(int fd, const struct msghdr* message, int flags) {
  static ssize_t (*real)(int, const struct msghdr*, int);
  if (real == NULL) real = (ssize_t(*)(int, const struct msghdr*, int))dlsym(RTLD_NEXT, "sendmsg");
  size_t size = 0;
  for (size_t i = 0; i < message->msg_iovlen; ++i) size += message->msg_iov[i].iov_len;
  pthread_mutex_lock(&one_at_a_time);
  const size_t at = Among(size);
  if (at == SIZE_MAX) return Sent(real(fd, message, flags));
  char* other = malloc(size);
  if (other == NULL) abort();
  size_t have = 0;
  for (size_t i = 0; i < message->msg_iovlen; ++i) {
    memcpy(other + have, message->msg_iov[i].iov_base, message->msg_iov[i].iov_len);
    have += message->msg_iov[i].iov_len;
  }
  other[at] ^= (char)(1 << flip_bit);
  struct iovec all = {other, size};
  struct msghdr changed = *message;
  changed.msg_iov = &all;
  changed.msg_iovlen = 1;
  const ssize_t n = real(fd, &changed, flags);
  free(other);
  return Sent(n);
}

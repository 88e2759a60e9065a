// SPDX-License-Identifier: Apache-2.0
#define _POSIX_C_SOURCE 200809L
#include "tests/c/mail_host.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef struct post {
  struct post* next;
  uint64_t request;
  int32_t from, to;
  uint32_t tag;
  int is_send;
  const void* source;
  void* target;
  uint64_t size;
  int state;  // 0: under way, 1: done, -1: failed.
} post;

struct mail_host {
  pthread_mutex_t mutex;
  post* posts;  // Oldest first.
  uint64_t next_request;
  int cancelled;
};

mail_host* mail_host_new(void) {
  mail_host* host = calloc(1, sizeof(*host));
  if (host == NULL) return NULL;
  pthread_mutex_init(&host->mutex, NULL);
  host->next_request = 1;
  return host;
}

int mail_host_left(mail_host* host) {
  int left = 0;
  pthread_mutex_lock(&host->mutex);
  for (const post* p = host->posts; p != NULL; p = p->next) ++left;
  left += host->cancelled;
  pthread_mutex_unlock(&host->mutex);
  return left;
}

void mail_host_free(mail_host* host) {
  for (post* p = host->posts; p != NULL;) {
    post* next = p->next;
    free(p);
    p = next;
  }
  pthread_mutex_destroy(&host->mutex);
  free(host);
}

static int start(mail_seat* seat, post mine, uint64_t* request) {
  mail_host* host = seat->host;
  post* added = malloc(sizeof(*added));
  if (added == NULL) return 1;
  pthread_mutex_lock(&host->mutex);
  *added = mine;
  added->request = host->next_request++;
  added->next = NULL;
  *request = added->request;
  // The oldest post of the other kind that fits is the one to meet.
  post** end = &host->posts;
  post* other = NULL;
  for (; *end != NULL; end = &(*end)->next) {
    post* p = *end;
    if (other == NULL && p->state == 0 && p->is_send != added->is_send && p->from == added->from &&
        p->to == added->to && p->tag == added->tag) {
      other = p;
    }
  }
  *end = added;
  if (other != NULL) {
    const post* from = added->is_send ? added : other;
    const post* to = added->is_send ? other : added;
    const int fits = from->size == to->size;
    if (fits) memcpy(to->target, from->source, from->size);
    added->state = other->state = fits ? 1 : -1;
  }
  pthread_mutex_unlock(&host->mutex);
  return 0;
}

static int mail_send(void* context, int32_t to, uint32_t tag, const void* data, uint64_t size,
                     uint64_t* request) {
  mail_seat* seat = context;
  const post mine = {
      .from = seat->rank, .to = to, .tag = tag, .is_send = 1, .source = data, .size = size};
  return start(seat, mine, request);
}

static int mail_receive(void* context, int32_t from, uint32_t tag, void* data, uint64_t size,
                        uint64_t* request) {
  mail_seat* seat = context;
  const post mine = {.from = from, .to = seat->rank, .tag = tag, .target = data, .size = size};
  return start(seat, mine, request);
}

// Takes a post out of the list where its state is not 0, or `always`. Its state, -1 if there is
// none.
static int finish(mail_seat* seat, uint64_t request, int always) {
  mail_host* host = seat->host;
  int state = -1;
  pthread_mutex_lock(&host->mutex);
  for (post** at = &host->posts; *at != NULL; at = &(*at)->next) {
    post* p = *at;
    if (p->request != request) continue;
    state = p->state;
    if (state != 0 || always) {
      *at = p->next;
      free(p);
    }
    break;
  }
  if (always) ++host->cancelled;
  pthread_mutex_unlock(&host->mutex);
  return state;
}

static int mail_test(void* context, uint64_t request) { return finish(context, request, 0); }

static void mail_cancel(void* context, uint64_t request) { (void)finish(context, request, 1); }

tm_callbacks mail_host_callbacks(mail_seat* seat, uint32_t tag) {
  const tm_callbacks callbacks = {.struct_size = sizeof(callbacks),
                                  .tag = tag,
                                  .context = seat,
                                  .send = mail_send,
                                  .receive = mail_receive,
                                  .test = mail_test,
                                  .cancel = mail_cancel,
                                  .leave_wait_ms = 60000};
  return callbacks;
}

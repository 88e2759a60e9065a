// SPDX-License-Identifier: Apache-2.0
// Jobs in the background from C99, waits of all kinds, their end by request, errors as fields, and
// what a forked child may do with what it inherited. Prints what is wrong and exits 1.
#define _POSIX_C_SOURCE 200809L
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <tensormount/c.h>

#include "tests/c/checks.h"
#include "tests/c/mail_host.h"

enum { COUNT = 1000 };
static const int64_t kCount = COUNT;

static tm_buffer numbers_of(int32_t* memory) {
  const tm_buffer buffer = {
      .struct_size = sizeof(buffer), .dtype = TM_I32, .data = memory, .shape = &kCount, .rank = 1};
  return buffer;
}

// "numbers", i32 [COUNT], in `memory`.
static tm_state* state_of(int32_t* memory, const char* key) {
  tm_state* state = NULL;
  OK(tm_state_new(&state));
  const tm_buffer data = numbers_of(memory);
  const tm_shard shard = {
      .struct_size = sizeof(shard), .global_shape = &kCount, .global_rank = 1, .data = &data};
  OK(tm_state_add_tensor(state, key, &shard));
  return state;
}

static void count_up(int32_t* memory, int32_t from) {
  for (int32_t i = 0; i < COUNT; ++i) memory[i] = from + i;
}

static void holds(const char* path, int32_t from) {
  tm_checkpoint* checkpoint = NULL;
  int32_t got[COUNT] = {0};
  OK(tm_checkpoint_open(path, &checkpoint));
  OK(tm_checkpoint_read_bytes(checkpoint, "numbers", 0, got, sizeof(got)));
  CHECK(got[0] == from && got[COUNT - 1] == from + COUNT - 1);
  tm_checkpoint_close(checkpoint);
}

// Polls until `fd` is readable, for a minute at most.
static int comes(int fd) {
  struct pollfd poll_fd = {.fd = fd, .events = POLLIN};
  return poll(&poll_fd, 1, 60000) == 1 && (poll_fd.revents & POLLIN) != 0;
}

// What the last error of this thread says as JSON has all of `texts`, which ends with NULL.
static int error_has(const char* const* texts) {
  char* json = NULL;
  if (tm_last_error_json(&json) != TM_OK) return 0;
  int all = 1;
  for (; *texts != NULL; ++texts) {
    if (strstr(json, *texts) == NULL) {
      fprintf(stderr, "%s has no %s\n", json, *texts);
      all = 0;
    }
  }
  tm_free(json);
  return all;
}

// A thread that nothing failed on yet.
static void* errors_as_fields(void* path) {
  char* json = NULL;
  CHECK(tm_last_error_json(&json) == TM_NOT_FOUND && json == NULL);
  CHECK(tm_last_error_json(NULL) == TM_INVALID_ARGUMENT);
  tm_checkpoint* checkpoint = NULL;
  FAILS(tm_checkpoint_open("/nowhere/at/all", &checkpoint), TM_NOT_FOUND, "/nowhere");
  CHECK(error_has((const char*[]){"\"code\":\"NOT_FOUND\"", "\"status\":2", "\"errno\":2", NULL}));
  OK(tm_checkpoint_open(path, &checkpoint));
  char byte = 0;
  FAILS(tm_checkpoint_read_bytes(checkpoint, "no\"such", 0, &byte, 1), TM_NOT_FOUND, "no tensor");
  CHECK(error_has((const char*[]){"\"key\":\"no\\\"such\"", NULL}));
  tm_checkpoint_close(checkpoint);
  // What another library says has its code and words, and no field of ours.
  CHECK(tm_set_last_error(TM_BUSY, 0, "later") == TM_BUSY);
  OK(tm_last_error_json(&json));
  CHECK(strcmp(json, "{\"code\":\"BUSY\",\"status\":10,\"errno\":16,\"message\":\"later\"}") == 0);
  tm_free(json);
  return NULL;
}

// Layouts that do not fit together: key, box and cause, on the rank that is told.
static void layout_as_fields(const char* path) {
  tm_communicator* comm = NULL;
  tm_state* state = NULL;
  OK(tm_communicator_self(&comm));
  OK(tm_state_new(&state));
  int32_t memory[COUNT];
  count_up(memory, 0);
  const int64_t begin = 10;
  const int64_t extent = COUNT - 10;
  const tm_region region = {
      .struct_size = sizeof(region), .rank = 1, .begin = &begin, .extent = &extent};
  tm_buffer data = numbers_of(memory);
  data.shape = &extent;
  const tm_shard shard = {.struct_size = sizeof(shard),
                          .global_shape = &kCount,
                          .global_rank = 1,
                          .region = &region,
                          .data = &data};
  OK(tm_state_add_tensor(state, "numbers", &shard));
  FAILS(tm_save(state, path, comm, NULL, NULL), TM_INVALID_ARGUMENT, "numbers");
  CHECK(error_has(
      (const char*[]){"\"key\":\"numbers\"", "\"box\":{\"begin\":[0],\"extent\":[10]}", NULL}));
  tm_state_free(state);
  tm_communicator_free(comm);
}

static void damage_as_fields(const char* path) {
  // Found by its size: the one data file of a checkpoint with one tensor.
  char command[600];
  snprintf(command, sizeof(command),
           "f=$(find '%s/data' -type f | head -n 1) && chmod u+w \"$f\" && printf X | dd of=\"$f\" "
           "bs=1 seek=100 conv=notrunc status=none",
           path);
  CHECK(system(command) == 0);
  tm_checkpoint* checkpoint = NULL;
  int32_t got[COUNT];
  OK(tm_checkpoint_open(path, &checkpoint));
  FAILS(tm_checkpoint_read_bytes(checkpoint, "numbers", 0, got, sizeof(got)), TM_DATA_LOSS, "byte");
  CHECK(error_has((const char*[]){"\"key\":\"numbers\"", "\"file\":\"data/", "\"begin\":[0]",
                                  "\"errno\":5", NULL}));
  tm_checkpoint_close(checkpoint);
}

// Waits that say "not yet", descriptors that are readable in the end, and saves without a copy.
static void jobs_alone(const char* copied, const char* in_place, const char* by_saver) {
  // Its file is damaged later: nobody else shall have it.
  const tm_save_options own_files = {.struct_size = sizeof(own_files), .no_reuse = 1};
  tm_communicator* comm = NULL;
  OK(tm_communicator_self(&comm));
  int32_t memory[COUNT];
  count_up(memory, 7);
  tm_state* state = state_of(memory, "numbers");
  tm_save_job* job = NULL;
  int32_t done = 0;
  int fd = -1;
  OK(tm_save_async(state, copied, comm, NULL, &job));
  OK(tm_save_job_wait_staged(job, 0, &done));
  CHECK(done == 1);
  count_up(memory, 1000);
  OK(tm_save_job_staged_fd(job, &fd));
  CHECK(comes(fd));
  OK(tm_save_job_fd(job, &fd));
  CHECK(comes(fd) && comes(fd));  // Stays so.
  OK(tm_save_job_wait_for(job, 0, &done, NULL));
  CHECK(done == 1);
  tm_save_job_free(job);
  holds(copied, 7);

  // The descriptor may be asked for before the end, and after it.
  OK(tm_save_in_place(state, in_place, comm, NULL, &job));
  OK(tm_save_job_fd(job, &fd));
  tm_state_free(state);
  CHECK(comes(fd));
  OK(tm_save_job_wait_staged(job, -1, &done));
  CHECK(done == 1);
  tm_save_report* report = NULL;
  OK(tm_save_job_wait_for(job, -1, &done, &report));
  CHECK(done == 1 && strcmp(tm_save_report_path(report), in_place) == 0);
  tm_save_report_free(report);
  tm_job_progress progress = {.struct_size = sizeof(progress)};
  OK(tm_save_job_progress(job, &progress));
  CHECK(progress.state == TM_JOB_COMMITTED && progress.bytes_staged == 0);
  CHECK(progress.bytes_written >= sizeof(memory));
  tm_save_job_free(job);
  holds(in_place, 1000);

  // A saver of its own; memory that never suffices is said.
  const tm_saver_options options = {
      .struct_size = sizeof(options), .staging_bytes = 100, .stage_in_background = 1};
  tm_saver* saver = NULL;
  OK(tm_saver_new(comm, &options, &saver));
  state = state_of(memory, "numbers");
  OK(tm_saver_save(saver, state, by_saver, &own_files, &job));
  FAILS(tm_save_job_wait_staged(job, -1, &done), TM_RESOURCE_EXHAUSTED, "staging");
  CHECK(done == 1);
  FAILS(tm_save_job_wait(job, NULL), TM_RESOURCE_EXHAUSTED, "staging");
  tm_save_job_free(job);
  tm_saver_free(saver);
  OK(tm_saver_new(comm, NULL, &saver));
  OK(tm_saver_save(saver, state, by_saver, &own_files, &job));
  OK(tm_save_job_wait(job, NULL));
  tm_save_job_free(job);
  tm_saver_free(saver);
  FAILS(tm_saver_new(comm, &(tm_saver_options){.struct_size = 1}, &saver), TM_INVALID_ARGUMENT,
        "tm_saver_options");
  tm_state_free(state);

  // Loads, two at once: they run one after the other.
  int32_t first[COUNT] = {0};
  int32_t second[COUNT] = {0};
  tm_state* wanted = state_of(first, "numbers");
  tm_load_job* load = NULL;
  tm_load_job* other = NULL;
  OK(tm_load_async(wanted, copied, comm, NULL, &load));
  tm_state_free(wanted);
  wanted = state_of(second, "numbers");
  OK(tm_load_async(wanted, in_place, comm, NULL, &other));
  tm_state_free(wanted);
  OK(tm_load_job_fd(other, &fd));
  CHECK(comes(fd));
  tm_load_report* loaded = NULL;
  OK(tm_load_job_wait(other, 0, &done, &loaded));
  CHECK(done == 1 && second[0] == 1000 && second[COUNT - 1] == 1000 + COUNT - 1);
  tm_load_numbers numbers = {.struct_size = sizeof(numbers)};
  OK(tm_load_report_numbers(loaded, &numbers));
  CHECK(numbers.bytes_wanted == sizeof(second));
  CHECK(tm_load_job_bytes_read(other) >= sizeof(second));
  tm_load_report_free(loaded);
  OK(tm_load_job_wait(load, -1, &done, NULL));
  CHECK(done == 1 && first[0] == 7);
  tm_load_job_free(load);
  tm_load_job_free(other);
  wanted = state_of(first, "absent");
  OK(tm_load_async(wanted, copied, comm, NULL, &load));
  FAILS(tm_load_job_wait(load, -1, &done, NULL), TM_NOT_FOUND, "absent");
  CHECK(done == 1 && error_has((const char*[]){"\"key\":\"absent\"", NULL}));
  tm_load_job_free(load);
  // What is asked for wrongly is the verdict of the job, which other ranks take part in.
  OK(tm_load_async(wanted, NULL, comm, NULL, &load));
  FAILS(tm_load_job_wait(load, -1, &done, NULL), TM_INVALID_ARGUMENT, "argument 'path'");
  tm_load_job_free(load);
  tm_state_free(wanted);
  tm_communicator_free(comm);
}

// Rank 1 of two comes to nothing: the job of rank 0, and the one where they are exchanged, end soon
// after they are cancelled, and not after half an hour.
typedef struct lonely {
  mail_seat seat;
  const char* path;
} lonely;

static void* alone_among_two(void* argument) {
  lonely* me = argument;
  tm_callbacks callbacks = mail_host_callbacks(&me->seat, 9);
  callbacks.leave_wait_ms = 100;  // The other does not come to take leave either.
  tm_communicator* comm = NULL;
  OK(tm_communicator_from_callbacks(&callbacks, me->seat.rank, 2, &comm));
  int32_t memory[COUNT];
  count_up(memory, 0);
  tm_state* state = state_of(memory, "numbers");
  const char* const rank = me->seat.rank == 0 ? "\"rank\":0" : "\"rank\":1";
  int32_t done = 1;
  if (me->seat.rank == 0) {
    tm_save_job* job = NULL;
    OK(tm_save_in_place(state, me->path, comm, NULL, &job));
    OK(tm_save_job_wait_for(job, 50, &done, NULL));
    CHECK(done == 0);
    OK(tm_save_job_wait_staged(job, 0, &done));
    CHECK(done == 0);
    tm_save_job_cancel(job);
    FAILS(tm_save_job_wait_for(job, 60000, &done, NULL), TM_CANCELLED, "cancelled by rank 0");
    CHECK(done == 1 && error_has((const char*[]){rank, "\"code\":\"CANCELLED\"", NULL}));
    tm_job_progress progress = {.struct_size = sizeof(progress)};
    OK(tm_save_job_progress(job, &progress));
    CHECK(progress.state == TM_JOB_CANCELLED);
    tm_save_job_free(job);
  } else {
    tm_load_job* job = NULL;
    OK(tm_load_async(state, me->path, comm, NULL, &job));
    OK(tm_load_job_wait(job, 50, &done, NULL));
    CHECK(done == 0);
    tm_load_job_cancel(job);
    FAILS(tm_load_job_wait(job, 60000, &done, NULL), TM_CANCELLED, "cancelled by rank 1");
    CHECK(done == 1 && error_has((const char*[]){rank, NULL}));
    tm_load_job_free(job);
  }
  tm_state_free(state);
  tm_communicator_free(comm);
  return NULL;
}

static void cancelled_waits(const char* path) {
  mail_host* hosts[2];
  lonely ranks[2];
  pthread_t threads[2];
  for (int32_t r = 0; r < 2; ++r) {
    hosts[r] = mail_host_new();
    ranks[r].seat.host = hosts[r];
    ranks[r].seat.rank = r;
    ranks[r].path = path;
    if (pthread_create(&threads[r], NULL, alone_among_two, &ranks[r]) != 0) exit(3);
  }
  for (int32_t r = 0; r < 2; ++r) {
    pthread_join(threads[r], NULL);
    mail_host_free(hosts[r]);
  }
}

// What a child of fork(2) has is refused by name; what it makes itself works; and the parent's
// things are as they were.
static void forked(const char* path, const char* own_path) {
  tm_communicator* comm = NULL;
  tm_checkpoint* checkpoint = NULL;
  tm_saver* saver = NULL;
  tm_save_job* job = NULL;
  tm_load_job* load = NULL;
  int32_t memory[COUNT];
  count_up(memory, 3);
  OK(tm_communicator_self(&comm));
  OK(tm_checkpoint_open(path, &checkpoint));
  OK(tm_saver_new(comm, NULL, &saver));
  tm_state* state = state_of(memory, "numbers");
  OK(tm_save_async(state, own_path, comm, NULL, &job));
  OK(tm_load_async(state, path, comm, NULL, &load));
  const pid_t child = fork();
  if (child == 0) {
    failures = 0;
    char text[64];
    snprintf(text, sizeof(text), "was created by process %d", (int)getppid());
    tm_list* keys = NULL;
    int32_t done = 0;
    int fd = -1;
    FAILS(tm_checkpoint_keys(checkpoint, &keys), TM_UNSUPPORTED, "'checkpoint'");
    FAILS(tm_checkpoint_read_bytes(checkpoint, "numbers", 0, memory, 4), TM_UNSUPPORTED, text);
    FAILS(tm_save(state, own_path, comm, NULL, NULL), TM_UNSUPPORTED, text);
    FAILS(tm_save_async(state, own_path, comm, NULL, &job), TM_UNSUPPORTED, text);
    FAILS(tm_saver_save(saver, state, own_path, NULL, &job), TM_UNSUPPORTED, text);
    FAILS(tm_save_job_wait(job, NULL), TM_UNSUPPORTED, text);
    FAILS(tm_save_job_wait_staged(job, -1, &done), TM_UNSUPPORTED, text);
    FAILS(tm_save_job_fd(job, &fd), TM_UNSUPPORTED, text);
    FAILS(tm_load(state, path, comm, NULL, NULL), TM_UNSUPPORTED, text);
    FAILS(tm_load_async(state, path, comm, NULL, &load), TM_UNSUPPORTED, text);
    FAILS(tm_load_job_wait(load, -1, &done, NULL), TM_UNSUPPORTED, text);
    tm_communicator* channel = NULL;
    FAILS(tm_communicator_channel(comm, 7, &channel), TM_UNSUPPORTED, text);
    tm_load_job_free(load);
    tm_save_job_free(job);
    tm_saver_free(saver);
    tm_checkpoint_close(checkpoint);
    tm_communicator_free(comm);
    holds(path, 7);
    _exit(failures == 0 ? 0 : 1);
  }
  int status = -1;
  CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
  int32_t done = 0;
  OK(tm_save_job_wait(job, NULL));
  OK(tm_load_job_wait(load, -1, &done, NULL));
  CHECK(done == 1 && memory[0] == 7);
  tm_load_job_free(load);
  tm_save_job_free(job);
  tm_saver_free(saver);
  tm_checkpoint_close(checkpoint);
  tm_state_free(state);
  tm_communicator_free(comm);
}

// Whether `json`, which is freed, has the text.
static int json_has(char* json, const char* text) {
  const int has = json != NULL && strstr(json, text) != NULL;
  if (!has) fprintf(stderr, "%s has no %s\n", json == NULL ? "NULL" : json, text);
  tm_free(json);
  return has;
}

static tm_status refuse(void* context, const tm_save_report* report) {
  ++*(int*)context;
  CHECK(strlen(tm_save_report_uuid(report)) == 32);
  return tm_set_last_error(TM_RESOURCE_EXHAUSTED, 0, "the host has no room for it");
}

static tm_status refuse_in_silence(void* context, const tm_save_report* report) {
  (void)context, (void)report;
  return 99;
}

static void committed(void* context, const tm_save_report* report) {
  *(int*)context += 10;
  holds(tm_save_report_path(report), 5);
}

// What a host may say before a checkpoint is published, and hear afterwards.
static void hooks_of_saves(const char* path) {
  int32_t memory[COUNT];
  count_up(memory, 5);
  tm_communicator* comm = NULL;
  OK(tm_communicator_self(&comm));
  tm_state* state = state_of(memory, "numbers");
  int calls = 0;
  tm_save_options options = {.struct_size = sizeof(options),
                             .before_publish = refuse,
                             .before_publish_context = &calls,
                             .on_commit = committed,
                             .on_commit_context = &calls};
  FAILS(tm_save(state, path, comm, &options, NULL), TM_RESOURCE_EXHAUSTED, "no room for it");
  CHECK(calls == 1);
  tm_checkpoint* checkpoint = NULL;
  FAILS(tm_checkpoint_open(path, &checkpoint), TM_NOT_FOUND, "");
  options.before_publish = refuse_in_silence;
  CHECK(tm_save(state, path, comm, &options, NULL) == TM_INTERNAL);
  options.before_publish = NULL;
  OK(tm_save(state, path, comm, &options, NULL));
  CHECK(calls == 11);
  tm_state_free(state);
  tm_communicator_free(comm);
}

// Where the bytes of a checkpoint are.
static void places(const char* path) {
  tm_checkpoint* checkpoint = NULL;
  OK(tm_checkpoint_open(path, &checkpoint));
  tm_mapping* mapping = NULL;
  OK(tm_checkpoint_map(checkpoint, "numbers", 40, 8, &mapping));
  FAILS(tm_checkpoint_map(checkpoint, "numbers", 3996, 8, &mapping), TM_INVALID_ARGUMENT, "past");
  FAILS(tm_checkpoint_map(checkpoint, "nothing", 0, 8, &mapping), TM_NOT_FOUND, "nothing");
  tm_mapping* empty = NULL;
  OK(tm_checkpoint_map(checkpoint, "numbers", 4000, 0, &empty));
  CHECK(tm_mapping_data(empty) == NULL);
  tm_mapping_free(empty);
  char* text = NULL;
  OK(tm_checkpoint_layout(checkpoint, "numbers", &text));
  CHECK(json_has(text, "\"chunks\":[{\"region\":\"[0:1000]\""));
  OK(tm_checkpoint_picture(checkpoint, "numbers", &text));
  CHECK(json_has(text, "</svg>"));
  FAILS(tm_checkpoint_picture(checkpoint, "nothing", &text), TM_NOT_FOUND, "nothing");
  tm_checkpoint_close(checkpoint);
  int32_t first = 0;  // The mapping has all that it needs.
  memcpy(&first, tm_mapping_data(mapping), sizeof(first));
  CHECK(first == 15);
  tm_mapping_free(mapping);
  tm_mapping_free(NULL);
}

// Calls that take long, and their end by another thread.
static void tasks(const char* store, const char* good, const char* other) {
  tm_task* task = NULL;
  OK(tm_task_new(&task));
  const tm_verify_options verify = {.struct_size = sizeof(verify), .task = task};
  int32_t answer = 0;
  uint64_t done = 1, total = 0;
  tm_task_progress(task, &done, NULL);
  CHECK(done == 0);
  OK(tm_verify(good, &verify, &answer, NULL));
  tm_task_progress(task, &done, &total);
  CHECK(done == total && total >= 4 * COUNT);

  char path[300];
  char* json = NULL;
  tm_communicator* comm = NULL;
  OK(tm_communicator_self(&comm));
  snprintf(path, sizeof(path), "%s/../out.safetensors", store);
  OK(tm_export(good, path, comm, NULL, &json));
  CHECK(json_has(json, "\"format\":\"safetensors\",\"ranks\":1,\"files\":1,\"tensors\":1"));
  FAILS(tm_export(good, path, comm, NULL, NULL), TM_ALREADY_EXISTS, "out.safetensors");
  tm_export_options wrong = {.struct_size = sizeof(wrong), .format = "zip"};
  FAILS(tm_export(good, path, comm, &wrong, NULL), TM_INVALID_ARGUMENT, "zip");
  wrong.format = "npy";
  wrong.hf_part_bytes = 5;
  FAILS(tm_export(good, path, comm, &wrong, NULL), TM_INVALID_ARGUMENT, "hf");
  FAILS(tm_export(good, NULL, comm, NULL, NULL), TM_INVALID_ARGUMENT, "destination");
  FAILS(tm_export(store, path, comm, NULL, NULL), TM_INVALID_ARGUMENT, "several");

  tm_task_cancel(task);
  FAILS(tm_verify(good, &verify, &answer, NULL), TM_CANCELLED, "cancelled");
  const tm_diff_options values = {.struct_size = sizeof(values), .values = 1, .task = task};
  FAILS(tm_diff(good, other, &values, &answer, NULL), TM_CANCELLED, "cancelled");
  const tm_export_options again = {.struct_size = sizeof(again), .replace = 1, .task = task};
  FAILS(tm_export(good, path, comm, &again, NULL), TM_CANCELLED, "interrupted");
  const tm_diff_options tensors = {.struct_size = sizeof(tensors), .keys = "numbers"};
  OK(tm_diff(good, path, &tensors, &answer, NULL));
  CHECK(answer == 1);  // As it was.
  tm_task_free(task);
  tm_task_free(NULL);
  tm_task_cancel(NULL);
  tm_communicator_free(comm);

  FAILS(tm_store_publish(good, NULL, NULL), TM_INVALID_ARGUMENT, ".staging/");
  snprintf(path, sizeof(path), "%s/.staging/nothing", store);
  FAILS(tm_store_publish(path, NULL, &json), TM_NOT_FOUND, "nothing");
}

// What is published is told to a watch, and what exists if it is asked for.
static void watches(const char* store, const char* good) {
  tm_watch* watch = NULL;
  char* json = NULL;
  tm_watch_options options = {sizeof options, 0, 0, NULL};
  OK(tm_store_watch(store, NULL, &watch));
  OK(tm_watch_next(watch, 0, &json));
  CHECK(json == NULL);
  tm_watch_free(watch);
  options.existing = 1;
  OK(tm_store_watch(store, &options, &watch));
  OK(tm_watch_next(watch, 20000, &json));
  CHECK(json_has(json, "\"event\":\"committed\""));
  tm_watch_free(watch);
  tm_watch_free(NULL);
  options.since = "of-no-checkpoint";
  FAILS(tm_store_watch(store, &options, &watch), TM_NOT_FOUND, "of-no-checkpoint");
  FAILS(tm_store_watch(good, NULL, &watch), TM_INVALID_ARGUMENT, "is a checkpoint");
  FAILS(tm_watch_next(NULL, 0, &json), TM_INVALID_ARGUMENT, "watch");
}

// A store with `good` and `damaged`, `other` among others.
static void stores(const char* store, const char* good, const char* other, const char* damaged) {
  char* json = NULL;
  OK(tm_store_list(store, &json));
  CHECK(json_has(json, "\"checkpoint\":\"step-1\""));
  FAILS(tm_store_list("/nowhere/at/all", &json), TM_NOT_FOUND, "/nowhere");
  watches(store, good);
  OK(tm_store_latest(store, &json));
  CHECK(json_has(json, "\"path\":\""));
  OK(tm_store_list(store, &json));
  CHECK(json_has(json, "\"own_bytes\":"));

  char copies[300];
  snprintf(copies, sizeof(copies), "%s/../copies", store);
  const char* sources[2] = {good, damaged};
  const tm_copy_options slow = {.struct_size = sizeof(slow), .limit_rate = 1000000000};
  int32_t there = -1;
  OK(tm_store_copy(sources, 2, copies, &slow, &there, &json));
  CHECK(there == 0 && json_has(json, "\"code\":\"DATA_LOSS\""));
  OK(tm_store_copy(sources, 1, copies, NULL, &there, &json));
  CHECK(there == 1 && json_has(json, "\"event\":\"there\""));
  OK(tm_store_copy(sources, 1, copies, NULL, NULL, NULL));
  FAILS(tm_store_copy(sources + 1, 1, copies, NULL, &there, NULL), TM_DATA_LOSS, "data/");
  FAILS(tm_store_copy(sources, 1, store, NULL, &there, NULL), TM_INVALID_ARGUMENT,
        "is the store of the source");
  tm_task* ended = NULL;
  OK(tm_task_new(&ended));
  tm_task_cancel(ended);
  const tm_copy_options cancelled = {.struct_size = sizeof(cancelled), .task = ended};
  FAILS(tm_store_copy(&other, 1, copies, &cancelled, NULL, NULL), TM_CANCELLED, "");
  tm_task_free(ended);

  int32_t whole = -1;
  OK(tm_verify(good, NULL, &whole, &json));
  CHECK(whole == 1 && json_has(json, "\"damage\":[]"));
  OK(tm_verify(damaged, NULL, &whole, &json));
  CHECK(whole == 0 && json_has(json, "\"object\":\"tensor numbers [0:1000]\""));
  const tm_verify_options quick = {.struct_size = sizeof(quick), .quick = 1};
  OK(tm_verify(damaged, &quick, &whole, NULL));
  CHECK(whole == 1);  // It reads no data.
  FAILS(tm_verify(store, NULL, &whole, NULL), TM_INVALID_ARGUMENT, "several checkpoints");

  int32_t same = -1;
  OK(tm_diff(good, good, NULL, &same, &json));
  CHECK(same == 1 && json_has(json, "\"mismatches\":[]"));
  const tm_diff_options values = {.struct_size = sizeof(values), .values = 1};
  OK(tm_diff(good, other, &values, &same, &json));
  CHECK(same == 0 && json_has(json, "\"differing\":1000"));
  const tm_diff_options renamed = {.struct_size = sizeof(renamed),
                                   .key_map = "[{\"key\": \"numbers\", \"to\": \"counts\"}]",
                                   .limit = 1};
  OK(tm_diff(good, good, &renamed, &same, &json));
  CHECK(same == 0 && json_has(json, "\"more\":1"));
  const tm_diff_options none = {.struct_size = sizeof(none), .keys = "weights*"};
  FAILS(tm_diff(good, other, &none, &same, NULL), TM_NOT_FOUND, "no key matches");

  tm_list* names = NULL;
  OK(tm_key_map_apply("[{\"drop\": \"optim.*\"}, {\"prefix\": \"model.\", \"to\": \"\"}]",
                      "model.w\0optim.m\0b", 18, 3, &names));
  CHECK(tm_list_size(names) == 3 && strcmp(tm_list_get(names, 0, NULL), "w") == 0);
  CHECK(tm_list_get(names, 1, NULL)[0] == '\0' && strcmp(tm_list_get(names, 2, NULL), "b") == 0);
  tm_list_free(names);
  FAILS(tm_key_map_apply("[]", "a\0b", 4, 3, &names), TM_INVALID_ARGUMENT, "2 of 3");
  FAILS(tm_key_map_apply("[]", "a\0b", 4, 1, &names), TM_INVALID_ARGUMENT, "left over");

  // What another program saved, where it lies.
  char folder[300], path[400], command[900];
  snprintf(folder, sizeof(folder), "%s/../foreign", store);
  snprintf(path, sizeof(path), "%s/adopted", store);
  snprintf(command, sizeof(command),
           "mkdir '%s' && printf '\\065\\000\\000\\000\\000\\000\\000\\000%%s\\001\\002\\003' "
           "'{\"w\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]}}' > "
           "'%s/model.safetensors'",
           folder, folder);
  CHECK(system(command) == 0);
  OK(tm_adopt(folder, path, NULL, &json));
  CHECK(json_has(json, "\"tensors\":1"));
  FAILS(tm_adopt(folder, path, NULL, NULL), TM_ALREADY_EXISTS, "adopted");
  const tm_adopt_options again = {.struct_size = sizeof(again), .replace = 1, .quick = 1};
  OK(tm_adopt(folder, path, &again, NULL));
  tm_checkpoint* checkpoint = NULL;
  OK(tm_checkpoint_open(path, &checkpoint));
  char bytes[3] = {0};
  OK(tm_checkpoint_read_bytes(checkpoint, "w", 0, bytes, 3));
  CHECK(memcmp(bytes, "\001\002\003", 3) == 0);
  tm_checkpoint_close(checkpoint);

  OK(tm_store_list(store, &json));
  CHECK(json_has(json, ",\"pinned\":false"));
  const tm_pin_options pin = {.struct_size = sizeof(pin), .reason = "for the paper"};
  OK(tm_store_pin(path, &pin, &json));
  CHECK(json_has(json, "\"reason\":\"for the paper\""));
  OK(tm_store_pin(path, NULL, NULL));
  OK(tm_store_pins(store, &json));
  CHECK(json_has(json, "\"name\":\"adopted\""));
  FAILS(tm_store_remove(path), TM_PERMISSION_DENIED, "pinned");
  FAILS(tm_store_remove_with(path, NULL), TM_PERMISSION_DENIED, "pinned");
  OK(tm_store_unpin(path));
  FAILS(tm_store_unpin(path), TM_NOT_FOUND, "not pinned");
  OK(tm_store_pin(path, &pin, NULL));
  OK(tm_store_policy(store, &json));
  CHECK(json_has(json, "{\"rules\":null}"));
  OK(tm_store_set_policy(store, "last=100"));
  OK(tm_store_policy(store, &json));
  CHECK(json_has(json, "{\"rules\":\"last=100\"}"));
  OK(tm_store_prune(store, NULL, &json));
  CHECK(json_has(json, "{\"rules\":\"last=100\",\"dry_run\":false,\"removed\":0,"));
  OK(tm_store_set_policy(store, NULL));
  FAILS(tm_store_set_policy(store, "all"), TM_INVALID_ARGUMENT, "rule \"all\"");
  const tm_prune_options one = {.struct_size = sizeof(one), .dry_run = 1, .rules = "last=1"};
  OK(tm_store_prune(store, &one, &json));
  CHECK(json_has(json, "\"reason\":\"no rule keeps it\""));
  const tm_prune_options wrong = {.struct_size = sizeof(wrong), .rules = "last=none"};
  FAILS(tm_store_prune(store, &wrong, NULL), TM_INVALID_ARGUMENT, "last=none");
  const tm_remove_options force = {.struct_size = sizeof(force), .force = 1};
  OK(tm_store_remove_with(path, &force));
  FAILS(tm_store_remove(path), TM_NOT_FOUND, "adopted");
  FAILS(tm_store_remove("../.."), TM_INVALID_ARGUMENT, "..");
  const tm_gc_options look = {.struct_size = sizeof(look), .dry_run = 1, .grace_seconds = -1};
  const tm_gc_options all = {.struct_size = sizeof(all), .grace_seconds = -1};
  OK(tm_store_gc(store, &look, &json));
  CHECK(json_has(json, "\"dry_run\":true"));
  OK(tm_store_gc(store, &all, &json));
  CHECK(json_has(json, ".trash/"));
  OK(tm_store_gc(store, NULL, &json));
  CHECK(json_has(json, "\"bytes_freed\":0"));
}

int main(void) {
  const char* base = getenv("TENSORMOUNT_TEST_TMPDIR");
  if (base == NULL) base = getenv("TMPDIR");
  char store[200];
  snprintf(store, sizeof(store), "%s/tensormount-c-XXXXXX", base == NULL ? "/tmp" : base);
  if (mkdtemp(store) == NULL) return 3;
  char paths[7][256];
  for (int i = 0; i < 7; ++i) {
    snprintf(paths[i], sizeof(paths[i]), "%s/store/step-%d", store, i + 1);
  }
  jobs_alone(paths[0], paths[1], paths[2]);
  pthread_t thread;
  if (pthread_create(&thread, NULL, errors_as_fields, paths[0]) != 0) return 3;
  pthread_join(thread, NULL);
  layout_as_fields(paths[3]);
  cancelled_waits(paths[4]);
  forked(paths[0], paths[5]);
  damage_as_fields(paths[2]);
  char folder[256];
  snprintf(folder, sizeof(folder), "%s/store", store);
  hooks_of_saves(paths[6]);
  places(paths[6]);
  tasks(folder, paths[0], paths[1]);
  stores(folder, paths[0], paths[1], paths[2]);
  char command[300];
  snprintf(command, sizeof(command), "rm -rf '%s'", store);
  if (system(command) != 0) return 3;
  if (failures == 0) printf("c_jobs_test: all is well\n");
  return failures == 0 ? 0 : 1;
}

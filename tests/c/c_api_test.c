// SPDX-License-Identifier: Apache-2.0
// The C interface, used from C99: c_api_test [STORE]. Prints what is wrong and exits 1.
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <tensormount/c.h>

#include "tests/c/checks.h"
#include "tests/c/mail_host.h"

enum { ROWS = 8, COLUMNS = 6 };

static float value_at(int64_t row, int64_t column) { return (float)(row * 100 + column); }

static const int64_t kShape[2] = {ROWS, COLUMNS};

static tm_buffer floats(float* data, const int64_t* shape, int32_t rank) {
  const tm_buffer buffer = {
      .struct_size = sizeof(buffer), .dtype = TM_F32, .data = data, .shape = shape, .rank = rank};
  return buffer;
}

// Rows [first, first + rows) of tensor "w", and the rest of a small checkpoint.
static void fill_state(tm_state* state, int32_t rank, int64_t first, int64_t rows, float* memory,
                       int64_t* begin, int64_t* extent, int32_t world) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < COLUMNS; ++column) {
      memory[row * COLUMNS + column] = value_at(first + row, column);
    }
  }
  begin[0] = first;
  begin[1] = 0;
  extent[0] = rows;
  extent[1] = COLUMNS;
  const tm_region region = {
      .struct_size = sizeof(region), .rank = 2, .begin = begin, .extent = extent};
  const tm_buffer data = floats(memory, extent, 2);
  const tm_shard shard = {.struct_size = sizeof(shard),
                          .global_shape = kShape,
                          .global_rank = 2,
                          .region = &region,
                          .data = &data};
  OK(tm_state_add_tensor(state, "w", &shard));
  const int64_t index = rank;
  const int64_t grid = world;
  char words[32];
  snprintf(words, sizeof(words), "rng of rank %d", (int)rank);
  OK(tm_state_add_object(state, "rng", words, strlen(words), &index, &grid, 1));
  OK(tm_state_add_object(state, "notes", "the same", 8, NULL, NULL, 0));
  OK(tm_state_set_common(state, "args", "{\"lr\": 0.5, \"steps\": [1, 2]}"));
  OK(tm_state_set_common(state, "iteration", "1000"));
  char json[16];
  snprintf(json, sizeof(json), "%d", (int)rank * 11);
  OK(tm_state_set_rank_common(state, "seed", json));
  OK(tm_state_set_metadata(state, "{\"model\": \"tiny\"}"));
}

static void count_events(void* context, const tm_event* event) {
  int* counts = context;
  CHECK(event->struct_size == sizeof(*event) && event->phase[0] != '\0');
  if (event->kind >= TM_EVENT_START && event->kind <= TM_EVENT_ERROR) ++counts[event->kind];
}

static void save_alone(const char* path) {
  tm_communicator* comm = NULL;
  tm_state* state = NULL;
  OK(tm_communicator_self(&comm));
  CHECK(tm_communicator_rank(comm) == 0 && tm_communicator_size(comm) == 1);
  OK(tm_state_new(&state));
  float memory[ROWS * COLUMNS];
  int64_t begin[2], extent[2];
  fill_state(state, 0, 0, ROWS, memory, begin, extent, 1);

  int32_t sound = 0;
  char* json = NULL;
  OK(tm_validate(state, comm, NULL, &sound, &json));
  CHECK(sound == 1 && json != NULL && json[0] == '{');
  tm_free(json);
  OK(tm_dump_spec(state, comm, NULL, &json));
  CHECK(strstr(json, "\"layouts\"") != NULL && strstr(json, "\"key\":\"w\"") != NULL);
  tm_free(json);
  FAILS(tm_dump_spec(NULL, comm, NULL, &json), TM_INVALID_ARGUMENT, "state");
  FAILS(tm_dump_spec(state, comm, NULL, NULL), TM_INVALID_ARGUMENT, "json");

  int events[3] = {0, 0, 0};
  const tm_save_options options = {.struct_size = sizeof(options),
                                   .replica_check = TM_REPLICAS_FULL,
                                   .producer = "a program in C",
                                   .on_event = count_events,
                                   .on_event_context = events};
  tm_save_report* report = NULL;
  OK(tm_save(state, path, comm, &options, &report));
  CHECK(events[TM_EVENT_START] > 0 && events[TM_EVENT_START] == events[TM_EVENT_END]);
  CHECK(events[TM_EVENT_ERROR] == 0);
  tm_save_numbers numbers = {.struct_size = sizeof(numbers)};
  OK(tm_save_report_numbers(report, &numbers));
  CHECK(numbers.tensors == 1 && numbers.bytes == sizeof(memory) && numbers.generation > 0);
  CHECK(numbers.bytes_written_here >= numbers.bytes);
  CHECK(strcmp(tm_save_report_path(report), path) == 0);
  CHECK(strlen(tm_save_report_uuid(report)) > 10);
  OK(tm_save_report_json(report, &json));
  CHECK(strstr(json, tm_save_report_uuid(report)) != NULL);
  CHECK(strstr(json, "\"plan_reused\":false,") != NULL && strstr(json, "\"tensors\":1,") != NULL);
  CHECK(strstr(json, "\"files\":[\"data/") != NULL && strstr(json, "\"pruned\":[]") != NULL);
  tm_free(json);
  FAILS(tm_save_report_json(report, NULL), TM_INVALID_ARGUMENT, "json");
  tm_list* files = NULL;
  OK(tm_save_report_files(report, &files));
  CHECK(tm_list_size(files) > 0 && strncmp(tm_list_get(files, 0, NULL), "data/", 5) == 0);
  tm_list_free(files);
  tm_save_report_free(report);
  FAILS(tm_save(state, path, comm, NULL, NULL), TM_ALREADY_EXISTS, "step-1");
  CHECK(tm_last_errno() == EEXIST);
  CHECK(strcmp(tm_status_name(TM_ALREADY_EXISTS), "ALREADY_EXISTS") == 0);
  tm_state_free(state);
  tm_communicator_free(comm);
}

static int json_is(char* json, const char* expected) {
  char packed[256];
  size_t n = 0;
  for (const char* c = json; *c != '\0' && n + 1 < sizeof(packed); ++c) {
    if (*c != ' ' && *c != '\n') packed[n++] = *c;
  }
  packed[n] = '\0';
  const int same = strcmp(packed, expected) == 0;
  if (!same) fprintf(stderr, "%s instead of %s\n", packed, expected);
  tm_free(json);
  return same;
}

static void look_at(const char* path, int32_t world) {
  tm_checkpoint* checkpoint = NULL;
  OK(tm_checkpoint_open(path, &checkpoint));
  tm_list* list = NULL;
  OK(tm_checkpoint_keys(checkpoint, &list));
  size_t length = 0;
  CHECK(tm_list_size(list) == 1 && strcmp(tm_list_get(list, 0, &length), "w") == 0);
  CHECK(length == 1 && tm_list_get(list, 1, NULL) == NULL);
  tm_list_free(list);
  OK(tm_checkpoint_objects(checkpoint, &list));
  CHECK(tm_list_size(list) == 2 && strcmp(tm_list_get(list, 1, NULL), "rng") == 0);
  tm_list_free(list);
  OK(tm_checkpoint_warnings(checkpoint, &list));
  CHECK(tm_list_size(list) == 0);
  tm_list_free(list);

  tm_tensor_info info = {.struct_size = sizeof(info)};
  OK(tm_checkpoint_tensor(checkpoint, "w", &info));
  CHECK(info.dtype == TM_F32 && info.rank == 2 && info.shape[0] == ROWS &&
        info.shape[1] == COLUMNS && info.bytes == ROWS * COLUMNS * 4 && info.has_digest == 1);
  FAILS(tm_checkpoint_tensor(checkpoint, "v", &info), TM_NOT_FOUND, "v");

  float all[ROWS * COLUMNS];
  const tm_buffer whole = floats(all, kShape, 2);
  OK(tm_checkpoint_read(checkpoint, "w", NULL, &whole));
  for (int i = 0; i < ROWS * COLUMNS; ++i) CHECK(all[i] == value_at(i / COLUMNS, i % COLUMNS));

  // Rows 2 and 3, columns 1 to 4, column by column into every other element.
  const int64_t begin[2] = {2, 1};
  const int64_t extent[2] = {2, 4};
  const tm_region box = {.struct_size = sizeof(box), .rank = 2, .begin = begin, .extent = extent};
  float strided[16] = {0};
  const int64_t strides[2] = {2, 4};
  tm_buffer part = floats(strided, extent, 2);
  part.strides = strides;
  OK(tm_checkpoint_read(checkpoint, "w", &box, &part));
  for (int i = 0; i < 16; ++i) {
    CHECK(strided[i] == (i % 2 != 0 ? 0 : value_at(2 + i / 2 % 2, 1 + i / 4)));
  }

  const tm_region flat = {.struct_size = sizeof(flat),
                          .rank = 2,
                          .extent = kShape,
                          .is_flat = 1,
                          .flat_first = 10,
                          .flat_count = 5};
  const int64_t five = 5;
  float row[5];
  const tm_buffer flat_out = floats(row, &five, 1);
  OK(tm_checkpoint_read(checkpoint, "w", &flat, &flat_out));
  CHECK(row[0] == value_at(1, 4) && row[4] == value_at(2, 2));
  FAILS(tm_checkpoint_read(checkpoint, "w", &flat, &whole), TM_INVALID_ARGUMENT, "");

  float one = 0;
  OK(tm_checkpoint_read_bytes(checkpoint, "w", 4 * (COLUMNS + 1), &one, sizeof(one)));
  CHECK(one == value_at(1, 1));
  FAILS(tm_checkpoint_read_bytes(checkpoint, "w", sizeof(all), &one, 1), TM_INVALID_ARGUMENT, "");

  void* data = NULL;
  size_t size = 0;
  const int64_t last = world - 1;
  char words[32];
  snprintf(words, sizeof(words), "rng of rank %d", (int)last);
  int64_t grid[TM_MAX_RANK] = {0};
  int32_t axes = 9;
  OK(tm_checkpoint_object_grid(checkpoint, "rng", grid, &axes));
  CHECK(axes == 1 && grid[0] == world);
  OK(tm_checkpoint_object_grid(checkpoint, "notes", grid, &axes));
  CHECK(axes == 0);
  FAILS(tm_checkpoint_object_grid(checkpoint, "none", grid, &axes), TM_NOT_FOUND, "none");
  FAILS(tm_checkpoint_object(checkpoint, "rng", NULL, 0, &data, &size), TM_NOT_FOUND,
        "pass the index of a part");
  OK(tm_checkpoint_object(checkpoint, "rng", &last, 1, &data, &size));
  CHECK(size == strlen(words) && strcmp(data, words) == 0);
  tm_free(data);
  OK(tm_checkpoint_object(checkpoint, "notes", NULL, 0, &data, &size));
  CHECK(size == 8 && memcmp(data, "the same", 8) == 0);
  tm_free(data);
  FAILS(tm_checkpoint_object(checkpoint, "none", NULL, 0, &data, &size), TM_NOT_FOUND, "none");

  char* json = NULL;
  OK(tm_checkpoint_common(checkpoint, NULL, &json, &size));
  CHECK(size == strlen(json));
  CHECK(json_is(json, "{\"args\":{\"lr\":0.5,\"steps\":[1,2]},\"iteration\":1000}"));
  OK(tm_checkpoint_common(checkpoint, "iteration", &json, NULL));
  CHECK(json_is(json, "1000"));
  FAILS(tm_checkpoint_common(checkpoint, "epoch", &json, NULL), TM_NOT_FOUND, "epoch");
  OK(tm_checkpoint_rank_common(checkpoint, (int32_t)last, "seed", &json, NULL));
  char seed[16];
  snprintf(seed, sizeof(seed), "%d", (int)last * 11);
  CHECK(json_is(json, seed));
  OK(tm_checkpoint_rank_common(checkpoint, 77, NULL, &json, NULL));
  CHECK(json_is(json, "{}"));
  OK(tm_checkpoint_metadata(checkpoint, &json, NULL));
  CHECK(json_is(json, "{\"model\":\"tiny\"}"));
  CHECK(strlen(tm_checkpoint_uuid(checkpoint)) == 32);
  CHECK(tm_checkpoint_path(checkpoint)[0] != '\0' && tm_checkpoint_path(NULL)[0] == '\0');
  tm_checkpoint_close(checkpoint);
}

// The files that a mount would show.
static void look_at_files(const char* path) {
  tm_checkpoint* checkpoint = NULL;
  tm_files* files = NULL;
  OK(tm_checkpoint_open(path, &checkpoint));
  tm_files_options options = {.struct_size = sizeof(options),
                              .key_map = "[{\"key\":\"w\",\"to\":\"v\"}]"};
  OK(tm_files_open(checkpoint, &options, &files));
  FAILS(tm_files_open(NULL, NULL, &files), TM_INVALID_ARGUMENT, "checkpoint");
  tm_checkpoint_close(checkpoint);
  tm_list* list = NULL;
  OK(tm_files_list(files, "tensors", &list));
  CHECK(tm_list_size(list) == 1 && strcmp(tm_list_get(list, 0, NULL), "v") == 0);
  tm_list_free(list);
  FAILS(tm_files_list(files, "tensors/v", &list), TM_INVALID_ARGUMENT, "tensors/v");
  tm_file_info info = {.struct_size = sizeof(info)};
  OK(tm_files_stat(files, "", &info));
  CHECK(info.is_directory == 1 && info.size == 0);
  OK(tm_files_stat(files, "tensors/v", &info));
  CHECK(info.is_directory == 0 && info.size == ROWS * COLUMNS * 4 && info.inode != 0);
  FAILS(tm_files_stat(files, "tensors/w", &info), TM_NOT_FOUND, "tensors/w");
  tm_file* file = NULL;
  FAILS(tm_file_open(files, "tensors", &file), TM_INVALID_ARGUMENT, "tensors");
  OK(tm_file_open(files, "tensors/v", &file));
  tm_files_close(files);
  CHECK(tm_file_size(file) == ROWS * COLUMNS * 4 && tm_file_size(NULL) == 0);
  float row[COLUMNS + 1];
  size_t got = 0;
  OK(tm_file_read(file, 2 * COLUMNS * 4, row, COLUMNS * 4, &got));
  CHECK(got == COLUMNS * 4);
  for (int i = 0; i < COLUMNS; ++i) CHECK(row[i] == value_at(2, i));
  OK(tm_file_read(file, (ROWS - 1) * COLUMNS * 4, row, sizeof(row), &got));
  CHECK(got == COLUMNS * 4);
  OK(tm_file_read(file, ROWS * COLUMNS * 4, row, sizeof(row), &got));
  CHECK(got == 0);
  OK(tm_file_read(file, 0, NULL, 0, &got));
  tm_file_close(file);
  tm_file_close(NULL);
}

// Two rows more than there are, another type, a key that is not stored, and what the report says.
// Lines about rng, which a load did not ask for, and the level of the last one.
typedef struct logged {
  int lines;
  tm_log_level level;
} logged;
static void count_lines(void* context, tm_log_level level, const char* line) {
  logged* l = context;
  l->level = level;
  if (strstr(line, "rng") != NULL && strchr(line, '\n') == NULL) l->lines += 1;
}

static void load_by_rules(const char* path) {
  tm_communicator* comm = NULL;
  tm_state* request = NULL;
  OK(tm_communicator_self(&comm));
  OK(tm_state_new(&request));
  double memory[(ROWS + 2) * COLUMNS];
  for (int i = 0; i < (ROWS + 2) * COLUMNS; ++i) memory[i] = -1;
  const int64_t larger[2] = {ROWS + 2, COLUMNS};
  tm_buffer data = floats(NULL, larger, 2);
  data.dtype = TM_F64;
  data.data = memory;
  const tm_shard shard = {
      .struct_size = sizeof(shard), .global_shape = larger, .global_rank = 2, .data = &data};
  OK(tm_state_add_tensor(request, "w", &shard));
  OK(tm_state_want_object(request, "notes", NULL, NULL, 0));
  OK(tm_state_want_object(request, "gone", NULL, NULL, 0));
  OK(tm_state_set_local(request, "mine", "[true]"));

  tm_load_options options = {.struct_size = sizeof(options),
                             .not_stored = TM_STRICT_RETURN,
                             .not_requested = TM_STRICT_RETURN};
  FAILS(tm_load(request, path, comm, &options, NULL), TM_INVALID_ARGUMENT, "w");
  CHECK(memory[0] == -1);

  const tm_load_rule rules[2] = {
      {.struct_size = sizeof(tm_load_rule), .keys = "v*", .grow = TM_GROW_KEEP},
      {.struct_size = sizeof(tm_load_rule), .keys = "w", .grow = TM_GROW_ZERO, .convert_dtype = 1}};
  options.rules = rules;
  options.rule_count = 2;
  options.not_stored = TM_STRICT_DEFAULT;
  FAILS(tm_load(request, path, comm, &options, NULL), TM_NOT_FOUND, "gone");
  CHECK(memory[0] == -1);
  options.not_stored = TM_STRICT_RETURN;
  tm_load_report* report = NULL;
  OK(tm_load(request, path, comm, &options, &report));
  for (int i = 0; i < (ROWS + 2) * COLUMNS; ++i) {
    CHECK(memory[i] == (i < ROWS * COLUMNS ? (double)value_at(i / COLUMNS, i % COLUMNS) : 0));
  }
  logged lines = {0, TM_LOG_DEBUG};
  options.not_requested = TM_STRICT_LOG;
  OK(tm_set_log_sink(count_lines, &lines));
  OK(tm_load(request, path, comm, &options, NULL));
  CHECK(lines.lines == 1 && lines.level == TM_LOG_WARNING);
  OK(tm_enable_mapping_guard());
  OK(tm_set_log_level(TM_LOG_ERROR));
  OK(tm_load(request, path, comm, &options, NULL));
  CHECK(lines.lines == 1);
  FAILS(tm_set_log_level(4), TM_INVALID_ARGUMENT, "4");
  FAILS(tm_set_log_level(-1), TM_INVALID_ARGUMENT, "-1");
  OK(tm_load(request, path, comm, &options, NULL));
  CHECK(lines.lines == 1);
  OK(tm_set_log_level(TM_LOG_WARNING));
  OK(tm_set_log_sink(NULL, NULL));
  tm_load_numbers numbers = {.struct_size = sizeof(numbers)};
  OK(tm_load_report_numbers(report, &numbers));
  CHECK(numbers.bytes_wanted > 0 && numbers.bytes_read > 0);
  tm_list* list = NULL;
  OK(tm_load_report_not_stored(report, &list));
  CHECK(tm_list_size(list) == 1 && strcmp(tm_list_get(list, 0, NULL), "gone") == 0);
  tm_list_free(list);
  OK(tm_load_report_not_requested(report, &list));
  CHECK(tm_list_size(list) == 1 && strcmp(tm_list_get(list, 0, NULL), "rng") == 0);
  tm_list_free(list);
  OK(tm_load_report_skipped(report, &list));
  CHECK(tm_list_size(list) == 1);
  tm_list_free(list);
  OK(tm_load_report_converted(report, &list));
  CHECK(tm_list_size(list) == 1 && strcmp(tm_list_get(list, 0, NULL), "w") == 0);
  tm_list_free(list);
  tm_uncovered uncovered = {.struct_size = sizeof(uncovered)};
  CHECK(tm_load_report_uncovered_count(report) == 1);
  OK(tm_load_report_uncovered(report, 0, &uncovered));
  CHECK(strcmp(uncovered.key, "w") == 0 && uncovered.rank == 2 && uncovered.zeroed == 1 &&
        uncovered.begin[0] == ROWS && uncovered.extent[0] == 2 && uncovered.extent[1] == COLUMNS);
  FAILS(tm_load_report_uncovered(report, 1, &uncovered), TM_NOT_FOUND, "1");
  char* said = NULL;
  OK(tm_load_report_json(report, &said));
  CHECK(strstr(said, "\"not_stored\":[\"gone\"],\"not_requested\":[\"rng\"]") != NULL);
  CHECK(strstr(said, "\"converted\":[\"w\"],\"uncovered\":[{\"key\":\"w\",") != NULL);
  CHECK(strstr(said, "\"zeroed\":true}]") != NULL);
  char wanted[64];
  snprintf(wanted, sizeof(wanted), "\"bytes_wanted\":%llu,",
           (unsigned long long)numbers.bytes_wanted);
  CHECK(strstr(said, wanted) != NULL);
  tm_free(said);
  FAILS(tm_load_report_json(NULL, &said), TM_INVALID_ARGUMENT, "report");
  void* bytes = NULL;
  size_t size = 0;
  OK(tm_load_report_object(report, "notes", NULL, 0, &bytes, &size));
  CHECK(size == 8);
  tm_free(bytes);
  char* json = NULL;
  OK(tm_load_report_common(report, "iteration", &json, NULL));
  CHECK(json_is(json, "1000"));
  OK(tm_load_report_rank_common(report, 0, "seed", &json, NULL));
  CHECK(json_is(json, "0"));
  OK(tm_load_report_metadata(report, &json, NULL));
  CHECK(json_is(json, "{\"model\":\"tiny\"}"));
  OK(tm_load_report_local(report, "mine", &json, NULL));
  CHECK(json_is(json, "[true]"));
  tm_load_report_free(report);
  tm_state_free(request);
  tm_communicator_free(comm);
}

// Four ranks on callbacks: rows saved, columns loaded; a channel and a subgroup; a failure that
// all see.
typedef struct rank_args {
  mail_seat seat;
  const char* path;
  const char* async_path;
  const char* half_path;
} rank_args;
enum { RANKS = 4 };

static void* run_rank(void* argument) {
  rank_args* args = argument;
  const int32_t rank = args->seat.rank;
  const tm_callbacks callbacks = mail_host_callbacks(&args->seat, 5);
  tm_communicator* comm = NULL;
  OK(tm_communicator_from_callbacks(&callbacks, rank, RANKS, &comm));
  if (comm == NULL) return NULL;
  CHECK(tm_communicator_rank(comm) == rank && tm_communicator_size(comm) == RANKS);

  tm_state* state = NULL;
  OK(tm_state_new(&state));
  enum { MINE = ROWS / RANKS };
  float rows[MINE * COLUMNS];
  int64_t begin[2], extent[2];
  fill_state(state, rank, rank * MINE, MINE, rows, begin, extent, RANKS);
  OK(tm_save(state, args->path, comm, NULL, NULL));

  // In the background, over a channel.
  tm_communicator* channel = NULL;
  OK(tm_communicator_channel(comm, 7, &channel));
  tm_save_job* job = NULL;
  OK(tm_save_async(state, args->async_path, comm, NULL, &job));
  memset(rows, 0, sizeof(rows));
  int32_t sound = 0;
  OK(tm_validate(state, channel, NULL, &sound, NULL));
  CHECK(sound == 1);
  tm_save_report* report = NULL;
  OK(tm_save_job_wait(job, &report));
  tm_job_progress progress = {.struct_size = sizeof(progress)};
  OK(tm_save_job_progress(job, &progress));
  CHECK(progress.state == TM_JOB_COMMITTED && progress.bytes_staged >= sizeof(rows));
  tm_save_report_free(report);
  tm_save_job_free(job);
  tm_communicator_free(channel);

  // One column and a half each.
  tm_state* request = NULL;
  OK(tm_state_new(&request));
  const int64_t first = rank < 2 ? rank : 2 * rank - 2;
  const int64_t columns = rank < 2 ? 1 : 2;
  const int64_t begin_column[2] = {0, first};
  const int64_t extent_column[2] = {ROWS, columns};
  const tm_region region = {
      .struct_size = sizeof(region), .rank = 2, .begin = begin_column, .extent = extent_column};
  float got[ROWS * 2];
  const tm_buffer data = floats(got, extent_column, 2);
  const tm_shard shard = {.struct_size = sizeof(shard),
                          .global_shape = kShape,
                          .global_rank = 2,
                          .region = &region,
                          .data = &data};
  OK(tm_state_add_tensor(request, "w", &shard));
  const tm_load_options options = {
      .struct_size = sizeof(options), .validate = 1, .path = TM_LOAD_EXCHANGE};
  OK(tm_load(request, args->async_path, comm, &options, NULL));
  for (int64_t i = 0; i < ROWS * columns; ++i) {
    CHECK(got[i] == value_at(i / columns, first + i % columns));
  }

  // Ranks 3 and 1, without the others; and a failure of one of them.
  if (rank % 2 == 1) {
    const int32_t ranks[2] = {3, 1};
    tm_communicator* half = NULL;
    OK(tm_communicator_subgroup(comm, ranks, 2, 2, &half));
    tm_load_report* loaded = NULL;
    OK(tm_load(request, args->path, half, NULL, &loaded));
    tm_load_report_free(loaded);
    tm_state* bad = NULL;
    OK(tm_state_new(&bad));
    if (rank == 1) OK(tm_state_fail(bad, TM_BUSY, "the optimizer is not ready"));
    FAILS(tm_save(bad, args->half_path, half, NULL, NULL), TM_BUSY, "rank 1: the optimizer");
    tm_state_free(bad);
    // With its fields, which the other rank gets too.
    OK(tm_state_new(&bad));
    if (rank == 1) {
      OK(tm_state_fail_json(bad,
                            "{\"status\": 8, \"message\": \"it fell off the bus\", \"key\": \"w\","
                            "\"device\": \"cuda:0\", \"of a later version\": [1]}"));
    }
    FAILS(tm_save(bad, args->half_path, half, NULL, NULL), TM_UNAVAILABLE, "rank 1: it fell off");
    char* json = NULL;
    OK(tm_last_error_json(&json));
    CHECK(strstr(json, "\"device\":\"cuda:0\"") != NULL);
    CHECK(strstr(json, "\"key\":\"w\"") != NULL);
    CHECK(strstr(json, "\"rank\":1") != NULL);
    tm_free(json);
    tm_state_free(bad);
    tm_communicator_free(half);
  }
  tm_state_free(request);

  // What one rank asks for wrongly is told to all, who would wait for it half an hour.
  const tm_save_options bad_save = {.struct_size = sizeof(bad_save), .placement = 99};
  const tm_load_options bad_load = {.struct_size = sizeof(bad_load), .path = 99};
  const tm_validate_options bad_check = {.struct_size = 3};
  const int wrong = rank == 2;
  FAILS(tm_save(state, args->half_path, comm, wrong ? &bad_save : NULL, NULL), TM_INVALID_ARGUMENT,
        "rank 2: tm_save_options.placement");
  FAILS(tm_save(state, wrong ? NULL : args->half_path, comm, NULL, NULL), TM_INVALID_ARGUMENT,
        "rank 2: argument 'path'");
  OK(tm_save_async(state, args->half_path, comm, wrong ? &bad_save : NULL, &job));
  FAILS(tm_save_job_wait(job, NULL), TM_INVALID_ARGUMENT, "rank 2: tm_save_options.placement");
  tm_save_job_free(job);
  FAILS(tm_load(state, args->path, comm, wrong ? &bad_load : NULL, NULL), TM_INVALID_ARGUMENT,
        "rank 2: tm_load_options.path");
  FAILS(tm_validate(wrong ? NULL : state, comm, NULL, &sound, NULL), TM_INVALID_ARGUMENT,
        "rank 2: argument 'state'");
  FAILS(tm_validate(state, comm, wrong ? &bad_check : NULL, &sound, NULL), TM_INVALID_ARGUMENT,
        "rank 2: tm_validate_options");

  // The communicator may go before its job: it waits for the save, whose verdict stays.
  OK(tm_save_async(state, args->half_path, comm, NULL, &job));
  tm_state_free(state);
  tm_communicator_free(comm);
  OK(tm_save_job_wait(job, NULL));
  tm_save_job_free(job);
  return NULL;
}

static void on_four_ranks(const char* path, const char* async_path, const char* half_path) {
  mail_host* host = mail_host_new();
  pthread_t threads[RANKS];
  rank_args args[RANKS];
  for (int32_t r = 0; r < RANKS; ++r) {
    args[r].seat.host = host;
    args[r].seat.rank = r;
    args[r].path = path;
    args[r].async_path = async_path;
    args[r].half_path = half_path;
    if (pthread_create(&threads[r], NULL, run_rank, &args[r]) != 0) exit(3);
  }
  for (int r = 0; r < RANKS; ++r) pthread_join(threads[r], NULL);
  CHECK(mail_host_left(host) == 0);
  mail_host_free(host);
}

// Structures of other versions of the library.
static void other_sizes(const char* path) {
  tm_checkpoint* checkpoint = NULL;
  OK(tm_checkpoint_open(path, &checkpoint));
  // An older caller's: nothing behind it is written.
  tm_tensor_info info;
  memset(&info, 0x5a, sizeof(info));
  info.struct_size = offsetof(tm_tensor_info, bytes);
  OK(tm_checkpoint_tensor(checkpoint, "w", &info));
  CHECK(info.dtype == TM_F32 && info.rank == 2);
  CHECK(info.bytes == UINT64_C(0x5a5a5a5a5a5a5a5a) &&
        info.struct_size == offsetof(tm_tensor_info, bytes));
  info.struct_size = 0;
  FAILS(tm_checkpoint_tensor(checkpoint, "w", &info), TM_INVALID_ARGUMENT, "struct_size");
  // A newer caller's: what is beyond must be zero.
  struct {
    tm_buffer known;
    uint64_t more;
  } newer;
  memset(&newer, 0, sizeof(newer));
  float all[ROWS * COLUMNS];
  newer.known = floats(all, kShape, 2);
  newer.known.struct_size = sizeof(newer);
  OK(tm_checkpoint_read(checkpoint, "w", NULL, &newer.known));
  newer.more = 1;
  FAILS(tm_checkpoint_read(checkpoint, "w", NULL, &newer.known), TM_UNSUPPORTED, "tm_buffer");
  // Where memory is: pinned memory of the host is read like any other, a stream cannot be waited
  // for.
  tm_buffer where = floats(all, kShape, 2);
  where.memory_kind = TM_MEMORY_PINNED;
  OK(tm_checkpoint_read(checkpoint, "w", NULL, &where));
  where.stream_kind = TM_STREAM_PER_THREAD_DEFAULT;
  FAILS(tm_checkpoint_read(checkpoint, "w", NULL, &where), TM_UNSUPPORTED, "cannot wait for");
  where.stream_kind = TM_STREAM_NONE;
  where.stream = &where;  // As older headers have it: a handle.
  FAILS(tm_checkpoint_read(checkpoint, "w", NULL, &where), TM_UNSUPPORTED, "cannot wait for");
  where.stream = NULL;
  where.memory_kind = TM_MEMORY_DEVICE;
  FAILS(tm_checkpoint_read(checkpoint, "w", NULL, &where), TM_INVALID_ARGUMENT,
        "its device is the host");
  where.device_kind = TM_DEVICE_CUDA;
  FAILS(tm_checkpoint_read(checkpoint, "w", NULL, &where), TM_UNSUPPORTED, "tensor w: ");
  where.memory_kind = 4;
  FAILS(tm_checkpoint_read(checkpoint, "w", NULL, &where), TM_INVALID_ARGUMENT, "memory_kind: 4");
  where.memory_kind = 0;
  where.stream_kind = -1;
  FAILS(tm_checkpoint_read(checkpoint, "w", NULL, &where), TM_INVALID_ARGUMENT, "stream_kind: -1");
  // An older one's: its stream is not looked at.
  tm_buffer older = floats(all, kShape, 2);
  older.struct_size = offsetof(tm_buffer, stream);
  older.stream = &older;
  OK(tm_checkpoint_read(checkpoint, "w", NULL, &older));
  // One that was never set: nothing beyond it is read.
  older.struct_size = UINT32_MAX;
  FAILS(tm_checkpoint_read(checkpoint, "w", NULL, &older), TM_INVALID_ARGUMENT, "struct_size is");
  info.struct_size = 5000;
  FAILS(tm_checkpoint_tensor(checkpoint, "w", &info), TM_INVALID_ARGUMENT, "struct_size is");
  tm_checkpoint_close(checkpoint);
}

static void what_cannot_be(void) {
  tm_checkpoint* checkpoint = NULL;
  FAILS(tm_checkpoint_open(NULL, &checkpoint), TM_INVALID_ARGUMENT, "'path' is NULL");
  FAILS(tm_checkpoint_open("nowhere/step-1", &checkpoint), TM_NOT_FOUND, "nowhere");
  CHECK(checkpoint == NULL && tm_last_errno() == ENOENT);
  tm_open_options open = {.struct_size = sizeof(open), .file = "model.safetensors"};
  FAILS(tm_checkpoint_open_with("nowhere", &open, &checkpoint), TM_NOT_FOUND,
        "nowhere/model.safetensors");
  const char* roots[] = {NULL};
  open = (tm_open_options){.struct_size = sizeof(open), .roots = roots, .root_count = 1};
  FAILS(tm_checkpoint_open_with("nowhere", &open, &checkpoint), TM_INVALID_ARGUMENT,
        "tm_open_options.roots");
  FAILS(tm_checkpoint_keys(NULL, NULL), TM_INVALID_ARGUMENT, "'checkpoint'");
  tm_checkpoint_close(NULL);
  tm_list_free(NULL);
  tm_free(NULL);

  CHECK(strcmp(tm_dtype_name(TM_BF16), "bf16") == 0 && tm_dtype_bits(TM_F4) == 4);
  CHECK(tm_dtype_name(0) == NULL && tm_dtype_name(1000) == NULL && tm_dtype_bits(24) == 0);
  uint32_t dtype = 0;
  OK(tm_dtype_from_name("torch.bfloat16", &dtype));
  CHECK(dtype == TM_BF16);
  FAILS(tm_dtype_from_name("float7", &dtype), TM_UNSUPPORTED, "float7");
  CHECK(strcmp(tm_status_name(-1), "UNKNOWN_STATUS") == 0 && strcmp(tm_status_name(0), "OK") == 0);
  CHECK(tm_version()[0] >= '0' && tm_version()[0] <= '9');

  tm_communicator* comm = NULL;
  tm_callbacks callbacks = {.struct_size = sizeof(callbacks)};
  FAILS(tm_communicator_from_callbacks(&callbacks, 0, 2, &comm), TM_INVALID_ARGUMENT, "send");
  OK(tm_communicator_self(&comm));
  tm_communicator* sub = NULL;
  const int32_t nobody = 3;
  FAILS(tm_communicator_subgroup(comm, &nobody, 1, 1, &sub), TM_INVALID_ARGUMENT, "rank 3");
  FAILS(tm_communicator_channel(comm, 8, &sub), TM_INVALID_ARGUMENT, "channel number 8");

  // What is refused when it is added fails the save, too.
  tm_state* state = NULL;
  OK(tm_state_new(&state));
  FAILS(tm_state_set_common(state, "bad", "{"), TM_INVALID_ARGUMENT, "bad");
  FAILS(tm_save(state, "nowhere/step-1", comm, NULL, NULL), TM_INVALID_ARGUMENT, "bad");
  tm_state_free(state);
  OK(tm_state_new(&state));
  float one = 0;
  tm_buffer data = floats(&one, kShape, 17);
  tm_shard shard = {.struct_size = sizeof(shard), .data = &data};
  FAILS(tm_state_add_tensor(state, "w", &shard), TM_INVALID_ARGUMENT, "17 axes");
  data.rank = 0;
  data.dtype = 99;
  FAILS(tm_state_add_tensor(state, "w", &shard), TM_INVALID_ARGUMENT, "99");
  FAILS(tm_state_fail(state, TM_OK, "fine"), TM_INVALID_ARGUMENT, "0");
  FAILS(tm_state_fail_json(state, "[]"), TM_INVALID_ARGUMENT, "not a JSON object");
  FAILS(tm_state_fail_json(state, "{\"status\": 0, \"message\": \"\"}"), TM_INVALID_ARGUMENT,
        "status");
  FAILS(tm_state_fail_json(state, "{\"status\": 16, \"message\": \"\"}"), TM_INVALID_ARGUMENT,
        "status");
  FAILS(tm_state_fail_json(state, "{\"status\": 1}"), TM_INVALID_ARGUMENT, "message");
  tm_save_options options = {.struct_size = sizeof(options), .strategy = 9};
  FAILS(tm_save(state, "nowhere/step-1", comm, &options, NULL), TM_INVALID_ARGUMENT, "strategy: 9");
  tm_state_free(state);

  // A hole is in the report, not in the status.
  OK(tm_state_new(&state));
  const int64_t extent[2] = {ROWS - 1, COLUMNS};
  const tm_region region = {.struct_size = sizeof(region), .rank = 2, .extent = extent};
  const tm_buffer nothing = floats(NULL, extent, 2);
  const tm_shard hole = {.struct_size = sizeof(hole),
                         .global_shape = kShape,
                         .global_rank = 2,
                         .metadata_only = 1,
                         .region = &region,
                         .data = &nothing};
  OK(tm_state_add_tensor(state, "w", &hole));
  int32_t sound = 1;
  char* json = NULL;
  OK(tm_validate(state, comm, NULL, &sound, &json));
  CHECK(sound == 0 && json != NULL && strstr(json, "missing") != NULL);
  tm_free(json);
  tm_state_free(state);
  tm_communicator_free(comm);
}

// ---- Many shards at once ----

enum { WORDS = 64 };
typedef struct words {
  int64_t at[WORDS];
  size_t count;
} words;
static void put(words* w, int n, const int64_t* numbers) {
  for (int i = 0; i < n; ++i) w->at[w->count++] = numbers[i];
}
#define PUT(w, ...) \
  put((w), (int)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (int64_t[]){__VA_ARGS__})

static const char kThreeKeys[] = "box\0flat\0strided";

// A box, a flat range, and a matrix that stands by columns in memory; all of each.
static words three_shards(const float* box, const double* flat, const uint8_t* strided) {
  words w = {{0}, 0};
  PUT(&w, TM_F32, 0, TM_REPLICA_UNLABELLED, 2, (int64_t)(intptr_t)box, 3, 2, 0, 0, 3, 2);
  PUT(&w, TM_F64, TM_WORDS_FLAT, 0, 1, (int64_t)(intptr_t)flat, 5, 0, 5, 0, 5);
  PUT(&w, TM_U8, TM_WORDS_STRIDED, 0, 2, (int64_t)(intptr_t)strided, 2, 3, 0, 0, 2, 3, 1, 2);
  return w;
}

static void check_three(const char* path, float first) {
  tm_checkpoint* checkpoint = NULL;
  OK(tm_checkpoint_open(path, &checkpoint));
  float box[6];
  double flat[5];
  uint8_t strided[6];
  OK(tm_checkpoint_read_bytes(checkpoint, "box", 0, box, sizeof(box)));
  OK(tm_checkpoint_read_bytes(checkpoint, "flat", 0, flat, sizeof(flat)));
  OK(tm_checkpoint_read_bytes(checkpoint, "strided", 0, strided, sizeof(strided)));
  for (int i = 0; i < 6; ++i) CHECK(box[i] == first + (float)i);
  for (int i = 0; i < 5; ++i) CHECK(flat[i] == (double)first - i);
  // By columns in memory 0 1 | 2 3 | 4 5, so by rows 0 2 4 | 1 3 5.
  CHECK(memcmp(strided, "\0\2\4\1\3\5", 6) == 0);
  tm_checkpoint_close(checkpoint);
}

static void many_at_once(const char* first_path, const char* second_path) {
  tm_communicator* comm = NULL;
  OK(tm_communicator_self(&comm));
  float box[2][6];
  double flat[2][5];
  uint8_t strided[6] = {0, 1, 2, 3, 4, 5};
  for (int which = 0; which < 2; ++which) {
    for (int i = 0; i < 6; ++i) box[which][i] = (float)(10 * which + i);
    for (int i = 0; i < 5; ++i) flat[which][i] = 10.0 * which - i;
  }
  const words good = three_shards(box[0], flat[0], strided);
  const size_t keys = sizeof(kThreeKeys);
  tm_state* state = NULL;
  OK(tm_state_new(&state));
  OK(tm_state_add_tensors(state, kThreeKeys, keys, good.at, good.count, 3));
  OK(tm_state_add_tensors(state, NULL, 0, NULL, 0, 0));
  OK(tm_save(state, first_path, comm, NULL, NULL));
  tm_state_free(state);
  check_three(first_path, 0);

  // The same layout with what stands elsewhere, and with what its words said.
  tm_layout* layout = NULL;
  OK(tm_layout_new(kThreeKeys, keys, good.at, good.count, 3, &layout));
  void* const addresses[3] = {box[1], flat[1], strided};
  OK(tm_state_new(&state));
  FAILS(tm_state_add_layout(state, layout, addresses, 2), TM_INVALID_ARGUMENT, "2 addresses");
  tm_state_free(state);
  OK(tm_state_new(&state));
  OK(tm_state_add_layout(state, layout, addresses, 3));
  OK(tm_save(state, second_path, comm, NULL, NULL));
  tm_state_free(state);
  check_three(second_path, 10);
  const tm_save_options replace = {.struct_size = sizeof(replace), .replace = 1};
  OK(tm_state_new(&state));
  OK(tm_state_add_layout(state, layout, NULL, 0));
  OK(tm_save(state, second_path, comm, &replace, NULL));
  tm_state_free(state);
  check_three(second_path, 0);

  // A load into them, and one without memory.
  OK(tm_state_new(&state));
  memset(box[1], 0, sizeof(box[1]));
  OK(tm_state_add_layout(state, layout, addresses, 3));
  OK(tm_load(state, second_path, comm, NULL, NULL));
  CHECK(memcmp(box[0], box[1], sizeof(box[0])) == 0);
  tm_state_free(state);
  words bare = {{0}, 0};
  PUT(&bare, TM_F32, TM_WORDS_METADATA_ONLY, 0, 1, 0, 4, 0, 3);
  OK(tm_state_new(&state));
  OK(tm_state_add_tensors(state, "v", 2, bare.at, bare.count, 1));
  int32_t sound = 1;
  OK(tm_validate(state, comm, NULL, &sound, NULL));
  CHECK(sound == 0);
  tm_state_free(state);
  tm_layout_free(layout);
  tm_layout_free(NULL);

  // Memory of a device, and of the host that a device sees.
  words seen = {{0}, 0};
  PUT(&seen, TM_F32, TM_WORDS_MEMORY, 0, 1, (int64_t)(intptr_t)box[0], 6, 0, 6, TM_DEVICE_HOST, 0,
      0, 0, TM_MEMORY_PINNED, TM_STREAM_NONE, 0);
  OK(tm_state_new(&state));
  OK(tm_state_add_tensors(state, "v", 2, seen.at, seen.count, 1));
  tm_state_free(state);
  const struct {
    size_t word;
    int64_t value;
    tm_status status;
    const char* why;
  } elsewhere[] = {{8, TM_DEVICE_CUDA, TM_INVALID_ARGUMENT, "pinned host memory"},
                   {8, INT64_MIN, TM_INVALID_ARGUMENT, "tensor v: device_kind"},
                   {12, TM_MEMORY_DEVICE, TM_INVALID_ARGUMENT, "its device is the host"},
                   {12, INT64_C(1) << 32, TM_INVALID_ARGUMENT, "memory_kind"},
                   {13, TM_STREAM_LEGACY_DEFAULT, TM_UNSUPPORTED, "cannot wait for"},
                   {13, TM_STREAM_HANDLE, TM_INVALID_ARGUMENT, "does not match its handle"},
                   {14, 7, TM_UNSUPPORTED, "cannot wait for"}};
  for (size_t i = 0; i < sizeof(elsewhere) / sizeof(elsewhere[0]); ++i) {
    words bad = seen;
    bad.at[elsewhere[i].word] = elsewhere[i].value;
    OK(tm_state_new(&state));
    FAILS(tm_state_add_tensors(state, "v", 2, bad.at, bad.count, 1), elsewhere[i].status,
          elsewhere[i].why);
    tm_state_free(state);
  }

  // What is wrong is named, and fails the state.
  OK(tm_state_new(&state));
  FAILS(tm_state_add_tensors(state, kThreeKeys, keys - 1, good.at, good.count, 3),
        TM_INVALID_ARGUMENT, "2 of 3");
  FAILS(tm_save(state, first_path, comm, &replace, NULL), TM_INVALID_ARGUMENT, "2 of 3");
  tm_state_free(state);
  check_three(first_path, 0);
  OK(tm_state_new(&state));
  FAILS(tm_state_add_tensors(state, kThreeKeys, keys, good.at, good.count - 1, 3),
        TM_INVALID_ARGUMENT, "within shard 2, tensor strided");
  FAILS(tm_state_add_tensors(state, kThreeKeys, keys, good.at, good.count, 2), TM_INVALID_ARGUMENT,
        "left over");
  FAILS(tm_state_add_tensors(state, kThreeKeys, keys, good.at, good.count, SIZE_MAX),
        TM_INVALID_ARGUMENT, "shards do not fit in 17 bytes");
  FAILS(tm_state_add_tensors(state, NULL, keys, good.at, good.count, 3), TM_INVALID_ARGUMENT,
        "'keys'");
  FAILS(tm_state_add_tensors(NULL, kThreeKeys, keys, good.at, good.count, 3), TM_INVALID_ARGUMENT,
        "'state'");
  FAILS(tm_layout_new(kThreeKeys, keys, good.at, good.count, 3, NULL), TM_INVALID_ARGUMENT,
        "'out'");
  FAILS(tm_state_add_layout(state, NULL, NULL, 0), TM_INVALID_ARGUMENT, "'layout'");
  // Each number of the first shard in turn.
  const struct {
    size_t word;
    int64_t value;
    tm_status status;
    const char* why;
  } wrong[] = {{0, 0, TM_INVALID_ARGUMENT, "tensor box: 0 is not a dtype"},
               {0, -1, TM_INVALID_ARGUMENT, "-1 is not a dtype"},
               {0, INT64_C(1) << 40, TM_INVALID_ARGUMENT, "is not a dtype"},
               {1, 64, TM_UNSUPPORTED, "tensor box: flags 64"},
               {1, TM_WORDS_MEMORY, TM_INVALID_ARGUMENT, "tensor box: device_kind: 13"},
               {2, 3, TM_INVALID_ARGUMENT, "3 is not a TM_REPLICA_ value"},
               {2, -1, TM_INVALID_ARGUMENT, "-1 is not a TM_REPLICA_ value"},
               {3, 17, TM_INVALID_ARGUMENT, "17 axes"},
               {3, -1, TM_INVALID_ARGUMENT, "-1 axes"},
               {4, 0, TM_INVALID_ARGUMENT, "the buffer is null"},
               {5, -3, TM_INVALID_ARGUMENT, "tensor box"},
               {7, 1, TM_INVALID_ARGUMENT, "tensor box"},
               {9, INT64_MAX, TM_INVALID_ARGUMENT, "tensor box"}};
  for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); ++i) {
    words bad = good;
    bad.at[wrong[i].word] = wrong[i].value;
    tm_state* failed = NULL;
    OK(tm_state_new(&failed));
    FAILS(tm_state_add_tensors(failed, kThreeKeys, keys, bad.at, bad.count, 3), wrong[i].status,
          wrong[i].why);
    tm_state_free(failed);
  }
  tm_state_free(state);
  tm_communicator_free(comm);
}

// The same rows over TCP, by ranks that know no more of each other than addresses and a token.
typedef struct tcp_args {
  tm_tcp* tcp;
  const char* const* addresses;
  const uint8_t* token;
  int32_t rank;
  const char* path;
} tcp_args;

static void* run_tcp_rank(void* argument) {
  const tcp_args* args = argument;
  tm_communicator* comm = NULL;
  OK(tm_tcp_connect(args->tcp, args->addresses, args->rank, RANKS, args->token, TM_TCP_TOKEN_BYTES,
                    &comm));
  tm_tcp_free(args->tcp);  // What it listened with is the communicator's now.
  if (comm == NULL) return NULL;
  CHECK(tm_communicator_rank(comm) == args->rank && tm_communicator_size(comm) == RANKS);
  tm_state* state = NULL;
  OK(tm_state_new(&state));
  enum { MINE = ROWS / RANKS };
  float rows[MINE * COLUMNS];
  int64_t begin[2], extent[2];
  fill_state(state, args->rank, args->rank * MINE, MINE, rows, begin, extent, RANKS);
  OK(tm_save(state, args->path, comm, NULL, NULL));
  tm_state_free(state);
  tm_communicator_free(comm);
  return NULL;
}

static void over_tcp(const char* path) {
  uint8_t token[TM_TCP_TOKEN_BYTES] = {0};
  OK(tm_tcp_token(token, sizeof(token)));
  pthread_t threads[RANKS];
  tcp_args args[RANKS];
  const char* addresses[RANKS];
  for (int32_t r = 0; r < RANKS; ++r) {
    const tm_tcp_options options = {.struct_size = sizeof(options),
                                    .address = "127.0.0.1",
                                    .no_unix_sockets = r % 2 == 0,
                                    .keep_alive_ms = r == 0 ? -1 : 0};
    OK(tm_tcp_listen(&options, &args[r].tcp));
    addresses[r] = tm_tcp_address(args[r].tcp);
    CHECK(addresses[r] != NULL && strlen(addresses[r]) <= 512);
    args[r].addresses = addresses;
    args[r].token = token;
    args[r].rank = r;
    args[r].path = path;
  }
  // What cannot be, before it goes well.
  tm_communicator* comm = NULL;
  const char* wrong[2] = {addresses[0], "tm1:damaged"};
  FAILS(tm_tcp_connect(args[0].tcp, wrong, 0, 2, token, sizeof(token), &comm), TM_INVALID_ARGUMENT,
        "rank 1");
  FAILS(tm_tcp_connect(args[0].tcp, addresses, 0, RANKS, token, 16, &comm), TM_INVALID_ARGUMENT,
        "32 bytes");
  FAILS(tm_tcp_connect(args[0].tcp, addresses, 0, 0, token, sizeof(token), &comm),
        TM_INVALID_ARGUMENT, "size");
  FAILS(tm_tcp_connect(args[0].tcp, NULL, 0, 1, token, sizeof(token), &comm), TM_INVALID_ARGUMENT,
        "addresses");
  FAILS(tm_tcp_connect(NULL, addresses, 0, RANKS, token, sizeof(token), &comm), TM_INVALID_ARGUMENT,
        "tcp");
  FAILS(tm_tcp_token(token, 31), TM_INVALID_ARGUMENT, "32 bytes");
  tm_tcp* none = NULL;
  tm_tcp_options bad = {.struct_size = sizeof(bad), .first_port = 65536, .last_port = 65536};
  FAILS(tm_tcp_listen(&bad, &none), TM_INVALID_ARGUMENT, "first_port");
  const tm_tcp_options nowhere = {.struct_size = sizeof(nowhere), .interface_name = "no-such-one"};
  FAILS(tm_tcp_listen(&nowhere, &none), TM_NOT_FOUND, "no-such-one");
  CHECK(none == NULL && comm == NULL && tm_tcp_address(NULL) == NULL);
  tm_tcp_free(NULL);
  // Each frees the address of its own: the others have copies of the pointers.
  char copies[RANKS][513];
  for (int32_t r = 0; r < RANKS; ++r) {
    snprintf(copies[r], sizeof(copies[r]), "%s", addresses[r]);
    addresses[r] = copies[r];
  }
  for (int32_t r = 0; r < RANKS; ++r) {
    if (pthread_create(&threads[r], NULL, run_tcp_rank, &args[r]) != 0) exit(3);
  }
  for (int r = 0; r < RANKS; ++r) pthread_join(threads[r], NULL);
}

int main(int argc, char** argv) {
  const char* base = getenv("TENSORMOUNT_TEST_TMPDIR");
  if (base == NULL) base = getenv("TMPDIR");
  char folder[200];
  snprintf(folder, sizeof(folder), "%s/tensormount-c-XXXXXX", base == NULL ? "/tmp" : base);
  const char* store = argc > 1 ? argv[1] : mkdtemp(folder);
  if (store == NULL) return 3;
  char paths[7][256];
  for (int i = 0; i < 7; ++i) {
    snprintf(paths[i], sizeof(paths[i]), "%s/store/step-%d", store, i + 1);
  }
  what_cannot_be();
  save_alone(paths[0]);
  look_at(paths[0], 1);
  look_at_files(paths[0]);
  other_sizes(paths[0]);
  load_by_rules(paths[0]);
  many_at_once(paths[4], paths[5]);
  on_four_ranks(paths[1], paths[2], paths[3]);
  look_at(paths[1], RANKS);
  look_at(paths[2], RANKS);
  over_tcp(paths[6]);
  look_at(paths[6], RANKS);
  if (argc == 1) {
    char command[300];
    snprintf(command, sizeof(command), "rm -rf '%s'", store);
    if (system(command) != 0) return 3;
  }
  if (failures == 0) printf("c_api_test: all is well\n");
  return failures == 0 ? 0 : 1;
}

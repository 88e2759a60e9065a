// SPDX-License-Identifier: Apache-2.0
// Lists the tensors of a checkpoint, and shows the first row of one, in C:
//   c_read STORE/NAME [KEY]
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tensormount/c.h>

static int fail(const char* what, tm_status status) {
  fprintf(stderr, "c_read: %s: %s: %s\n", what, tm_status_name(status), tm_last_error());
  return 2;
}

static int list(const tm_checkpoint* checkpoint) {
  tm_list* keys = NULL;
  const tm_status status = tm_checkpoint_keys(checkpoint, &keys);
  if (status != TM_OK) return fail("list", status);
  for (size_t i = 0; i < tm_list_size(keys); ++i) {
    const char* key = tm_list_get(keys, i, NULL);
    tm_tensor_info info = {.struct_size = sizeof(info)};
    const tm_status found = tm_checkpoint_tensor(checkpoint, key, &info);
    if (found != TM_OK) return fail(key, found);
    printf("%s %s [", key, tm_dtype_name(info.dtype));
    for (int axis = 0; axis < info.rank; ++axis) {
      printf("%s%lld", axis == 0 ? "" : ", ", (long long)info.shape[axis]);
    }
    printf("]\n");
  }
  tm_list_free(keys);
  return 0;
}

// The box [0:1, 0:n] of a matrix of f32, whatever the cuts that it was saved with.
static int show_row(const tm_checkpoint* checkpoint, const char* key) {
  tm_tensor_info info = {.struct_size = sizeof(info)};
  tm_status status = tm_checkpoint_tensor(checkpoint, key, &info);
  if (status != TM_OK) return fail(key, status);
  if (info.dtype != TM_F32 || info.rank != 2 || info.shape[0] < 1) {
    fprintf(stderr, "c_read: %s is no matrix of f32\n", key);
    return 2;
  }
  const int64_t extent[2] = {1, info.shape[1]};
  const tm_region row = {.struct_size = sizeof(row), .rank = 2, .extent = extent};
  float* values = malloc((size_t)info.shape[1] * sizeof(float));
  if (values == NULL) return 2;
  const tm_buffer buffer = {
      .struct_size = sizeof(buffer), .dtype = TM_F32, .data = values, .shape = extent, .rank = 2};
  status = tm_checkpoint_read(checkpoint, key, &row, &buffer);
  if (status == TM_OK) {
    for (int64_t i = 0; i < info.shape[1]; ++i) printf("%s%g", i == 0 ? "" : " ", values[i]);
    printf("\n");
  }
  free(values);
  return status == TM_OK ? 0 : fail(key, status);
}

int main(int argc, char** argv) {
  if (argc != 2 && argc != 3) {
    fprintf(stderr, "usage: c_read STORE/NAME [KEY]\n");
    return 2;
  }
  tm_checkpoint* checkpoint = NULL;
  const tm_status status = tm_checkpoint_open(argv[1], &checkpoint);
  if (status != TM_OK) return fail("open", status);
  const int result = argc == 2 ? list(checkpoint) : show_row(checkpoint, argv[2]);
  tm_checkpoint_close(checkpoint);
  return result;
}

// SPDX-License-Identifier: Apache-2.0
// Each process of an MPI job saves its rank as an object: c_mpi STORE/NAME
#include <stdint.h>
#include <stdio.h>

#include <tensormount/c.h>

int main(int argc, char** argv) {
  tm_mpi* mpi = NULL;
  tm_communicator* world = NULL;
  tm_state* state = NULL;
  if (argc != 2 || tm_mpi_init(&mpi) != TM_OK || tm_mpi_world(mpi, &world) != TM_OK ||
      tm_state_new(&state) != TM_OK) {
    fprintf(stderr, "c_mpi: %s\n", tm_last_error());
    return 2;
  }
  const int64_t rank = tm_communicator_rank(world);
  const int64_t size = tm_communicator_size(world);
  tm_status status = tm_state_add_object(state, "rank", &rank, sizeof(rank), &rank, &size, 1);
  if (status == TM_OK) status = tm_save(state, argv[1], world, NULL, NULL);
  if (status != TM_OK) fprintf(stderr, "c_mpi: %s\n", tm_last_error());
  if (status == TM_OK && rank == 0) printf("%d processes saved in C\n", (int)size);
  tm_state_free(state);
  tm_communicator_free(world);
  tm_mpi_free(mpi);
  return status == TM_OK ? 0 : 2;
}

// SPDX-License-Identifier: Apache-2.0
// Writes a checkpoint whose tensors are cut into very many chunks: save_chunks STORE NAME [WRITERS]
// "one": i32 [5000, 4], a chunk each row, by 2 writers in turn; "few": i32 [3, 400, 4], a chunk
// each index of axis 1.
#include <cstdio>
#include <cstdlib>

#include "tests/support/tiny_checkpoint.h"

int main(int argc, char** argv) {
  using namespace tensormount;  // NOLINT
  if (argc != 3 && argc != 4) {
    std::fprintf(stderr, "usage: save_chunks STORE NAME [WRITERS]\n");
    return 2;
  }
  TinySpec spec;
  spec.writers = argc == 4 ? std::atoi(argv[3]) : 2;
  spec.tensors = {
      {.key = "one", .dtype = DType::kI32, .shape = {5000, 4}, .parts = 5000},
      {.key = "few", .dtype = DType::kI32, .shape = {3, 400, 4}, .parts = 400, .axis = 1}};
  const auto published = WriteTinyCheckpoint(HostFileSystem(), argv[1], argv[2], spec);
  if (!published.ok()) std::fprintf(stderr, "%s\n", published.status().ToString().c_str());
  return published.ok() ? 0 : 1;
}

// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_LIB_C_API_CHECKPOINT_H_
#define TENSORMOUNT_LIB_C_API_CHECKPOINT_H_

#include <string>
#include <sys/types.h>
#include <unistd.h>

#include "tensormount/c.h"
#include "tensormount/checkpoint.h"

struct tm_checkpoint {
  tensormount::Checkpoint checkpoint;
  std::string uuid;  // The text that tm_checkpoint_uuid returns.
  const pid_t process = getpid();
};

#endif  // TENSORMOUNT_LIB_C_API_CHECKPOINT_H_

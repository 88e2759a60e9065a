// SPDX-License-Identifier: Apache-2.0
// All headers of the C++ library except mpi.h, whose functions are in libtensormount_mpi.
// Start with save.h and load.h (programs with ranks), checkpoint.h (reading only) or c.h (other
// languages). state_dict.h describes what a rank passes in, box.h and buffer.h how it describes
// cells and memory.
#ifndef TENSORMOUNT_TENSORMOUNT_H_
#define TENSORMOUNT_TENSORMOUNT_H_

#include "tensormount/async_load.h"
#include "tensormount/async_save.h"
#include "tensormount/box.h"
#include "tensormount/buffer.h"
#include "tensormount/callback_communicator.h"
#include "tensormount/checkpoint.h"
#include "tensormount/common_value.h"
#include "tensormount/communicator.h"
#include "tensormount/derive.h"
#include "tensormount/dtype.h"
#include "tensormount/event.h"
#include "tensormount/key_map.h"
#include "tensormount/load.h"
#include "tensormount/log.h"
#include "tensormount/mapping_guard.h"
#include "tensormount/name_map.h"
#include "tensormount/retention.h"
#include "tensormount/save.h"
#include "tensormount/shard.h"
#include "tensormount/state_dict.h"
#include "tensormount/status.h"
#include "tensormount/store.h"
#include "tensormount/store_copy.h"
#include "tensormount/store_repair.h"
#include "tensormount/tcp_group.h"
#include "tensormount/validate.h"
#include "tensormount/visibility.h"

#endif  // TENSORMOUNT_TENSORMOUNT_H_

// SPDX-License-Identifier: Apache-2.0
// What programs that are compiled already believe of the structures of c.h, on 64-bit Linux. A
// structure grows at its end, with a new size here: the library tells by struct_size what it was given.
#include <tensormount/c.h>

_Static_assert(sizeof(tm_region) == 48, "");
_Static_assert(sizeof(tm_buffer) == 80, "");
_Static_assert(sizeof(tm_tensor_info) == 160, "");
_Static_assert(sizeof(tm_callbacks) == 56, "");
_Static_assert(sizeof(tm_tcp_options) == 56, "");
_Static_assert(sizeof(tm_shard) == 40, "");
_Static_assert(sizeof(tm_event) == 64, "");
_Static_assert(sizeof(tm_save_options) == 208, "");
_Static_assert(sizeof(tm_value_statistics) == 64, "");
_Static_assert(sizeof(tm_save_numbers) == 184, "");
_Static_assert(sizeof(tm_job_progress) == 40, "");
_Static_assert(sizeof(tm_load_rule) == 32, "");
_Static_assert(sizeof(tm_load_options) == 136, "");
_Static_assert(sizeof(tm_load_numbers) == 104, "");
_Static_assert(sizeof(tm_open_options) == 40, "");
_Static_assert(sizeof(tm_uncovered) == 280, "");
_Static_assert(sizeof(tm_validate_options) == 40, "");
_Static_assert(sizeof(tm_saver_options) == 32, "");
_Static_assert(sizeof(tm_gc_options) == 24, "");
_Static_assert(sizeof(tm_copy_options) == 24, "");
_Static_assert(sizeof(tm_verify_options) == 40, "");
_Static_assert(sizeof(tm_repair_options) == 32, "");
_Static_assert(sizeof(tm_diff_options) == 56, "");
_Static_assert(sizeof(tm_adopt_options) == 56, "");
_Static_assert(sizeof(tm_derive_options) == 48, "");
_Static_assert(sizeof(tm_publish_options) == 24, "");
_Static_assert(sizeof(tm_remove_options) == 8, "");
_Static_assert(sizeof(tm_pin_options) == 24, "");
_Static_assert(sizeof(tm_prune_options) == 16, "");
_Static_assert(sizeof(tm_export_options) == 96, "");
_Static_assert(sizeof(tm_watch_options) == 24, "");

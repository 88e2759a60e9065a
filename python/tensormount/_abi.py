# SPDX-License-Identifier: Apache-2.0
"""The C interface (tensormount/c.h) as ctypes sees it: structures, functions, statuses.

One table of functions, one class a structure; tests/python/abi_test.py compares sizes and offsets
with the header. Which library: that which the environment's TENSORMOUNT_LIBRARY names, else the one
that stands in this package. It is opened by the first call of `library()`.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any, NoReturn, Optional

MAX_RANK = 16  # TM_MAX_RANK
DEVICE_HOST = 0  # TM_DEVICE_HOST

Dims = c_int64 * MAX_RANK
PDims = POINTER(c_int64)


class Region(Structure):
    """tm_region"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("rank", c_int32),
        ("begin", c_void_p),  # Addresses, so that they can be set once (Frame).
        ("extent", c_void_p),
        ("is_flat", c_int32),
        ("reserved", c_int32),
        ("flat_first", c_int64),
        ("flat_count", c_int64),
    ]


class Buffer(Structure):
    """tm_buffer"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("dtype", c_uint32),
        ("device_kind", c_int32),
        ("device_ordinal", c_int32),
        ("data", c_void_p),
        ("shape", c_void_p),
        ("strides", c_void_p),
        ("rank", c_int32),
        ("reserved", c_int32),
        ("stream", c_void_p),
        ("memory_kind", c_int32),
        ("stream_kind", c_int32),
        ("device_uuid", c_uint8 * 16),
    ]


class TensorInfo(Structure):
    """tm_tensor_info"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("dtype", c_uint32),
        ("rank", c_int32),
        ("has_digest", c_int32),
        ("bytes", c_uint64),
        ("digest", c_uint64),
        ("shape", Dims),
    ]


class Callbacks(Structure):
    """tm_callbacks; the functions as addresses"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("tag", c_uint32),
        ("context", c_void_p),
        ("send", c_void_p),
        ("receive", c_void_p),
        ("test", c_void_p),
        ("cancel", c_void_p),
        ("leave_wait_ms", c_int64),
    ]


class Shard(Structure):
    """tm_shard"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("replica", c_int32),
        ("global_shape", c_void_p),
        ("global_rank", c_int32),
        ("metadata_only", c_int32),
        ("region", POINTER(Region)),
        ("data", POINTER(Buffer)),
    ]


class Event(Structure):
    """tm_event"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("kind", c_int32),
        ("job", c_char_p),
        ("path", c_char_p),
        ("phase", c_char_p),
        ("rank", c_int32),
        ("status", c_int32),
        ("message", c_char_p),
        ("bytes", c_uint64),
        ("seconds", c_double),
    ]


class SaveOptions(Structure):
    """tm_save_options"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("placement", c_int32),
        ("replica_check", c_int32),
        ("replace", c_int32),
        ("strategy", c_int32),
        ("common_check", c_int32),
        ("skip_validation", c_int32),
        ("no_plan_reuse", c_int32),
        ("common_exempt", POINTER(c_char_p)),
        ("common_exempt_count", c_size_t),
        ("producer", c_char_p),
        ("liveness_ms", c_int64),
        ("arrival_ms", c_int64),
        ("on_event", c_void_p),
        ("on_event_context", c_void_p),
        ("total_ms", c_int64),
        ("page_hashes", c_int32),
        ("reserved", c_int32),
        ("before_publish", c_void_p),
        ("before_publish_context", c_void_p),
        ("on_commit", c_void_p),
        ("on_commit_context", c_void_p),
        ("no_reuse", c_int32),
        ("full_every", c_int32),
        ("reuse_from", c_char_p),
        ("inherit", c_char_p),
        ("retention", c_char_p),
        ("ephemeral", c_int32),
        ("reserved2", c_int32),
    ]


class SaveNumbers(Structure):
    """tm_save_numbers"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("plan_reused", c_int32),
        ("generation", c_uint64),
        ("tensors", c_uint64),
        ("bytes", c_uint64),
        ("bytes_written", c_uint64),
        ("bytes_written_here", c_uint64),
        ("replica_bytes", c_uint64),
        ("replica_bytes_compared", c_uint64),
        ("validate_seconds", c_double),
        ("plan_seconds", c_double),
        ("write_seconds", c_double),
        ("compare_seconds", c_double),
        ("publish_seconds", c_double),
        ("reuse_seconds", c_double),
        ("reused_tensors", c_uint64),
        ("reused_objects", c_uint64),
        ("reused_bytes", c_uint64),
        ("reused_bytes_by_leaf", c_uint64),
        ("reused_bytes_by_comparison", c_uint64),
        ("files_linked", c_uint64),
        ("bytes_linked", c_uint64),
        ("files_copied", c_uint64),
        ("bytes_copied", c_uint64),
    ]


class JobProgress(Structure):
    """tm_job_progress"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("state", c_int32),
        ("bytes_total", c_uint64),
        ("bytes_staged", c_uint64),
        ("bytes_written", c_uint64),
        ("stalled_seconds", c_double),
    ]


class LoadRule(Structure):
    """tm_load_rule"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("allow_shrink", c_int32),
        ("keys", c_char_p),
        ("grow", c_int32),
        ("convert_dtype", c_int32),
        ("grid", c_int32),
        ("reserved", c_int32),
    ]


class LoadOptions(Structure):
    """tm_load_options"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("not_stored", c_int32),
        ("not_requested", c_int32),
        ("validate", c_int32),
        ("verify", c_int32),
        ("path", c_int32),
        ("exchange_group", c_int32),
        ("no_plan_reuse", c_int32),
        ("strict_exempt", POINTER(c_char_p)),
        ("strict_exempt_count", c_size_t),
        ("rules", POINTER(LoadRule)),
        ("rule_count", c_size_t),
        ("liveness_ms", c_int64),
        ("arrival_ms", c_int64),
        ("on_event", c_void_p),
        ("on_event_context", c_void_p),
        ("total_ms", c_int64),
        ("threads", c_int32),
        ("exchange_via", c_int32),
        ("roots", POINTER(c_char_p)),
        ("root_count", c_size_t),
    ]


class OpenOptions(Structure):
    """tm_open_options"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_int32),
        ("roots", POINTER(c_char_p)),
        ("root_count", c_size_t),
        ("file", c_char_p),
    ]


class LoadNumbers(Structure):
    """tm_load_numbers"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("plan_reused", c_int32),
        ("bytes_wanted", c_uint64),
        ("bytes_read", c_uint64),
        ("bytes_received", c_uint64),
        ("bytes_by_leaf", c_uint64),
        ("bytes_by_digest", c_uint64),
        ("bytes_unverified", c_uint64),
        ("messages_sent", c_uint64),
        ("peak_buffer_bytes", c_uint64),
        ("plan_seconds", c_double),
        ("read_seconds", c_double),
        ("proof_seconds", c_double),
        ("bytes_between_devices", c_uint64),
    ]


class Uncovered(Structure):
    """tm_uncovered"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("rank", c_int32),
        ("key", c_char_p),
        ("zeroed", c_int32),
        ("reserved", c_int32),
        ("begin", Dims),
        ("extent", Dims),
    ]


class ValidateOptions(Structure):
    """tm_validate_options"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("limit", c_uint32),
        ("liveness_ms", c_int64),
        ("arrival_ms", c_int64),
        ("total_ms", c_int64),
        ("task", c_void_p),
    ]


class RemoveOptions(Structure):
    """tm_remove_options"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("force", c_int32),
    ]


class PinOptions(Structure):
    """tm_pin_options"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_int32),
        ("reason", c_char_p),
        ("expires", c_int64),
    ]


class PruneOptions(Structure):
    """tm_prune_options"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("dry_run", c_int32),
        ("rules", c_char_p),
    ]


class CopyOptions(Structure):
    """tm_copy_options"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_int32),
        ("limit_rate", c_uint64),
        ("task", c_void_p),
    ]


class GcOptions(Structure):
    """tm_gc_options"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("dry_run", c_int32),
        ("grace_seconds", c_int64),
        ("staging_age_seconds", c_int64),
    ]


class VerifyOptions(Structure):
    """tm_verify_options"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("quick", c_int32),
        ("threads", c_int32),
        ("reserved", c_int32),
        ("roots", POINTER(c_char_p)),
        ("root_count", c_size_t),
        ("task", c_void_p),
    ]


class RepairOptions(Structure):
    """tm_repair_options"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("dry_run", c_int32),
        ("roots", POINTER(c_char_p)),
        ("root_count", c_size_t),
        ("task", c_void_p),
    ]


class DiffOptions(Structure):
    """tm_diff_options"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("values", c_int32),
        ("keys", c_char_p),
        ("key_map", c_char_p),
        ("limit", c_uint64),
        ("task", c_void_p),
        ("roots", POINTER(c_char_p)),
        ("root_count", c_size_t),
    ]


class DeriveOptions(Structure):
    """tm_derive_options"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("replace", c_int32),
        ("keep", POINTER(c_char_p)),
        ("keep_count", c_size_t),
        ("drop", POINTER(c_char_p)),
        ("drop_count", c_size_t),
        ("key_map", c_char_p),
    ]


class AdoptOptions(Structure):
    """tm_adopt_options"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("replace", c_int32),
        ("quick", c_int32),
        ("threads", c_int32),
        ("key_map", c_char_p),
        ("task", c_void_p),
        ("partial", c_int32),
        ("reserved", c_int32),
        ("roots", POINTER(c_char_p)),
        ("root_count", c_size_t),
    ]


class PublishOptions(Structure):
    """tm_publish_options"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_int32),
        ("name", c_char_p),
        ("wait_ms", c_int64),
    ]


class ExportOptions(Structure):
    """tm_export_options"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("replace", c_int32),
        ("partial", c_int32),
        ("reserved", c_int32),
        ("format", c_char_p),
        ("key_map", c_char_p),
        ("hf_part_bytes", c_uint64),
        ("hf_rules", c_char_p),
        ("liveness_ms", c_int64),
        ("arrival_ms", c_int64),
        ("total_ms", c_int64),
        ("task", c_void_p),
        ("roots", POINTER(c_char_p)),
        ("root_count", c_size_t),
    ]


class TcpOptions(Structure):
    """tm_tcp_options"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("no_unix_sockets", c_uint32),
        ("interface_name", c_char_p),
        ("address", c_char_p),
        ("first_port", c_uint32),
        ("last_port", c_uint32),
        ("connect_timeout_ms", c_int64),
        ("keep_alive_ms", c_int64),
        ("leave_wait_ms", c_int64),
    ]


class SaverOptions(Structure):
    """tm_saver_options"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("stage_in_background", c_int32),
        ("staging_bytes", c_uint64),
        ("cancel_on_free", c_int32),
        ("reserved", c_int32),
        ("device_staging_bytes", c_uint64),
    ]


# Name in c.h to class; what the test compares.
STRUCTURES: dict[str, type[Structure]] = {
    "tm_region": Region,
    "tm_buffer": Buffer,
    "tm_tensor_info": TensorInfo,
    "tm_callbacks": Callbacks,
    "tm_shard": Shard,
    "tm_event": Event,
    "tm_save_options": SaveOptions,
    "tm_save_numbers": SaveNumbers,
    "tm_job_progress": JobProgress,
    "tm_open_options": OpenOptions,
    "tm_load_rule": LoadRule,
    "tm_load_options": LoadOptions,
    "tm_load_numbers": LoadNumbers,
    "tm_uncovered": Uncovered,
    "tm_validate_options": ValidateOptions,
    "tm_copy_options": CopyOptions,
    "tm_gc_options": GcOptions,
    "tm_verify_options": VerifyOptions,
    "tm_repair_options": RepairOptions,
    "tm_diff_options": DiffOptions,
    "tm_adopt_options": AdoptOptions,
    "tm_derive_options": DeriveOptions,
    "tm_remove_options": RemoveOptions,
    "tm_pin_options": PinOptions,
    "tm_prune_options": PruneOptions,
    "tm_publish_options": PublishOptions,
    "tm_export_options": ExportOptions,
    "tm_saver_options": SaverOptions,
    "tm_tcp_options": TcpOptions,
}

# Name: (result, arguments). Pointers are addresses (c_void_p), which cost nothing to pass.
_P = c_void_p
_STATUS = c_int32
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "tm_status_name": (c_char_p, [c_int32]),
    "tm_last_error": (c_char_p, []),
    "tm_last_errno": (c_int, []),
    "tm_set_last_error": (_STATUS, [c_int32, c_int, c_char_p]),
    "tm_version": (c_char_p, []),
    "tm_enable_mapping_guard": (_STATUS, []),
    "tm_free": (None, [_P]),
    "tm_list_size": (c_size_t, [_P]),
    "tm_list_get": (c_char_p, [_P, c_size_t, _P]),
    "tm_list_free": (None, [_P]),
    "tm_dtype_name": (c_char_p, [c_uint32]),
    "tm_dtype_bits": (c_uint32, [c_uint32]),
    "tm_checkpoint_open": (_STATUS, [c_char_p, _P]),
    "tm_checkpoint_open_with": (_STATUS, [c_char_p, _P, _P]),
    "tm_checkpoint_close": (None, [_P]),
    "tm_checkpoint_keys": (_STATUS, [_P, _P]),
    "tm_checkpoint_objects": (_STATUS, [_P, _P]),
    "tm_checkpoint_warnings": (_STATUS, [_P, _P]),
    "tm_checkpoint_tensor": (_STATUS, [_P, c_char_p, _P]),
    "tm_checkpoint_read": (_STATUS, [_P, c_char_p, _P, _P]),
    "tm_checkpoint_read_bytes": (_STATUS, [_P, c_char_p, c_uint64, _P, c_size_t]),
    "tm_checkpoint_object_grid": (_STATUS, [_P, c_char_p, _P, _P]),
    "tm_checkpoint_object": (_STATUS, [_P, c_char_p, _P, c_int32, _P, _P]),
    "tm_checkpoint_common": (_STATUS, [_P, c_char_p, _P, _P]),
    "tm_checkpoint_rank_common": (_STATUS, [_P, c_int32, c_char_p, _P, _P]),
    "tm_checkpoint_metadata": (_STATUS, [_P, _P, _P]),
    "tm_checkpoint_map": (_STATUS, [_P, c_char_p, c_uint64, c_uint64, _P]),
    "tm_mapping_data": (_P, [_P]),
    "tm_mapping_free": (None, [_P]),
    "tm_checkpoint_layout": (_STATUS, [_P, c_char_p, _P]),
    "tm_checkpoint_picture": (_STATUS, [_P, c_char_p, _P]),
    "tm_checkpoint_path": (c_char_p, [_P]),
    "tm_checkpoint_uuid": (c_char_p, [_P]),
    "tm_last_error_json": (_STATUS, [_P]),
    # Groups.
    "tm_communicator_free": (None, [_P]),
    "tm_communicator_rank": (c_int32, [_P]),
    "tm_communicator_size": (c_int32, [_P]),
    "tm_communicator_self": (_STATUS, [_P]),
    "tm_tcp_listen": (_STATUS, [_P, _P]),
    "tm_tcp_address": (c_char_p, [_P]),
    "tm_tcp_token": (_STATUS, [_P, c_size_t]),
    "tm_tcp_connect": (_STATUS, [_P, _P, c_int32, c_int32, _P, c_size_t, _P]),
    "tm_tcp_free": (None, [_P]),
    # States.
    "tm_state_new": (_STATUS, [_P]),
    "tm_state_free": (None, [_P]),
    "tm_state_add_tensors": (_STATUS, [_P, c_char_p, c_size_t, _P, c_size_t, c_size_t]),
    "tm_layout_new": (_STATUS, [c_char_p, c_size_t, _P, c_size_t, c_size_t, _P]),
    "tm_layout_free": (None, [_P]),
    "tm_state_add_layout": (_STATUS, [_P, _P, _P, c_size_t]),
    "tm_state_add_object": (_STATUS, [_P, c_char_p, c_char_p, c_size_t, _P, _P, c_int32]),
    "tm_state_want_object": (_STATUS, [_P, c_char_p, _P, _P, c_int32]),
    "tm_state_set_common": (_STATUS, [_P, c_char_p, c_char_p]),
    "tm_state_set_rank_common": (_STATUS, [_P, c_char_p, c_char_p]),
    "tm_state_set_metadata": (_STATUS, [_P, c_char_p]),
    "tm_state_fail": (_STATUS, [_P, c_int32, c_char_p]),
    "tm_state_fail_json": (_STATUS, [_P, c_char_p]),
    # Saves.
    "tm_save_async": (_STATUS, [_P, c_char_p, _P, _P, _P]),
    "tm_save_in_place": (_STATUS, [_P, c_char_p, _P, _P, _P]),
    "tm_saver_new": (_STATUS, [_P, _P, _P]),
    "tm_saver_free": (None, [_P]),
    "tm_saver_save": (_STATUS, [_P, _P, c_char_p, _P, _P]),
    "tm_save_job_wait_for": (_STATUS, [_P, c_int64, _P, _P]),
    "tm_save_job_wait_staged": (_STATUS, [_P, c_int64, _P]),
    "tm_save_job_fd": (_STATUS, [_P, _P]),
    "tm_save_job_staged_fd": (_STATUS, [_P, _P]),
    "tm_save_job_cancel": (None, [_P]),
    "tm_save_job_progress": (_STATUS, [_P, _P]),
    "tm_save_job_free": (None, [_P]),
    "tm_save_report_free": (None, [_P]),
    "tm_save_report_numbers": (_STATUS, [_P, _P]),
    "tm_save_report_path": (c_char_p, [_P]),
    "tm_save_report_uuid": (c_char_p, [_P]),
    "tm_save_report_base": (c_char_p, [_P]),
    "tm_save_report_note": (c_char_p, [_P]),
    "tm_save_report_files": (_STATUS, [_P, _P]),
    "tm_save_report_warnings": (_STATUS, [_P, _P]),
    "tm_save_report_pruned": (_STATUS, [_P, _P]),
    "tm_save_report_not_pruned": (_STATUS, [_P, _P]),
    # Loads.
    "tm_load_async": (_STATUS, [_P, c_char_p, _P, _P, _P]),
    "tm_load_job_wait": (_STATUS, [_P, c_int64, _P, _P]),
    "tm_load_job_fd": (_STATUS, [_P, _P]),
    "tm_load_job_bytes_read": (c_uint64, [_P]),
    "tm_load_job_cancel": (None, [_P]),
    "tm_load_job_free": (None, [_P]),
    "tm_load_report_free": (None, [_P]),
    "tm_load_report_numbers": (_STATUS, [_P, _P]),
    "tm_load_report_uuid": (c_char_p, [_P]),
    "tm_load_report_not_stored": (_STATUS, [_P, _P]),
    "tm_load_report_not_requested": (_STATUS, [_P, _P]),
    "tm_load_report_skipped": (_STATUS, [_P, _P]),
    "tm_load_report_converted": (_STATUS, [_P, _P]),
    "tm_load_report_uncovered_count": (c_size_t, [_P]),
    "tm_load_report_uncovered": (_STATUS, [_P, c_size_t, _P]),
    "tm_load_report_object": (_STATUS, [_P, c_char_p, _P, c_int32, _P, _P]),
    "tm_load_report_common": (_STATUS, [_P, c_char_p, _P, _P]),
    "tm_load_report_rank_common": (_STATUS, [_P, c_int32, c_char_p, _P, _P]),
    "tm_load_report_metadata": (_STATUS, [_P, _P, _P]),
    # Layouts, stores.
    "tm_validate": (_STATUS, [_P, _P, _P, _P, _P]),
    "tm_dump_spec": (_STATUS, [_P, _P, _P, _P]),
    "tm_store_list": (_STATUS, [c_char_p, _P]),
    "tm_store_latest": (_STATUS, [c_char_p, _P]),
    "tm_store_remove_with": (_STATUS, [c_char_p, _P]),
    "tm_store_pin": (_STATUS, [c_char_p, _P, _P]),
    "tm_store_unpin": (_STATUS, [c_char_p]),
    "tm_store_pins": (_STATUS, [c_char_p, _P]),
    "tm_store_prune": (_STATUS, [c_char_p, _P, _P]),
    "tm_store_policy": (_STATUS, [c_char_p, _P]),
    "tm_store_set_policy": (_STATUS, [c_char_p, c_char_p]),
    "tm_store_gc": (_STATUS, [c_char_p, _P, _P]),
    "tm_store_copy": (_STATUS, [_P, c_size_t, c_char_p, _P, _P, _P]),
    "tm_store_publish": (_STATUS, [c_char_p, _P, _P]),
    "tm_task_new": (_STATUS, [_P]),
    "tm_task_cancel": (None, [_P]),
    "tm_task_progress": (None, [_P, _P, _P]),
    "tm_task_free": (None, [_P]),
    "tm_export": (_STATUS, [c_char_p, c_char_p, _P, _P, _P]),
    "tm_verify": (_STATUS, [c_char_p, _P, _P, _P]),
    "tm_repair": (_STATUS, [c_char_p, c_char_p, _P, _P, _P]),
    "tm_diff": (_STATUS, [c_char_p, c_char_p, _P, _P, _P]),
    "tm_adopt": (_STATUS, [c_char_p, c_char_p, _P, _P]),
    "tm_derive": (_STATUS, [c_char_p, c_char_p, _P, _P]),
    "tm_key_map_apply": (_STATUS, [c_char_p, c_char_p, c_size_t, c_size_t, _P]),
}

_MPI_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "tm_mpi_init": (_STATUS, [_P]),
    "tm_mpi_world": (_STATUS, [_P, _P]),
    "tm_mpi_abandon": (None, [_P]),
    "tm_mpi_free": (None, [_P]),
}

# [True] once the interpreter ends. What it forgets then is not freed: a daemon thread may be within
# the library with it, and the system frees all of it. A list, because names of modules go first.
ended = [False]


def free_with(owner: Any, function: Any, address: int, *needed: Any) -> None:
    """Calls `function(address)` when nothing refers to `owner` any more. `needed` lives until then,
    also where the collector takes down both at once."""
    import weakref

    weakref.finalize(owner, _free, function, address, ended, *needed).atexit = False


def _free(function: Any, address: int, ended: list[bool], *_: Any) -> None:
    if not ended[0]:
        function(address)


def _end(ended: list[bool] = ended) -> None:
    ended[0] = True


_library: Optional[Any] = None
_mpi: Optional[Any] = None
_path: Optional[str] = None
_lock = threading.RLock()  # Taken again by a signal handler in the middle of what it guards.


def bundled() -> str:
    """Path of the library that stands in this package, whether it is there or not."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib", "libtensormount.so")


def library() -> Any:
    """The opened C library, as ctypes has it; LibraryError where there is none that fits."""
    if _library is not None:
        return _library
    return _open()


def _open() -> Any:
    global _library, _path
    from tensormount.errors import LibraryError

    with _lock:
        if _library is not None:
            return _library
        chosen = os.environ.get("TENSORMOUNT_LIBRARY")
        path = chosen or bundled()
        hint = (
            "as the environment's TENSORMOUNT_LIBRARY says"
            if chosen
            else "the package has no library in it; TENSORMOUNT_LIBRARY can name another one"
            if not os.path.exists(path)
            else "the library of the package does not load"
        )
        try:
            opened: Any = ctypes.CDLL(path)
        except OSError as error:
            raise LibraryError(f"{path}: {error} ({hint})", file=path) from None
        missing = []
        for name, (result, arguments) in _FUNCTIONS.items():
            try:
                function = getattr(opened, name)
            except AttributeError:
                missing.append(name)
                continue
            function.restype = result
            function.argtypes = arguments
        if missing:
            raise LibraryError(
                f"{path} is older than this package: it lacks {', '.join(missing)}", file=path
            )
        import atexit

        atexit.register(_end)
        _path = path
        _library = opened
        return opened


def library_path() -> str:
    """Where the C library is that this process uses; opens it."""
    library()
    assert _path is not None
    return _path


def enable_mapping_guard() -> None:
    """Lets the library read short runs where files are mapped, the fastest way to columns of a sharded
    tensor. Once a process, after it has set signal handlers of its own (faulthandler, say): SIGBUS that
    a page raises within a read of the library becomes a DataLossError, and any other goes to the handler
    that was there before.
    """
    status = library().tm_enable_mapping_guard()
    if status:
        fail(status)


def mpi_library() -> Any:
    """The part that has tm_mpi_*, opened: mpi.so of the wheel, or libtensormount_mpi.so beside the
    library. LibraryError where it is not there, or this machine lacks the MPI that it was built with.
    """
    global _mpi
    if _mpi is not None:
        return _mpi
    from tensormount.errors import LibraryError

    folder = os.path.dirname(library_path())
    for name in ("tensormount/mpi.so", "libtensormount_mpi.so"):
        path = os.path.join(folder, name)
        if not os.path.exists(path):
            continue
        with _lock:
            try:
                # The plug-ins of MPI look for the names of its library among the global ones.
                opened: Any = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
            except OSError as error:
                raise LibraryError(
                    f"MPI: {error}: install the MPI library that it was built with (Debian: the "
                    "packages libopenmpi3 and openmpi-bin)", file=path
                ) from None
            for name, (result, arguments) in _MPI_FUNCTIONS.items():
                function = getattr(opened, name)
                function.restype = result
                function.argtypes = arguments
            _mpi = opened
            return opened
    raise LibraryError(f"MPI: beside {library_path()} there is no part with MPI")


def library_version() -> str:
    """Version of the C library: "0.1.0"."""
    text: bytes = library().tm_version()
    return text.decode()


# As the library says it of keys, and this package of plain values.
NOT_STORED = "asked for, but not stored: "


def fail(status: int, kinds: Optional[dict[int, Any]] = None, key: Optional[str] = None) -> NoReturn:
    """Raises what the last call on this thread failed with.

    kinds: status to class, for calls in which a status means something narrower.
    key: what it was about, where the library does not say.
    """
    from tensormount.errors import (
        CLASSES,
        CheckpointNotFoundError,
        DeviceError,
        InternalError,
        KeyNotFoundError,
        NotFoundError,
        PeerLost,
    )

    lib = library()
    message = lib.tm_last_error().decode("utf-8", "surrogateescape")
    fields: dict[str, Any] = {"errno": lib.tm_last_errno(), "key": key}
    fields.update(_fields(lib))
    message = fields.pop("message", message)
    kind = CLASSES[status] if 0 < status < len(CLASSES) else InternalError
    if kind is NotFoundError:
        # What has a key was looked for in something that is there.
        known = fields["key"] is not None or NOT_STORED in message
        kind = KeyNotFoundError if known else CheckpointNotFoundError
    if kind is PeerLost and fields.get("device"):
        kind = DeviceError
    raise (kinds or {}).get(status, kind)(message, **fields)


def _fields(lib: Any) -> dict[str, Any]:
    """What tm_last_error_json says, as arguments of Error; what it does not know is left out."""
    import json

    text = c_void_p()
    if lib.tm_last_error_json(ctypes.addressof(text)) != 0 or not text.value:
        return {}
    try:
        said = json.loads(ctypes.string_at(text.value).decode("utf-8", "surrogateescape"))
    except ValueError:
        return {}
    finally:
        lib.tm_free(text)
    found = {
        name: said[name]
        for name in ("errno", "message", "rank", "key", "file", "cause", "memory_in_use", "device")
        if said.get(name) is not None
    }
    box = said.get("box")
    if isinstance(box, dict):
        found["box"] = (tuple(box.get("begin", ())), tuple(box.get("extent", ())))
    return found


def indices(numbers: Sequence[int]) -> Any:
    """An int64_t array, which may be empty."""
    return (c_int64 * max(1, len(numbers)))(*numbers)


def get_list(function: Any, *arguments: Any) -> list[str]:
    """The texts that a function gives as a tm_list, its last argument."""
    out = c_void_p()
    status = function(*arguments, ctypes.addressof(out))
    if status:
        fail(status)
    assert out.value is not None
    return _take_list(out.value)


def get_text(function: Any, *arguments: Any, kinds: Optional[dict[int, Any]] = None,
             key: Optional[str] = None) -> bytes:
    """The text that a function gives as a char*, its last argument."""
    out = c_void_p()
    status = function(*arguments, ctypes.addressof(out))
    if status:
        fail(status, kinds, key)
    assert out.value is not None
    try:
        return ctypes.string_at(out.value)
    finally:
        library().tm_free(out)


def _take_list(handle: int) -> list[str]:
    """The texts of a tm_list, which is freed."""
    lib = library()
    try:
        get = lib.tm_list_get
        return [
            get(handle, i, None).decode("utf-8", "surrogateescape")
            for i in range(lib.tm_list_size(handle))
        ]
    finally:
        lib.tm_list_free(handle)


def take_bytes(address: Optional[int], size: int) -> bytes:
    """Bytes that the library handed out, which are freed."""
    try:
        return ctypes.string_at(address, size) if address else b""
    finally:
        library().tm_free(address)


class Frame:
    """What one read passes to the library, put together once: a region and a buffer that point to
    the numbers beside them. Reads take one from a list and put it back, so that a thread, or a
    signal handler in the middle of another read, never meets one that is in use."""

    __slots__ = ("buffer", "buffer_at", "extent", "begin", "region", "region_at", "strides",
                 "strides_at")

    def __init__(self) -> None:
        self.begin = Dims()
        self.extent = Dims()
        self.strides = Dims()
        self.strides_at = ctypes.addressof(self.strides)
        extent_at = ctypes.addressof(self.extent)
        self.region = Region(
            struct_size=ctypes.sizeof(Region),
            begin=ctypes.addressof(self.begin),
            extent=extent_at,
        )
        self.buffer = Buffer(
            struct_size=ctypes.sizeof(Buffer), device_kind=DEVICE_HOST, shape=extent_at
        )
        self.region_at = ctypes.addressof(self.region)
        self.buffer_at = ctypes.addressof(self.buffer)


FRAMES: list[Frame] = []

# SPDX-License-Identifier: Apache-2.0
"""torchtitan's own tests of its checkpoint manager, with tm.torchtitan.CheckpointManager in its place.

usage: TENSORMOUNT_UPSTREAM=DIR torchtitan_upstream.py [-v]     DIR has a checkout of torchtitan, "torchtitan"

The checkout is 862f966a3, which has the interface of 0.3.0. Tests that another manager cannot pass are skipped, with
the reason.
"""

import os
import sys
import unittest

UPSTREAM = os.environ.get("TENSORMOUNT_UPSTREAM")
if not UPSTREAM:
    raise unittest.SkipTest("TENSORMOUNT_UPSTREAM is not set")
sys.path.insert(0, os.path.join(UPSTREAM, "torchtitan", "tests", "unit_tests"))

import test_checkpoint as upstream

import tensormount as tm

upstream.CheckpointManager = tm.torchtitan.CheckpointManager

_CALLS = "counts the calls of a replaced torch.distributed.checkpoint.save, async_save or load"
_FILES = "reads the files of a replaced torch.distributed.checkpoint.save"
_WHERE = "asks for the class of torchtitan itself"
SKIPPED = {
    "TestCheckpointManager": {
        "test_async_save_calls_maybe_wait_for_saving": _CALLS,
        "test_async_save_with_pinned_mem_assigns_staging_future": _CALLS,
        "test_checkpointer_package_import_path": _WHERE,
        "test_enable_first_step_checkpoint": _CALLS,
        "test_initial_load_path_used_when_folder_has_no_valid_checkpoints": _CALLS,
        "test_interval_respects_interval": _CALLS,
        "test_last_save_model_only_and_initial_load_model_only": _CALLS,
        "test_legacy_import_path": _WHERE,
        "test_load_only_prevents_saving": _CALLS,
        "test_non_persist_buffer_not_saved": _FILES,
        "test_nonzero_rank_does_not_purge_or_save": _CALLS,
        "test_save_and_purge_keeps_last_k_checkpoints": _FILES,
        "test_trainer_uses_checkpoint_interface_with_concrete_default": _WHERE,
    },
    "TestConfigPostInit": {
        "test_legacy_config_only_adds_dcp_specific_fields": "lists the fields of torchtitan's own configuration",
    },
}
for case, tests in SKIPPED.items():
    for name, reason in tests.items():
        kind = getattr(upstream, case)
        setattr(kind, name, unittest.skip(reason)(getattr(kind, name)))


def load_tests(loader, tests, pattern):
    return loader.loadTestsFromModule(upstream)


if __name__ == "__main__":
    unittest.main()

# SPDX-License-Identifier: Apache-2.0
"""Lightning's own tests of checkpoints, with tm.lightning.CheckpointIO in the place of TorchCheckpointIO.

usage: TENSORMOUNT_UPSTREAM=DIR lightning_upstream.py     DIR has a checkout of Lightning, "pytorch-lightning"

pytest loads this file as a plugin, too. It replaces the default plugin of all strategies. Where the tests expect one
file, os.path.isfile, torch.load and `load_from_checkpoint` take a directory for that file.
"""

import os
import re
import subprocess
import sys
import unittest

import tensormount as tm

FILES = (
    "tests_pytorch/checkpointing/test_checkpoint_callback_frequency.py",
    "tests_pytorch/checkpointing/test_model_checkpoint.py",
    "tests_pytorch/checkpointing/test_torch_saving.py",
    "tests_pytorch/checkpointing/test_trainer_checkpoint.py",
    "tests_pytorch/callbacks/test_model_checkpoint_additional_cases.py",
    "tests_pytorch/callbacks/test_model_checkpoint_edge_cases.py",
    "tests_pytorch/callbacks/test_model_checkpoint_step_interval_val_metric.py",
    "tests_pytorch/models/test_hooks.py",
    "tests_pytorch/models/test_restore.py",
    "tests_pytorch/plugins/test_async_checkpoint.py",
    "tests_pytorch/plugins/test_checkpoint_io_plugin.py",
    "tests_pytorch/trainer/connectors/test_checkpoint_connector.py",
)
# Tests that cannot pass, and why.
REFUSED = {
    "test_trainer_save_checkpoint_storage_options": "passes text as storage_options; ours are options of a save",
    "test_strict_model_load_more_params[True]": "an HTTP server of the test serves the checkpoint as one file",
    "test_strict_model_load_less_params[True]": "an HTTP server of the test serves the checkpoint as one file",
    "test_multi_wrapped_checkpoint_io_initialization": "asks for the class TorchCheckpointIO",
    "test_local_cross_device_checkpoint": "lets each rename fail as between two file systems; ours are in one directory",
}
FAILED = re.compile(r"^FAILED \S+::(\S+)", re.MULTILINE)


def pytest_configure(config):
    """Called by pytest, which loads this file with -p."""
    import lightning.fabric.strategies.strategy
    import lightning.fabric.utilities.cloud_io
    import lightning.pytorch.core.saving
    import lightning.pytorch.strategies.strategy
    import torch

    ours = tm.lightning.CheckpointIO
    for module in (lightning.fabric.strategies.strategy, lightning.pytorch.strategies.strategy):
        module.TorchCheckpointIO = ours

    def reading_directories(load):
        def call(path, *args, **options):
            if isinstance(path, (str, os.PathLike)) and os.path.isdir(path):
                path = ours().as_file(path, weights_only=options.get("weights_only"))
            return load(path, *args, **options)

        return call

    isfile = os.path.isfile
    os.path.isfile = lambda path: isfile(path) or isfile(os.path.join(path, "tm-state", "COMMIT"))
    torch.load = reading_directories(torch.load)
    for module, name in ((lightning.fabric.utilities.cloud_io, "_load"), (lightning.pytorch.core.saving, "pl_load")):
        setattr(module, name, reading_directories(getattr(module, name)))


class Upstream(unittest.TestCase):
    def test_lightnings_own_tests_pass(self):
        folder = os.environ.get("TENSORMOUNT_UPSTREAM")
        if folder is None:
            self.skipTest("TENSORMOUNT_UPSTREAM is not set")
        here, package = os.path.dirname(os.path.abspath(__file__)), os.path.dirname(os.path.dirname(tm.__file__))
        path = os.pathsep.join(filter(None, [here, package, os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-rf", "--color=no", "-p", "no:cacheprovider",
             "-p", os.path.splitext(os.path.basename(__file__))[0], *FILES],
            cwd=os.path.join(folder, "pytorch-lightning", "tests"), env={**os.environ, "PYTHONPATH": path},
            capture_output=True, text=True, timeout=1800)
        print(done.stdout.strip().splitlines()[-1])
        self.assertEqual(set(FAILED.findall(done.stdout)), set(REFUSED), done.stdout[-5000:])
        self.assertGreater(int(re.findall(r"(\d+) passed", done.stdout)[-1]), 200)


if __name__ == "__main__":
    unittest.main()

# SPDX-License-Identifier: Apache-2.0
"""Runs Megatron-Core's own checkpoint tests on CPU ranks, through tm.megatron.install().

usage: TENSORMOUNT_UPSTREAM=DIR python megatron_upstream.py [--stock] [--ranks N] [--logs] [TEST...]

DIR/Megatron-LM is a checkout of the tag of the installed version. TEST is a file of its folder
tests/unit_tests/dist_checkpointing without ".py", or FILE::NAME; default: FILES. --stock: without tensormount.
Each test runs in new processes, because Megatron's tests leave process groups behind. Prints the verdict of each test,
the worst of all ranks. Fails if a test does that is not among KNOWN.
"""

import argparse
import collections
import json
import os
import signal
import sys
import tempfile
import time
import types

sys.path[1:1] = [os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "python")]
import torchrun  # noqa: E402

HERE = os.path.dirname(os.path.abspath(__file__))
FILES = ("test_mapping", "test_serialization", "test_torch_dist", "test_strict", "test_nonpersistent",
         "test_checkpointable", "test_fully_parallel", "test_async_save", "test_global_metadata_reuse",
         "test_optimizer", "test_msc",
         "models/test_t5_model", "models/test_gpt_model", "models/test_mlp_glu", "models/test_moe_experts")
# Errors of tests that need a GPU.
NEEDS = ("Torch not compiled with CUDA", "TESpecProvider", "TENorm", "TEColumn", "TERow", "Transformer Engine",
         "HAVE_TE", "Grouped GEMM is not available", "sequence parallel not supported by torch LayerNorm")
# Tests that fail, and why.
KNOWN = {
    "test_cached_metadata": "reads the file .metadata of Megatron's own format",
    "test_cpu_tensors_dont_take_too_much_space": "looks at the sizes of .distcp files",
    "test_remove_sharded_tensors": "counts .distcp files (the tensors are removed)",
    "TestCrossRanksReads": "looks up which .distcp file has a tensor",
    "TestGlobalMetadataReuse": "looks at the plans that Megatron's own writer keeps",
    "test_errors_are_reported": "replaces a function of Megatron's own writer",
    "test_missing_keys_raises_error_during_validation": "also without tensormount: a warning of PyTorch is logged",
    "test_broadcast_sharded_objects": "also without tensormount: has no process group when it runs alone",
    "test_nonreshardable_optimizer_save_load": "also without tensormount: replicas begin with other numbers on a CPU",
    "test_async_is_equivalent_to_sync[True-True]": "also without tensormount: Megatron's worker asks for a GPU",
    "test_async_is_equivalent_to_sync[False-True]": "also without tensormount: Megatron's worker asks for a GPU",
}
LIMIT = float(os.environ.get("TENSORMOUNT_UPSTREAM_LIMIT", "120"))
WORST = ("error", "failed", "killed", "known", "skipped", "passed")


def prepare(checkout):
    """Imports what all tests need, once, before the ranks are forked."""
    sys.path[:0] = [HERE]
    import typing

    import torch._dynamo  # Before megatron_cpu.
    import typing_extensions

    typing.override = typing_extensions.override  # Of Python 3.12, which megatron.training 0.19 needs.

    import megatron_cpu  # noqa: F401
    import megatron.core.optimizer.distrib_optimizer
    import megatron.core.utils

    # The tests make the state of an Adam that needs a GPU: without "step", and without a learning rate.
    megatron.core.optimizer.distrib_optimizer.HAVE_APEX_OR_TE = True
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        kind.__init__, kind.__setstate__ = with_learning_rate(kind.__init__), torch.optim.Optimizer.__setstate__
    megatron.core.utils.is_te_min_version = lambda *args, **kwargs: False  # Transformer Engine needs CUDA.
    # Downloads of data that tests of checkpoints do not need.
    stub = types.ModuleType("tests.test_utils.python_scripts.download_unit_tests_dataset")
    stub.download_and_extract_asset = lambda **options: None
    for name in ("tests.test_utils", "tests.test_utils.python_scripts"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules[stub.__name__] = stub
    os.chdir(checkout)
    sys.path.insert(0, checkout)
    os.environ.update(WORLD_SIZE="1", RANK="0", LOCAL_RANK="0")
    import pytest  # noqa: F401
    import tests.unit_tests.dist_checkpointing  # noqa: F401
    from tests.unit_tests.test_utilities import Utils

    return Utils


def with_learning_rate(init):
    return lambda self, params, lr=None, *args, **options: init(
        self, params, 1e-3 if lr is None else lr, *args, **options)


class Collected:
    """A plug-in of pytest: the tests that it finds."""

    def __init__(self):
        self.found = []

    def pytest_collection_modifyitems(self, items):
        self.found = [item.nodeid for item in items]


class Verdict:
    """A plug-in of pytest: the worst outcome of the phases of a test, and why."""

    def __init__(self):
        self.outcome, self.why = "error", "it did not run"
        self.ran = False

    def pytest_runtest_logreport(self, report):
        if not self.ran:
            self.ran, self.outcome, self.why = True, "passed", ""
        outcome = "error" if report.when != "call" and report.outcome == "failed" else report.outcome
        outcome = outcome if outcome in WORST else "error"
        if WORST.index(outcome) < WORST.index(self.outcome):
            text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            lines = [line for line in text.splitlines() if line.startswith("E ")] or text.strip().splitlines()[-1:]
            self.outcome, self.why = outcome, " ".join(lines[-1].split())[:160]


def in_child(function, output):
    """Calls the function in a forked process; its pid."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 1)
            os.dup2(1, 2)
            function()
            status = 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return child


def collect(paths, logs):
    def child():
        import pytest

        plugin = Collected()
        pytest.main(["-q", "--collect-only", "-p", "no:cacheprovider", *paths], plugins=[plugin])
        with open(f"{logs}/tests", "w") as file:
            json.dump(plugin.found, file)

    os.waitpid(in_child(child, f"{logs}/output"), 0)
    with open(f"{logs}/tests") as file:
        return json.load(file)


def run(test, ranks, stock, utils, logs):
    """The worst verdict of the ranks, and why."""
    port = torchrun.free_port()

    def child(rank):
        import pytest

        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
        utils.rank, utils.world_size = rank, ranks
        if not stock:
            import tensormount as tm

            tm.megatron.install()
        plugin = Verdict()
        pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:rerunfailures", "--tb=short",
                     f"--basetemp={logs}/pytest-{rank}", test], plugins=[plugin])
        with open(f"{logs}/verdict-{rank}", "w") as file:
            json.dump([plugin.outcome, plugin.why], file)
        sys.stdout.flush()
        os._exit(0)

    left = {in_child(lambda rank=rank: child(rank), f"{logs}/output-{rank}") for rank in range(ranks)}
    end = time.monotonic() + LIMIT
    while left and time.monotonic() < end:
        ended, _ = os.waitpid(-1, os.WNOHANG)
        left.discard(ended)
        if not ended:
            time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    found = []
    for rank in range(ranks):
        try:
            with open(f"{logs}/verdict-{rank}") as file:
                found.append(json.load(file))
        except FileNotFoundError:
            found.append(["killed", f"rank {rank} did not end within {LIMIT:g} s"])
    return min(found, key=lambda one: WORST.index(one[0]))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stock", action="store_true")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--logs", action="store_true", help="also print the output of rank 0 of tests that fail")
    parser.add_argument("tests", nargs="*", default=list(FILES))
    options = parser.parse_args()
    checkout = os.path.abspath(os.path.join(os.environ["TENSORMOUNT_UPSTREAM"], "Megatron-LM"))
    utils = prepare(checkout)
    paths = []
    for name in options.tests:
        file, _, test = name.partition("::")
        path = f"tests/unit_tests/dist_checkpointing/{file}.py"
        paths.append(path + ("::" + test if test else ""))
    count = collections.Counter()
    with tempfile.TemporaryDirectory() as logs:
        names = collect([path for path in paths if os.path.exists(path.partition("::")[0])], logs)
    for name in names:
        with tempfile.TemporaryDirectory() as logs:
            outcome, why = run(name, options.ranks, options.stock, utils, logs)
            known = next((reason for part, reason in KNOWN.items() if part in name), None)
            if outcome not in ("passed", "skipped") and any(text in why for text in NEEDS):
                outcome, why = "skipped", f"needs a GPU: {why}"
            elif outcome not in ("passed", "skipped") and known is not None:
                outcome, why = "known", known
            count[outcome] += 1
            print(outcome, name.partition("dist_checkpointing/")[2], why, sep="\t", flush=True)
            if options.logs and outcome not in ("passed", "skipped", "known"):
                with open(f"{logs}/output-0") as file:
                    print(file.read()[-20000:], flush=True)
    print(dict(count))
    return 1 if count["failed"] or count["error"] or count["killed"] else 0


if __name__ == "__main__":
    sys.exit(main())

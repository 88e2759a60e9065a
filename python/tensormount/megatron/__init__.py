# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core saves to and loads from tensormount:

    import tensormount as tm

    tm.megatron.install()                          # before the first save or load
    pretrain(...)                                  # --ckpt-format torch_dist

megatron.core.dist_checkpointing still makes the state dicts, checks them, and writes its own files metadata.json
and common.pt. Only the code that saves, reads and removes sharded tensors and objects is replaced, and the code by
which the distributed optimizer gathers its state for a save. Tested with Megatron-Core 0.16.1 and 0.19.2.
"""

from tensormount.megatron._strategy import SaveStrategy, install

__all__ = ["SaveStrategy", "install"]

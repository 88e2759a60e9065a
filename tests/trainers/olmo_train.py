# SPDX-License-Identifier: Apache-2.0
"""A tiny OLMo-core trainer on gloo ranks: its own model, train module, data loader, callbacks and checkpointer."""

import json
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dist_cp_sd
from olmo_core.data import NumpyDataLoaderConfig, NumpyFSLDatasetConfig, TokenizerConfig
from olmo_core.distributed import parallel as olmo_parallel
from olmo_core.distributed.parallel import DataParallelType
from olmo_core.distributed.utils import init_distributed
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import AdamWConfig, OptimGroupOverride
from olmo_core.train import Duration, TrainerConfig
from olmo_core.train.callbacks import Callback, CheckpointerCallback
from olmo_core.train.train_module import TransformerTrainModuleConfig
from olmo_core.train.train_module.transformer import TransformerDataParallelConfig
from olmo_core.utils import seed_all
from torch.distributed.fsdp import FSDPModule

LENGTH = 32  # Tokens of a sequence.


class Losses(Callback):
    """The loss of each step as a hexadecimal number, on rank 0; and the whole state after step 4, in state-FOLDER."""

    def pre_train(self):
        self.found = {}

    def log_metrics(self, step, metrics):
        if "train/CE loss" in metrics:
            self.found[step] = float(metrics["train/CE loss"]).hex()

    def post_train_batch(self):
        if self.step == 4:
            state = whole_state(self.trainer.train_module)
            if dist.get_rank() == 0:
                torch.save(state, f"state-{os.path.basename(self.trainer.save_folder)}")


def write_tokens():
    np.random.default_rng(1).integers(2, 128, 64 * 1024, dtype=np.uint16).tofile("tokens.npy")


def build(folder, steps, *, replicas=1, **checkpoints):
    """A trainer that saves to `folder`; its ranks are `replicas` times a sharded model. `checkpoints`: options of
    CheckpointerCallback."""
    os.environ["NUM_NODES"] = "1"
    init_distributed("gloo")
    olmo_parallel._WORLD_MESH = None  # Of an earlier trainer of this process.
    seed_all(7)
    parallel = TransformerDataParallelConfig(name=DataParallelType.fsdp)
    if replicas > 1:
        parallel = TransformerDataParallelConfig(name=DataParallelType.hsdp, num_replicas=replicas)
    module = TransformerTrainModuleConfig(
        rank_microbatch_size=2 * LENGTH,
        max_sequence_length=LENGTH,
        optim=AdamWConfig(
            lr=1e-3, group_overrides=[OptimGroupOverride(params=["embeddings.weight"], opts={"weight_decay": 0.0})]
        ),
        dp_config=parallel,
        max_grad_norm=1.0,
    ).build(
        TransformerConfig.llama_like(d_model=32, vocab_size=128, n_layers=2, n_heads=2).build(init_device="meta"),
        device=torch.device("cpu"),
    )
    for part in module.model.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM.
    tokenizer = TokenizerConfig(vocab_size=128, eos_token_id=0, pad_token_id=1)
    data = NumpyFSLDatasetConfig(
        paths=["tokens.npy"], sequence_length=LENGTH, tokenizer=tokenizer, work_dir="dataset-cache"
    ).build()
    loader = NumpyDataLoaderConfig(global_batch_size=8 * LENGTH, seed=0, num_workers=0).build(
        data, dp_process_group=module.dp_process_group
    )
    trainer = (
        TrainerConfig(
            save_folder=folder,
            work_dir="work",
            save_overwrite=True,
            metrics_collect_interval=1,
            max_duration=Duration.steps(steps),
        )
        .with_callback("checkpointer", CheckpointerCallback(**{"save_interval": 2, **checkpoints}))
        .with_callback("losses", Losses())
        .build(module, loader)
    )
    record = trainer.record_metric

    def record_metric(name, *args, **options):
        # OLMo-core 3.0 records it when a background save ends, which may be at another step on another rank. The
        # ranks then reduce different numbers of metrics, and hang.
        if name != "checkpoint/save_async_duration_s":
            record(name, *args, **options)

    trainer.record_metric = record_metric
    return trainer


def train(folder, steps, **options):
    """Trains, from the latest checkpoint in `folder` if there is one; the losses are then in losses-FOLDER-STEPS."""
    trainer = build(folder, steps, **options)
    trainer.fit()
    if dist.get_rank() == 0:
        with open(f"losses-{os.path.basename(folder)}-{steps}", "w") as file:
            json.dump(trainer.callbacks["losses"].found, file)
    return trainer


def whole_state(module):
    """All weights and the optimizer's state, on rank 0."""
    options = dist_cp_sd.StateDictOptions(full_state_dict=True, cpu_offload=True)
    model = dist_cp_sd.get_model_state_dict(module.model, options=options)
    optim = dist_cp_sd.get_optimizer_state_dict(module.model, module.optim, options=options)
    return {"model": model, "optim": optim}

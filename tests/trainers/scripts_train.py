# SPDX-License-Identifier: Apache-2.0
"""scripts_train.py OUT STEPS RESULTS: a training script that knows nothing of tensormount.

FSDP2 and torch.distributed.checkpoint, to which it only passes paths: saves each step to OUT/step-N in the background,
resumes from the step that OUT/latest names. Rank 0 writes what it found to the file RESULTS: the step that it resumed
from, and for each step the loss, and a digest of all weights and optimizer state.
"""

import hashlib
import json
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

WIDTH = 700


def digest(state):
    """One line for the whole state, whatever its sharding."""
    found = hashlib.sha256()

    def add(key, value):
        if isinstance(value, dict):
            for name in sorted(value):
                add(f"{key}.{name}", value[name])
            return
        if isinstance(value, DTensor):
            value = value.full_tensor()
        found.update(key.encode())
        found.update(value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode())

    add("", state)
    return found.hexdigest()


def main(out, steps, results):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    for part in (model, *model):
        part.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM.
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def state():
        weights, moments = get_state_dict(model, optim)
        return {"model": weights, "optim": moments}

    found = {"resumed": 0, "losses": {}, "digests": {}}
    latest = os.path.join(out, "latest")
    if os.path.exists(latest):
        with open(latest) as file:
            found["resumed"] = int(file.read())
        loaded = {**state(), "step": 0}
        dcp.load(loaded, checkpoint_id=os.path.join(out, f"step-{found['resumed']}"))
        set_state_dict(model, optim, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
        assert loaded["step"] == found["resumed"], loaded["step"]
        found["digests"][loaded["step"]] = digest(state())
    if rank == 0:
        os.makedirs(out, exist_ok=True)
    own = dist.new_group()  # A save in the background must not meet the collective calls of the training.
    saving = None

    def finish():
        if saving is not None:
            number, job = saving
            job.result()
            if rank == 0:
                with open(latest + ".new", "w") as file:
                    file.write(str(number))
                os.replace(latest + ".new", latest)

    for step in range(found["resumed"] + 1, steps + 1):
        batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
        loss = model(batch).pow(2).mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        found["losses"][step] = loss.item().hex()
        found["digests"][step] = digest(state())
        finish()
        path = os.path.join(out, f"step-{step}")
        saving = step, dcp.async_save({**state(), "step": step}, checkpoint_id=path, process_group=own)
    finish()
    if rank == 0:
        with open(results, "w") as file:
            json.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])

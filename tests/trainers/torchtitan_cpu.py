# SPDX-License-Identifier: Apache-2.0
"""Lets the unmodified trainer of torchtitan 0.3.0 train llama3_debugmodel on CPU ranks.

Import this file before torchtitan. It puts stand-ins in the place of packages that are not installed and that
training on a CPU does not call, and of torchtitan's module for the GPU.
"""

import collections
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
import types

import torch
import torch.distributed as dist

# Modules that torchtitan imports and that are not called here, and the packages without which they are replaced.
# torch itself must not find the stand-in of a package.
_STAND_INS = {
    "torch.utils.tensorboard": "tensorboard",
    "wandb": "wandb",
    "torch_checkpointing": "torch_checkpointing",
    "torchtitan.distributed.minimal_async_ep.kernels": "triton",
}


class _Anything(types.ModuleType):
    """A module that has every name. Each is a decorator that changes nothing, and a class to derive from."""

    __path__: list = []
    __version__ = "99.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing


class _Nothing:
    def __new__(cls, *arguments, **_):
        if len(arguments) == 1 and callable(arguments[0]):
            return arguments[0]
        return super().__new__(cls)

    def __init__(self, *_, **__):
        pass

    def __call__(self, *arguments, **_):
        return arguments[0] if arguments else None

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if not any(name == one or name.startswith(one + ".") for one in self.names):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Anything(spec.name)

    def exec_module(self, module):
        pass


_Finder.names = [name for name, package in _STAND_INS.items() if importlib.util.find_spec(package) is None]
sys.meta_path.insert(0, _Finder())

if not hasattr(dist, "set_timeout"):  # 0.3.0 wants a newer PyTorch.
    dist.set_timeout = lambda *_, **__: None

import torchtitan.tools.utils as utils  # noqa: E402

utils.device_type = "cpu"
utils.device_module = types.SimpleNamespace(
    set_device=lambda device: None,
    current_device=lambda: 0,
    device_count=lambda: 1,
    get_device_name=lambda device=None: "cpu",
    get_device_properties=lambda device=None: types.SimpleNamespace(total_memory=1 << 34, name="cpu"),
    reset_peak_memory_stats=lambda *_: None,
    empty_cache=lambda: None,
    memory_stats=lambda device=None: collections.defaultdict(int),
    synchronize=lambda *_: None,
    is_available=lambda: False,
)
utils.get_local_device = lambda: torch.device("cpu")

import torchtitan.models.common.config_utils as config_utils  # noqa: E402
import torchtitan.models.llama3 as llama3  # noqa: E402
import torchtitan.trainer  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402

_attention = config_utils.get_attention_config
# FlexAttention needs a compiler for the CPU.
llama3.get_attention_config = lambda name: ScaledDotProductAttention.Config() if name == "sdpa" else _attention(name)

# Rank 0 sleeps for two seconds at the end of the training.
torchtitan.trainer.time = types.SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})

_init = torchtitan.trainer.Trainer.__init__


def _build(trainer, *arguments, **options):
    """Also keeps the losses as `trainer.losses`: (step, loss) each."""
    _init(trainer, *arguments, **options)
    for part in trainer.model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo cannot average.
    trainer.losses = []
    log = trainer.metrics_processor.log

    def keep(step, loss, *arguments, **options):
        trainer.losses.append((step, float(loss).hex()))
        return log(step, loss, *arguments, **options)

    trainer.metrics_processor.log = keep


torchtitan.trainer.Trainer.__init__ = _build


def make_assets(words=400):
    """The text and the tokenizer that llama3_debugmodel reads, below the current directory."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {f"w{number}": number for number in range(words)}
    vocabulary["</s>"] = words
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    os.makedirs("tests/assets/tokenizer", exist_ok=True)
    tokenizer.save("tests/assets/tokenizer/tokenizer.json")
    with open("tests/assets/tokenizer/tokenizer_config.json", "w") as file:
        json.dump({"eos_token": "</s>"}, file)
    os.makedirs("tests/assets/c4_test", exist_ok=True)
    with open("tests/assets/c4_test/data.json", "w") as file:
        for line in range(200):
            text = " ".join(f"w{(line * 31 + word * word * 7) % words}" for word in range(150))
            file.write(json.dumps({"text": text}) + "\n")


def hugging_face_config():
    """The configuration of the model of `config`, with two layers, for transformers."""
    import transformers

    scaling = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"], hidden_size=256, intermediate_size=768, num_hidden_layers=2,
        num_attention_heads=16, num_key_value_heads=16, vocab_size=2048, rms_norm_eps=1e-5, rope_parameters=scaling,
        max_position_embeddings=131072, tie_word_embeddings=False)


def config(dump, checkpoint, steps, layers=2, tp=1):
    """The configuration of a job that trains `steps` steps. `checkpoint`: the Config of a checkpoint manager."""
    made = llama3_debugmodel()
    made.dump_folder = dump
    made.model_spec = llama3.model_registry("debugmodel", attn_backend="sdpa")
    del made.model_spec.model.layers[layers:]
    made.training.steps = steps
    made.training.seq_len = 64
    made.training.local_batch_size = 2
    made.training.global_batch_size = 8
    made.training.disable_cuda_graphs = True
    made.training.mixed_precision_param = "float32"
    made.validator.enable = False
    made.debug.seed = 1
    made.parallelism.tensor_parallel_degree = tp
    made.parallelism.spmd_backend = "partial_dtensor"  # The default needs a newer PyTorch.
    made.checkpoint = checkpoint
    checkpoint.enable = True
    return made

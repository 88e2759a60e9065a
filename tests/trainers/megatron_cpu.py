# SPDX-License-Identifier: Apache-2.0
"""Lets Megatron-Core run on a CPU with gloo ranks, and makes small models of it.

Import it before Megatron. Megatron asks CUDA for devices, streams and types by name; the answers here say "cpu".
"""

import contextlib
import functools
import importlib.machinery
import queue
import sys
import types
import zlib

import torch
import torch.distributed as dist


class _Nothing:
    """Takes the place of streams, events and modules that are not called."""

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        return _Nothing()

    def __call__(self, *args, **kwargs):
        return self


def _on_cpu():
    cuda = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.device_count = lambda: 1
    for name in ("synchronize", "set_device", "empty_cache", "nvtx"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: _Nothing()
    cuda.stream = lambda *args, **kwargs: contextlib.nullcontext()
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.manual_seed = torch.default_generator.manual_seed
    cuda.Stream, cuda.Event = type("Stream", (_Nothing,), {}), type("Event", (_Nothing,), {})
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    own_type = torch.Tensor.type
    torch.Tensor.type = lambda self, *args, **kwargs: (
        own_type(self, *args, **kwargs) if args or kwargs else own_type(self).replace("torch.", "torch.cuda.", 1)
    )
    for name in ("arange", "empty", "empty_like", "full", "ones", "ones_like", "rand", "randint", "randn", "tensor",
                 "zeros", "zeros_like"):
        setattr(torch, name, _moved(getattr(torch, name)))
    for name in ("to", "new_empty", "new_zeros"):
        setattr(torch.Tensor, name, _moved(getattr(torch.Tensor, name)))
    torch.nn.Module.to = _moved(torch.nn.Module.to)
    own_init = dist.init_process_group
    dist.init_process_group = lambda backend=None, *args, **kwargs: own_init("gloo", *args, **kwargs)
    own_new_group = dist.new_group
    dist.new_group = lambda *args, backend=None, pg_options=None, **kwargs: own_new_group(
        *args, backend="gloo", **kwargs)
    own_barrier = dist.barrier
    dist.barrier = lambda *args, device_ids=None, **kwargs: own_barrier(*args, **kwargs)


def _moved(function):
    """The function with "cpu" in place of every device of CUDA."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        args = ["cpu" if isinstance(one, (str, torch.device)) and str(one).startswith("cuda") else one for one in args]
        return function(*args, **kwargs)

    return call


class _Stub(types.ModuleType):
    __version__ = "3.4.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()


_on_cpu()
torch.compile = lambda function=None, **options: function if function is not None else lambda one: one
try:
    import triton  # noqa: F401: Megatron-Core 0.19 imports it.
except ImportError:
    for _name in ("triton", "triton.language"):
        sys.modules[_name] = _Stub(_name)
        sys.modules[_name].__spec__ = importlib.machinery.ModuleSpec(_name, None)

import megatron.core  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.dist_checkpointing.strategies import filesystem_async  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

# Megatron's own loader of "fully_reshardable" expects an Adam that has its step in the parameter groups.
_set_states = DistributedOptimizer._set_main_param_and_optimizer_states
DistributedOptimizer._set_main_param_and_optimizer_states = lambda self, param, tensors: _set_states(
    self, param, {**self._get_main_param_and_optimizer_states(param), **tensors})
# 0.16.1 asks for it without having it, if Transformer Engine is not installed.
moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)
tensor_parallel.random.CudaRNGStatesTracker.fork = lambda self, *args, **kwargs: contextlib.nullcontext()


def keep_results_in_this_process():
    """Megatron's own writer gets its results through a process that it spawns, which takes ten seconds."""
    results = queue.Queue()
    filesystem_async._results_queue = results
    filesystem_async.get_write_results_queue = lambda *args, **kwargs: results


def parallel(tp=1, pp=1, ep=1):
    """Ranks in these many parts; the rest is data parallelism."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
    torch.manual_seed(5)


def gpt(experts=0, tied=False, vocabulary=128, **options):
    """A small GPT model of four layers. `tied`: the first and the last stage share the embedding."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    given = dict(
        num_layers=4, hidden_size=32, ffn_hidden_size=64, num_attention_heads=4, num_query_groups=2, kv_channels=8,
        hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True,
        pipeline_dtype=torch.float32, params_dtype=torch.float32, tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        normalization="RMSNorm", bias_activation_fusion=False, masked_softmax_fusion=False, persist_layer_norm=False,
        bias_dropout_fusion=False, apply_rope_fusion=False, gradient_accumulation_fusion=False,
    )
    spec = {"normalization": "RMSNorm", "qk_layernorm": options.get("qk_layernorm", False)}
    if experts:
        given.update(num_moe_experts=experts, moe_ffn_hidden_size=48, moe_router_topk=2,
                     expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
                     moe_token_dispatcher_type="alltoall")
        spec.update(num_experts=experts, moe_grouped_gemm=False)
    return GPTModel(
        config=TransformerConfig(**{**given, **options}), transformer_layer_spec=get_gpt_layer_local_spec(**spec),
        vocab_size=vocabulary, max_sequence_length=64, pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(), share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
    )


class Training:
    """A GPT model with Megatron's DistributedDataParallel and DistributedOptimizer."""

    def __init__(self, dtype=torch.float32, experts=0, tied=False, bucket_size=None, **options):
        bf16 = dtype == torch.bfloat16
        model = gpt(experts, tied, params_dtype=dtype, pipeline_dtype=dtype, bf16=bf16, **options).to(dtype)
        # Megatron makes several buckets only if it reduces gradients during the backward pass.
        given = DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=bucket_size is not None, bucket_size=bucket_size)
        self.model = DistributedDataParallel(model.config, given, model)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=0.01, use_distributed_optimizer=True, bf16=bf16, params_dtype=dtype),
            [self.model])
        self.vocabulary = options.get("vocabulary", 128)

    @property
    def parts(self):
        """The DistributedOptimizers: one for dense parameters, one for experts."""
        return getattr(self.optimizer, "chained_optimizers", [self.optimizer])

    def step(self, number):
        """One step of training, on other data for each data-parallel rank; the loss. Without pipeline stages."""
        self.model.zero_grad_buffer()
        generator = torch.Generator().manual_seed(1000 * number + parallel_state.get_data_parallel_rank())
        tokens = torch.randint(0, self.vocabulary, (2, 16), generator=generator)
        loss = self.model(tokens, torch.arange(16).repeat(2, 1), None, labels=tokens).float().mean()
        loss.backward()
        self.model.finish_grad_sync()
        self.optimizer.step()
        return loss.item()

    def step_in_stages(self, number):
        """One step with two microbatches by Megatron's own schedule; the losses, which only the last stage has."""
        def forward(batches, model):
            tokens = next(batches)
            losses = model(tokens, torch.arange(16).repeat(2, 1), None, labels=tokens)
            return losses, lambda found: (found.float().mean(), found.float().mean().item())

        self.model.zero_grad_buffer()
        self.model.config.finalize_model_grads_func = finalize_model_grads
        generator = torch.Generator().manual_seed(1000 * number + parallel_state.get_data_parallel_rank())
        batches = torch.randint(0, self.vocabulary, (2, 2, 16), generator=generator)
        losses = get_forward_backward_func()(
            forward_step_func=forward, data_iterator=iter(batches), model=self.model, num_microbatches=2, seq_length=16,
            micro_batch_size=2, forward_only=False)
        self.optimizer.step()
        return losses

    def fill(self, seed):
        """A step with invented gradients, for models in pipeline stages. Those of replicas are equal."""
        for name, one in self.model.named_parameters():
            place = [seed, parallel_state.get_data_parallel_rank()]
            if getattr(one, "tensor_model_parallel", False):
                place.append(parallel_state.get_tensor_model_parallel_rank())
            if not getattr(one, "shared_embedding", False):
                place += [name, parallel_state.get_pipeline_model_parallel_rank()]
            generator = torch.Generator().manual_seed(zlib.crc32(repr(place).encode()))
            one.main_grad.copy_(torch.randn(one.shape, generator=generator))
        self.model.start_grad_sync()
        self.model.finish_grad_sync()
        self.optimizer.step()

    def sharded_state_dict(self, loads=False, sharding="fully_reshardable"):
        metadata = {"distrib_optim_sharding_type": sharding, "chained_optim_avoid_prefix": True}
        model = self.model.module.sharded_state_dict(metadata=metadata)
        if loads:
            for part in self.parts:
                part._init_optimizer_states_with_dummy_values()  # PyTorch's Adam makes its state at the first step.
        return {"model": model, "optimizer": self.optimizer.sharded_state_dict(
            model, is_loading=loads, metadata=metadata)}

    def load_state_dict(self, state):
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for part in self.parts:
            # Megatron gives all parameters one tensor, to which PyTorch's Adam would add 1 for each of them.
            for one in part.optimizer.state.values():
                one["step"] = one["step"].clone()

    def state(self):
        """Copies of the weights, and of this rank's parts of the optimizer."""
        found = {f"model.{name}": one.detach().clone() for name, one in self.model.module.named_parameters()}
        names = {one: name for name, one in self.model.module.named_parameters()}
        for part in self.parts:
            for param in part.model_param_gbuf_map:
                for key, one in part._get_main_param_and_optimizer_states(param).items():
                    found[f"{key}.{names[param]}"] = one.detach().clone()
        return found

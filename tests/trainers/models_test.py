# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of real trainers as models of Hugging Face: transformers loads them from the mount or from an export,
and computes the logits of the trainer's own model. Rules: docs/mapping.md."""

import argparse
import contextlib
import os
import sys
import unittest
import unittest.mock

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "python"))

import support
import tensormount as tm
from torchrun import main, torchrun

try:
    import torch
    import torch.distributed as dist
    import transformers
except ImportError as error:
    raise unittest.SkipTest(str(error))

HERE = os.path.abspath(__file__)
TOKENS = [[1, 5, 9, 77, 3, 100, 42, 8], [120, 2, 2, 64, 31, 7, 0, 127]]


# ---- Megatron-Core: models of tests/trainers/megatron_cpu.py -------------------------------------

MEGATRON = {
    "llama": {}, "qwen3": {"qk_layernorm": True}, "qwen3_moe": {"qk_layernorm": True, "experts": 4},
    # Square matrices, for which a wrong orientation has no other shape.
    "square": {"ffn_hidden_size": 32, "num_query_groups": 4},
    # Gate and up of an expert have as many rows as the model is wide.
    "gpt_oss": {"experts": 4, "moe_ffn_hidden_size": 16, "add_bias_linear": True, "softmax_type": "learnable",
                "glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0},
}


def megatron_model(kind):
    import megatron_cpu

    options = dict(MEGATRON[kind])
    if kind == "gpt_oss":
        from megatron.core.fusions.fused_bias_geglu import quick_gelu

        options["activation_func"] = quick_gelu
    return megatron_cpu.gpt(options.pop("experts", 0), **options)


def save_megatron(kind, tp, pp, ep):
    import megatron_cpu
    from megatron.core import dist_checkpointing as dc

    megatron_cpu.keep_results_in_this_process()
    megatron_cpu.parallel(tp, pp, ep)
    model = megatron_model(kind)
    for parameter in model.parameters():  # Norms are ones otherwise.
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.1)
    if dist.get_rank() == 0:
        os.makedirs(f"megatron/{kind}", exist_ok=True)
    dist.barrier()
    with tm.megatron.install():
        dc.save({**model.sharded_state_dict(), "args": arguments(model.config)}, f"megatron/{kind}")


def arguments(config):
    """What Megatron-LM's trainer saves of such a model: its arguments, most of which are members of the configuration."""
    plain = {name: value for name, value in vars(config).items() if isinstance(value, (bool, int, float, str, type(None)))}
    return argparse.Namespace(**{
        **plain, "num_experts": config.num_moe_experts, "swiglu": True,
        "position_embedding_type": "rope", "rotary_base": 10000, "rotary_percent": 1.0, "use_rope_scaling": False,
        "rotary_seq_len_interpolation_factor": None, "max_position_embeddings": 64, "vocab_size": 128,
        "untie_embeddings_and_output_weights": True, "group_query_attention": True})


def megatron_logits(kind):
    """The logits of the checkpoint in Megatron, on one rank."""
    import megatron_cpu
    from megatron.core import dist_checkpointing as dc

    megatron_cpu.parallel()
    model = megatron_model(kind)
    with tm.megatron.install():
        state = dc.load(model.sharded_state_dict(), f"megatron/{kind}")
    del state["args"]
    model.load_state_dict(state)
    model.eval()
    tokens = torch.tensor(TOKENS)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    mask = torch.ones(1, 1, tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
    with torch.no_grad():
        torch.save(model(tokens, positions, mask).float(), f"logits-{kind}.pt")


def megatron_config(kind):
    options = MEGATRON[kind]
    given = dict(hidden_size=32, intermediate_size=options.get("ffn_hidden_size", 64), num_hidden_layers=4,
                 num_attention_heads=4, num_key_value_heads=options.get("num_query_groups", 2), head_dim=8, vocab_size=128,
                 rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=False, max_position_embeddings=64)
    if kind in ("llama", "square"):
        return transformers.LlamaConfig(**given)
    if kind == "gpt_oss":
        return transformers.GptOssConfig(**{**given, "intermediate_size": 16}, num_local_experts=4, num_experts_per_tok=2,
                                         rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    if kind == "qwen3":
        return transformers.Qwen3Config(**given)
    return transformers.Qwen3MoeConfig(**given, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48,
                                       norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])


# ---- torchtitan: its own trainer, two steps ------------------------------------------------------


def train_torchtitan():
    import torchtitan_cpu
    from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

    manager = tm.torchtitan.CheckpointManager.Config(interval=2, last_save_model_only=False, keep_latest_k=0)
    config = torchtitan_cpu.config("titan", manager, steps=2)
    trainer = config.build()
    trainer.train()
    model = trainer.model_parts[0]
    with torch.no_grad():
        hidden = model.eval()(torch.tensor(TOKENS))  # torchtitan computes the logits together with the loss.
    state = {key: value.full_tensor() if hasattr(value, "full_tensor") else value
             for key, value in model.state_dict().items()}
    trainer.close()
    if dist.get_rank() == 0:
        torch.save(hidden.float() @ state["lm_head.weight"].T, "logits-titan.pt")
        torch.save(Llama3StateDictAdapter(config.model_spec.model, None).to_hf(state), "converted-titan.pt")


def gpt_oss_inner_attention(q, k, v, *, attention_masks, scale, enable_gqa, out_transform):
    """What torchtitan's FlexAttention computes, which needs a GPU: causal, in heads of [batch, position, head, size]."""
    q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(torch.ones(q.shape[2], q.shape[2]).triu(1).bool(), -torch.inf)
    out = (scores.softmax(-1) @ v).transpose(1, 2)
    return out_transform(out, scores.logsumexp(-1).transpose(1, 2))


def gpt_oss_grouped_mm(A, B_t, offs):
    """A GPU's grouped matrix product, of floats."""
    starts = [0, *offs.tolist()]
    return torch.cat([A[a:b] @ B_t[e] for e, (a, b) in enumerate(zip(starts, starts[1:]))])


def save_gpt_oss():
    import torchtitan_cpu  # noqa: F401
    from torch.distributed.fsdp import fully_shard
    from torchtitan.models import gpt_oss
    from torchtitan.models.common import CosSinRoPE, Embedding, Linear, RMSNorm

    torch.manual_seed(4)
    size, vocabulary = 64, 128
    rope = CosSinRoPE.Config(dim=64, max_seq_len=256, theta=150000.0, scaling="yarn", rope_factor=32, beta_fast=32.0,
                             beta_slow=1.0, truncate=False, original_seq_len=4096)
    # Matrices of the experts are square: gate and up have as many rows as the model is wide.
    layers = gpt_oss._build_gptoss_layers(dim=size, n_layers=2, hidden_dim=size // 2, num_experts=4, top_k=2,
                                          load_balance_coeff=1e-3, attn_backend="flex", moe_comm_backend="standard", rope=rope)
    model = gpt_oss.GptOssModel.Config(
        vocab_size=vocabulary, dim=size, tok_embeddings=Embedding.Config(num_embeddings=vocabulary, embedding_dim=size),
        norm=RMSNorm.Config(normalized_shape=size), lm_head=Linear.Config(in_features=size, out_features=vocabulary),
        layers=layers).build()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.1)
    for layer in model.layers.values():
        layer.attention.inner_attention.forward = gpt_oss_inner_attention
        layer.moe.routed_experts.inner_experts._grouped_mm = gpt_oss_grouped_mm
    if dist.get_rank() == 0:
        with torch.no_grad(), unittest.mock.patch.object(torch.Tensor, "bfloat16", lambda self: self):
            torch.save(model.eval()(torch.tensor(TOKENS), attention_masks=None), "logits-gpt_oss.pt")
    for layer in model.layers.values():
        fully_shard(layer)
    fully_shard(model)
    tm.save(model.state_dict(), "oss/step-1", group=tm.Group.from_env())


def gpt_oss_config():
    yarn = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 4096}
    return transformers.GptOssConfig(
        architectures=["GptOssForCausalLM"], hidden_size=64, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=64, num_key_value_heads=8, head_dim=64, vocab_size=128, num_local_experts=4,
        num_experts_per_tok=2, rope_parameters=yarn, sliding_window=128, max_position_embeddings=131072,
        tie_word_embeddings=False)


def train_megatron(path, dtype, own):
    """Three steps of the model that torchtitan calls llama3_debugmodel, with two layers, in Megatron. `own`: saved in
    Megatron's own format."""
    import megatron_cpu
    from megatron.core import dist_checkpointing as dc

    megatron_cpu.keep_results_in_this_process()
    megatron_cpu.parallel(tp=2)
    training = megatron_cpu.Training(
        getattr(torch, dtype), vocabulary=2048, num_layers=2, hidden_size=256, ffn_hidden_size=768,
        num_attention_heads=16, num_query_groups=16, kv_channels=16)
    for step in range(3):
        training.step(step)
    if dist.get_rank() == 0:
        os.makedirs(path)
    dist.barrier()
    with contextlib.nullcontext() if own else tm.megatron.install():
        dc.save(training.sharded_state_dict(), path)


def go_on_in_torchtitan(dump):
    """The state of the step that was loaded, and a fourth step."""
    import torchtitan_cpu

    manager = tm.torchtitan.CheckpointManager.Config(interval=1, last_save_model_only=False, keep_latest_k=0)
    trainer = torchtitan_cpu.config(dump, manager, steps=4).build()
    trainer.checkpointer.load(step=-1)

    def whole(value):
        return value.full_tensor() if hasattr(value, "full_tensor") else value

    state = {key: whole(value).detach().clone() for key, value in trainer.model_parts[0].state_dict().items()}
    state.update({f"optimizer.{key}": whole(value).clone() for key, value in trainer.optimizers.state_dict().items()
                  if isinstance(value, torch.Tensor)})
    counts = (trainer.step, trainer.lr_schedulers.state_dict()["last_epoch"])
    trainer.train()
    if dist.get_rank() == 0:
        torch.save((state, counts, trainer.losses), f"{dump}.pt")
    trainer.close()


# ---- OLMo-core -----------------------------------------------------------------------------------


def save_olmo():
    from olmo_core.distributed.checkpoint import save_model_and_optim_state
    from olmo_core.nn.hf.convert import convert_state_to_hf
    from olmo_core.nn.transformer import TransformerConfig
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(3)
    model = TransformerConfig.olmo2_14M(vocab_size=128).build(init_device="cpu")
    model.init_weights(device=torch.device("cpu"), max_seq_len=64)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.1)
    if dist.get_rank() == 0:
        with torch.no_grad():
            torch.save(model.eval()(torch.tensor(TOKENS)), "logits-olmo2.pt")
        torch.save(convert_state_to_hf(olmo_config(), dict(model.state_dict())), "converted-olmo2.pt")
    for block in model.blocks.values():
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    with tm.olmo.install():
        save_model_and_optim_state("olmo/step1/model_and_optim", model, optimizer)


def olmo_config():
    return transformers.Olmo2Config(
        hidden_size=128, intermediate_size=OLMO_HIDDEN, num_hidden_layers=4, num_attention_heads=8, vocab_size=128,
        rms_norm_eps=1e-6, rope_theta=500000.0, max_position_embeddings=64, tie_word_embeddings=False)


OLMO_HIDDEN = 512


def logits_of(directory):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    with torch.no_grad():
        return model.eval()(torch.tensor(TOKENS)).logits


class Models(support.Folder):
    def check(self, kind, store, config, most, **numbers):
        """The logits of the model that is exported by the rules of its trainer, against those of the trainer."""
        config.save_pretrained("config")
        sets = [part for name, value in numbers.items() for part in ("--set", f"{name}={value}")]
        directory = "-".join(["hf", kind, *numbers])
        support.run("export", store, directory, "--to", "hf", "--as", "hf", "--with", "config", *sets)
        self.compare(kind, directory, most, numbers)

    def compare(self, kind, directory, most, numbers=()):
        found = logits_of(directory)
        expected = torch.load(f"logits-{kind}.pt")
        error = (found - expected).abs().max() / expected.abs().max()
        print(f"{kind} {numbers}: largest difference of the logits {error:.1e}")
        self.assertLessEqual(float(error), most)

    def check_weights(self, kind, store, config):
        """Bit for bit what the trainer's own converter makes of the same weights."""
        expected = torch.load(f"converted-{kind}.pt")
        with tm.open(store, as_="hf", config=config.to_dict()) as checkpoint:
            self.assertEqual(sorted(checkpoint.keys()), sorted(expected))
            for key, weight in expected.items():
                self.assertTrue(torch.equal(torch.from_numpy(checkpoint[key][...].copy()), weight), key)

    def test_torchtitan(self):
        import torchtitan_cpu

        torchtitan_cpu.make_assets()
        torchrun(HERE, 2, ("train_torchtitan",))
        self.check_weights("titan", "titan/checkpoint/step-2", torchtitan_cpu.hugging_face_config())
        self.check("titan", "titan/checkpoint/step-2", torchtitan_cpu.hugging_face_config(), 1e-5)

    def test_gpt_oss_of_torchtitan(self):
        torchrun(HERE, 2, ("save_gpt_oss",))
        self.check("gpt_oss", "oss/step-1", gpt_oss_config(), 1e-5)

    def test_gpt_oss_of_megatron(self):
        torchrun(HERE, 4, ("save_megatron", "gpt_oss", 1, 2, 2))
        torchrun(HERE, 1, ("megatron_logits", "gpt_oss"))
        self.check("gpt_oss", "megatron/gpt_oss/tm-state", megatron_config("gpt_oss"), 1e-6)

    def test_a_run_of_megatron_goes_on_in_torchtitan(self):
        import torchtitan_cpu

        torchtitan_cpu.make_assets()
        torchtitan_cpu.hugging_face_config().save_pretrained("config")
        for dtype, own in (("float32", False), ("bfloat16", False), ("bfloat16", True)):
            with self.subTest(dtype=dtype, own=own):
                saved, dump = f"megatron/{dtype}-{own}", f"goes_on_{dtype}_{own}"
                torchrun(HERE, 2, ("train_megatron", saved, dtype, own))
                stored = saved if own else f"{saved}/tm-state"
                os.makedirs(f"{dump}/checkpoint")
                support.run("import", stored, f"{dump}/checkpoint/step-3", "--as", "torchtitan:llama", "--with", "config")
                torchrun(HERE, 2, ("go_on_in_torchtitan", dump))
                state, counts, losses = torch.load(f"{dump}.pt")
                self.assertEqual(counts, (3, 3))
                self.assertEqual([step for step, _ in losses], [4])
                self.assertLess(float.fromhex(losses[0][1]), 12)
                with tm.open(stored) as megatron:
                    self.check_state(megatron, state)
                with tm.open(f"{dump}/checkpoint/step-4") as after:
                    self.assertEqual(int(after["optimizer.state.norm.weight.step"][...]), 4)

    def check_state(self, megatron, state):
        """Weights and moments in torchtitan are, bit for bit, the float32 ones of Megatron."""
        def rows_within_heads(weight):  # llama3/state_dict_adapter.py, _reverse_permute
            return weight.view(16, 2, 8, 256).transpose(1, 2).reshape(256, 256)

        slots = {"": "optimizer.state.param.", "exp_avg": "optimizer.state.exp_avg.",
                 "exp_avg_sq": "optimizer.state.exp_avg_sq."}
        for slot, prefix in slots.items():
            def ours(key, slot=slot):
                if slot and ".qkv_linear." in key:  # Fused in the optimizer: _split_qkv_on_save
                    before, _, name = key.removesuffix(".weight").rpartition(".")
                    fused = state[f"optimizer.state.{before}.wqkv.weight.{slot}"].view(16, 3, 16, 256)
                    return fused[:, "qkv".index(name[1])].reshape(256, 256)
                return state[f"optimizer.state.{key}.{slot}" if slot else key]

            def theirs(key, prefix=prefix):
                return megatron[prefix + key].torch()

            self.assertTrue(torch.equal(ours("tok_embeddings.weight"), theirs("embedding.word_embeddings.weight")))
            self.assertTrue(torch.equal(ours("lm_head.weight"), theirs("output_layer.weight")))
            for layer in range(2):
                at, of = f"layers.{layer}.", "decoder.layers."
                fused = theirs(of + "self_attention.linear_qkv.weight")[layer].view(16, 3, 16, 256)
                q, k, v = (fused[:, n].reshape(256, 256) for n in range(3))
                gate, up = theirs(of + "mlp.linear_fc1.weight")[layer].chunk(2)
                expected = {
                    "attention.qkv_linear.wq": rows_within_heads(q), "attention.qkv_linear.wk": rows_within_heads(k),
                    "attention.qkv_linear.wv": v, "feed_forward.w1": gate, "feed_forward.w3": up,
                    "attention.wo": theirs(of + "self_attention.linear_proj.weight")[layer],
                    "feed_forward.w2": theirs(of + "mlp.linear_fc2.weight")[layer],
                    "attention_norm": theirs(of + "self_attention.linear_qkv.layer_norm_weight")[layer],
                    "ffn_norm": theirs(of + "mlp.linear_fc1.layer_norm_weight")[layer],
                }
                for name, value in expected.items():
                    self.assertTrue(torch.equal(ours(f"{at}{name}.weight"), value), (slot, name))

    def test_olmo(self):
        torchrun(HERE, 2, ("save_olmo",))
        self.check_weights("olmo2", "olmo/step1/model_and_optim", olmo_config())
        self.check("olmo2", "olmo/step1/model_and_optim", olmo_config(), 1e-5)

    def test_megatron(self):
        kinds = [kind for kind in MEGATRON if kind != "gpt_oss"]
        torchrun(HERE, 4, ("save_megatron", "llama", 2, 2, 1), ("save_megatron", "qwen3", 1, 4, 1),
                 ("save_megatron", "square", 4, 1, 1), ("save_megatron", "qwen3_moe", 1, 2, 2))
        torchrun(HERE, 1, *(("megatron_logits", kind) for kind in kinds))
        for kind in kinds:
            with self.subTest(kind=kind):
                self.check(kind, f"megatron/{kind}/tm-state", megatron_config(kind), 1e-6)
                # The configuration is made of the arguments that Megatron saved.
                directory = f"made-{kind}"
                support.run("export", f"megatron/{kind}/tm-state", directory, "--to", "hf", "--as", "hf")
                self.compare(kind, directory, 1e-6, ["with the arguments"])
        # Without an export: from a mount.
        os.mkdir("MNT")
        megatron_config("qwen3").save_pretrained("config")
        support.run("mount", "megatron/qwen3/tm-state", "MNT", "--as", "hf", "--with", "config")
        try:
            self.compare("qwen3", "MNT/hf", 1e-6)
        finally:
            support.run("unmount", "MNT")
        # All experts of a layer in one tensor, the form of transformers 5.
        self.check("qwen3_moe", "megatron/qwen3_moe/tm-state", megatron_config("qwen3_moe"), 1e-6, split=0)


if __name__ == "__main__":
    main(globals())

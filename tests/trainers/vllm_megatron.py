# SPDX-License-Identifier: Apache-2.0
"""vllm_megatron.py: Megatron-Core trains small models, for tests/trainers/vllm_test.py, in whose Python it is not.

Writes to the current directory for each model of MODELS: RUN/MODEL, a checkpoint by tensormount; OWN/MODEL, the same
state by Megatron's own writer; HF/MODEL, a directory of Hugging Face that a converter below made from OWN/MODEL.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "python"))

import support  # noqa: F401: finds the package.
import tensormount as tm
import torch
import torch.distributed as dist
from torchrun import main, torchrun

HERE = os.path.abspath(__file__)
LAYERS, WIDTH, HEADS, GROUPS, HEAD, HIDDEN, EXPERTS, EXPERT_HIDDEN = 4, 128, 4, 2, 32, 256, 8, 64
VOCAB, PADDED = 512, 640
# Options of the model, and the ranks in tensor, pipeline and expert parallelism: four in each.
MODELS = {"llama": ({}, (2, 2, 1)),
          "qwen3_moe": ({"qk_layernorm": True, "experts": EXPERTS, "moe_ffn_hidden_size": EXPERT_HIDDEN,
                        "moe_token_dispatcher_type": "allgather"}, (1, 2, 2))}
SIZES = dict(vocabulary=PADDED, hidden_size=WIDTH, ffn_hidden_size=HIDDEN, num_attention_heads=HEADS,
             num_query_groups=GROUPS, kv_channels=HEAD, init_method_std=0.3)


def train(name):
    """Three steps in bfloat16, by Megatron's own schedule of the pipeline."""
    import megatron_cpu
    from megatron.core import dist_checkpointing as dc

    options, ranks = MODELS[name]
    megatron_cpu.keep_results_in_this_process()
    megatron_cpu.parallel(*ranks)
    training = megatron_cpu.Training(torch.bfloat16, **SIZES, **options)
    losses = [training.step_in_stages(step) for step in range(3)]
    if dist.get_rank() == dist.get_world_size() - 1:
        print(f"{name}, losses of three steps: {losses}", flush=True)
    if dist.get_rank() == 0:
        os.makedirs(f"RUN/{name}")
        os.makedirs(f"OWN/{name}")
    dist.barrier()
    dc.save(training.sharded_state_dict(), f"OWN/{name}")
    with tm.megatron.install():
        dc.save(training.sharded_state_dict(), f"RUN/{name}")


def convert(name):
    """From what Megatron itself loads on one rank, by the definitions of its layers."""
    import megatron_cpu
    from megatron.core import dist_checkpointing as dc
    from safetensors.torch import save_file

    megatron_cpu.parallel()
    options = dict(MODELS[name][0])
    model = megatron_cpu.gpt(options.pop("experts", 0), **SIZES, **options, params_dtype=torch.bfloat16)
    state = dc.load({"model": model.sharded_state_dict()}, f"OWN/{name}")["model"]
    of = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    out = {"model.embed_tokens.weight": of.pop("embedding.word_embeddings.weight")[:VOCAB],
           "lm_head.weight": of.pop("output_layer.weight")[:VOCAB],
           "model.norm.weight": of.pop("decoder.final_layernorm.weight")}

    def mlp(theirs, ours):
        """TransformerLayer, MLP.forward: the first half of linear_fc1 goes through the activation."""
        out[ours + "gate_proj.weight"], out[ours + "up_proj.weight"] = of.pop(theirs + "linear_fc1.weight").chunk(2)
        out[ours + "down_proj.weight"] = of.pop(theirs + "linear_fc2.weight")

    for layer in range(LAYERS):
        theirs, ours = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        # SelfAttention.get_query_key_value_tensors: for each group its queries, its key and its value.
        fused = of.pop(theirs + "self_attention.linear_qkv.weight").view(GROUPS, HEADS // GROUPS + 2, HEAD, WIDTH)
        for part, rows in (("q", fused[:, :-2]), ("k", fused[:, -2]), ("v", fused[:, -1])):
            out[f"{ours}self_attn.{part}_proj.weight"] = rows.reshape(-1, WIDTH)
        names = {"input_layernorm": "input_layernorm", "self_attention.linear_proj": "self_attn.o_proj",
                 "pre_mlp_layernorm": "post_attention_layernorm"}
        if name == "qwen3_moe":
            names.update({"self_attention.q_layernorm": "self_attn.q_norm", "mlp.router": "mlp.gate",
                          "self_attention.k_layernorm": "self_attn.k_norm"})
            for expert in range(EXPERTS):
                mlp(f"{theirs}mlp.experts.local_experts.{expert}.", f"{ours}mlp.experts.{expert}.")
        else:
            mlp(theirs + "mlp.", ours + "mlp.")
        out.update({f"{ours}{value}.weight": of.pop(f"{theirs}{key}.weight") for key, value in names.items()})
    assert not of, of.keys()
    config(name).save_pretrained(f"HF/{name}")
    save_file({key: value.contiguous() for key, value in out.items()}, f"HF/{name}/model.safetensors", {"format": "pt"})


def config(name):
    import transformers

    given = dict(hidden_size=WIDTH, intermediate_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
                 num_key_value_heads=GROUPS, head_dim=HEAD, vocab_size=VOCAB, rms_norm_eps=1e-5,
                 max_position_embeddings=256, tie_word_embeddings=False, dtype="bfloat16")
    if name == "llama":
        return transformers.LlamaConfig(architectures=["LlamaForCausalLM"], **given)
    return transformers.Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"], **given, num_experts=EXPERTS, num_experts_per_tok=2,
        moe_intermediate_size=EXPERT_HIDDEN, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])


if __name__ == "__main__":
    if "TENSORMOUNT_TEST_PIDS" in os.environ:
        main(globals())
    print(torchrun(HERE, 4, *(("train", name) for name in MODELS)), end="")
    torchrun(HERE, 1, *(("convert", name) for name in MODELS))

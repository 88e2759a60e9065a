# SPDX-License-Identifier: Apache-2.0
"""Rule packs: a tiny random model in the layout of each trainer is, `as_="hf"`, the model that it was made from.

The layouts are written here in NumPy, from the formulas of the trainers' own converters, which each function names.
"""

import argparse
import io
import json
import os
import shutil
import subprocess
import unittest

import numpy
import torch

import support
import tensormount as tm

LAYERS, HEADS, GROUPS, HEAD, WIDTH, HIDDEN, VOCAB, EXPERTS = 3, 6, 2, 4, 24, 10, 13, 4
PADDED = 16


def config(family, **more):
    return {"model_type": family, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "hidden_size": WIDTH,
            "vocab_size": VOCAB, "num_hidden_layers": LAYERS, "head_dim": HEAD, **more}


class Model:
    """Random weights under the names of Hugging Face."""

    def __init__(self, seed, family, square=False):
        self.random = numpy.random.default_rng(seed)
        self.family = family
        hidden = WIDTH if square else HIDDEN
        w = self.weight
        self.hf = {"model.embed_tokens.weight": w(VOCAB, WIDTH), "model.norm.weight": w(WIDTH),
                   "lm_head.weight": w(VOCAB, WIDTH)}
        for layer in range(LAYERS):
            at = f"model.layers.{layer}."
            self.hf[at + "self_attn.q_proj.weight"] = w(HEADS * HEAD, WIDTH)
            self.hf[at + "self_attn.k_proj.weight"] = w(GROUPS * HEAD, WIDTH)
            self.hf[at + "self_attn.v_proj.weight"] = w(GROUPS * HEAD, WIDTH)
            self.hf[at + "self_attn.o_proj.weight"] = w(WIDTH, HEADS * HEAD)
            before, after = (("post_attention_layernorm", "post_feedforward_layernorm") if family == "olmo2"
                             else ("input_layernorm", "post_attention_layernorm"))
            self.hf[at + before + ".weight"] = w(WIDTH)
            self.hf[at + after + ".weight"] = w(WIDTH)
            if family != "llama":
                heads = (HEADS, GROUPS) if family == "olmo2" else (1, 1)  # OLMo2 norms all heads together.
                self.hf[at + "self_attn.q_norm.weight"] = w(heads[0] * HEAD)
                self.hf[at + "self_attn.k_norm.weight"] = w(heads[1] * HEAD)
            if family == "qwen3_moe":
                self.hf[at + "mlp.gate.weight"] = w(EXPERTS, WIDTH)
                for expert in range(EXPERTS):
                    self.mlp(at + f"mlp.experts.{expert}.", hidden)
            else:
                self.mlp(at + "mlp.", hidden)

    def weight(self, *shape):
        return self.random.standard_normal(shape).astype("f4")

    def mlp(self, at, hidden):
        self.hf[at + "gate_proj.weight"] = self.weight(hidden, WIDTH)
        self.hf[at + "up_proj.weight"] = self.weight(hidden, WIDTH)
        self.hf[at + "down_proj.weight"] = self.weight(WIDTH, hidden)

    def layer(self, number, name):
        return self.hf[f"model.layers.{number}.{name}.weight"]

    def stacked(self, name):
        return numpy.stack([self.layer(n, name) for n in range(LAYERS)])

    def experts(self, number, name):
        return numpy.stack([self.layer(number, f"mlp.experts.{e}.{name}") for e in range(EXPERTS)])

    def fused_experts(self):
        """Transformers 5: all experts of a layer in one tensor, gate before up."""
        out = {}
        for key, value in self.hf.items():
            if ".experts." not in key:
                out[key] = value
        for n in range(LAYERS):
            at = f"model.layers.{n}.mlp.experts."
            out[at + "gate_up_proj"] = numpy.concatenate([self.experts(n, "gate_proj"), self.experts(n, "up_proj")], 1)
            out[at + "down_proj"] = self.experts(n, "down_proj")
        return out


def megatron(model, layers=False):
    """Megatron-Bridge param_mapping.py: merge_qkv_weights, GatedMLPMapping; rows of the vocabulary are padded."""
    def fused(n):
        parts = []
        q, k, v = (model.layer(n, f"self_attn.{p}_proj").reshape(-1, HEAD, WIDTH) for p in "qkv")
        each = HEADS // GROUPS
        for group in range(GROUPS):
            parts += [q[group * each : (group + 1) * each], k[group : group + 1], v[group : group + 1]]
        return numpy.concatenate(parts).reshape(-1, WIDTH)

    def padded(weight):
        return numpy.concatenate([weight, numpy.full((PADDED - VOCAB, WIDTH), numpy.nan, "f4")])

    per_layer = {
        "self_attention.linear_qkv.layer_norm_weight": lambda n: model.layer(n, "input_layernorm"),
        "self_attention.linear_qkv.weight": fused,
        "self_attention.linear_proj.weight": lambda n: model.layer(n, "self_attn.o_proj"),
    }
    if model.family != "llama":
        per_layer["self_attention.q_layernorm.weight"] = lambda n: model.layer(n, "self_attn.q_norm")
        per_layer["self_attention.k_layernorm.weight"] = lambda n: model.layer(n, "self_attn.k_norm")
    if model.family == "qwen3_moe":
        per_layer["pre_mlp_layernorm.weight"] = lambda n: model.layer(n, "post_attention_layernorm")
        per_layer["mlp.router.weight"] = lambda n: model.layer(n, "mlp.gate")
        per_layer["mlp.experts.experts.linear_fc1.weight"] = lambda n: numpy.concatenate(
            [model.experts(n, "gate_proj"), model.experts(n, "up_proj")], 1)
        per_layer["mlp.experts.experts.linear_fc2.weight"] = lambda n: model.experts(n, "down_proj")
    else:
        per_layer["mlp.linear_fc1.layer_norm_weight"] = lambda n: model.layer(n, "post_attention_layernorm")
        per_layer["mlp.linear_fc1.weight"] = lambda n: numpy.concatenate(
            [model.layer(n, "mlp.gate_proj"), model.layer(n, "mlp.up_proj")])
        per_layer["mlp.linear_fc2.weight"] = lambda n: model.layer(n, "mlp.down_proj")
    out = {"embedding.word_embeddings.weight": padded(model.hf["model.embed_tokens.weight"]),
           "output_layer.weight": padded(model.hf["lm_head.weight"]),
           "decoder.final_layernorm.weight": model.hf["model.norm.weight"]}
    for name, make in per_layer.items():
        if layers:
            for n in range(LAYERS):
                out[f"decoder.layers.{n}.{name}"] = make(n)
        else:
            out[f"decoder.layers.{name}"] = numpy.stack([make(n) for n in range(LAYERS)])
    out["optimizer.state.exp_avg.decoder.final_layernorm.weight"] = numpy.zeros(WIDTH, "f4")
    return out


def torchtitan(model):
    """torchtitan models/llama3/state_dict_adapter.py: _reverse_permute for wq and wk of Llama; models/qwen3."""
    def heads(weight, count):
        if model.family != "llama":
            return weight
        return weight.reshape(count, 2, HEAD // 2, WIDTH).swapaxes(1, 2).reshape(count * HEAD, WIDTH)

    out = {"tok_embeddings.weight": model.hf["model.embed_tokens.weight"], "norm.weight": model.hf["model.norm.weight"],
           "lm_head.weight": model.hf["lm_head.weight"]}
    for n in range(LAYERS):
        at, here = f"layers.{n}.", lambda name, n=n: model.layer(n, name)
        out[at + "attention.qkv_linear.wq.weight"] = heads(here("self_attn.q_proj"), HEADS)
        out[at + "attention.qkv_linear.wk.weight"] = heads(here("self_attn.k_proj"), GROUPS)
        out[at + "attention.qkv_linear.wv.weight"] = here("self_attn.v_proj")
        out[at + "attention.wo.weight"] = here("self_attn.o_proj")
        out[at + "attention_norm.weight"] = here("input_layernorm")
        out[at + "ffn_norm.weight"] = here("post_attention_layernorm")
        if model.family != "llama":
            out[at + "attention.q_norm.weight"] = here("self_attn.q_norm")
            out[at + "attention.k_norm.weight"] = here("self_attn.k_norm")
        if model.family == "qwen3_moe":
            inner = at + "moe.routed_experts.inner_experts."
            out[at + "moe.router.gate.weight"] = here("mlp.gate")
            out[inner + "w1_EFD"] = model.experts(n, "gate_proj")
            out[inner + "w3_EFD"] = model.experts(n, "up_proj")
            out[inner + "w2_EDF"] = model.experts(n, "down_proj")
        else:
            out[at + "feed_forward.w1.weight"] = here("mlp.gate_proj")
            out[at + "feed_forward.w3.weight"] = here("mlp.up_proj")
            out[at + "feed_forward.w2.weight"] = here("mlp.down_proj")
        out[f"optimizer.state.{at}attention.wo.weight.exp_avg"] = numpy.zeros((WIDTH, HEADS * HEAD), "f4")
    return out


def olmo(model):
    """OLMo-core nn/hf/convert.py."""
    before, after = (("post_attention_layernorm", "post_feedforward_layernorm") if model.family == "olmo2"
                     else ("input_layernorm", "post_attention_layernorm"))
    names = {"attention.w_q": "self_attn.q_proj", "attention.w_k": "self_attn.k_proj", "attention.w_v": "self_attn.v_proj",
             "attention.w_out": "self_attn.o_proj", "feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj",
             "feed_forward.w3": "mlp.up_proj", "attention_norm": before, "feed_forward_norm": after}
    if model.family != "llama":
        names |= {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
    out = {"model.embeddings.weight": model.hf["model.embed_tokens.weight"], "model.lm_head.norm.weight": model.hf["model.norm.weight"],
           "model.lm_head.w_out.weight": model.hf["lm_head.weight"], "optim.state.x.step": numpy.zeros(1, "f4")}
    for n in range(LAYERS):
        for theirs, ours in names.items():
            out[f"model.blocks.{n}.{theirs}.weight"] = model.layer(n, ours)
    return out


# The keys of an optimizer's tensors.
SLOTS = {"megatron": "optimizer.state.{slot}.{key}", "torchtitan": "optimizer.state.{key}.{slot}",
         "olmo": "optim.state.{key}.{slot}"}


class GptOss:
    """Random weights of gpt-oss under the names of transformers (modeling_gpt_oss.py), here with square experts."""

    def __init__(self, seed, square):
        random = numpy.random.default_rng(seed)
        self.hidden = WIDTH if square else HIDDEN
        self.hf = {}

        def w(key, *shape):
            self.hf[key] = random.standard_normal(shape).astype("f4")

        w("model.embed_tokens.weight", VOCAB, WIDTH)
        w("model.norm.weight", WIDTH)
        w("lm_head.weight", VOCAB, WIDTH)
        for n in range(LAYERS):
            at = f"model.layers.{n}."
            for name, rows in (("q", HEADS), ("k", GROUPS), ("v", GROUPS)):
                w(at + f"self_attn.{name}_proj.weight", rows * HEAD, WIDTH)
                w(at + f"self_attn.{name}_proj.bias", rows * HEAD)
            w(at + "self_attn.o_proj.weight", WIDTH, HEADS * HEAD)
            w(at + "self_attn.o_proj.bias", WIDTH)
            w(at + "self_attn.sinks", HEADS)
            w(at + "input_layernorm.weight", WIDTH)
            w(at + "post_attention_layernorm.weight", WIDTH)
            w(at + "mlp.router.weight", EXPERTS, WIDTH)
            w(at + "mlp.router.bias", EXPERTS)
            w(at + "mlp.experts.gate_up_proj", EXPERTS, WIDTH, 2 * self.hidden)
            w(at + "mlp.experts.gate_up_proj_bias", EXPERTS, 2 * self.hidden)
            w(at + "mlp.experts.down_proj", EXPERTS, self.hidden, WIDTH)
            w(at + "mlp.experts.down_proj_bias", EXPERTS, WIDTH)

    def layer(self, n, name):
        return self.hf[f"model.layers.{n}.{name}"]

    def megatron(self):
        """Megatron-Bridge gpt_oss_bridge.py: rows 0::2 are the gate, then transposed; QKV by groups, biases too."""
        def fused(n, kind):
            parts, each = [], HEADS // GROUPS
            q, k, v = (self.layer(n, f"self_attn.{p}_proj.{kind}") for p in "qkv")
            q, k, v = (one.reshape(-1, HEAD, *one.shape[1:]) for one in (q, k, v))
            for group in range(GROUPS):
                parts += [q[group * each : (group + 1) * each], k[group : group + 1], v[group : group + 1]]
            whole = numpy.concatenate(parts)
            return whole.reshape(-1, *whole.shape[2:])

        def apart(interleaved):  # On the last axis: gate before up.
            return numpy.concatenate([interleaved[..., 0::2], interleaved[..., 1::2]], -1)

        names = {
            "self_attention.linear_qkv.layer_norm_weight": lambda n: self.layer(n, "input_layernorm.weight"),
            "self_attention.linear_qkv.weight": lambda n: fused(n, "weight"),
            "self_attention.linear_qkv.bias": lambda n: fused(n, "bias"),
            "self_attention.linear_proj.weight": lambda n: self.layer(n, "self_attn.o_proj.weight"),
            "self_attention.linear_proj.bias": lambda n: self.layer(n, "self_attn.o_proj.bias"),
            "self_attention.core_attention.softmax_offset": lambda n: self.layer(n, "self_attn.sinks"),
            "pre_mlp_layernorm.weight": lambda n: self.layer(n, "post_attention_layernorm.weight"),
            "mlp.router.weight": lambda n: self.layer(n, "mlp.router.weight"),
            "mlp.router.bias": lambda n: self.layer(n, "mlp.router.bias"),
            "mlp.experts.experts.linear_fc1.weight":
                lambda n: apart(self.layer(n, "mlp.experts.gate_up_proj")).swapaxes(1, 2),
            "mlp.experts.experts.linear_fc1.bias": lambda n: apart(self.layer(n, "mlp.experts.gate_up_proj_bias")),
            "mlp.experts.experts.linear_fc2.weight": lambda n: self.layer(n, "mlp.experts.down_proj").swapaxes(1, 2),
            "mlp.experts.experts.linear_fc2.bias": lambda n: self.layer(n, "mlp.experts.down_proj_bias"),
        }
        out = {f"decoder.layers.{name}": numpy.stack([make(n) for n in range(LAYERS)]) for name, make in names.items()}
        out["embedding.word_embeddings.weight"] = self.hf["model.embed_tokens.weight"]
        out["output_layer.weight"] = self.hf["lm_head.weight"]
        out["decoder.final_layernorm.weight"] = self.hf["model.norm.weight"]
        return out

    def torchtitan(self):
        """torchtitan models/gpt_oss/moe.py: gate and up interleaved as in transformers, matrices transposed."""
        out = {"tok_embeddings.weight": self.hf["model.embed_tokens.weight"], "norm.weight": self.hf["model.norm.weight"],
               "lm_head.weight": self.hf["lm_head.weight"]}
        for n in range(LAYERS):
            at = f"layers.{n}."
            for kind in ("weight", "bias"):
                for p in "qkv":
                    out[at + f"attention.qkv_linear.w{p}.{kind}"] = self.layer(n, f"self_attn.{p}_proj.{kind}")
                out[at + f"attention.wo.{kind}"] = self.layer(n, f"self_attn.o_proj.{kind}")
                out[at + f"moe.router.gate.{kind}"] = self.layer(n, f"mlp.router.{kind}")
            out[at + "attention.sinks"] = self.layer(n, "self_attn.sinks")
            out[at + "attention_norm.weight"] = self.layer(n, "input_layernorm.weight")
            out[at + "ffn_norm.weight"] = self.layer(n, "post_attention_layernorm.weight")
            inner = at + "moe.routed_experts.inner_experts."
            out[inner + "mlp1_weight_EGD"] = self.layer(n, "mlp.experts.gate_up_proj").swapaxes(1, 2)
            out[inner + "mlp1_bias_EG"] = self.layer(n, "mlp.experts.gate_up_proj_bias")
            out[inner + "mlp2_weight_EDF"] = self.layer(n, "mlp.experts.down_proj").swapaxes(1, 2)
            out[inner + "mlp2_bias_ED"] = self.layer(n, "mlp.experts.down_proj_bias")
        return out


LAYOUTS = {"megatron": ("llama", "qwen3", "qwen3_moe"), "torchtitan": ("llama", "qwen3", "qwen3_moe"),
           "olmo": ("llama", "qwen3", "olmo2")}
MAKE = {"megatron": megatron, "torchtitan": torchtitan, "olmo": olmo}


class Packs(support.Folder):
    def tearDown(self):
        for name in os.listdir():
            shutil.rmtree(name)
        super().tearDown()

    def assert_same(self, checkpoint, wanted):
        self.assertEqual(checkpoint.keys(), sorted(wanted))
        for key, array in wanted.items():
            self.assertEqual(checkpoint[key][...].tobytes(), array.tobytes(), key)
            self.assertEqual(checkpoint[key].shape, array.shape, key)

    def test_each_layout_is_the_model_that_it_was_made_from(self):
        for layout, families in LAYOUTS.items():
            for number, family in enumerate(families):
                for square in (False, True):
                    with self.subTest(layout=layout, family=family, square=square):
                        model = Model(number, family, square)
                        tm.save(MAKE[layout](model), "S/c", replace=True)
                        with tm.open("S/c", as_="hf", config=config(family)) as checkpoint:
                            self.assert_same(checkpoint, model.hf)
                        named = f"hf:{family}"
                        with tm.open("S/c", as_=named, from_=layout, config=config(family)) as checkpoint:
                            self.assert_same(checkpoint, model.hf)

    def test_gpt_oss(self):
        for square in (False, True):
            model = GptOss(9, square)
            for layout, stored in (("megatron", model.megatron()), ("torchtitan", model.torchtitan())):
                with self.subTest(layout=layout, square=square):
                    tm.save({key: numpy.ascontiguousarray(array) for key, array in stored.items()}, "S/c", replace=True)
                    with tm.open("S/c", as_="hf", config=config("gpt_oss")) as checkpoint:
                        self.assert_same(checkpoint, model.hf)
                    tm.save(model.hf, "S/hf", replace=True)
                    numbers = {"padded_vocab": VOCAB} if layout == "megatron" else {}
                    with tm.open("S/hf", as_=f"{layout}:gpt_oss", config=config("gpt_oss"), numbers=numbers) as checkpoint:
                        self.assertEqual(checkpoint.keys(), sorted(stored))
                        for key, array in stored.items():
                            self.assertEqual(checkpoint[key][...].tobytes(), array.tobytes(), key)

    def test_models_under_fsdp_lose_their_prefix(self):
        model = Model(10, "llama")
        tm.save({f"model.{key}": array for key, array in model.hf.items()}, "S/c")
        with tm.open("S/c", as_="hf") as checkpoint:
            self.assert_same(checkpoint, model.hf)
        with tm.open("S/c", as_="hf:llama", config=config("llama")) as checkpoint:
            self.assert_same(checkpoint, model.hf)

    def test_one_tensor_for_each_layer_of_megatron(self):
        for family in LAYOUTS["megatron"]:
            model = Model(1, family)
            tm.save(megatron(model, layers=True), "S/c", replace=True)
            with tm.open("S/c", as_="hf", config=config(family)) as checkpoint:
                self.assert_same(checkpoint, model.hf)

    def test_experts_are_split_or_fused(self):
        model = Model(2, "qwen3_moe")
        for layout in ("megatron", "torchtitan"):
            tm.save(MAKE[layout](model), "S/c", replace=True)
            with tm.open("S/c", as_="hf", config=config("qwen3_moe"), numbers={"split": 0}) as checkpoint:
                self.assert_same(checkpoint, model.fused_experts())
        os.mkdir("with")
        with open("with/config.json", "w") as file:
            json.dump(config("qwen3_moe"), file)
        for form, wanted in (("fused", model.fused_experts()), ("split", model.hf)):
            support.run("export", "S/c", f"with/{form}", "--to", "hf", "--as", "hf", "--with", "with", "--experts", form)
            with tm.open(f"with/{form}") as checkpoint:
                self.assert_same(checkpoint, wanted)

    def test_the_way_back(self):
        for layout, families in LAYOUTS.items():
            for family in families:
                with self.subTest(layout=layout, family=family):
                    model = Model(3, family)
                    tm.save(model.hf, "S/hf", replace=True)
                    wanted = {key: array for key, array in MAKE[layout](model).items() if not key.startswith("opti")}
                    numbers = {"padded_vocab": PADDED} if layout == "megatron" else {}
                    with tm.open("S/hf", as_=f"{layout}:{family}", config=config(family), numbers=numbers) as checkpoint:
                        self.assertEqual(checkpoint.keys(), sorted(wanted))
                        for key, array in wanted.items():
                            self.assertEqual(checkpoint[key][...].tobytes(), numpy.nan_to_num(array).tobytes(), key)
        model = Model(4, "qwen3")
        tm.save(model.hf, "S/hf", replace=True)
        with tm.open("S/hf", as_="megatron@layers:qwen3", config=config("qwen3"), numbers={"padded_vocab": PADDED}) as checkpoint:
            self.assertIn("decoder.layers.2.self_attention.linear_qkv.weight", checkpoint)

    @staticmethod
    def moments(layout, model, fused=True):
        """The tensors of one slot: as the weights, but torchtitan's projections are fused in the optimizer."""
        made = {key: array for key, array in MAKE[layout](model).items() if not key.startswith("opti")}
        if layout == "torchtitan" and fused:
            for n in range(LAYERS):
                at = f"layers.{n}.attention.qkv_linear."
                q, k, v = (made.pop(f"{at}w{p}.weight").reshape(GROUPS, -1, HEAD, WIDTH) for p in "qkv")
                made[f"{at}wqkv.weight"] = numpy.concatenate([q, k, v], 1).reshape(-1, WIDTH)
        return made

    def trained(self, layout, model, main=False, fused=True):
        """The checkpoint of a trainer with random moments; and what it has of moments under Hugging Face names."""
        weights = {key: array for key, array in MAKE[layout](model).items() if not key.startswith("opti")}
        stored, moments = dict(weights), {}
        for number, slot in enumerate(("exp_avg", "exp_avg_sq", "param")[: 3 if main else 2]):
            moments[slot] = Model(1000 + number, model.family)
            made = self.moments(layout, moments[slot], fused)
            stored.update({SLOTS[layout].format(slot=slot, key=key): array for key, array in made.items()})
        return stored, moments

    def test_from_one_trainer_to_another(self):
        for layout, families in LAYOUTS.items():
            for other in LAYOUTS:
                for family in sorted(set(families) & set(LAYOUTS[other])):
                    with self.subTest(layout=layout, other=other, family=family):
                        model = Model(3, family)
                        stored, moments = self.trained(layout, model, fused=other != "olmo")
                        tm.save(stored, "S/c", replace=True)
                        wanted = {key: array for key, array in MAKE[other](model).items() if not key.startswith("opti")}
                        for slot, made in moments.items():
                            wanted.update({SLOTS[other].format(slot=slot, key=key): array
                                           for key, array in self.moments(other, made).items()})
                        numbers = {"padded_vocab": PADDED} if other == "megatron" else {}
                        how = {"as_": f"{other}:{family}", "config": config(family), "numbers": numbers}
                        with tm.open("S/c", **how) as checkpoint:
                            self.assertEqual(checkpoint.keys(), sorted(wanted))
                            for key, array in wanted.items():
                                self.assertEqual(checkpoint[key][...].tobytes(), numpy.nan_to_num(array).tobytes(), key)
                        request = {key: numpy.zeros_like(array) for key, array in wanted.items()}
                        tm.load(request, "S/c", **how)
                        for key, array in wanted.items():
                            self.assertEqual(request[key].tobytes(), numpy.nan_to_num(array).tobytes(), key)
                        with tm.open("S/c", **{**how, "numbers": {**numbers, "moments": 0}}) as checkpoint:
                            self.assertFalse([key for key in checkpoint.keys() if key.startswith("opti")])

    def test_main_weights_take_the_place_of_the_models(self):
        model = Model(3, "qwen3")
        stored, moments = self.trained("megatron", model, main=True)
        tm.save(stored, "S/c")
        with tm.open("S/c", as_="torchtitan:qwen3", config=config("qwen3")) as checkpoint:
            for key, array in torchtitan(moments["param"]).items():
                if not key.startswith("opti"):
                    self.assertEqual(checkpoint[key][...].tobytes(), array.tobytes(), key)
            self.assertFalse([key for key in checkpoint.keys() if "param" in key])
        with tm.open("S/c", as_="hf", config=config("qwen3")) as checkpoint:
            self.assert_same(checkpoint, model.hf)
        with tm.open("S/c", as_="hf", config=config("qwen3"), numbers={"main": 1}) as checkpoint:
            self.assert_same(checkpoint, moments["param"].hf)
        # Between forms of Megatron they stay what they are.
        numbers = {"padded_vocab": PADDED}
        with tm.open("S/c", as_="megatron@layers:qwen3", config=config("qwen3"), numbers=numbers) as checkpoint:
            for key, array in megatron(moments["param"], layers=True).items():
                if not key.startswith("opti"):
                    held = checkpoint[f"optimizer.state.param.{key}"][...]
                    self.assertEqual(held.tobytes(), numpy.nan_to_num(array).tobytes(), key)
        # One of them is not stored.
        del stored["optimizer.state.param.decoder.final_layernorm.weight"]
        tm.save(stored, "S/less")
        with self.assertRaisesRegex(tm.InvalidArgumentError, "param.decoder.final_layernorm.weight is to take the place of"
                                    " decoder.final_layernorm.weight, and is not stored"):
            tm.open("S/less", as_="torchtitan:qwen3", config=config("qwen3"))

    def test_moments_have_the_shapes_of_their_weights(self):
        stored, _ = self.trained("megatron", Model(3, "llama"))
        stored["optimizer.state.exp_avg.decoder.final_layernorm.weight"] = numpy.zeros(WIDTH + 1, "f4")
        tm.save(stored, "S/c")
        with self.assertRaisesRegex(tm.InvalidArgumentError, r"exp_avg.decoder.final_layernorm.weight has shape \[25\], but"):
            tm.open("S/c", as_="olmo:llama", config=config("llama"))
        # Moments of one layer are not stored.
        stored, _ = self.trained("torchtitan", Model(3, "llama"))
        del stored["optimizer.state.layers.1.attention.wo.weight.exp_avg"]
        tm.save(stored, "S/c", replace=True)
        with self.assertRaisesRegex(tm.InvalidArgumentError, "2 tensors would be called .*o_proj.weight.exp_avg"):
            tm.open("S/c", as_="olmo:llama", config=config("llama"))

    def test_own_rules_come_before_a_pack(self):
        model = Model(5, "qwen3")
        names = {"mine." + key: array for key, array in megatron(model).items()}
        tm.save(names, "S/c")
        rules = [{"prefix": "mine.", "to": ""}]
        with tm.open("S/c", names=rules, as_="hf", config=config("qwen3")) as checkpoint:
            self.assert_same(checkpoint, model.hf)
        with self.assertRaisesRegex(tm.InvalidArgumentError, "no rule uses the number vocabb"):
            tm.open("S/c", names=rules, as_="hf", config=config("qwen3"), numbers={"vocabb": 1})
        os.mkdir("with")
        with open("with/mine.json", "w") as file:
            json.dump(rules, file)
        with open("with/config.json", "w") as file:
            json.dump(config("qwen3"), file)
        shown = support.run("map", "check", "with/mine.json", "S/c", "--as", "hf", "--with", "with")
        self.assertIn("embedding.word_embeddings.weight  f32 [16, 24]  <- mine.embedding.word_embeddings.weight", shown)
        self.assertIn("and then, from these names:\nlm_head.weight  f32 [13, 24]  <- output_layer.weight", shown)

    def test_errors_say_what_is_missing(self):
        model = Model(5, "qwen3")
        tm.save(megatron(model), "S/c")
        with self.assertRaisesRegex(tm.InvalidArgumentError, "groups is not known .*config.num_key_value_heads.*--set"):
            tm.open("S/c", as_="hf", numbers={"vocab": VOCAB})
        with self.assertRaisesRegex(tm.InvalidArgumentError, "fits none .*for megatron:llama it has decoder.layers.self_attention.q_l"):
            tm.open("S/c", as_="hf:llama", config=config("llama"))
        with self.assertRaisesRegex(tm.InvalidArgumentError, "fits none .*for torchtitan:qwen3 it has no layers.{l}"):
            tm.open("S/c", as_="hf", from_="torchtitan", config=config("qwen3"))
        with self.assertRaisesRegex(tm.InvalidArgumentError, "no rules for megatron:bert"):
            tm.open("S/c", as_="megatron:bert")
        with self.assertRaisesRegex(tm.InvalidArgumentError, "model_type"):
            tm.open("S/c", as_="hf", config={"vocab_size": 3})
        with self.assertRaisesRegex(tm.InvalidArgumentError, "does not fit|is not a multiple"):
            tm.open("S/c", as_="hf", config={**config("qwen3"), "num_attention_heads": 5})
        with self.assertRaisesRegex(tm.InvalidArgumentError, "from_ needs as_"):
            tm.open("S/c", names=[], from_="megatron")
        # A tensor that no rule knows is not left out in silence.
        tm.save({**megatron(model), "decoder.layers.mlp.shared_experts.linear_fc1.weight": numpy.zeros(3, "f4")}, "S/more")
        with self.assertRaisesRegex(tm.InvalidArgumentError, "no rule matches tensor decoder.layers.mlp.shared_experts"):
            tm.open("S/more", as_="hf", config=config("qwen3"))

        with self.assertRaisesRegex(tm.InvalidArgumentError, "no rule uses the number splt; known are: .*vocab"):
            tm.open("S/c", as_="hf", config=config("qwen3"), numbers={"splt": 0})
        with self.assertRaisesRegex(tm.InvalidArgumentError, "vocab is not known .*config.vocab_size"):
            tm.open("S/c", as_="hf", numbers={"heads": HEADS, "groups": GROUPS})
        for wrong in ("gemma", "gpt2"):
            with self.assertRaisesRegex(tm.InvalidArgumentError, f"model_type .* is {wrong}, for which there are no rules"):
                tm.open("S/c", as_="hf", config=config(wrong))
        with self.assertRaisesRegex(tm.InvalidArgumentError, "no rules for family gpt2"):
            tm.open("S/c", as_="hf:gpt2")
        tm.save(model.hf, "S/hf")
        with self.assertRaisesRegex(tm.InvalidArgumentError, "names are those of Hugging Face already"):
            tm.open("S/hf", as_="hf")
        with self.assertRaisesRegex(tm.InvalidArgumentError, "model_type .* is gemma, and not qwen3"):
            tm.open("S/hf", as_="torchtitan:qwen3", config=config("gemma"))
        # The checkpoint is there, so this is not what a program takes for a first start.
        with self.assertRaisesRegex(tm.InvalidArgumentError, "nothere"):
            tm.open("S/c", names=[{"from": "nothere : a b", "to": "x : b a"}])

    def test_incomplete_models_are_refused(self):
        layer = "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight"
        model = Model(11, "qwen3")
        stored = megatron(model, layers=True)
        moe = megatron(Model(12, "qwen3_moe"))
        oss = {key: numpy.ascontiguousarray(array) for key, array in GptOss(13, False).megatron().items()}
        gone = "decoder.layers.mlp.experts.experts.linear_fc2.weight"
        titan = torchtitan(model)
        cases = (
            ("qwen3", config("qwen3"), stored, (layer,), "would be called model.layers.{l}.input_layernorm.weight, but"),
            ("qwen3", config("qwen3"), stored, [key for key in stored if ".layers.2." in key], "has 2 layers, and layers is 3"),
            ("qwen3", {}, titan, [key for key in titan if key.startswith("layers.2.feed")], "has 2 layers, and model.layers.{l}"),
            ("qwen3", {}, titan, ("norm.weight",), "needs norm.weight, which is not stored"),
            ("qwen3_moe", config("qwen3_moe"), moe, (gone,), "no stored tensor belongs to .*down_proj"),
            ("qwen3_moe", config("qwen3_moe", num_experts=64), moe, (), "has 4 experts, and experts is 64"),
            ("gpt_oss", config("gpt_oss"), oss, (gone,), "no stored tensor belongs to .*down_proj"),
        )
        for family, given, tensors, without, message in cases:
            with self.subTest(family=family, message=message):
                tm.save({key: array for key, array in tensors.items() if key not in without}, "S/c", replace=True)
                options = {"config": given} if given else {}
                with self.assertRaisesRegex(tm.InvalidArgumentError, message):
                    tm.open("S/c", as_="hf", **options)

    def test_lost_tensors_take_part_in_the_choice(self):
        """Without its norms of queries and keys a Qwen3 of torchtitan would be a Llama, whose rows are permuted."""
        model = Model(14, "qwen3")
        stored = torchtitan(model)
        norms = {key: array for key, array in stored.items() if "_norm.weight" in key and ".attention." in key}
        os.mkdir("lost")
        files = {"a.safetensors": {key: stored[key] for key in stored if key not in norms}, "b.safetensors": norms}
        for name, tensors in files.items():
            tm.save(tensors, "S/part", replace=True)
            support.run("export", "S/part", f"lost/{name}", "--to", "safetensors")
        with open("lost/model.safetensors.index.json", "w") as file:
            json.dump({"weight_map": {key: name for name, tensors in files.items() for key in tensors}}, file)
        os.unlink("lost/b.safetensors")
        with tm.open("lost", as_="hf") as checkpoint:
            key = "model.layers.0.self_attn.q_proj.weight"
            self.assertEqual(checkpoint[key][...].tobytes(), model.hf[key].tobytes())
            with self.assertRaises(tm.DataLossError):
                tm.load({"model.layers.0.self_attn.q_norm.weight": numpy.zeros(HEAD, "f4")}, "lost", as_="hf")

    def test_numbers_come_from_the_arguments_of_megatron(self):
        model = Model(7, "qwen3")
        args = {"num_attention_heads": HEADS, "num_query_groups": GROUPS, "group_query_attention": True,
                "kv_channels": HEAD, "swiglu": True}
        tm.save({**megatron(model), "args": args}, "S/c")
        with tm.open("S/c", as_="hf", numbers={"vocab": VOCAB}) as checkpoint:
            self.assert_same(checkpoint, model.hf)
        # Without grouped queries Megatron's arguments have one group, which does not count.
        args = {**args, "num_query_groups": 1, "group_query_attention": False}
        tm.save({**megatron(model), "args": args}, "S/c", replace=True)
        with self.assertRaisesRegex(tm.InvalidArgumentError, "does not fit|by the keys or shapes"):
            tm.open("S/c", as_="hf", numbers={"vocab": VOCAB})
        tm.save({**megatron(model), "args": {**args, "swiglu": False}}, "S/c", replace=True)
        with self.assertRaisesRegex(tm.UnsupportedError, "common.args.swiglu is 0"):
            tm.open("S/c", as_="hf", numbers={"vocab": VOCAB})

    # Of Megatron-LM's arguments, those that config.json needs.
    ARGUMENTS = {
        "num_layers": LAYERS, "hidden_size": WIDTH, "ffn_hidden_size": HIDDEN, "num_attention_heads": HEADS,
        "num_query_groups": GROUPS, "group_query_attention": True, "kv_channels": HEAD, "vocab_size": VOCAB,
        "max_position_embeddings": 64, "layernorm_epsilon": 1e-6, "rotary_base": 500000, "rotary_percent": 1.0,
        "rotary_interleaved": False, "rotary_seq_len_interpolation_factor": None, "use_rope_scaling": False,
        "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False,
        "add_qkv_bias": False, "qk_layernorm": True, "untie_embeddings_and_output_weights": True,
        "num_experts": EXPERTS, "moe_layer_freq": 1, "moe_router_pre_softmax": False, "moe_router_topk": 2,
        "moe_ffn_hidden_size": HIDDEN, "moe_router_score_function": "softmax", "moe_router_load_balancing_type": "aux_loss",
        "moe_mlp_glu_interleave_size": None, "layernorm_zero_centered_gamma": False, "params_dtype": torch.bfloat16,
    }
    CONFIG = {"hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
              "num_key_value_heads": GROUPS, "head_dim": HEAD, "vocab_size": VOCAB, "max_position_embeddings": 64,
              "rms_norm_eps": 1e-6, "rope_theta": 500000, "tie_word_embeddings": False, "torch_dtype": "float32"}

    def save_run(self, directory, family, object_of_it=False, **changed):
        """A checkpoint of tensormount.megatron with the arguments in Megatron's own form."""
        shutil.rmtree(directory, ignore_errors=True)
        os.mkdir(directory)
        state = {"args": argparse.Namespace(**{**self.ARGUMENTS, **changed}), "iteration": 7}
        objects = {}
        if object_of_it:  # Megatron-Core 0.19
            buffer = io.BytesIO()
            torch.save([state], buffer)
            objects["common_state"] = buffer.getvalue()
        else:
            torch.save(state, f"{directory}/common.pt")
        tm.save(megatron(Model(5, family)), f"{directory}/tm-state", objects=objects)
        return f"{directory}/tm-state"

    def exported(self, source, *more):
        """The config.json of an export, and what was said."""
        shutil.rmtree("out", ignore_errors=True)
        done = subprocess.run([support.command(), "export", source, "out", "--to", "hf", "--as", "hf", *more],
                              capture_output=True, text=True, check=True)
        if not os.path.exists("out/config.json"):
            return None, done.stderr
        with open("out/config.json") as file:
            return json.load(file), done.stderr

    def test_config_is_made_of_megatrons_arguments(self):
        made, said = self.exported(self.save_run("run", "qwen3"))
        self.assertEqual(made, {**made, **self.CONFIG, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]})
        self.assertNotIn("config.json", said)
        # The name of older releases.
        made, _ = self.exported(self.save_run("run", "llama", qk_layernorm=False, layernorm_epsilon=None, norm_epsilon=1e-6))
        self.assertEqual(made, {**made, **self.CONFIG, "model_type": "llama"})
        made, _ = self.exported(self.save_run("run", "qwen3_moe"))
        self.assertEqual(made, {**made, **self.CONFIG, "model_type": "qwen3_moe", "num_experts": EXPERTS,
                                "num_experts_per_tok": 2, "moe_intermediate_size": HIDDEN, "norm_topk_prob": True})
        made, _ = self.exported(self.save_run("run", "qwen3", object_of_it=True))
        self.assertEqual(made["rope_theta"], 500000)
        self.assertIn("config.json: made", support.run("map", "check", "hf", "run/tm-state"))
        # An import keeps it.
        support.run("import", "run/tm-state", "S/kept", "--as", "hf")
        with tm.open("S/kept") as checkpoint:
            self.assertEqual(json.loads(checkpoint.object("config.json")), made)
        # Tied embeddings are stored once.
        store = self.save_run("run", "qwen3", untie_embeddings_and_output_weights=False)
        tensors = megatron(Model(5, "qwen3"))
        del tensors["output_layer.weight"]
        tm.save({key: one for key, one in tensors.items() if not key.startswith("optimizer")}, store, replace=True)
        made, _ = self.exported(store)
        self.assertEqual(made, {**made, **self.CONFIG, "tie_word_embeddings": True})

    def test_a_config_that_would_be_wrong_is_asked_for(self):
        numbers = [word for name, value in (("heads", HEADS), ("groups", GROUPS), ("head_dim", HEAD), ("vocab", VOCAB))
                   for word in ("--set", f"{name}={value}")]
        for changed in ({"use_rope_scaling": True}, {"rotary_percent": 0.5}, {"normalization": "LayerNorm"},
                        {"rotary_seq_len_interpolation_factor": 2}, {"qk_layernorm": False}, {"add_qkv_bias": True},
                        {"position_embedding_type": "yarn"}, {"layernorm_epsilon": None}, {"no_rope_freq": [0, 1, 1]},
                        {"window_size": (64, 0)}, {"hidden_size": [24]}, {"hidden_size": 77}, {"ffn_hidden_size": 9},
                        {"rotary_base": "10000"}, {"rotary_base": True}, {"rotary_base": float("inf")},
                        {"layernorm_epsilon": float("nan")}, {"untie_embeddings_and_output_weights": False},
                        {"softmax_type": "off-by-one"}, {"qk_l2_norm": True}, {"glu_linear_offset": 1.0}, {"use_mup": True},
                        {"activation_func_clamp_value": 0.1}):
            with self.subTest(changed=changed):
                made, said = self.exported(self.save_run("run", "qwen3", **changed), *numbers)
                self.assertIsNone(made)
                self.assertRegex(said, f"no config.json, .*because .*common.args.{next(iter(changed))}.* is .*--with")
        self.assertIn("config.json: give it by --with", support.run("map", "check", "hf", "run/tm-state", *numbers))
        # The arguments cannot be read: a file of another program, or a damaged one.
        for data in (b"", b"PK\3\4 no archive"):
            store = self.save_run("run", "qwen3")
            with open("run/common.pt", "wb") as file:
                file.write(data)
            made, said = self.exported(store, *numbers)
            self.assertIsNone(made)
            self.assertRegex(said, "is not known \\(.*run/common.pt is no file of torch.save that can be read safely\\): give")
            with self.assertRaisesRegex(tm.InvalidArgumentError, "groups is not known.*run/common.pt is no file"):
                tm.open(store, as_="hf", numbers={"vocab": VOCAB})
        made, said = self.exported(self.save_run("run", "qwen3_moe", moe_router_load_balancing_type="sinkhorn"))
        self.assertIn("moe_router_load_balancing_type is \"sinkhorn\"", said)
        # Weights that mean something else are an error.
        for family, name in (("qwen3", "layernorm_zero_centered_gamma"), ("qwen3_moe", "moe_mlp_glu_interleave_size")):
            with self.assertRaisesRegex(tm.UnsupportedError, f"common.args.{name} is (1|32), and the rules are for 0"):
                value = 32 if name.startswith("moe") else True
                tm.open(self.save_run("run", family, **{name: value}), as_="hf", numbers={"vocab": VOCAB})
        # The directory's own counts.
        os.mkdir("with")
        with open("with/config.json", "w") as file:
            json.dump(config("qwen3", rope_theta=3), file)
        made, _ = self.exported(self.save_run("run", "qwen3"), "--with", "with")
        self.assertEqual(made, config("qwen3", rope_theta=3))
        # torchtitan saves none.
        tm.save(torchtitan(Model(5, "qwen3")), "S/titan")
        made, said = self.exported("S/titan", *numbers[:4])
        self.assertIsNone(made)
        self.assertIn("because the trainer does not save it: give the model's directory by --with", said)
        made, said = self.exported("S/titan", "--with", "with")
        self.assertNotIn("config.json", said)

    def test_a_config_beside_foreign_files_counts(self):
        model = Model(15, "qwen3")
        tm.save(megatron(model), "S/c")
        os.mkdir("foreign")
        support.run("export", "S/c", "foreign/model.safetensors", "--to", "safetensors")
        with open("foreign/config.json", "w") as file:
            json.dump(config("qwen3"), file)
        with tm.open("foreign", as_="hf") as checkpoint:
            self.assert_same(checkpoint, model.hf)

    def test_a_hostile_config_takes_little_memory(self):
        import resource

        model = Model(8, "llama")
        tm.save(megatron(model), "S/c")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        big = {**config("llama"), "x" * 50_000: {str(n): 1 for n in range(8000)}}
        with tm.open("S/c", as_="hf", config=big) as checkpoint:
            self.assert_same(checkpoint, model.hf)
        self.assertLess(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, 200_000)  # KiB

    def test_commands_take_packs(self):
        model = Model(6, "qwen3")
        tm.save(megatron(model), "S/c")
        os.mkdir("with")
        with open("with/config.json", "w") as file:
            json.dump(config("qwen3"), file)
        shown = support.run("map", "check", "hf", "S/c", "--with", "with")
        self.assertIn("model.layers.2.self_attn.k_proj.weight  f32 [8, 24]  <- decoder.layers.self_attention.linear_qkv.weight"
                      " : l (groups (q + k + v) h) d", shown)
        self.assertIn("dropped: optimizer.state.exp_avg.decoder.final_layernorm.weight", shown)
        self.assertIn("left out: 72 of 384 cells of embedding.word_embeddings.weight (rules[0] (line", shown)
        self.assertIn("every cell of the others that is not left out is used once", shown)
        for words, why in ((("--with", "nowhere"), "nowhere"), (("--set", "heads=6", "--set", "heads=5"), "given twice")):
            with self.assertRaisesRegex(AssertionError, why):
                support.run("map", "check", "hf", "S/c", "--with", "with", *words)
        for command in (("load", "S/c", "--ranks", "1", "--shard", "rows"), ("diff", "S/c", "S/c")):
            with self.assertRaisesRegex(AssertionError, "NOT_FOUND: .*missing"):
                support.run(*command, "--as", "hf", "--with", "missing", "--set", f"heads={HEADS}", "--set", f"groups={GROUPS}",
                            "--set", f"head_dim={HEAD}", "--set", f"vocab={VOCAB}")
        if os.path.exists("/dev/fuse"):
            os.mkdir("mnt")
            # The checkpoint is there, and does not fit.
            with self.assertRaisesRegex(AssertionError, "INVALID_ARGUMENT: .*fits none of the known rules"):
                support.run("mount", "S/c", "mnt", "--as", "hf:llama", "--with", "with")
        support.run("export", "S/c", "model", "--to", "hf", "--as", "hf", "--with", "with")
        with tm.open("model") as checkpoint:
            self.assert_same(checkpoint, model.hf)
        support.run("import", "model", "S/back", "--as", "megatron:qwen3", "--with", "with", "--set", "padded_vocab=16")
        support.run("diff", "S/c", "S/back", "--keys", "decoder.*")


if __name__ == "__main__":
    unittest.main()

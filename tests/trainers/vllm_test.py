# SPDX-License-Identifier: Apache-2.0
"""vLLM with `--load-format tensormount`, on CPUs: greedy tokens equal those of a directory of Hugging Face, each rank
reads its own part, and a reload reads what changed. How to run it: docs/testing.md."""

import atexit
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "python"))

if importlib.util.find_spec("vllm") is None:
    raise unittest.SkipTest("not installed: vllm")

os.environ.update({
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
})
if __name__ != "__main__" or "--tp" not in sys.argv:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # One process, if it is one rank.

import support
import tensormount as tm

HERE = os.path.abspath(__file__)
PROMPTS = [[1, 5, 9, 77, 3, 100, 42, 8], [120, 2, 2, 64, 31, 7, 0, 127]]
TRAINERS = os.environ.get("TENSORMOUNT_TRAINERS_PYTHON")
EXTENSION = "tensormount.vllm.WorkerExtension"


def provide_entry_point():
    """If the package runs from the tree, an entry point like the wheel's, for this process and those of vLLM."""
    from importlib.metadata import entry_points

    if any(one.value == "tensormount.vllm:register" for one in entry_points(group="vllm.general_plugins")):
        return
    directory = tempfile.mkdtemp(dir=os.environ.get("TENSORMOUNT_TEST_TMPDIR"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    about = os.path.join(directory, "tensormount_tree-0.dist-info")
    os.mkdir(about)
    with open(os.path.join(about, "METADATA"), "w", encoding="utf-8") as file:
        file.write("Metadata-Version: 2.1\nName: tensormount-tree\nVersion: 0\n")
    with open(os.path.join(about, "entry_points.txt"), "w", encoding="utf-8") as file:
        file.write("[vllm.general_plugins]\ntensormount = tensormount.vllm:register\n")
    sys.path.append(directory)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), directory]))


def engine(model, tp=1, **options):
    from vllm import LLM

    return LLM(model=model, tensor_parallel_size=tp, skip_tokenizer_init=True, enforce_eager=True, max_model_len=64,
               disable_log_stats=True, **options)


def loading(source=None, tp=1, **options):
    """Options of an engine that loads by tensormount."""
    extra = dict(options, **({} if source is None else {"source": source}))
    return {"load_format": "tensormount", "model_loader_extra_config": extra, "worker_extension_cls": EXTENSION}


def tokens(llm):
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=12, detokenize=False)
    found = llm.generate([{"prompt_token_ids": one} for one in PROMPTS], greedy, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in found]


# ---- Models of random weights --------------------------------------------------------------------

SIZES = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
             head_dim=32, vocab_size=512, rms_norm_eps=1e-5, max_position_embeddings=256)
EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True,
               decoder_sparse_step=1, mlp_only_layers=[])
# Keys that differ in the second checkpoint of each model: one that vLLM fuses with others, and one of its own.
CHANGED = {
    "llama": ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight"],
    "llama-tied": ["model.embed_tokens.weight"],
    "qwen3": ["model.layers.2.mlp.up_proj.weight", "model.layers.3.self_attn.q_norm.weight"],
    "qwen3-moe": ["model.layers.1.mlp.experts.3.up_proj.weight", "model.layers.3.input_layernorm.weight"],
}
# Tensors that vLLM has in one layer with those.
READ_WITH = {"llama": 3 + 1, "llama-tied": 1, "qwen3": 2 + 1, "qwen3-moe": 8 * 3 + 1}


def save_models():
    """MODEL, its changed copy MODEL-B, and stores STORE/MODEL.1 and .2 with names of Hugging Face."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    configs = {
        "llama": transformers.LlamaConfig(**SIZES, tie_word_embeddings=False),
        "llama-tied": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
        "qwen3": transformers.Qwen3Config(**SIZES, tie_word_embeddings=False),
        "qwen3-moe": transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, tie_word_embeddings=False),
    }
    for name, config in configs.items():
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(float(parameter.dim() == 1), 0.1 if parameter.dim() == 1 else 0.15)
        model.save_pretrained(name)
        shutil.copytree(name, name + "-B")
        weights = load_file(name + "/model.safetensors")
        for key in CHANGED[name]:
            weights[key] = weights[key].roll(7, 0) * 1.25
        save_file(weights, name + "-B/model.safetensors", metadata={"format": "pt"})
        support.run("import", name, f"STORE/{name}.1")
        support.run("import", name + "-B", f"STORE/{name}.2")
    for name, family in (("llama", "llama"), ("qwen3", "qwen3"), ("qwen3-moe", "qwen3_moe")):
        support.run("import", name, f"MEGATRON/{name}", "--as", f"megatron:{family}", "--with", name,
                    "--set", "padded_vocab=640")


class Vllm(support.Folder):
    maxDiff = None

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        provide_entry_point()
        save_models()
        cls.expected = {}

    def of_directory(self, model):
        """The tokens of a directory of Hugging Face, by vLLM's own loader."""
        if model not in self.expected:
            self.expected[model] = tokens(engine(model))
            for one in self.expected[model]:
                self.assertGreater(len(set(one)), 2, "the model generates hardly anything")
        return self.expected[model]

    def check(self, model, source=None, expected=None, **options):
        # Before the other engine, because vLLM has one in a process.
        self.of_directory(expected or model)
        llm = engine(model, **loading(source, **options))
        self.assertEqual(tokens(llm), self.of_directory(expected or model), (model, source, options))
        (about,) = llm.collective_rpc("loaded_checkpoint")
        with self.subTest(model=model, source=source, options=options):
            print(f"{model} from {source} {options}: {about['bytes']} bytes in {about['reads']} reads, "
                  f"{about['bytes'] / about['parameter_bytes']:.4f} of the parameters")
            self.assertEqual(about["bytes"], about["parameter_bytes"])
        return llm

    # ---- Tokens and bytes --------------------------------------------------------------------

    def test_stores_with_names_of_hugging_face(self):
        for model in CHANGED:
            self.check(model, f"STORE/{model}.1")

    def test_megatron_checkpoints_and_both_forms_of_experts(self):
        for model in ("llama", "qwen3"):
            self.check(model, f"MEGATRON/{model}", **{"as": "hf"})
        for split in (0, 1):
            self.check("qwen3-moe", f"MEGATRON/qwen3-moe", **{"as": "hf", "numbers": {"split": split}})
        # The configuration comes from the model's directory.
        with tm.open("MEGATRON/qwen3") as checkpoint:
            tm.save({key: tensor.torch() for key, tensor in checkpoint.items()}, "BARE/plain")
        self.check("qwen3", "BARE/plain", **{"as": "hf"})

    def test_directories_and_mounts_without_a_source(self):
        self.check("llama")
        os.mkdir("MNT")
        support.run("mount", "MEGATRON", "MNT", "--as", "hf")
        try:
            # First without the plug-in, as any program would read the mount.
            self.assertEqual(tokens(engine("MNT/qwen3-moe/hf")), self.of_directory("qwen3-moe"))
            self.check("MNT/qwen3-moe/hf", expected="qwen3-moe")
            self.assertEqual(tokens(engine("MNT/latest/hf")), self.of_directory("qwen3-moe"))
        finally:
            support.run("unmount", "MNT")

    def test_tied_embeddings_under_either_name(self):
        import torch
        from safetensors.torch import load_file

        weights = load_file("llama-tied/model.safetensors")
        table = weights["model.embed_tokens.weight"]
        tm.save({**weights, "lm_head.weight": table}, "TIED/one-key")  # Stored once, as lm_head.weight.
        with tm.open("TIED/one-key") as checkpoint:
            self.assertNotIn("model.embed_tokens.weight", checkpoint.keys())
        self.check("llama-tied", "TIED/one-key")
        tm.save({**weights, "lm_head.weight": table.clone()}, "TIED/two-keys")
        self.check("llama-tied", "TIED/two-keys")
        tm.save({**weights, "lm_head.weight": torch.zeros_like(table)}, "TIED/differ")
        with self.assertRaisesRegex(tm.LayoutError, "tie_word_embeddings is true"):
            engine("llama-tied", **loading("TIED/differ"))

    def test_wrong_options_and_sources_are_named(self):
        with self.assertRaisesRegex(ValueError, "no option 'sauce'; it has source, as, from"):
            engine("llama", **loading("STORE/llama.1", sauce=1))
        with self.assertRaisesRegex(ValueError, 'add "as": "hf"'):
            engine("llama", **loading("MEGATRON/llama"))
        with self.assertRaises(tm.CheckpointNotFoundError):
            engine("llama", **loading("STORE/nothing"))
        with tm.open("STORE/llama.1") as checkpoint:
            weights = {key: one.torch() for key, one in checkpoint.items() if "layers.2.mlp" not in key}
        tm.save(weights, "PART/step-1")
        with self.assertRaisesRegex(tm.KeyNotFoundError, "not stored for these parameters: model.layers.2.mlp"):
            engine("llama", **loading("PART/step-1"))

    @unittest.skipUnless(TRAINERS, "TENSORMOUNT_TRAINERS_PYTHON is not set: a Python with Megatron-Core")
    def test_steps_of_real_megatron_runs(self):
        import torch
        from safetensors.torch import load_file

        os.mkdir("TRAINED")
        done = subprocess.run([TRAINERS, "-W", "ignore", os.path.join(os.path.dirname(HERE), "vllm_megatron.py")],
                              cwd="TRAINED", capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout[-4000:] + done.stderr[-8000:])
        print(done.stdout, end="")
        for name in ("llama", "qwen3_moe"):
            model, saved = f"TRAINED/HF/{name}", f"TRAINED/RUN/{name}/tm-state"
            weights = load_file(f"{model}/model.safetensors")
            with tm.open(saved, as_="hf", config=model) as checkpoint:
                self.assertEqual(sorted(checkpoint.keys()), sorted(weights))
                for key, weight in weights.items():
                    self.assertTrue(torch.equal(checkpoint[key].torch(), weight), key)
            for source in (saved, f"TRAINED/OWN/{name}"):
                self.check(model, source, **{"as": "hf"})
            self.check_two_ranks(model, [{"source": saved, "as": "hf"}])

    # ---- Reloads -----------------------------------------------------------------------------

    def reload(self, llm, model, read, path=None):
        llm.collective_rpc("reload_weights", kwargs={} if path is None else {"weights_path": path})
        self.assertEqual(tokens(llm), self.of_directory(model))
        (about,) = llm.collective_rpc("loaded_checkpoint")
        self.assertEqual(about["tensors"], read)
        return about

    def test_reloads_read_the_layers_that_changed(self):
        for model in CHANGED:
            with self.subTest(model=model):
                self.assertNotEqual(self.of_directory(model), self.of_directory(model + "-B"))
                llm = self.check(model, f"STORE/{model}.1")
                about = self.reload(llm, model + "-B", READ_WITH[model], f"STORE/{model}.2")
                with tm.open(f"STORE/{model}.2") as checkpoint:
                    self.assertEqual(about["uuid"], checkpoint.uuid)
                self.assertEqual(self.reload(llm, model + "-B", 0)["bytes"], 0)
                self.reload(llm, model, READ_WITH[model], f"STORE/{model}.1")
                self.reload(llm, model + "-B", len(tm.open(model).keys()), model + "-B")  # It has no digests.
                # The end of an engine ends the process groups of the next one.
                del llm

    def test_latest_is_looked_up_at_each_reload(self):
        support.run("import", "llama", "RUN/step-1")
        self.of_directory("llama-B")
        llm = self.check("llama", "RUN/latest")
        support.run("import", "llama-B", "RUN/step-2")
        about = self.reload(llm, "llama-B", READ_WITH["llama"])
        self.assertTrue(about["path"].endswith("RUN/step-2"))
        self.assertEqual(self.reload(llm, "llama-B", 0)["uuid"], about["uuid"])
        llm.collective_rpc("forget_checkpoint")
        self.reload(llm, "llama-B", about["of_tensors"])

    def test_mapped_checkpoints_compare_the_stored_tensors(self):
        with tm.open("MEGATRON/llama") as checkpoint:
            weights = {key: one.torch() for key, one in checkpoint.items()}
        weights["decoder.final_layernorm.weight"] = weights["decoder.final_layernorm.weight"].roll(5)
        weights["decoder.layers.self_attention.linear_proj.weight"].mul_(1.5)
        tm.save(weights, "MEGATRON/llama-2")
        support.run("export", "MEGATRON/llama-2", "llama-2", "--to", "hf", "--as", "hf", "--with", "llama")
        self.of_directory("llama-2")
        llm = self.check("llama", "MEGATRON/llama", **{"as": "hf"})
        self.reload(llm, "llama-2", 4 + 1, "MEGATRON/llama-2")

    def test_a_reload_that_failed_is_followed_by_one_of_everything(self):
        self.of_directory("llama-B")
        llm = self.check("llama", "STORE/llama.1")
        support.run("import", "llama-B", "BAD/step-1", "--ranks", "1")
        support.damage("BAD/step-1", "model.layers.1.self_attn.k_proj.weight", b"\xff\x00\xff")
        with self.assertRaisesRegex(Exception, "DATA_LOSS"):
            llm.collective_rpc("reload_weights", kwargs={"weights_path": "BAD/step-1"})
        self.assertEqual(llm.collective_rpc("loaded_checkpoint"), [{}])
        self.reload(llm, "llama-B", 39, "STORE/llama.2")
        self.reload(llm, "llama", READ_WITH["llama"], "STORE/llama.1")

    # ---- Two ranks ---------------------------------------------------------------------------

    def two_ranks(self, steps):
        """Runs the steps in a process of their own, whose engine has two ranks. The printed results."""
        done = subprocess.run([sys.executable, HERE, "--tp", json.dumps(steps)], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout[-4000:] + done.stderr[-8000:])
        return [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]

    def check_two_ranks(self, model, extras, reload=None):
        """Tokens and bytes with each of these options of tensormount; the printed results of each."""
        expected, *found = self.two_ranks(
            [[model, None, None, False], *([model, extra, reload, False] for extra in extras)])
        for extra, (generated, loaded, _, _) in zip(extras, found):
            self.assertEqual(generated, expected[0])
            for about in loaded:
                print(f"{model} {extra}: {about['bytes']} of {about['parameter_bytes']} bytes on one of 2 ranks")
                self.assertEqual(about["bytes"], about["parameter_bytes"])
        return found

    def test_two_ranks_read_their_own_halves(self):
        megatron = {"source": "MEGATRON/qwen3-moe", "as": "hf"}
        self.check_two_ranks("qwen3-moe", [megatron, {**megatron, "numbers": {"split": 0}}])
        ((_, _, generated, loaded),) = self.check_two_ranks("llama", [{"source": "STORE/llama.1"}], "STORE/llama.2")
        (other, *_), = self.two_ranks([["llama-B", None, None, False]])
        self.assertEqual(generated, other)
        self.assertEqual([one["tensors"] for one in loaded], [READ_WITH["llama"]] * 2)

    def test_expert_parallel_ranks_read_their_own_experts(self):
        # vLLM 0.32 cannot generate with expert parallelism on CPUs.
        for about in self.two_ranks([["qwen3-moe", {"source": "STORE/qwen3-moe.1"}, None, True]])[0][1]:
            print(f"expert parallel: {about['bytes']} of {about['parameter_bytes']} bytes on one of 2 ranks")
            self.assertLessEqual(about["bytes"], 1.02 * about["parameter_bytes"])


def run_two_ranks(steps):
    """[model, options of tensormount or None, path of a reload or None, expert parallel]: prints tokens, what was
    loaded, and both after the reload."""
    for model, extra, path, experts in steps:
        llm = engine(model, tp=2, enable_expert_parallel=experts, **({} if extra is None else loading(**extra)))
        result = [None if experts else tokens(llm), None, None, None]
        if extra is not None:
            result[1] = llm.collective_rpc("loaded_checkpoint")
        if path is not None:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
            result[2:] = tokens(llm), llm.collective_rpc("loaded_checkpoint")
        print("RESULT " + json.dumps(result), flush=True)
        del llm


if __name__ == "__main__":
    if "--tp" in sys.argv:
        run_two_ranks(json.loads(sys.argv[sys.argv.index("--tp") + 1]))
    else:
        unittest.main()

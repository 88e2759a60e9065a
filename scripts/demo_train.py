# SPDX-License-Identifier: Apache-2.0
"""What `scripts/demo --train` runs in Python: torchtitan trains its debug model on CPU ranks, and transformers generates
from the mounted checkpoint.

    demo_train.py prepare             the text and the tokenizer of the debug model, and its configuration MODEL
    demo_train.py train STEPS         on each rank, started by torch.distributed.run
    demo_train.py generate DIRECTORY  a few words from a model directory of Hugging Face
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "tests", "trainers"))


def prepare():
    import torchtitan_cpu
    import transformers

    torchtitan_cpu.make_assets()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file="tests/assets/tokenizer/tokenizer.json", eos_token="</s>")
    tokenizer.save_pretrained("MODEL")
    torchtitan_cpu.hugging_face_config().save_pretrained("MODEL")


def train(steps):
    import torch.distributed as dist
    import torchtitan_cpu

    import tensormount as tm

    manager = tm.torchtitan.CheckpointManager.Config(interval=1, last_save_model_only=False, keep_latest_k=0)
    trainer = torchtitan_cpu.config("RUN", manager, steps=int(steps)).build()
    trainer.train()
    if dist.get_rank() == 0:
        for step, loss in trainer.losses:
            print(f"step {step}: loss {float.fromhex(loss):.3f}", flush=True)
    trainer.close()


def generate(directory):
    import transformers

    model, info = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    wrong = {name: keys for name, keys in info.items() if keys}
    if wrong:
        sys.exit(f"{directory}: {wrong}")
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    tokens = tokenizer("w1 w2 w3", return_tensors="pt", return_token_type_ids=False)
    made = model.generate(**tokens, max_new_tokens=8, do_sample=False)
    print(tokenizer.decode(made[0]))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])

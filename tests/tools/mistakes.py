# SPDX-License-Identifier: Apache-2.0
"""Mistakes that people make at the command line, and what the answer must say.

A line is a command (split as a shell would, without a shell), then what its error must contain: what
is wrong and where, and of the hint what to do. mistakes_test.py runs them; as a program this prints
what a build of the command answers:

  mistakes.py BIN > answers.md
"""

import os
import pathlib
import shlex
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

MISTAKES = """
mout st mnt | mout: no such command | did you mean `tensormount mount`
unmout mnt | unmout: no such command | did you mean `tensormount unmount`
help | help: no such command | `tensormount --help`
verfy st | verfy: no such command | did you mean `tensormount verify`
list st | list: no such command | `tensormount --help`
save m.safetensors st/a | save: no such command | `tensormount --help`
--versoin | --versoin: tensormount has no such option | did you mean --version
'' | no command was given | --help
ls | ls: SOURCE is required | `tensormount ls --help`
cat st/step-1 | cat: KEY | `tensormount cat --help`
import m.safetensors | import: | required | `tensormount import --help`
export st/step-1 out --to | export: --to | `tensormount export --help`
export st/step-1 out | --to is required | `tensormount export --help`
ls --long st | --long: ls has no such option | `tensormount ls --help`
ls --jsno st | --jsno: ls has no such option | did you mean --json
import m.safetensors st/a --rank 2 | --rank: import has no such option | did you mean --ranks
import m.safetensors st/a --shards rows | --shards: import has no such option | did you mean --shard
import m.safetensors st/a --overwrite | --overwrite: import has no such option | --help
mount st mnt --allow_other | --allow_other: mount has no such option | did you mean --allow-other
verify st --quik | --quik: verify has no such option | did you mean --quick
load st/step-1 --ranks x | --ranks | Value x
load st/step-1 --ranks 0 | --ranks | 0
load st/step-1 --ranks -3 | --ranks | -3
load st/step-1 --ranks 1e3 | --ranks | 1e3
load st/step-1 --ranks 5000 | --ranks | 5000
load st/step-1 --shard dim:9 --ranks 2 | --shard dim:9: splits no tensor | at most 2 axes
load st/step-1 --shard grid:2x2x2 --ranks 8 | --shard grid:2x2x2: splits no tensor | at most 2 axes
load st/step-1 --shard grid:2x2 --ranks 3 | is for 4 ranks, but there are 3
load st/step-1 --shard diagonal | shard rule 'diagonal' | rows, cols, dim:K
load st/step-1 --shard dim:-1 | dim:-1
load st/step-1 --shard dim: | dim:
load st/step-1 --shard rows:3 | rows:3 | rows, cols, dim:K
load st/step-1 --shard none.json | none.json
load st/step-1 --shard m.safetensors | m.safetensors
load st/step-1 --keys 'typo*' | --keys 'typo*': no key matches it
load st/step-1 --compare m.safetensors --keys 'typo*' | --keys 'typo*': no key matches it
load st/step-1 --compare nothere | nothere: no such file or directory
load nothere | nothere: no such file or directory
load st/step-1 --map none.json | none.json | No such file
load st/step-1 --map notes.json | notes.json
load st/step-1 --liveness -1 | --liveness
diff st/step-1 | diff: | required
diff st/step-1 nothere | nothere: no such file or directory
diff st/step-1 st/step-2 --keys 'typo*' | --keys 'typo*': no key matches it
diff st/step-1 empty | empty: the directory is empty
log st/step-1 | st/step-1: is a checkpoint; name the store that contains it
log m.safetensors | m.safetensors: is not a store | `tensormount adopt`
log st --show loss,,lr | --show loss,,lr: a path is empty | loss,lr
blame st wte.weigth | no tensor or object wte.weigth in any step of | did you mean wte.weight
watch st/step-1 | st/step-1: is a checkpoint; watch the store that contains it
watch st --since step-9 --once | st/step-9: no such checkpoint
watch st --exec | --exec: a command must follow | `tensormount watch --help`
cat st/step-1 wte.weigth | no tensor wte.weigth | did you mean wte.weight
cat st/step-1 WTE.weight | no tensor WTE.weight | did you mean wte.weight
cat st/step-1 wteweight | no tensor wteweight | did you mean wte.weight
cat st/step-1 nothing.at.all.like.it | no tensor nothing.at.all.like.it | `tensormount ls st/step-1` lists the keys
cat st/step-1 'wte.weight[0:2' | wte.weight[0:2 | a slice ends with a bracket
cat st/step-1 'wte.weight[0:99]' | wte.weight | 99
cat st/step-1 'wte.weight[0:2,0:2,0:2]' | tensor wte.weight: slice [0:2,0:2,0:2] of shape [4, 6] | more parts than axes
cat st/step-1 'wte.weight[a]' | wte.weight | a
cat st/step-1 'wte.weight[::0]' | wte.weight
cat st/step-1 'wte.weight[3:1]' | wte.weight
cat st/step-1 wte.weight --as json | --as json: must be raw, npy or text
cat st/latest2 wte.weight | st/latest2: no such file or directory
cat notes.txt wte.weight | notes.txt
cat st/step-1 '' | no tensor | `tensormount ls st/step-1` lists the keys
ls st/step-1 '' | ls: GLOB: this argument is empty
info st/step-1 '' | info: KEY: this argument is empty
info st/step-1 wte.wieght | no tensor wte.wieght | did you mean wte.weight
info st/step-3 | st/step-3: no such file or directory | did you mean st/step-
layout st/step-1 wte.weigth | wte.weigth | did you mean wte.weight
layout st/step-1 wte.weight --svg nodir/a.svg | nodir/a.svg | No such file
layout st/step-1 | layout: | required
ls nothere | nothere: no such file or directory
ls empty | empty: the directory is empty
ls other | other: | no COMMIT, no store.json
ls notes.txt | notes.txt | not a file of a supported format
ls st/step-1 'typo*' | 'typo*': no key of st/step-1 matches it | `tensormount ls st/step-1`
ls st/step-1 wte.weigth | no key of st/step-1 matches it | did you mean wte.weight
ls st/step-3 | st/step-3: no such file or directory | did you mean st/step-
ls s3://bucket/x | s3://bucket/x | connect
ls ftp://host/x | ftp://host/x: is a URL | https, s3
ls file:///tmp/x | is a URL; pass the path instead: /tmp/x
ls st/step-1/data | st/step-1/data
ls cut.safetensors | cut.safetensors
import m.safetensors s3://bucket/x | save s3://bucket/x: ranks save into a bucket through a staging directory
import m.safetensors gs://b/x | save gs://b/x: ranks save into a bucket through a staging directory
import s3://bucket/x st/a | s3://bucket/x | connect
import m.safetensors st | st: the path must be STORE/NAME
import m.safetensors st/ | st
import m.safetensors st/step-1 | st/step-1 | choose another name, or pass --if-exists replace
import m.safetensors st/step-1/c | cannot create a store there | is a checkpoint
import m.safetensors st/sub/dir/c | cannot create a store there | is a store
import m.safetensors st/latest | latest | reserved
import m.safetensors st/.hidden | .hidden | begins with a dot
import m.safetensors notes.txt/a | notes.txt is not a directory
import m.safetensors st/a --if-exists maybe | --if-exists maybe: must be fail or replace
import m.safetensors st/a --placement fast | --placement fast
import m.safetensors st/a --shard dim:9 --ranks 2 | --shard dim:9: splits no tensor
import nothere st/a | nothere: no such file or directory
import st st/a --map none.json | none.json | No such file
import cut.safetensors st/a | cut.safetensors
export st/step-1 out --to pickle | --to pickle: must be one of safetensors, hf, npy
export st/step-1 m.safetensors --to safetensors | m.safetensors
export st/step-1 nodir/out --to npy | nodir | No such file
export st/step-1 out --to npy --hf-part-size 1GB | --hf-part-size and --hf-rules require --to hf
export st/step-1 out --to hf --hf-part-size many | many
export st/step-1 https://x/y --to npy | https://x/y: storage behind a URL is read-only
export nothere out --to npy | nothere: no such file or directory
adopt m.safetensors st/step-1 | st/step-1
adopt m.safetensors bare | adopt bare: the path must be STORE/NAME
adopt st/step-1 st/a | st/step-1: already a tensormount checkpoint | `tensormount import`
adopt empty st/a | empty: the directory is empty
adopt m.safetensors s3://x/y | s3://x: only saves, imports and copies make checkpoints in a bucket
mount nothere mnt | nothere: no such file or directory
mount st nomnt | mount point nomnt: no such directory
mount empty mnt | `tensormount init empty` makes this directory a store | the directory is empty
mount st full | full
mount st mnt --verify sometimes | --verify sometimes
mount st mnt --tier fast | --tier fast
unmount mnt | mnt
stats mnt | mnt
verify nothere | nothere: no such file or directory
verify empty | empty: the directory is empty
rm st/step-3 | st/step-3: no such checkpoint; nothing was removed | `tensormount ls st`
rm st | st: is a store; name a checkpoint in it, st/NAME; nothing was removed
rm nothere/a | nothere | No such file
gc nothere | nothere | No such file
gc other | other: not a store
gc st --grace -1 | --grace
fsck nothere | nothere | No such file
fsck m.safetensors | m.safetensors
publish st/.staging/none | none
publish st/step-1 | st/step-1
check none.json | none.json | No such file
check notes.json | notes.json
init https://x/y | https://x/y: storage behind a URL is read-only
init st/step-1 | cannot create a store there
init notes.txt | notes.txt is not a directory
compact st/a | compact: this command is not implemented yet
"""

def commands():
    """(words, texts that the error must contain), in the order of the table."""
    out = []
    for line in MISTAKES.strip().splitlines():
        command, *says = [part.strip() for part in line.split(" | ")]
        out.append((shlex.split(command), says))
    return out

def make_world(tool, folder):
    """What the commands are tried on."""
    import numpy as np
    from harness import write_safetensors

    wte = np.arange(24, dtype="<f4").reshape(4, 6)
    tensors = {"wte.weight": ("F32", (4, 6), wte.tobytes()), "b": ("F32", (3,), wte.tobytes()[:12])}
    write_safetensors(folder / "m.safetensors", tensors)
    (folder / "cut.safetensors").write_bytes((folder / "m.safetensors").read_bytes()[:50])
    (folder / "notes.txt").write_text("to do\n")
    (folder / "notes.json").write_text('"to do"\n')
    for name in ["empty", "other", "mnt", "full"]:
        (folder / name).mkdir()
    (folder / "other" / "notes.txt").write_text("to do\n")
    (folder / "full" / "notes.txt").write_text("to do\n")
    for name in ["step-1", "step-2"]:
        subprocess.run([tool, "import", "m.safetensors", f"st/{name}"], cwd=folder, check=True, capture_output=True)

def answer(tool, folder, words):
    """(exit status, standard error)."""
    done = subprocess.run([tool, *words], cwd=folder, capture_output=True, stdin=subprocess.DEVNULL, timeout=60,
                          errors="replace",  # Nothing answers at this port, and the network is not asked.
                          env={**os.environ, "HOME": str(folder), "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
                               "AWS_EC2_METADATA_DISABLED": "true"})
    return done.returncode, done.stderr.strip()

def main():
    tool = str(pathlib.Path(sys.argv[1]).resolve() / "tensormount")
    for words, says in commands():
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            make_world(tool, folder)
            status, error = answer(tool, folder, words)
            subprocess.run(["umount", "-l", str(folder / "mnt")], capture_output=True)
        told = all(text in error for text in says)
        print(f"| `{shlex.join(words)}` | {status} | {error.replace(name, '')} | {told}".replace("\n", "<br>"))

if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Saves the state of make_torch.py with OLMo-core: make_olmo.py FOLDER."""

import importlib.machinery
import pathlib
import sys
import types

# Of what it imports for storage in the cloud nothing is used here.
ABSENT = {"cached_path", "boto3", "botocore", "google", "pandas", "s3transfer"}


class AnyName(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return AnyName(name, (Exception,), {})


class Standin(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return AnyName(name, (Exception,), {})


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Standin(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(Finder())

from olmo_core.distributed import checkpoint  # noqa: E402

import make_torch  # noqa: E402
import ranks  # noqa: E402


def make(rank, count, folder):
    checkpoint.save_state_dict(f"{folder}/model_and_optim", make_torch.state(rank, count))


def main():
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    ranks.run(4, make, str(folder))
    # As its trainer ends a save.
    (folder / ".metadata.json").write_text('{"version": "3.0.0", "ephemeral": false}')


if __name__ == "__main__":
    main()

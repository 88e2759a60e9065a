# SPDX-License-Identifier: Apache-2.0
"""A model loader for vLLM: `--load-format tensormount` (docs/serving.md).

    vllm serve MODEL --load-format tensormount --model-loader-extra-config '{"source": "STORE/latest"}'

Each rank reads its own part of every weight. `reload_weights` reads only what changed. If tensormount is installed,
vLLM finds the loader by itself (entry point vllm.general_plugins); otherwise call `register()` in every process.

Tested with vLLM 0.32.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, Optional

import torch
import vllm
from vllm.logger import init_logger
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.platforms import current_platform

from tensormount import _plugins, _refit
from tensormount._checkpoint import Checkpoint
from tensormount._checkpoint import open as open_checkpoint
from tensormount._load import listed
from tensormount.errors import (
    CheckpointNotFoundError,
    InvalidArgumentError,
    KeyNotFoundError,
    LayoutError,
    StaleError,
    UnsupportedError,
)
from tensormount.torch._lazy import LazyReads

TESTED = ("0.32",)
FORMAT = "tensormount"

# Below "vllm", whose messages vLLM shows.
_logger = init_logger("vllm.tensormount")

# Keys of model_loader_extra_config, and their options of tensormount.open.
_OPTIONS = {
    "as": "as_", "from": "from_", "names": "names", "numbers": "numbers", "config": "config", "roots": "roots",
    "file": "file",
}
# Bytes of two stored tensors that are compared at a time.
_COMPARED_BYTES = 4 << 20


def register() -> None:
    """Makes vLLM know `--load-format tensormount`. vLLM calls it in each of its processes."""
    _plugins.check_version("vLLM", vllm.__version__, TESTED)
    from vllm.model_executor import model_loader

    if model_loader._LOAD_FORMAT_TO_MODEL_LOADER.get(FORMAT) is not Loader:
        register_model_loader(FORMAT)(Loader)


def loaded(model: Any) -> dict[str, Any]:
    """The checkpoint whose weights a model of vLLM has, of the rank that calls it.

    path, uuid      of the checkpoint; uuid None: a format of another program.
    bytes, reads    read from it for this rank.
    tensors         keys that were read, or offered to the model; of `of_tensors` in the checkpoint.
    parameter_bytes bytes of this rank's parameters.

    Empty if the model was not loaded by tensormount, its last reload failed, or `forget` was called.
    """
    record = _records.get(model)
    return record.about() if record is not None and record.complete else {}


def forget(model: Any) -> None:
    """Makes the next reload of a model read everything: other calls have written to its weights."""
    record = _records.get(model)
    if record is not None:
        record.complete = False


class WorkerExtension:
    """With LLM(worker_extension_cls="tensormount.vllm.WorkerExtension") these are calls of `llm.collective_rpc`."""

    def loaded_checkpoint(self) -> dict[str, Any]:
        """`loaded`, of each rank."""
        return loaded(self.model_runner.get_model())  # type: ignore[attr-defined]

    def forget_checkpoint(self) -> None:
        """`forget`, on each rank."""
        forget(self.model_runner.get_model())  # type: ignore[attr-defined]


class Loader(BaseModelLoader):
    """vLLM's model loader for checkpoints that tensormount opens.

    Options of model_loader_extra_config:

    source   the checkpoint: "STORE/step-100", "STORE/latest", or what `tensormount.open` opens. Default: the
             model's path.
    as, from, names, numbers, config, roots, file
             as of `tensormount.open` (as: as_, from: from_). `names` may also be the path of a JSON file of rules.
             Default of `config`, if `as` is given: config.json of the model.

    Raises ValueError (tensormount.InvalidArgumentError) for any other option.
    """

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        given = load_config.model_loader_extra_config or {}
        if not isinstance(given, Mapping):
            raise InvalidArgumentError(f"model_loader_extra_config={given!r}: a dict was expected")
        unknown = [name for name in given if name not in _OPTIONS and name != "source"]
        if unknown:
            raise InvalidArgumentError(
                f"model_loader_extra_config: load format {FORMAT} has no option {unknown[0]!r}; it has source, "
                + ", ".join(_OPTIONS)
            )
        self._given = dict(given)

    # ---- What vLLM calls ---------------------------------------------------------------------

    def download_model(self, model_config: Any) -> None:
        """Nothing: the checkpoint is read in place."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Loads all weights of this rank."""
        record = self._begin(model, model_config)
        try:
            done = model.load_weights(record.weights())
        except ValueError as error:
            if "no module or parameter named" in str(error) and not self._given.keys() & {"as", "names"}:
                raise InvalidArgumentError(
                    f"{record.path}: {error} For a checkpoint of a trainer add \"as\": \"hf\", or rules in \"names\", "
                    "to model_loader_extra_config (docs/mapping.md)"
                ) from error
            raise
        if model_config.quantization is None:
            _check_complete(model, done, record)
        _logger.info("Loaded %s", record.text())

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights for `reload_weights`: only those of layers of which a tensor changed, if the model was loaded by
        this loader."""
        before = _records.get(model)
        half = _end_failed_reload(model)
        record = self._begin(model, model_config)
        record.choose(None if half else before)
        return record.weights()

    # ---- Implementation ----------------------------------------------------------------------

    def _begin(self, model: Any, model_config: Any) -> _Record:
        if getattr(model, "secondary_weights", ()):
            raise UnsupportedError(
                f"{type(model).__name__} loads weights from several sources, which load format {FORMAT} does not "
                "support: use load format auto on a mount's hf/"
            )
        before = _records.get(model)
        first = before.first_path if before is not None else model_config.model
        # reload_weights(weights_path=...) has replaced the model's path.
        moved = model_config.model != first
        source = model_config.model if moved else self._given.get("source", model_config.model)
        checkpoint = _the_same_on_all_ranks(source, lambda path: self._open(path, first, model_config))
        _check_tied(checkpoint, model_config)
        return _Record(checkpoint, model, first)

    def _open(self, source: str, model_path: str, model_config: Any) -> Checkpoint:
        options: dict[str, Any] = {_OPTIONS[name]: value for name, value in self._given.items() if name != "source"}
        names = options.get("names")
        if isinstance(names, str):
            with open(names, encoding="utf-8") as file:
                options["names"] = json.load(file)
        if options.get("as_") is not None:
            # The same for all checkpoints of a model, so that a reload can compare them.
            options.setdefault("config", _config_of(model_path, model_config))
        return open_checkpoint(source, **options)


def _the_same_on_all_ranks(source: str, opened: Callable[[str], Checkpoint]) -> Checkpoint:
    """Opens what rank 0 opens: "STORE/latest" may be another checkpoint a moment later."""
    from vllm.distributed import get_world_group

    group = get_world_group()
    if group.world_size == 1:
        return opened(source)
    if group.rank_in_group == 0:
        try:
            checkpoint = opened(source)
        except Exception as error:
            group.broadcast_object((None, str(error)))
            raise
        group.broadcast_object((checkpoint.path, checkpoint.uuid))
        return checkpoint
    path, uuid = group.broadcast_object()
    if path is None:
        raise CheckpointNotFoundError(f"{source}: rank 0 cannot open it: {uuid}")
    checkpoint = opened(path)
    if checkpoint.uuid != uuid:
        raise StaleError(
            f"{path}: the checkpoint was replaced while the ranks opened it (uuid {uuid}, now {checkpoint.uuid})"
        )
    return checkpoint


def _config_of(model_path: str, model_config: Any) -> Mapping[str, Any]:
    path = os.path.join(model_path, "config.json")
    if os.path.isfile(path):
        with open(path, encoding="utf-8") as file:
            found: dict[str, Any] = json.load(file)
            return found
    return dict(model_config.hf_config.to_dict())


def _check_tied(checkpoint: Checkpoint, model_config: Any) -> None:
    """LayoutError: the configuration ties the output layer to the embedding, but the checkpoint has two different
    tensors for them. vLLM would use the embedding for both."""
    if not getattr(model_config.hf_config, "tie_word_embeddings", False):
        return
    head, table = checkpoint.get("lm_head.weight"), checkpoint.get("model.embed_tokens.weight")
    if head is None or table is None:
        return
    if (head.dtype_name, head.shape) == (table.dtype_name, table.shape):
        if head.digest is not None and table.digest is not None:
            if head.digest == table.digest:
                return
        elif all(
            head.read_bytes(at, min(_COMPARED_BYTES, head.nbytes - at))
            == table.read_bytes(at, min(_COMPARED_BYTES, head.nbytes - at))
            for at in range(0, head.nbytes, _COMPARED_BYTES)
        ):
            return
    raise LayoutError(
        f"{checkpoint.path}: tie_word_embeddings is true in the model's configuration, but lm_head.weight and "
        "model.embed_tokens.weight differ: set it to false (--hf-overrides '{\"tie_word_embeddings\": false}')",
        key="lm_head.weight",
    )


def _check_complete(model: Any, done: Optional[Container[str]], record: _Record) -> None:
    """KeyNotFoundError: a parameter of a model that is not quantised got no value. vLLM's own check excepts linear
    layers. `done`: the parameters that vLLM loaded, if the model tells."""
    parameters = dict(model.named_parameters())
    cells = record.reads.cells
    absent, partial = [], []
    for name, parameter in parameters.items():
        loaded = cells.get(_storage(parameter), 0)
        if loaded == 0 and parameter.numel() and (done is None or name not in done):
            absent.append(name)
        # The rows that pad a vocabulary are not stored.
        elif 0 < loaded < parameter.numel() and not hasattr(_owner(model, name), "org_vocab_size"):
            partial.append(f"{name} ({loaded} of {parameter.numel()} elements)")
    if absent:
        raise KeyNotFoundError(f"{record.path}: not stored for these parameters: {listed(absent)}", key=absent[0])
    if partial:
        _logger.warning("%s: stored in part for these parameters: %s", record.path, listed(partial))


def _owner(model: Any, name: str) -> Any:
    return model.get_submodule(name.rpartition(".")[0])


class _Record:
    """A load of a model: which checkpoint, and what became of each of its tensors."""

    def __init__(self, checkpoint: Checkpoint, model: Any, first_path: str) -> None:
        self.path, self.uuid = checkpoint.path, checkpoint.uuid
        self.first_path = first_path  # The model's path at its first load.
        self.complete = False
        self.keys = checkpoint.keys()
        self.fingerprints = _refit.fingerprints(checkpoint, _refit.facts(checkpoint, self.keys))
        # The layers into which each tensor was loaded on this rank, by name; None: not known.
        self.layers: dict[str, Optional[frozenset[str]]] = {}
        self.chosen = list(self.keys)
        self.reads = _Destinations()
        self._checkpoint: Optional[Checkpoint] = checkpoint
        self._model = weakref.ref(model)
        # Before a reload takes the parameters out of the model.
        self._tied = _tied_names(model)
        self._is_reload = False
        self._changed: Optional[int] = None
        self._reason = ""
        # Counted before vLLM turns the weights into forms of its kernels.
        self._parameter_bytes = sum(one.numel() * one.element_size() for one in model.parameters())

    def about(self) -> dict[str, Any]:
        return {
            "path": self.path, "uuid": self.uuid, "bytes": self.reads.bytes,
            "reads": self.reads.reads, "tensors": len(self.chosen), "of_tensors": len(self.keys),
            "parameter_bytes": self._parameter_bytes,
        }

    def text(self) -> str:
        about = self.about()
        return (
            f"{about['path']} (uuid {about['uuid']}): {about['tensors']} of {about['of_tensors']} tensors, "
            f"{about['bytes']} bytes read in {about['reads']} reads; parameters of this rank: "
            f"{about['parameter_bytes']} bytes"
        )

    def choose(self, before: Optional[_Record]) -> None:
        """Leaves out tensors of layers in which nothing changed since `before`.

        vLLM builds a layer that gets any weight anew, from nothing. So all tensors of such a layer are read.
        """
        self._is_reload = True
        self._reason = "the model was not loaded by tensormount, or its last reload failed"
        if before is None:
            return
        self._parameter_bytes = before._parameter_bytes
        if not before.complete:
            self._reason = "its last reload failed, or its weights were changed otherwise"
        elif _other_writers():
            self._reason = _other_writers()
        elif before.keys != self.keys:
            self._reason = "the checkpoints have other tensors"
        else:
            old, new = before.fingerprints, self.fingerprints
            changed = {key for key in self.keys if new[key] is None or new[key] != old[key]}
            self._changed = len(changed)
            unknown = [key for key in self.keys if before.layers.get(key) is None]
            if unknown and changed:
                self._reason = f"it is not known into which layer {unknown[0]} is loaded"
                return
            self.layers = dict(before.layers)
            self._reason = ""
            self.chosen = _with_their_layers(changed, before.layers, self.keys)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The chosen tensors as lazy ones, under the names that the model asks for."""
        model, checkpoint = self._model(), self._checkpoint
        if model is None or checkpoint is None:
            return
        self._checkpoint = None  # Lazy tensors keep it open; what is kept here must not keep it from being removed.
        _records[model] = self  # Not complete: until the end the model has weights of two checkpoints.
        twice = set()
        if self._is_reload and current_platform.is_cpu():
            touched = None if not self.layers else {name for key in self.chosen for name in self.layers[key] or ()}
            _forget_packed_experts(model, touched)
            # The output layer has a packed copy of the tied weights, which vLLM makes anew only if it loads them.
            twice = set(self._tied)
        if self._changed is not None:
            _logger.info(
                "Reloading from %s (uuid %s): %d of %d tensors changed, %d are read with their layers%s",
                self.path, self.uuid, self._changed, len(self.keys), len(self.chosen),
                f" ({self._reason})" if self._reason else "",
            )
        elif self._reason:
            _logger.info("Reloading all from %s (uuid %s): %s", self.path, self.uuid, self._reason)
        self.reads.watch(model)
        for name, key in self._names(twice):
            yield name, checkpoint[key].lazy(self.reads)
        if not self.layers:
            # A tensor that this rank did not read has no layer here.
            self.layers = {key: self.reads.layers_of(key) for key in self.keys}
        self.complete = True

    def _names(self, twice: Container[str]) -> Iterator[tuple[str, str]]:
        """Pairs of vLLM's name and the key of the chosen tensors. A tied tensor that the checkpoint has only under the
        name that vLLM leaves out is given the other one. `twice`: tied names that are not left out."""
        known, chosen = frozenset(self.keys), frozenset(self.chosen)
        instead = {other: name for other, name in self._tied.items() if name not in known}
        for key in self.chosen:
            yield instead.get(key, key), key
        for other, name in self._tied.items():
            key = name if name in known else other
            if other in twice and key in chosen and (other not in chosen or other in instead):
                yield other, key


_records: weakref.WeakKeyDictionary[Any, _Record] = weakref.WeakKeyDictionary()


class _Destinations(LazyReads):
    """Notes into which layers tensors are copied: layers, because vLLM fuses and renames parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.cells: dict[int, int] = {}  # Elements copied into the memory of parameters.
        self._owners: dict[int, frozenset[str]] = {}
        self._layers: dict[str, frozenset[str]] = {}
        self._unknown: set[str] = set()  # Elements of these went through other operations than copies.
        self._copies: set[str] = set()

    def watch(self, model: Any) -> None:
        """Looks up the memory of the model's parameters, as they are now."""
        owners: dict[int, set[str]] = {}
        for name, module in model.named_modules():
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    owners.setdefault(_storage(tensor), set()).add(name)
        self._owners = {storage: frozenset(names) for storage, names in owners.items()}

    def _copied(self, key: str, destination: torch.Tensor) -> None:
        storage = _storage(destination)
        names = self._owners.get(storage)
        if names is not None:
            self.cells[storage] = self.cells.get(storage, 0) + destination.numel()
            self._layers[key] = self._layers.get(key, frozenset()) | names
        self._copies.add(key)

    def _kept(self, key: str) -> None:
        self._unknown.add(key)

    def layers_of(self, key: str) -> Optional[frozenset[str]]:
        """The layers of which a parameter has cells of this tensor on this rank; None: not known."""
        if key in self._unknown:
            return None
        return self._layers.get(key, None if key in self._copies else frozenset())


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _with_their_layers(
    changed: set[str], layers: Mapping[str, Optional[frozenset[str]]], keys: list[str]
) -> list[str]:
    """The changed keys, and all keys that share a layer with one of them. In the order of `keys`."""
    touched: set[str] = set()
    for key in changed:
        touched |= layers[key] or frozenset()
    while True:
        chosen = [key for key in keys if (layers[key] or frozenset()) & touched]
        more = touched.union(*(layers[key] or frozenset() for key in chosen))
        if more == touched:
            return chosen
        touched = more


def _tied_names(model: Any) -> dict[str, str]:
    """Tied weights of a model: the names that vLLM leaves out, and the names that it loads for them."""
    try:
        from vllm.model_executor.models.utils import _get_tied_embedding_params as tied
    except ImportError:
        return {}
    return dict(tied(model))


def _forget_packed_experts(model: Any, layers: Optional[Container[str]]) -> None:
    """For these layers, or all: vLLM 0.32 packs the experts for the CPU's kernels only when it makes their kernel. A
    reload without a new kernel leaves them unpacked, and the model generates other tokens."""
    for name, module in model.named_modules():
        method: Any = getattr(module, "quant_method", None)
        if (layers is None or name in layers) and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _other_writers() -> str:
    """Why weights may not be those of the last load any more; "" if only loads write to them."""
    from vllm.config import get_current_vllm_config

    config = get_current_vllm_config()
    if config.parallel_config.enable_eplb:
        return "experts move between ranks (enable_eplb)"
    if config.model_config.enable_sleep_mode:
        return "sleep may have discarded the weights (enable_sleep_mode)"
    if getattr(config, "weight_transfer_config", None) is not None:
        return "weights may have been transferred (weight_transfer_config)"
    return ""


def _end_failed_reload(model: Any) -> bool:
    """Whether layers still wait for weights of a reload that failed. Gives them their parameters back: vLLM would add
    the weights of the next reload to those that arrived before."""
    try:
        from vllm.model_executor.model_loader.reload import layerwise
    except ImportError:
        return False
    half = False
    for module in model.modules():
        info = layerwise.get_layerwise_info(module)
        if info.can_load():
            half = True
            if info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(module, info)
            info.reset()
    return half

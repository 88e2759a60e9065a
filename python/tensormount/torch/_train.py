# SPDX-License-Identifier: Apache-2.0
"""Saves models and optimizers by the state dicts that PyTorch makes of them."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
from collections.abc import Container, Iterator, Sequence
from typing import Any, NamedTuple, Optional, Union, cast

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _init_optim_state,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from tensormount import _abi, _key_map, _load, _lost, _save, _saver, _stateful, _tree
from tensormount._jobs import log
from tensormount._state import FailedState
from tensormount._tree import PerRank
from tensormount.errors import (
    InvalidArgumentError,
    KeyNotFoundError,
    LayoutError,
    UnsupportedError,
)

PathLike = Union[str, "os.PathLike[str]"]

_OTHER_GROUPS = "the saved optimizer had different parameter groups"


def save(
    path: PathLike,
    *,
    model: Any = None,
    optim: Any = None,
    extra: Any = None,
    group: Any = None,
    ignore_frozen: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Saves a model and its optimizers as checkpoint "STORE/NAME". Collective.

    model     a module, plain or wrapped by FSDP2, tensor parallelism or DDP. Keys are parameter names,
              whatever wraps the module (torch.distributed.checkpoint.state_dict).
    optim     one optimizer of the module, or several.
    extra     further values, as for `tensormount.save`. An item with a state_dict() (a scheduler, a data
              loader; also in dicts, lists and tuples) is saved through it. Put a value or state that
              differs between ranks into PerRank(...).
    ignore_frozen   True: parameters without gradients, and their optimizer states, are left out.
    options   as for `tensormount.save`.

    No optimizer step is taken: an optimizer that has no moments yet is saved without moments, and loads as
    it was. A parameter without gradients has no slots (exp_avg, ...) of its optimizer. A parameter that has
    some slots, but lacks one that others of its group have, is a LayoutError that names both; for
    optimizers outside torch.optim it is a warning in the log, once, because their slots may depend on sizes.

    Returns the report of `tensormount.save`.
    """
    return _save.save(_state_to_save(model, optim, extra, ignore_frozen), path, group, **options)


def async_save(
    path: PathLike,
    *,
    model: Any = None,
    optim: Any = None,
    extra: Any = None,
    group: Any = None,
    ignore_frozen: bool = False,
    saver: Optional[_saver.Saver] = None,
    **options: Any,
) -> _save.SaveJob:
    """Saves in the background: returns a SaveJob when the bytes are copied, and training goes on.

    Parameters as for `save`; see `tensormount.async_save`.

    saver     a `tensormount.Saver`, whose group is used: copies on the devices, limits of memory.
    """
    if saver is None:
        return _save.async_save(_state_to_save(model, optim, extra, ignore_frozen), path, group, **options)
    if not isinstance(saver, _saver.Saver):
        raise InvalidArgumentError(f"saver={saver!r}: a tensormount.Saver was expected")
    if group is not None and group is not saver.group:
        raise InvalidArgumentError("the saver belongs to another group than the one passed as group=")
    return saver.save(_state_to_save(model, optim, extra, ignore_frozen), path, **options)


def load(
    source: PathLike,
    *,
    model: Any = None,
    optim: Any = None,
    extra: Any = None,
    group: Any = None,
    ignore_frozen: bool = False,
    optional: Sequence[str] = (),
    **options: Any,
) -> _load.Loaded:
    """Loads a checkpoint of `save` into a model and its optimizers, on any number of ranks and any mesh.

    Collective. `model`, `optim`, `group` and `ignore_frozen` as for `save`.

    extra     a dict or list like the saved one. Plain values are replaced; an item with a
              load_state_dict() gets its state. A list or tuple with such items must have the saved length,
              or it is a LayoutError on all ranks before anything is loaded.
    optional  globs of keys ("optim.state.*.exp_avg", "extra.sampler*") that may be absent: the model,
              optimizer or `extra` keeps its own, and `not_stored` of the result lists them. Any other key
              that is not stored is a KeyNotFoundError: nothing is kept or reset silently.
    options   as for `tensormount.load`. `not_stored` and `strict_exempt` apply to keys that no glob of
              `optional` matches.

    Parameters added since the save, to a group or as new groups, are not stored: `optional=["*adapter*"]`
    lets them keep their values. Groups are found by the names of their other parameters. An added
    parameter without moments counts as the key "optim.state.NAME". A group that was split or united, or that
    lost parameters, is a LayoutError before anything is loaded.

    Options of a parameter group that the saved group lacks (those of a newer PyTorch, a scheduler's
    "initial_lr") keep the optimizer's values, and `not_stored` lists them.

    An optimizer that has not stepped gets memory for its moments by a step without gradients and with a
    learning rate of 0, as in torch.distributed.checkpoint.state_dict. If its step() needs a closure
    (LBFGS), that is an UnsupportedError. If the load fails, or if the optimizer was saved before its first
    step, it is as before.

    Returns `tensormount.Loaded`. Raises as `tensormount.load`: CheckpointNotFoundError at a first start.
    """
    arguments = {name: options.pop(name) for name in ("objects", "key_map", "progress") if name in options}
    with contextlib.ExitStack() as stack:
        wanted: Any = None
        try:
            key_map = arguments.get("key_map")
            roots = options.get("roots") or ()
            rank = 0 if group is None else group.rank
            wanted = _TrainRequest(stack, source, key_map, roots, model, optim, extra, ignore_frozen)
            _check_extra(extra, source, key_map, roots, rank)
            wanted.check_added(source, optional, options)
            request: Any = wanted.request
        except Exception as error:
            request = FailedState(error)  # The load still begins, so that it fails on all ranks.
        try:
            loaded = _load.load_with(
                request, source, group, cast(_load.LoadOptions, options), optional=optional, **arguments
            )
        except KeyNotFoundError as error:
            if error.key is not None and "optional=" not in error.message:
                error.message += _load.optional_hint([error.key])
            raise
        state = loaded.state
        if optim is not None:
            loaded.not_stored += wanted.take(state["optim"], loaded)
        if model is not None:
            set_model_state_dict(model, state["model"], options=_options(ignore_frozen))
        if optim is not None:
            with _without_implicit_step(wanted.optimizers):
                set_optimizer_state_dict(
                    _module(model), optim, state["optim"], options=_options(ignore_frozen)
                )
            for one in wanted.optimizers:
                _drop_empty(one)
    if extra is not None:
        _stateful.restore(extra, state["extra"])
    return loaded


class _TrainRequest:
    """The request of a `load`, and the data that are needed to complete its result."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        source: PathLike,
        key_map: Optional[_key_map.Rules],
        roots: Sequence[str],
        model: Any,
        optim: Any,
        extra: Any,
        ignore_frozen: bool,
    ) -> None:
        """`stack`: restores the optimizers if its block raises."""
        self.optimizers = _optimizers(optim)
        self.saved = _saved_optimizer(source, key_map, roots) if optim is not None else None
        fresh = stack.enter_context(_moments_to_fill(self.optimizers, self.saved))
        self.request = _state(model, optim, extra, ignore_frozen)
        # For each group the index of the stored group; None: the group was added since the save. If the
        # whole list is None, groups are requested like other values.
        self.stored: Optional[list[Optional[int]]] = None
        if optim is None:
            return
        wanted = self.request["optim"]
        # A copy of each group with its options, because the load changes those of the request.
        self.groups = [_plain(group) for group in wanted["param_groups"]]
        self.made_up = _parameters_of(fresh, self.optimizers, self.groups)
        self.empty: list[str] = []  # Parameters without moments, both here and in the checkpoint.
        self.added: list[str] = []  # Keys of added parameters and groups, which keep their values.
        self.new_options: list[str] = []
        if self.saved is not None:
            self.saved.check_not_lost(self.groups)
            self.empty = _remove_unsaved(wanted, self.saved)
            if self.saved.groups is not None:
                self.stored = _stored_groups(self.groups, self.saved.groups)
                self.new_options = _remove_new_options(wanted, self.saved.groups, self.stored)

    def check_added(self, source: PathLike, optional: Sequence[str], options: dict[str, Any]) -> None:
        """KeyNotFoundError: parameters without requested moments were added to the optimizer since the save, and the
        options of the load do not allow that."""
        if self.stored is None or self.saved is None or self.saved.groups is None:
            return
        state = self.request["optim"].get("state", {})
        added = [
            f"optim.state.{name}"
            for group in self.groups
            for name in group["params"]
            if name not in self.saved.parameters and not state.get(name)
        ]
        allowed = _load.globs("optional", optional)
        exempt = _load.globs("strict_exempt", options.get("strict_exempt") or ())
        policy = options.get("not_stored", "raise")
        missing = _load.unmatched(added, (*allowed, *exempt))
        if missing and policy == "raise":
            raise KeyNotFoundError(
                f"{os.fspath(source)}: {_abi.NOT_STORED}{_load.listed(missing)} (added to the optimizer since the save)"
                + _load.optional_hint(missing),
                key=missing[0],
            )
        if missing and policy == "log":
            log.warning("%s: %s%s", os.fspath(source), _abi.NOT_STORED, _load.listed(missing))
        self.added = _load.matched(added, allowed) + (missing if policy == "return" else [])
        count = itertools.count(len(self.saved.groups))
        self.added += [f"optim.param_groups.{next(count)}" for one in self.stored if one is None]

    def take(self, optim: dict[str, Any], loaded: _load.Loaded) -> list[str]:
        """Completes the loaded state dict of the optimizers for PyTorch. Returns the names that were not requested:
        added parameters and groups, and options of groups that the checkpoint lacks."""
        _load.check_same_uuid(self.saved.uuid if self.saved is not None else None, loaded.uuid)
        found = optim["param_groups"]
        if self.stored is None:  # This rank could not open the checkpoint before the load.
            self.stored = _stored_groups(self.groups, found)
            known = {name for group in found for name in _params_of(group) or ()}
            if any(name not in known for group in self.groups for name in group["params"]):
                raise LayoutError(f"{_OTHER_GROUPS}: groups were added since the save", key="optim.param_groups")
        optim["param_groups"] = [
            {**group, **({} if number is None else found[number]), "params": group["params"]}
            for group, number in zip(self.groups, self.stored)
        ]
        optim.setdefault("state", {}).update((name, {}) for name in self.empty)
        _drop_unloaded(optim["state"], self.made_up, loaded._absent)
        for group in self.groups:
            for name in group["params"]:
                optim["state"].setdefault(name, {})
        return self.added + self.new_options


def rng_state() -> PerRank:
    """The states of this rank's random generators, as one value of the rank.

    They are torch's on the CPU and on each CUDA device, Python's, and NumPy's if it is installed.
    """
    states: dict[str, Any] = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": repr(random.getstate()),
    }
    if torch.cuda.is_available():
        states["cuda"] = [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()]
    try:
        import numpy
    except ImportError:
        pass
    else:
        state: Any = numpy.random.get_state()
        kind, keys, position, has_gauss, gauss = state
        states["numpy"] = [kind, keys.tobytes(), int(position), int(has_gauss), float(gauss)]
    return PerRank(states)


def set_rng_state(saved: PerRank) -> None:
    """Restores the states of `rng_state`. CUDA devices that do not exist here are left out."""
    import ast

    states = saved.value if isinstance(saved, PerRank) else saved
    torch.set_rng_state(torch.frombuffer(bytearray(states["torch"]), dtype=torch.uint8))
    random.setstate(ast.literal_eval(states["python"]))
    if "cuda" in states and torch.cuda.is_available():
        made = [torch.frombuffer(bytearray(one), dtype=torch.uint8) for one in states["cuda"]]
        torch.cuda.set_rng_state_all(made[: torch.cuda.device_count()])
    if "numpy" in states:
        import numpy

        kind, keys, position, has_gauss, gauss = states["numpy"]
        numpy.random.set_state(
            (kind, numpy.frombuffer(keys, numpy.uint32), position, has_gauss, gauss)
        )


# ---- Implementation ----------------------------------------------------------------------------------------


def _options(ignore_frozen: bool) -> StateDictOptions:
    return StateDictOptions(ignore_frozen_params=ignore_frozen, strict=not ignore_frozen)


def _module(model: Any) -> Any:
    if model is None:
        raise InvalidArgumentError("optim without model: the names of parameters come from the model")
    return model


def _state(model: Any, optim: Any, extra: Any, ignore_frozen: bool) -> dict[str, Any]:
    state: dict[str, Any] = {}
    options = _options(ignore_frozen)
    if model is not None:
        state["model"] = dict(get_model_state_dict(model, options=options))
    if optim is not None:
        with _without_implicit_step(_optimizers(optim)):
            found = get_optimizer_state_dict(_module(model), optim, options=options)
        state["optim"] = _plain(found)
    if extra is not None:
        state["extra"] = _stateful.with_states(extra)
    return state


def _state_to_save(model: Any, optim: Any, extra: Any, ignore_frozen: bool) -> Any:
    """The state dict to save; FailedState if this rank cannot make it. The save then fails on all ranks."""
    try:
        state = _state(model, optim, extra, ignore_frozen)
        if optim is not None:
            _check_slots(state["optim"], _optimizers(optim), state["model"])
        return state
    except Exception as error:
        return FailedState(error)


# Slots that parameters have only while an option of their group is on. The option may have changed since a slot was
# made.
_OPTION_OF_SLOT = {"momentum_buffer": "momentum", "max_exp_avg_sq": "amsgrad", "grad_avg": "centered"}
_warned_kinds: set[str] = set()  # Kinds of optimizers, not PyTorch's, for which a warning was logged.


def _check_slots(optim: dict[str, Any], optimizers: Sequence[Any], model: dict[str, Any]) -> None:
    """LayoutError: a parameter with moments lacks a slot that others of its group have, as in OptimizerState of the
    C++ library. Optimizers that are not PyTorch's may do that, so it is only a warning."""
    groups = optim["param_groups"]
    whose = _owners(optimizers, groups) or [None] * len(groups)
    for number, (group, one) in enumerate(zip(groups, whose)):
        alike: dict[int, dict[str, Any]] = {}
        for name in group["params"]:
            slots = optim["state"].get(name)
            axes = getattr(model.get(name), "ndim", None)  # None: a hook of the model renamed it.
            if slots and axes is not None:
                # Adafactor has other slots for matrices than for vectors.
                alike.setdefault(axes, {})[name] = slots
        for states in alike.values():
            lacks = _lacking_slot(states, group)
            if lacks is None:
                continue
            name, slot, other = lacks
            said = (
                f"parameter {name} has no {slot} in its optimizer, but {other} of the same group "
                f"({number}) has one"
            )
            kind = type(one)
            if kind is getattr(torch.optim, kind.__name__, None):
                raise LayoutError(said, key=f"optim.state.{name}.{slot}")
            if one is not None and kind.__qualname__ not in _warned_kinds:
                _warned_kinds.add(kind.__qualname__)
                log.warning("%s; its state is saved as it is (%s)", said, kind.__qualname__)


def _lacking_slot(
    states: dict[str, Any], group: dict[str, Any]
) -> Optional[tuple[str, str, str]]:
    """A parameter, a slot that it lacks, and another parameter that has the slot; None: all slots exist."""
    wanted = {
        slot: name
        for name, slots in states.items()
        for slot in slots
        if group.get(_OPTION_OF_SLOT.get(slot, ""), True)
    }
    for name, slots in states.items():
        for slot in wanted.keys() - slots.keys():
            return name, slot, wanted[slot]
    return None


def _optimizers(optim: Any) -> list[Any]:
    """The optimizers of the argument `optim`, which is one, several or None."""
    if optim is None:
        return []
    return [optim] if isinstance(optim, torch.optim.Optimizer) else list(optim)


def _is_fresh(one: Any) -> bool:
    """Whether an optimizer has no moments yet."""
    return not any(one.state.values())


@contextlib.contextmanager
def _without_implicit_step(optimizers: Sequence[Any]) -> Iterator[None]:
    """Prevents the step that PyTorch makes when the state dict of an optimizer without states is read or set. That
    step would change the optimizer (a momentum, a learning rate of 0). Each parameter gets an empty state instead
    until the block ends."""
    marked = []
    for one in optimizers:
        if not one.state:
            for parameter in _parameters(one):
                one.state[parameter] = {}
            marked.append(one)
    try:
        yield
    finally:
        for one in marked:
            _drop_empty(one)


def _drop_empty(one: Any) -> None:
    """Removes the empty states of parameters without moments."""
    for parameter in [p for p, state in one.state.items() if not state]:
        del one.state[parameter]


def _parameters(one: Any) -> list[Any]:
    return [p for group in one.param_groups for p in group["params"]]


@contextlib.contextmanager
def _moments_to_fill(
    optimizers: Sequence[Any], saved: Optional[_SavedOptimizer]
) -> Iterator[list[Any]]:
    """Creates the moments of optimizers that have none, by a step that leaves the parameters unchanged, unless no
    moments were saved. Yields these optimizers, and restores them if the block raises."""
    fresh = [one for one in optimizers if _is_fresh(one)]
    if saved is not None and saved.moments is not None and not any(saved.moments.values()):
        fresh = []
    groups = [(group, dict(group)) for one in fresh for group in one.param_groups]
    gradients = [(p, p.grad) for one in fresh for p in _parameters(one)]
    try:
        for one in fresh:
            one.state.clear()
            for parameter in _parameters(one):
                parameter.grad = None  # _init_optim_state does nothing if there are gradients.
            # The weights are restored afterwards, because a step with a learning rate of 0 still changes infinity to
            # NaN, and -0 to 0.
            weights = [parameter.detach().clone() for parameter in _parameters(one)]
            try:
                _init_optim_state(one)
            except Exception as error:
                raise UnsupportedError(
                    f"{type(one).__name__}: its state cannot be created before its first step ({error}); "
                    "take one step before the load"
                ) from error
            finally:
                for parameter, gradient in gradients:
                    parameter.grad = gradient
                with torch.no_grad():
                    for parameter, values in zip(_parameters(one), weights):
                        parameter.copy_(values)
            for state in one.state.values():
                step = state.get("step")
                if isinstance(step, torch.Tensor):
                    step.zero_()
                elif step is not None:
                    state["step"] = 0
        yield fresh
    except BaseException:
        for one in fresh:
            one.state.clear()
        for group, before in groups:
            group.clear()
            group.update(before)
        raise


class _SavedOptimizer(NamedTuple):
    """An optimizer in a checkpoint: its moments by parameter (None: unknown, all are requested), all its parameters,
    and its parameter groups (None: unknown)."""

    moments: Optional[dict[str, Any]]
    parameters: frozenset[str]
    groups: Optional[list[Any]]
    uuid: Optional[str]  # The uuid of the checkpoint.
    lost: _lost.Lost

    def check_not_lost(self, groups: Sequence[dict[str, Any]]) -> None:
        """DataLossError: the saved groups, or moments of parameters in `groups`, are lost. Comes before the groups are
        compared, and before moments are taken for never saved."""
        names = ["optim.param_groups"]
        names += [f"optim.state.{name}" for group in groups for name in group["params"]]
        self.lost.check(["optim.param_groups"] if self.groups is None else [], names)


def _saved_optimizer(
    source: PathLike, key_map: Optional[_key_map.Rules], roots: Sequence[str]
) -> Optional[_SavedOptimizer]:
    """The optimizer in the checkpoint. None: its state dict has none, or the checkpoint cannot be opened; all moments
    are then requested."""
    with _load._try_open(source, roots) as checkpoint:
        if checkpoint is None:
            return None
        uuid, lost = checkpoint.uuid, _lost.lost_data(checkpoint, key_map)
        stored = _load._stored_state(checkpoint._values(), checkpoint._rank_values(0), {"optim": None})
    if key_map is not None:
        stored = _key_map.renamed_values({"optim": None}, stored, key_map)
    optim = stored.get("optim") if isinstance(stored, dict) else None
    if not isinstance(optim, dict):
        lost.check(["optim.param_groups"])
        return None
    moments, groups = optim.get("state"), optim.get("param_groups")
    moments = moments if isinstance(moments, dict) else None
    groups = groups if isinstance(groups, list) else None
    named: set[str] = set()
    for group in groups or ():
        named.update(_params_of(group) or ())
    return _SavedOptimizer(moments, frozenset(named), groups, uuid, lost)


def _params_of(group: Any) -> Optional[frozenset[str]]:
    """The names of the parameters of a stored group; None: it is malformed."""
    params = group.get("params") if isinstance(group, dict) else None
    if not isinstance(params, list):
        return None
    return frozenset(name for name in params if isinstance(name, str))


def _remove_unsaved(request: dict[str, Any], saved: _SavedOptimizer) -> list[str]:
    """Removes parameters that had no moments when they were saved from the request. Returns their names. If it is
    unknown which had moments, only those are removed that have none here."""
    own = set(itertools.chain.from_iterable(group["params"] for group in request["param_groups"]))
    moments = saved.moments
    known = saved.parameters if moments is not None else ()
    empty = [
        name
        for name in sorted(own)
        if not (moments or {}).get(name) and (name in known or not request["state"].get(name))
    ]
    for name in empty:
        request["state"].pop(name, None)
    if moments is None and not request["state"]:
        del request["state"]  # DCP stores no empty dicts.
    return empty


def _stored_groups(
    groups: Sequence[dict[str, Any]], stored: Sequence[Any]
) -> list[Optional[int]]:
    """For each group the index of the stored group with the same parameters, apart from parameters that no stored
    group had; None: it has only those. LayoutError: the groups cannot be matched."""
    if groups and not stored:
        raise LayoutError(
            f"{_OTHER_GROUPS}: the checkpoint has an empty list of groups, this optimizer has {len(groups)}",
            key="optim.param_groups",
        )
    names = [_params_of(group) for group in stored]
    where = {name: number for number, params in enumerate(names) for name in params or ()}
    found: list[Optional[int]] = []
    for group in groups:
        own = frozenset(name for name in group["params"] if name in where)
        number = next((where[name] for name in group["params"] if name in where), None)
        if not group["params"]:
            number = next((i for i, params in enumerate(names) if params == own and i not in found), None)
        if number is not None and (names[number] != own or number in found):
            break
        found.append(number)
    unknown = [number for number in range(len(names)) if number not in found]
    if not unknown and len(found) == len(groups):
        return found
    had = sorted(names[unknown[0]] or ()) if unknown else ["others"]
    none = f"no group has the saved parameters {_load.listed(had)} and otherwise only new parameters"
    raise LayoutError(
        f"{_OTHER_GROUPS}: {len(stored)} groups, this one has {len(groups)}, and "
        + (none if had else f"no group matches the saved group {unknown[0]}, which had no parameters"),
        key="optim.param_groups",
    )


def _remove_new_options(
    request: dict[str, Any], saved: Sequence[Any], stored: Sequence[Optional[int]]
) -> list[str]:
    """Puts the groups of the request into the order of the stored groups, without groups that are not stored, and
    removes options that are not stored. Returns the names of these options."""
    names = []
    own = dict(zip(stored, request["param_groups"]))
    request["param_groups"] = [own[number] for number in range(len(saved))]
    for number, (group, had) in enumerate(zip(request["param_groups"], saved)):
        for key in [key for key in group if key not in had]:
            del group[key]
            names.append(f"optim.param_groups.{number}.{key}")
    return names


def _owners(optimizers: Sequence[Any], groups: Sequence[Any]) -> Optional[list[Any]]:
    """The optimizer of each group of their common state dict; None: PyTorch has regrouped them."""
    whose = [one for one in optimizers for _ in one.param_groups]
    return whose if len(whose) == len(groups) else None


def _parameters_of(
    some: Sequence[Any], optimizers: Sequence[Any], groups: Sequence[dict[str, Any]]
) -> list[str]:
    """The names of the parameters of some optimizers. `groups`: those of the common state dict, in order."""
    chosen = {id(one) for one in some}
    if len(chosen) == len(optimizers):
        return [name for group in groups for name in group["params"]]
    whose = _owners(optimizers, groups) or []
    return [name for one, group in zip(whose, groups) if id(one) in chosen for name in group["params"]]


def _drop_unloaded(
    moments: dict[str, Any], made_up: Sequence[str], absent: Container[str]
) -> None:
    """Drops created moments of parameters for which nothing was stored; the next step makes new ones."""
    for name in made_up:
        of = moments.get(name)
        if of and all(f"optim.state.{name}.{part}" in absent for part in of):
            moments[name] = {}


def _plain(value: Any) -> Any:
    """A copy in which subclasses of dict are plain dicts."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if type(value) is list:
        return [_plain(item) for item in value]
    return value


def _check_extra(
    extra: Any,
    source: PathLike,
    key_map: Optional[_key_map.Rules],
    roots: Sequence[str],
    rank: int,
) -> None:
    """Checks, before the load, that all loaded values can be put into `extra`. InvalidArgumentError, LayoutError."""
    if extra is not None and type(extra) is not list and not _stateful.is_filled_in_place(extra):
        raise InvalidArgumentError(
            f"extra={extra!r:.100}: a dict or list was expected, which the load can put values into"
        )
    _stateful.check_lengths(extra, source, key_map, roots, rank, "extra")



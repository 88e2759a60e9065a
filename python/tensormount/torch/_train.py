# SPDX-License-Identifier: Apache-2.0
"""Models and optimizers as checkpoints, by the state dicts that PyTorch makes of them."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator, Sequence
from typing import Any, Optional, Union

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from tensormount import _load, _save, _saver, _tree
from tensormount._tree import PerRank
from tensormount.errors import InvalidArgumentError, LayoutError

PathLike = Union[str, "os.PathLike[str]"]


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

    model, optim   a module, wrapped by FSDP2, tensor parallelism, DDP or nothing, and one optimizer
                   or several of it. Their state dicts are those of
                   torch.distributed.checkpoint.state_dict: keys are names of parameters, whatever
                   wraps them.
    extra          further values, as of `tensormount.save`; what has a state_dict() (a scheduler, a
                   data loader) is asked for it. What each rank has for itself, or whose state is
                   another on each rank, stands in PerRank(...).
    ignore_frozen  leaves out parameters without gradients, and their optimizer states.
    options        as of `tensormount.save`.

    Returns the report.
    """
    return _save.save(_state(model, optim, extra, ignore_frozen), path, group, **options)


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
    """As `save`, in the background: returns when the bytes are copied, so that training goes on. See
    `tensormount.async_save`.

    saver   of `tensormount.Saver`, which has the group then: copies on the devices, bounds of memory.
    """
    if saver is None:
        return _save.async_save(_state(model, optim, extra, ignore_frozen), path, group, **options)
    if not isinstance(saver, _saver.Saver):
        raise InvalidArgumentError(f"saver={saver!r}: a tensormount.Saver was expected")
    if group is not None and group is not saver.group:
        raise InvalidArgumentError("group and saver: the saver is of another group")
    return saver.save(_state(model, optim, extra, ignore_frozen), path, **options)


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
    """Loads what `save` saved into a model and its optimizers, on any number of ranks and any mesh.
    Collective.

    extra      a dict like that which was saved: plain values take the place of its own, what has a
               load_state_dict() is given its state.
    optional   globs of keys ("optim.state.*.exp_avg") that may be absent: what the model or optimizer
               has of them stays, and `not_stored` of the result names them. Without one that matches,
               a key that is not stored is KeyNotFoundError: nothing is ever reset in silence.
    options    as of `tensormount.load`.

    Moments of an optimizer that has not stepped yet are made first (by a step without gradients, as
    torch.distributed.checkpoint.state_dict does it), so that they are there to be loaded.
    """
    request = _state(model, optim, extra, ignore_frozen)
    if optional:
        import fnmatch

        options.setdefault("not_stored", "return")
    groups = _groups_of(request["optim"]) if optim is not None else []
    loaded = _load.load(request, source, group, **options)
    if optional:
        lost = [
            key
            for key in loaded.not_stored
            if not any(fnmatch.fnmatchcase(key, glob) for glob in optional)
        ]
        if lost:
            from tensormount.errors import KeyNotFoundError

            raise KeyNotFoundError(
                "asked for, but not stored: " + ", ".join(lost[:8])
                + (f" and {len(lost) - 8} more" if len(lost) > 8 else ""),
                key=lost[0],
            )
    state = loaded.state
    if optim is not None and _groups_of(state["optim"]) != groups:
        raise LayoutError(
            "the optimizer that was saved had other groups of parameters: "
            f"{len(_groups_of(state['optim']))} of them, this one has {len(groups)}; nothing was set, "
            "but tensors that were asked for are filled",
            key="optim.param_groups",
        )
    if model is not None:
        set_model_state_dict(model, state["model"], options=_options(ignore_frozen))
    if optim is not None:
        set_optimizer_state_dict(
            _module(model), optim, state["optim"], options=_options(ignore_frozen)
        )
    if extra is not None:
        _give_back(extra, state["extra"])
    return loaded


def rng_state() -> PerRank:
    """The states of this rank's generators (torch on the CPU and on each CUDA device, Python,
    NumPy where it is there), to be saved as one value of the rank."""
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
    """What `rng_state` gave, here again. Generators that are not here are left out."""
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


# ---- How -----------------------------------------------------------------------------------------


def _options(ignore_frozen: bool) -> StateDictOptions:
    return StateDictOptions(ignore_frozen_params=ignore_frozen, strict=not ignore_frozen)


def _module(model: Any) -> Any:
    if model is None:
        raise InvalidArgumentError("optim without model: names of parameters are the model's")
    return model


def _state(model: Any, optim: Any, extra: Any, ignore_frozen: bool) -> dict[str, Any]:
    state: dict[str, Any] = {}
    options = _options(ignore_frozen)
    if model is not None:
        state["model"] = dict(get_model_state_dict(model, options=options))
    if optim is not None:
        with _fresh_moments(optim):
            found = get_optimizer_state_dict(_module(model), optim, options=options)
        state["optim"] = _plain(found)
    if extra is not None:
        state["extra"] = _asked(extra)
    return state


@contextlib.contextmanager
def _fresh_moments(optim: Any) -> Iterator[None]:
    """For the state dict of optimizers that have not stepped yet: PyTorch makes their moments by a
    step without gradients, but not where there are gradients, and counts that step."""
    found = [optim] if isinstance(optim, torch.optim.Optimizer) else list(optim)
    fresh = [one for one in found if not one.state]
    parameters = [p for one in fresh for group in one.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient
        for one in fresh:
            for state in one.state.values():
                step = state.get("step")
                if isinstance(step, torch.Tensor):
                    step.zero_()
                elif step is not None:
                    state["step"] = 0


def _groups_of(optim: Any) -> list[frozenset[str]]:
    """Which parameters are in one group of an optimizer's state dict."""
    return sorted(
        (frozenset(group["params"]) for group in optim.get("param_groups", [])), key=sorted
    )


def _plain(value: Any) -> Any:
    """Dicts of kinds that PyTorch makes, as dicts."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if type(value) is list:
        return [_plain(item) for item in value]
    return value


def _asked(extra: Any) -> Any:
    """`extra`, with the states of what has one."""
    if isinstance(extra, dict):
        return {key: _asked(item) for key, item in extra.items()}
    if isinstance(extra, PerRank):
        return PerRank(_asked(extra.value))
    if not _tree.is_tensor(extra) and hasattr(extra, "state_dict"):
        return extra.state_dict()
    return extra


def _give_back(extra: Any, loaded: Any) -> None:
    """Into the caller's dict, and to what has a load_state_dict()."""
    if not isinstance(extra, dict):
        if hasattr(extra, "load_state_dict"):
            extra.load_state_dict(loaded)
        return
    for key, item in list(extra.items()):
        if key not in loaded:
            continue
        if isinstance(item, PerRank) and hasattr(item.value, "load_state_dict"):
            item.value.load_state_dict(loaded[key].value)
        elif isinstance(item, dict):
            _give_back(item, loaded[key])
        elif not _tree.is_tensor(item) and hasattr(item, "load_state_dict"):
            item.load_state_dict(loaded[key])
        elif not _tree.is_tensor(item):
            extra[key] = loaded[key]

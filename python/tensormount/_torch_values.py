# SPDX-License-Identifier: Apache-2.0
"""State dicts of training frameworks, in which `tensormount.save` cannot store every value: objects of the program,
NumPy arrays, subclasses of dict and of torch.Tensor.

`split` replaces each such value by a marker and returns it as bytes that torch.save wrote; they become objects of
the checkpoint. `join` puts the values back. Nothing is unpickled before that, and then only by torch.load with the
caller's `weights_only`.
"""

from __future__ import annotations

import collections
import io
import pickle
from collections.abc import Mapping
from typing import Any, Optional

import torch
from torch.distributed.tensor import DTensor

from tensormount import _tree, _values
from tensormount._leaves import registry
from tensormount.errors import Error, LayoutError, UnsupportedError

# A dict whose only key is this text stands for an object; the value of the dict is the object's key.
_MARKER = "tensormount.torch_save"
# Key of the object that holds the attributes of OrderedDicts, such as `_metadata` of a module's state_dict().
_ATTRIBUTES = "tensormount.attributes"
# Text, bytes and lists of plain values with more characters, bytes or items become objects, because the values of a
# checkpoint are always read as a whole.
_MAX_INLINE = 1 << 16


def split(state: Any) -> tuple[Any, dict[str, bytes]]:
    """The state dict without the values that cannot be stored, and these values as objects. UnsupportedError: a value
    cannot be pickled. LayoutError: containers are nested too deeply, or contain themselves."""
    held = _Split()
    tree = held.visit(state, ())
    if held.attributes:
        held.objects[_ATTRIBUTES] = to_bytes(held.attributes, "the attributes of OrderedDicts")
    return tree, held.objects


def join(tree: Any, objects: Mapping[Any, bytes], **options: Any) -> Any:
    """The inverse of `split`; `tree` may be changed in place, and may lack parts of the state dict. `options`: of
    torch.load."""
    tree = _joined(tree, objects, options)
    if _ATTRIBUTES in objects:
        for steps, attributes in from_bytes(objects[_ATTRIBUTES], _ATTRIBUTES, **options):
            found = tree
            if steps and isinstance(tree, dict) and steps[0] not in tree:
                continue
            for step in steps:
                found = found[step]
            vars(found).update(attributes)
    return tree


def to_bytes(value: Any, name: str) -> bytes:
    """The value as a file of torch.save. UnsupportedError: it cannot be pickled."""
    out = io.BytesIO()
    try:
        torch.save(value, out)
    except Exception as error:  # __reduce__ of a class of the program may raise anything.
        raise UnsupportedError(f"{name}: {_values.type_name(value)} cannot be stored: {error}") from error
    return out.getvalue()


def from_bytes(data: bytes, name: str, **options: Any) -> Any:
    """The inverse of `to_bytes`. UnsupportedError: torch.load refuses a class in it (weights_only=True)."""
    try:
        return torch.load(io.BytesIO(data), **options)
    except pickle.UnpicklingError as error:
        raise UnsupportedError(f"{name}: {error}") from error


class _Split:
    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.attributes: list[tuple[list[Any], dict[str, Any]]] = []

    def visit(self, value: Any, path: _tree.Path) -> Any:
        kind = type(value)
        if kind in _tree.SPLIT_DICTS:
            if _MARKER in value or not all(type(key) is str or _is_plain(key) for key in value):
                return self.hold(value, path)
            self.check_depth(path)
            attributes = vars(value) if kind is collections.OrderedDict else None
            if attributes:
                self.attributes.append(([key for _, key in path], dict(attributes)))
            return kind((key, self.visit(item, (*path, (_tree._KEY, key)))) for key, item in value.items())
        if kind is list or kind is tuple:
            if set(map(type, value)) <= _values.NATIVE_SET:
                return self.hold(value, path) if len(value) > _MAX_INLINE else value
            self.check_depth(path)
            step = _tree._ITEM if kind is list else _tree._TUPLE_ITEM
            return kind([self.visit(item, (*path, (step, i))) for i, item in enumerate(value)])
        if kind is DTensor:
            plain = True
        elif kind is torch.Tensor:
            plain = not value.requires_grad and _is_stored(value)
        elif kind is str or kind is bytes:
            plain = len(value) <= _MAX_INLINE
        else:
            plain = kind in _values.NATIVE_SET or (not _tree.is_tensor(value) and _is_plain(value))
        return value if plain else self.hold(value, path)

    def hold(self, value: Any, path: _tree.Path) -> Any:
        key = _tree.reversible(path) or "%"
        self.objects[key] = to_bytes(value, _tree.path_text(path))
        return {_MARKER: key}

    def check_depth(self, path: _tree.Path) -> None:
        if len(path) > _tree.MAX_DEPTH:
            raise LayoutError(
                f"{_tree.path_text(path)}: containers are nested more than {_tree.MAX_DEPTH} deep, or in a cycle"
            )


def _is_plain(value: Any) -> bool:
    try:
        _values.encode(value)
    except Error:
        return False
    return True


def _is_stored(tensor: Any) -> bool:
    try:
        registry.describe("", tensor)
    except Error:  # Sparse, quantized, on the meta device, ...
        return False
    return True


def _joined(value: Any, objects: Mapping[Any, bytes], options: dict[str, Any]) -> Any:
    kind = type(value)
    if kind in _tree.SPLIT_DICTS:
        key: Optional[str] = value.get(_MARKER)
        if key is not None:
            return from_bytes(objects[key], key, **options)
        for name, item in value.items():
            value[name] = _joined(item, objects, options)
    elif (kind is list or kind is tuple) and not set(map(type, value)) <= _values.NATIVE_SET:
        return kind([_joined(item, objects, options) for item in value])
    return value

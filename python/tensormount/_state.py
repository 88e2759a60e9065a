# SPDX-License-Identifier: Apache-2.0
"""A state dict in the form of the C library (tm_state), for saves and loads."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Optional

from tensormount import _abi, _layouts, _shards, _values
from tensormount._leaves import registry
from tensormount.errors import CLASSES, Error, InvalidArgumentError


class State:
    """A tm_state under construction. `held`: objects that must live as long as a job works with it."""

    def __init__(self) -> None:
        self._lib = _abi.library()
        out = ctypes.c_void_p()
        self.check(self._lib.tm_state_new(ctypes.addressof(out)))
        assert out.value is not None
        self.address: int = out.value
        self.held: list[Any] = []
        _abi.free_with(self, self._lib.tm_state_free, self.address)

    @staticmethod
    def check(status: int) -> None:
        if status:
            _abi.fail(status)

    # ---- Tensors -----------------------------------------------------------------------------

    def add_tensors(
        self,
        items: Collection[tuple[str, Any]],
        purpose: str,
        cache: _layouts.LayoutCache,
        world_size: int,
    ) -> bool:
        """Adds tensors, or copies of them, and keeps them in `held`. Returns whether their layout was known."""
        layout, addresses, known = cache.get(items, purpose, world_size)
        handle = layout.handle  # Another thread may replace the layout's.
        if handle is None:
            handle = layout.handle = _layout(layout.keys, layout.words, layout.count)
        pointer, count = addresses.buffer_info()
        self.check(self._lib.tm_state_add_layout(self.address, handle.address, pointer, count))
        self.held += [addresses, layout, handle, items]
        if purpose == _shards.LOAD:
            # Keeps the storages alive, too, because `tensor.data = ...` replaces a tensor's memory, to which the
            # library still writes.
            tensors = registry.tensors_of(leaf for _, leaf in items)
            self.held.append([local.untyped_storage() for local in tensors])
        return known

    def add_shards(self, shards: Iterable[_shards.Shard]) -> None:
        """Adds shards that the caller has described (the writer and reader for DCP)."""
        found = list(shards)
        keys, words, count = _shards.pack(found)
        pointer, length = words.buffer_info()
        self.check(
            self._lib.tm_state_add_tensors(self.address, keys, len(keys), pointer, length, count)
        )
        self.held.append(found)

    # ---- Objects and values --------------------------------------------------------------------

    def add_object(
        self, key: str, data: bytes, index: tuple[int, ...] = (), grid: tuple[int, ...] = ()
    ) -> None:
        at, of = _abi.indices(index), _abi.indices(grid)
        self.check(
            self._lib.tm_state_add_object(
                self.address, text(key), data, len(data), ctypes.addressof(at),
                ctypes.addressof(of), len(index),
            )
        )

    def want_object(
        self, key: str, index: tuple[int, ...] = (), grid: tuple[int, ...] = ()
    ) -> None:
        at, of = _abi.indices(index), _abi.indices(grid)
        self.check(
            self._lib.tm_state_want_object(
                self.address, text(key), ctypes.addressof(at),
                ctypes.addressof(of) if grid else None, len(index),
            )
        )

    def set_values(self, common: Mapping[str, str], rank_common: Mapping[str, str]) -> None:
        """Sets values, given as JSON by name."""
        for name, value in common.items():
            self.check(self._lib.tm_state_set_common(self.address, text(name), value.encode()))
        for name, value in rank_common.items():
            self.check(self._lib.tm_state_set_rank_common(self.address, text(name), value.encode()))

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        value = _values.to_json(dict(metadata))
        self.check(self._lib.tm_state_set_metadata(self.address, value.encode()))

    # ---- Failure -----------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Makes the job fail on all ranks with this rank's own error."""
        status, message = status_of(error)
        if self._lib.tm_state_fail_json(self.address, _failure(status, message, error)) != 0:
            self._lib.tm_state_fail(self.address, status, message)


class FailedState:
    """Replaces a state dict or request that this rank could not make. A job that begins with it fails with `error`
    on all ranks, which would otherwise wait for this one."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


# Replaces an invalid path in a job that begins only to fail.
UNKNOWN_PATH = "?"


def status_of(error: BaseException) -> tuple[int, bytes]:
    """The library's status and message for any exception. Raises nothing, because the other ranks would then wait
    for this one."""
    status = _abi.TM_INVALID_ARGUMENT if isinstance(error, (ValueError, TypeError)) else _abi.TM_INTERNAL
    try:
        if isinstance(error, Error):
            codes = [kind.code for kind in CLASSES]
            status = codes.index(error.code, 1) if error.code in codes[1:] else _abi.TM_INTERNAL
            message = error.message
        else:
            message = f"{type(error).__name__}: {error}"
        return status, message.encode("utf-8", "replace").replace(b"\0", b"?")
    except Exception:
        return status, type(error).__name__.encode("utf-8", "replace")


def _failure(status: int, message: bytes, error: BaseException) -> bytes:
    """JSON for tm_state_fail_json with the attributes of `error`. Raises nothing, either."""
    told: dict[str, Any] = {"status": status, "message": message.decode("utf-8", "replace")}
    try:
        said = dict(told)
        if isinstance(error, Error):
            for name in ("key", "file", "cause", "device"):
                value = getattr(error, name, None)
                if value is not None:
                    # JSON cannot hold a lone surrogate, and NUL would end a C string.
                    said[name] = str(value).encode("utf-8", "replace").decode().replace("\0", "?")
            for name in ("errno", "rank"):
                value = getattr(error, name, None)
                if isinstance(value, int):
                    said[name] = value
            if error.box is not None:
                begin, extent = error.box
                said["box"] = {"begin": [int(n) for n in begin], "extent": [int(n) for n in extent]}
            said["memory_in_use"] = bool(error.memory_in_use)
        return json.dumps(said).encode()
    except Exception:
        return json.dumps(told).encode()


def text(key: str) -> bytes:
    """A key or name as bytes for the library. InvalidArgumentError: it contains NUL."""
    encoded = key.encode("utf-8", "surrogateescape")
    if b"\0" in encoded:
        raise InvalidArgumentError(f"{key!r}: a key must not contain NUL", key=key)
    return encoded


def texts(values: Sequence[str], kept: list[Any]) -> tuple[Any, int]:
    """An array of C strings, which is appended to `kept`, and its length. InvalidArgumentError: `values` is not a list
    of str."""
    if isinstance(values, str) or not all(isinstance(one, str) for one in values or ()):
        raise InvalidArgumentError(f"{values!r}: a list of str was expected")
    values = values or ()
    array = (ctypes.c_char_p * max(1, len(values)))(*(value.encode() for value in values))
    kept.append(array)
    return ctypes.cast(array, ctypes.POINTER(ctypes.c_char_p)), len(values)


def path_bytes(path: Any) -> bytes:
    """A path as bytes for the library. InvalidArgumentError: it contains NUL."""
    encoded = os.fsencode(os.fspath(path))
    if b"\0" in encoded:
        raise InvalidArgumentError(f"{path!r}: a path must not contain NUL")
    return encoded


def rules_text(rules: Optional[Sequence[Mapping[str, str]]]) -> Optional[bytes]:
    """Rules of a key map as JSON for the library; None: no rules."""
    if rules is None:
        return None
    if isinstance(rules, Mapping) or not all(isinstance(rule, Mapping) for rule in rules):
        raise InvalidArgumentError(f"{rules!r}: a list of rules was expected, each a dict")
    return json.dumps([dict(rule) for rule in rules]).encode()


class _LayoutHandle:
    """A tm_layout."""

    def __init__(self, address: int) -> None:
        self.address = address
        _abi.free_with(self, _abi.library().tm_layout_free, address)


def _layout(keys: bytes, words: Any, count: int) -> _LayoutHandle:
    out = ctypes.c_void_p()
    pointer, length = words.buffer_info()
    State.check(
        _abi.library().tm_layout_new(
            keys, len(keys), pointer, length, count, ctypes.addressof(out)
        )
    )
    assert out.value is not None
    return _LayoutHandle(out.value)


def cache_of(group: Any) -> _layouts.LayoutCache:
    """The cache of layouts that a group has saved and loaded before."""
    if group._cache is None:
        group._cache = _layouts.LayoutCache()
    cache: _layouts.LayoutCache = group._cache
    return cache


def take_json(function: Any, *arguments: Any) -> Optional[Any]:
    """The encoded value (`_values.decode`) that a function of the library returns as JSON."""
    out = ctypes.c_void_p()
    size = ctypes.c_size_t()
    status = function(*arguments, ctypes.addressof(out), ctypes.addressof(size))
    if status:
        _abi.fail(status)
    return _values.from_json(_abi.take_bytes(out.value, size.value))

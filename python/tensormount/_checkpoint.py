# SPDX-License-Identifier: Apache-2.0
"""Reading on one process: `open`, `Checkpoint`, `Tensor`."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, Optional, Union

from tensormount import _abi, _dtypes, _index, _names, _reads
from tensormount._names import NameOptions, name_map
from tensormount._objects import Objects
from tensormount._statistics import Statistics
from tensormount.errors import (
    CancelledError,
    CheckpointNotFoundError,
    ClosedError,
    InvalidArgumentError,
    KeyNotFoundError,
    LayoutError,
    OutOfRangeError,
    StaleError,
    UnsupportedError,
)

if TYPE_CHECKING:
    import numpy
    from typing_extensions import Self, Unpack

    from tensormount._files import Files
    from tensormount._progress import Progress
    from tensormount.torch import LazyReads, LazyTensor

_OPEN_ERRORS = {_abi.TM_NOT_FOUND: CheckpointNotFoundError}
_LOOKUP_ERRORS = {_abi.TM_NOT_FOUND: KeyNotFoundError}
_MAX_RANKS_WITHOUT_VALUES = 1000
# The most "did you mean" hints for each opened checkpoint.
_MAX_HINTS = 8

_addressof = ctypes.addressof
_getpid = os.getpid
_byte_of = ctypes.c_char.from_buffer
_frames = _abi.FRAMES

PathLike = Union[str, bytes, "os.PathLike[str]", "os.PathLike[bytes]"]


class _Handle:
    """An opened tm_checkpoint, closed when nothing refers to it any more. A read holds a reference, so that
    close() on another thread cannot free it during the read."""

    __slots__ = ("address", "process", "_close", "_ended")

    def __init__(self, address: int, close: Any) -> None:
        self.address = address
        self.process = _getpid()
        self._close = close  # Kept here, because at exit the names of modules may be gone.
        self._ended = _abi.ended

    def __del__(self) -> None:
        if not self._ended[0]:
            self._close(self.address)


def open(
    path: PathLike, *, roots: Sequence[PathLike] = (), file: Optional[str] = None, **names: Unpack[NameOptions]
) -> Checkpoint:
    """Opens a checkpoint for reading. Runs no code from it and writes nothing.

    path      a checkpoint ("STORE/step-1000"), the newest checkpoint of a store ("STORE/latest"), or the
              file or directory that another program saved, which is read in place
              (docs/formats-adopted.md); or the URL of one of these (docs/remote.md). A store or a training directory opens its latest checkpoint;
              `warnings` says which one.
    roots     directories that links out of a foreign directory may lead into, and that may contain data of
              checkpoints which another user adopted.
    file      the file or index to read, if the directory has several sets of weights; the same as path/file.
    names     a name map: rules that rename, split and join tensors without copying them (docs/mapping.md). The
              checkpoint has the keys that they give.
    as_       the same by rules of the library: "hf" for the names of Hugging Face files; from_ names the layout
              of the checkpoint ("megatron") if its keys do not.
    numbers   sizes that rules use and shapes do not give: {"heads": 32}.
    config    with as_: the model's config.json, as a dict, or the directory that has it.

    Raises CheckpointNotFoundError (a FileNotFoundError), DataLossError, PermissionDeniedError;
    UnsupportedError for a newer or unknown format, a URL of another kind, or a path that begins with "~/" (only
    shells expand it).

        >>> import tensormount as tm
        >>> checkpoint = tm.open("STORE/step-1")
        >>> checkpoint.keys()
        ['w']
        >>> checkpoint.close()
    """
    return Checkpoint(path, roots=roots, file=file, **names)


class Checkpoint:
    """An opened checkpoint: a read-only mapping from keys to tensors.

    It stays the checkpoint that was opened, even if another is saved under its name, or it is removed.
    Any number of threads may read from it. It is closed by close(), at the end of `with`, or when nothing
    refers to it.

    It pickles as its path and is opened again when it is unpickled. If another checkpoint of tensormount has the
    name by then, that is a StaleError.
    """

    _handle: Optional[_Handle]

    def __init__(
        self, path: PathLike, *, roots: Sequence[PathLike] = (), file: Optional[str] = None,
        **names: Unpack[NameOptions],
    ) -> None:
        self._handle = None
        self._names = name_map(names)
        self._roots = tuple(os.fsdecode(root) for root in roots)
        given = os.fsencode(path if file is None else os.path.join(os.fsdecode(path), file))
        shown = os.fsdecode(given)
        if b"\0" in given:
            raise InvalidArgumentError(f"{shown!r}: a path must not contain NUL")
        lib = _abi.library_for(given)
        out = ctypes.c_void_p()
        if self._roots or self._names:
            array = (ctypes.c_char_p * len(self._roots))(*map(os.fsencode, self._roots))
            options = _abi.OpenOptions(
                struct_size=ctypes.sizeof(_abi.OpenOptions),
                roots=array,
                root_count=len(self._roots),
                name_map=self._names,
            )
            status = lib.tm_checkpoint_open_with(given, _addressof(options), _addressof(out))
        else:
            status = lib.tm_checkpoint_open(given, _addressof(out))
        if status:
            _abi.fail(status, _OPEN_ERRORS)
        assert out.value is not None
        self._lib = lib
        self._handle = _Handle(out.value, lib.tm_checkpoint_close)
        self._read = lib.tm_checkpoint_read
        self._keys: Optional[list[str]] = None
        self._hints = _MAX_HINTS
        self._path = os.fsdecode(lib.tm_checkpoint_path(out.value))
        self._uuid = lib.tm_checkpoint_uuid(out.value).decode() or None

    # ---- Properties --------------------------------------------------------------------------

    @property
    def path(self) -> str:
        """The absolute path; "latest" is resolved."""
        return self._path

    @property
    def uuid(self) -> Optional[str]:
        """32 hexadecimal digits, unique to this checkpoint; None for formats of other programs."""
        return self._uuid

    @property
    def closed(self) -> bool:
        return self._handle is None

    def close(self) -> None:
        """Closes the checkpoint; its tensors cannot be read any more.

        Does not wait: reads under way on other threads still finish. May be called again.
        """
        self._handle = None

    def __enter__(self) -> Self:
        self._opened()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _opened(self) -> _Handle:
        handle = self._handle
        if handle is None:
            raise ClosedError(f"{self._path}: the checkpoint is closed")
        if handle.process != _getpid():
            return self._reopened_in_child(handle)
        return handle

    def _reopened_in_child(self, inherited: _Handle) -> _Handle:
        """Opens the checkpoint again in a forked child (a worker of a DataLoader), because a lock of the inherited
        handle may be held by a thread that does not exist here. StaleError: it was replaced meanwhile."""
        mine = _open_again(Checkpoint, self._path, self._roots, self._names)
        if mine._uuid != self._uuid:
            raise StaleError(
                f"{self._path}: the checkpoint was replaced by another one after process "
                f"{inherited.process}, which forked this one, had opened it"
            )
        handle = mine._handle
        assert handle is not None
        self._handle = handle
        return handle

    def __reduce__(self) -> Any:
        return (_reopen, (type(self), self._path, self._uuid, self._roots, self._names))

    def __repr__(self) -> str:
        state = "closed" if self._handle is None else f"{len(self)} tensors"
        return f"<tensormount.Checkpoint {self._path!r}: {state}>"

    def _repr_html_(self) -> str:
        """A table of the first 100 tensors, for notebooks."""
        from tensormount._html import table

        return table(self)

    # ---- Tensors -----------------------------------------------------------------------------

    def keys(self, pattern: Optional[str] = None) -> list[str]:
        """The keys of tensors, in byte order; with `pattern` those that match the glob ('*' matches '/')."""
        self._opened()
        if self._keys is None:
            self._keys = self._list(self._lib.tm_checkpoint_keys)
        if pattern is None:
            return list(self._keys)
        from fnmatch import filter as matching
        from fnmatch import fnmatchcase

        # fnmatch.filter ignores case on systems whose file names do.
        return matching(self._keys, pattern) if os.name == "posix" else [
            key for key in self._keys if fnmatchcase(key, pattern)
        ]

    def __getitem__(self, key: str) -> Tensor:
        """The tensor of that key, or one layer of a stacked tensor. Reads no data.

        Raises KeyNotFoundError (a KeyError), which suggests a key with a similar name if there is one.
        """
        try:
            return Tensor(self, key)
        except KeyNotFoundError as error:
            self._add_hint(error, key, self._keys, self._lib.tm_checkpoint_keys)
            raise

    def _add_hint(
        self, error: KeyNotFoundError, key: object, known: Optional[list[str]], function: Any
    ) -> None:
        """Adds "did you mean" to the error, for the first missing keys only, because programs may try many.
        `known`: the keys that `function` of the library lists, if they were listed before."""
        if self._hints <= 0 or not isinstance(key, str):
            return
        self._hints -= 1
        from tensormount._hints import nearest

        near = nearest(key, known, self._path, lambda: self._list(function))
        if near:
            error.message += f"; did you mean {near}?"

    def __contains__(self, key: object) -> bool:
        """Whether `checkpoint[key]` exists. True for layers of stacked tensors, which keys() omits."""
        try:
            Tensor(self, key)  # type: ignore[arg-type]
        except KeyNotFoundError:
            return False
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        if self._keys is None:
            self.keys()
        assert self._keys is not None
        return len(self._keys)

    def __bool__(self) -> bool:
        return True  # Without __bool__ Python would call len(), which lists the keys.

    def get(self, key: str, default: Any = None) -> Any:
        """The tensor of that key, or `default`."""
        try:
            return Tensor(self, key)
        except KeyNotFoundError:
            return default

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Pairs of key and tensor."""
        for key in self.keys():
            yield key, Tensor(self, key)

    def values(self) -> Iterator[Tensor]:
        for key in self.keys():
            yield Tensor(self, key)

    def read_many(
        self, wanted: Union[Mapping[str, Any], Iterable[str]], *, threads: Optional[int] = None
    ) -> dict[str, Any]:
        """Reads several boxes at once.

        wanted    a list of keys, or a dict. Its keys are your names; its values are a key, or (key, index):
                  {"rows": ("w", slice(0, 128)), "all": "b"}.
        threads   reads at a time; None: the number of cores, at most 8.

        Returns a dict of arrays by your names, or by key. If reads fail, the first failure in the order of
        `wanted` is raised once the reads that were begun are done; large ones end at their next part.

            >>> import tensormount as tm
            >>> with tm.open("STORE/step-1") as checkpoint:
            ...     read = checkpoint.read_many({"top": ("w", slice(0, 2)), "all": "w"})
            >>> read["top"].shape, read["all"].shape
            ((2, 32), (16, 32))
        """
        jobs = []
        stop: list[bool] = []
        for name, what in _reads.named_reads(wanted).items():
            key, index = (what, ...) if isinstance(what, str) else what
            tensor = self[key]
            tensor._stop = stop
            jobs.append((name, tensor, index))
        most = threads if threads is not None else min(8, os.cpu_count() or 1)
        if most < 1:
            raise InvalidArgumentError(f"threads={most}: must be 1 or more")
        if most == 1 or len(jobs) < 2:
            return {name: tensor[index] for name, tensor, index in jobs}
        from concurrent.futures import ThreadPoolExecutor

        from tensormount._tasks import Task

        task = Task()  # Its threads end before it.
        with ThreadPoolExecutor(min(most, len(jobs)), initializer=task.watch_thread) as pool:
            begun: list[Any] = []
            try:
                for _, tensor, i in jobs:
                    begun.append(pool.submit(tensor.__getitem__, i))
            except RuntimeError:
                pass  # No further thread can be started: this one reads the rest.
            try:
                read = [job.result() for job in begun]
                read += [tensor[i] for _, tensor, i in jobs[len(begun) :]]
                return {name: array for (name, _, _), array in zip(jobs, read)}
            except BaseException:
                stop.append(True)
                task.cancel()
                for job in begun:
                    job.cancel()
                raise

    # ---- Objects and values ------------------------------------------------------------------

    @property
    def objects(self) -> Objects:
        """Objects by key, as bytes. (key, index, ...) is one part of an object on a grid."""
        return Objects(self)

    def files(
        self,
        key_map: Optional[Sequence[Mapping[str, str]]] = None,
        hf_part_size: Optional[int] = None,
        hf_rules: Optional[Sequence[Mapping[str, str]]] = None,
    ) -> Files:
        """The files that a mount shows of this checkpoint: `npy/w.npy`, `hf/`, `dcp/` ... Options as of `export`."""
        from tensormount._files import Files

        return Files(self, key_map, hf_part_size, hf_rules)

    def _object_names(self) -> list[str]:
        return self._list(self._lib.tm_checkpoint_objects)

    def _object_grid(self, key: str) -> tuple[int, ...]:
        handle = self._opened()
        grid, rank = _abi.Dims(), ctypes.c_int32()
        status = self._lib.tm_checkpoint_object_grid(
            handle.address, _encode(key), _addressof(grid), _addressof(rank)
        )
        if status:
            _abi.fail(status, _LOOKUP_ERRORS, key)
        return tuple(grid[: rank.value])

    def object(self, key: str, index: tuple[int, ...] = ()) -> bytes:
        """The bytes of an object, or of its part `index` if it was saved on a grid.

        Raises KeyNotFoundError if there is no such object, or it is on a grid and `index` is not a part of it.
        """
        handle = self._opened()
        numbers = _abi.indices(index)
        data = ctypes.c_void_p()
        size = ctypes.c_size_t()
        status = self._lib.tm_checkpoint_object(
            handle.address, _encode(key), _addressof(numbers), len(index), _addressof(data),
            _addressof(size),
        )
        if status:
            try:
                _abi.fail(status, _LOOKUP_ERRORS, key)
            except KeyNotFoundError as error:
                self._add_hint(error, key, None, self._lib.tm_checkpoint_objects)
                raise
        return _abi.take_bytes(data.value, size.value)

    @property
    def common(self) -> dict[str, Any]:
        """Plain values that all ranks agreed on, as a new dict: {"iteration": 1000}."""
        from tensormount._tree import plain_values, structures_of

        values = self._values()
        return plain_values(values, structures_of(values))

    def _values(self) -> dict[str, Any]:
        """Encoded common values (`_values.decode`) by name, including the structures of state dicts."""
        value = self._json(self._lib.tm_checkpoint_common, None)
        return dict(value)

    def rank_common(self, rank: int) -> dict[str, Any]:
        """Plain values that rank `rank` of the save set for itself; empty if it set none."""
        from tensormount._tree import plain_values, structures_of

        return plain_values(self._rank_values(rank), structures_of(self._values()), "rank")

    def _rank_values(self, rank: int) -> dict[str, Any]:
        """Encoded values of one rank by name; empty if it set none."""
        return dict(self._json(self._lib.tm_checkpoint_rank_common, rank, None) or {})

    @property
    def metadata(self) -> dict[str, Any]:
        """Values that the application saved about the checkpoint as a whole."""
        return dict(self._json(self._lib.tm_checkpoint_metadata))

    def verify(self, *, quick: bool = False, progress: Progress = None) -> dict[str, Any]:
        """Compares every stored byte with its hash; see `tensormount.verify`."""
        from tensormount._verify import verify

        self._opened()
        return verify(self._path, quick=quick, roots=self._roots, progress=progress)

    def state(self, *, torch: bool = False) -> Any:
        """Reads the whole state dict on this process, nested as it was saved, with tied tensors tied.

        torch     True: tensors are PyTorch's; False: NumPy arrays.

            >>> import numpy, tensormount as tm
            >>> state = {"model": {"a": numpy.arange(3)}, "betas": (0.9, 0.95)}
            >>> path = tm.save(state, "STORE/whole", replace=True)["path"]
            >>> with tm.open(path) as checkpoint:
            ...     checkpoint.state()
            {'model': {'a': array([0, 1, 2])}, 'betas': (0.9, 0.95)}

        If several ranks have a `PerRank` value, the lowest rank's is taken. A tensor that NumPy (f4, f6) or
        torch (f6) cannot hold stays the checkpoint's `Tensor`, and a warning names it. LayoutError: the ranks
        saved different values under one path, so that their dicts cannot be united.
        """
        from tensormount import _tree

        tensors: dict[str, Any] = {}
        kept = []
        for key, tensor in self.items():
            try:
                tensors[key] = tensor.torch() if torch else tensor[...]
            except UnsupportedError:
                tensors[key] = tensor
                kept.append(f"{key} ({tensor.dtype_name})")
        if kept:
            from tensormount._jobs import log

            more = f" and {len(kept) - 8} more" if len(kept) > 8 else ""
            log.warning(
                "%s: %s does not support the dtype of these tensors, which are kept as Tensor handles: %s%s",
                self._path, "torch" if torch else "NumPy", ", ".join(kept[:8]), more,
            )
        values = self._values()
        if not _tree.structure_names(values):
            rest = _tree.plain_values(values, [])
            return {**tensors, **{name: rest[name] for name in rest if name not in tensors}}
        keys_of = self._stored_names(values, tensors)
        trees = [
            _tree.unflatten(values[name], tensors, values, ranks, names=keys_of)
            for name, ranks in self._structures_by_rank(values).items()
        ]
        state = _tree.merge_trees(trees)
        bad = _tree.first_unreadable(state)
        if bad is not None:
            raise LayoutError(f"{self._path}: a stored value cannot be read: {bad.reason}")
        return state

    def _stored_names(self, values: dict[str, Any], keys: Container[str]) -> dict[Any, str]:
        """`_tree.stored_names` of this checkpoint. If it was saved with `inherit=`, it also has structures of
        another checkpoint, which none of its ranks names."""
        from tensormount import _tree

        structures = {name[len(_tree.TREE_NAME) + 1 :]: values[name]
                      for name in _tree.structure_names(values)}
        own: set[Any] = set()
        if len(structures) > 1 and any(map(_tree.has_own_names, structures.values())):
            found = self._structures_by_rank(values).values()
            own.update(ranks[_tree.TREE_NAME] for ranks in found if ranks)
        current = [one for digest, one in structures.items() if digest in own]
        inherited = [one for digest, one in structures.items() if digest not in own]
        if not current:
            current, inherited = inherited, []
        return _tree.stored_names(current, keys, inherited)

    def _structures_by_rank(self, values: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Names of all structures, each with the values of the first rank that has it; in the order of
        these ranks. Structures of another checkpoint (`inherit=`) come last, without values."""
        from tensormount import _tree

        names = _tree.structure_names(values)
        found: dict[str, dict[str, Any]] = {}
        for own in self._values_by_rank():
            name = f"{_tree.TREE_NAME}.{own.get(_tree.TREE_NAME)}"
            if name in names:
                found.setdefault(name, own)
            if len(found) == len(names):
                break
        return {**found, **{name: {} for name in names if name not in found}}

    def _values_by_rank(self) -> Iterator[dict[str, Any]]:
        """`_rank_values` of the ranks that have some, from rank 0 on. A rank with a flat state dict has none, so the
        search ends only after _MAX_RANKS_WITHOUT_VALUES ranks in a row without values."""
        without = 0
        for rank in count():
            found = self._rank_values(rank)
            without = 0 if found else without + 1
            if found:
                yield found
            elif without == _MAX_RANKS_WITHOUT_VALUES:
                return

    @property
    def warnings(self) -> list[str]:
        """Texts about problems that did not prevent the checkpoint from being opened."""
        return self._list(self._lib.tm_checkpoint_warnings)

    def _json(self, function: Any, *arguments: Any) -> Any:
        from tensormount._values import from_json

        handle = self._opened()
        text = ctypes.c_void_p()
        size = ctypes.c_size_t()
        status = function(handle.address, *arguments, _addressof(text), _addressof(size))
        if status:
            _abi.fail(status, _LOOKUP_ERRORS)
        return from_json(_abi.take_bytes(text.value, size.value))

    def _list(self, function: Any) -> list[str]:
        handle = self._opened()
        return _abi.get_list(function, handle.address)


class Tensor:
    """One tensor of an opened checkpoint. Indexing it reads.

    `tensor[...]` is a NumPy array of the indexed part, and only that part is read:

        >>> import tensormount as tm
        >>> checkpoint = tm.open("STORE/step-1")
        >>> w = checkpoint["w"]
        >>> w.shape, w.dtype_name
        ((16, 32), 'f32')
        >>> w[3, :4].tolist()
        [96.0, 97.0, 98.0, 99.0]
        >>> w[..., -1:].shape
        (16, 1)

    An index has integers, slices, `...` and None (a new axis), as in NumPy. A slice with a step reads
    everything that it spans and keeps every n-th. Negative steps, and arrays or booleans as indices, raise
    UnsupportedIndexError (an IndexError). Elements of bf16 and of 8-bit floats have types of ml_dtypes;
    elements under a byte cannot be indexed (read_bytes returns them as stored).

    DataLossError: stored bytes are missing or fail their checksum. The tensor keeps the checkpoint open
    unless that is closed; any number of threads may read. A read of more than 128 MiB is made in parts of
    that size, and Ctrl-C ends it between two parts; from a server at once.
    """

    __slots__ = (
        "_checkpoint", "_key", "_name", "_row", "_shape", "_nbytes", "_digest", "_numpy", "_large",
        "_stop",
    )

    def __init__(self, checkpoint: Checkpoint, key: str) -> None:
        name = _encode(key)
        found = _abi.TensorInfo(struct_size=ctypes.sizeof(_abi.TensorInfo))
        handle = checkpoint._opened()  # The reference keeps the handle until the library has returned.
        status = checkpoint._lib.tm_checkpoint_tensor(handle.address, name, _addressof(found))
        if status:
            _abi.fail(status, _LOOKUP_ERRORS, key)
        self._checkpoint = checkpoint
        self._key = key
        self._name = name
        self._row = _dtypes.info(found.dtype)
        self._shape: tuple[int, ...] = tuple(found.shape[: found.rank])
        self._nbytes: int = found.bytes
        self._digest: Optional[int] = found.digest if found.has_digest else None
        self._numpy: Any = None
        self._large: bool = found.bytes > _reads.PART_BYTES
        self._stop: Sequence[bool] = ()  # Not empty: large reads end before their next part.

    # ---- Properties --------------------------------------------------------------------------

    @property
    def key(self) -> str:
        return self._key

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def ndim(self) -> int:
        return len(self._shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        count = 1
        for extent in self._shape:
            count *= extent
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, packed."""
        return self._nbytes

    @property
    def dtype_name(self) -> str:
        """The dtype as in `tensormount ls -l`: "bf16"."""
        return self._row.name

    @property
    def dtype(self) -> numpy.dtype[Any]:
        """The numpy.dtype, or one of ml_dtypes if NumPy has none.

        UnsupportedError: elements under a byte. LibraryError: NumPy or ml_dtypes is not installed.
        """
        if self._numpy is None:
            self._numpy = _dtypes.numpy_dtype(self._row)
        found: numpy.dtype[Any] = self._numpy
        return found

    @property
    def digest(self) -> Optional[int]:
        """CRC-64/NVME of the row-major bytes; None if none is stored (files of other programs)."""
        return self._digest

    @property
    def stats(self) -> Optional[Statistics]:
        """Counts of the values, taken when the tensor was saved; no data is read.

        None: not known, as for files of other programs, saves with statistics="off" or through a mount, and layers.

            >>> import tensormount as tm
            >>> tm.open("STORE/step-1")["w"].stats
            Statistics(count=512, zeros=1, nan=0, posinf=0, neginf=0, absmax=511.0)
        """
        found = _abi.ValueStatistics(struct_size=ctypes.sizeof(_abi.ValueStatistics))
        handle = self._checkpoint._opened()
        status = self._checkpoint._lib.tm_checkpoint_statistics(handle.address, self._name, _addressof(found))
        if status:
            _abi.fail(status, _LOOKUP_ERRORS, self._key)
        return Statistics.of(found)

    def __len__(self) -> int:
        if not self._shape:
            raise TypeError("a tensor without axes has no len()")
        return self._shape[0]

    def __bool__(self) -> bool:
        return True  # Without __bool__ Python would call len(), which fails for a tensor without axes.

    def __repr__(self) -> str:
        return f"<tensormount.Tensor {self._key!r}: {self._row.name} {list(self._shape)}>"

    def __reduce__(self) -> Any:
        return (Tensor, (self._checkpoint, self._key))

    # ---- Layout -------------------------------------------------------------------------

    def layout(self) -> dict[str, Any]:
        """Where the parts of the tensor are stored: file, byte range, and the rank that wrote it.

        This is the output of `tensormount layout --json` (docs/cli.md).

            >>> import tensormount as tm
            >>> with tm.open("STORE/step-1") as checkpoint:
            ...     chunks = checkpoint["w"].layout()["chunks"]
            >>> [(chunk["region"], chunk["length"]) for chunk in chunks]
            [('[0:8, 0:32]', 1024), ('[8:16, 0:32]', 1024)]
        """
        import json

        found: dict[str, Any] = json.loads(self._text(self._checkpoint._lib.tm_checkpoint_layout))
        return found

    def layout_svg(self) -> str:
        """The layout as a picture: which rank's file holds which part. No scripts, no external links."""
        return self._text(self._checkpoint._lib.tm_checkpoint_picture).decode("utf-8", "replace")

    def _repr_html_(self) -> str:
        """The layout as a picture, for notebooks.

        It is an image, so that no name can become a part of the page.
        """
        from tensormount._html import picture

        return picture(self)

    def _text(self, function: Any) -> bytes:
        handle = self._checkpoint._opened()
        return _abi.get_text(
            function, handle.address, self._name, kinds=_LOOKUP_ERRORS, key=self._key
        )

    # ---- Reading -----------------------------------------------------------------------------

    def memmap(self, index: Any = ...) -> Any:
        """The indexed part as a read-only NumPy array of the stored bytes, without a copy.

        Pages are read when they are touched. The array keeps the checkpoint open. The bytes are not compared
        with hashes (`checkpoint.verify()` does that). If another process truncates the file, a touch ends this
        process with SIGBUS.

        Raises UnsupportedError if the bytes are not one run of one file (another sharding), are stored in
        another form, or if the index is not a run of rows: read the tensor then.

            >>> import tensormount as tm
            >>> with tm.open("STORE/step-1") as checkpoint:
            ...     rows = checkpoint["w"].memmap(slice(2, 4))
            >>> rows.shape, float(rows[0, 1]), rows.flags.writeable
            ((2, 32), 65.0, False)
        """
        dtype = self.dtype
        plan = _index.plan(index, self._shape)
        offset, count = _reads.run(plan, self._shape, self._key)
        width = dtype.itemsize
        mapping = _Mapping(self._checkpoint, self, offset * width, count * width)
        return _dtypes.numpy_view(mapping, dtype).reshape(plan.shape)

    def __getitem__(self, index: Any) -> Any:
        dtype = self._numpy
        if dtype is None:
            dtype = self.dtype
        plan = _index.plan(index, self._shape)
        _, extent, steps, shape, scalar = plan
        out = _dtypes.numpy_empty(extent, dtype)
        if out.size:
            # from_buffer is five times as fast as __array_interface__, but does not accept types of ml_dtypes.
            self._fill(
                plan,
                out.__array_interface__["data"][0] if self._row.ml else _addressof(_byte_of(out)),
            )
        if steps is not None:
            # A copy, because a view would keep the whole box in memory.
            out = out[tuple(slice(None, None, step) for step in steps)].copy()
        if shape is not extent:
            out = out.reshape(shape)
        return out[()] if scalar else out

    def read(self, index: Any = ..., *, out: Any = None) -> Any:
        """Reads the indexed part, into `out` if it is given, and returns it.

        out       a NumPy array or a torch tensor on the CPU, with the shape of the result and the dtype of the
                  tensor; may be strided. After a DataLossError its contents are undefined.

        Raises InvalidArgumentError if shape or dtype differ.

            >>> import numpy, tensormount as tm
            >>> rows = numpy.empty((4, 2), "float32")
            >>> with tm.open("STORE/step-1") as checkpoint:
            ...     checkpoint["w"].read((slice(0, 8, 2), slice(0, 2)), out=rows)[-1].tolist()
            [192.0, 193.0]
        """
        if out is None:
            return self[index]
        plan = _index.plan(index, self._shape)
        memory = _reads.Memory.of(out, self._key)
        if memory.number != self._row.number:
            raise InvalidArgumentError(
                f"{self._key}: out has elements of {out.dtype}, not {self._row.name}",
                key=self._key,
            )
        if memory.shape != plan.shape:
            raise InvalidArgumentError(
                f"{self._key}: out has the shape {list(memory.shape)}, not {list(plan.shape)}",
                key=self._key,
            )
        if not all(plan.shape):
            return out
        if plan.steps is not None:
            memory.assign(self.torch(index=index) if memory.torch else self[index])
            return out
        strides = _reads.strides_of(plan, memory, index, self._shape)
        self._fill(plan, memory.address, strides)
        return out

    def read_bytes(self, offset: int = 0, size: Optional[int] = None) -> bytes:
        """Bytes [offset, offset + size) of the tensor in row-major order, little-endian, for any dtype.

        `size` None: to the end. Raises OutOfRangeError if the range ends past the tensor.
        """
        if size is None:
            size = self._nbytes - offset
        if offset < 0 or size < 0 or offset + size > self._nbytes:
            raise OutOfRangeError(
                f"{self._key}: bytes [{offset}, {offset + size}) are out of range: the tensor has "
                f"{self._nbytes} bytes"
            )
        memory = ctypes.create_string_buffer(max(size, 1))
        checkpoint = self._checkpoint
        handle = checkpoint._opened()
        for at in range(0, max(size, 1), _reads.PART_BYTES):
            status = checkpoint._lib.tm_checkpoint_read_bytes(
                handle.address, self._name, offset + at, _addressof(memory) + at,
                min(_reads.PART_BYTES, size - at),
            )
            if status:
                _abi.fail(status, _LOOKUP_ERRORS, self._key)
        return memory.raw[:size]

    def __array__(self, dtype: Any = None, copy: Optional[bool] = None) -> Any:
        """Reads all of it, for numpy.asarray(tensor)."""
        if copy is False:
            raise ValueError("a tensor of a checkpoint is read from storage: copy=False is not possible")
        array = self[...]
        return array if dtype is None else array.astype(dtype, copy=False)

    def __iter__(self) -> Iterator[Any]:
        """Iterates over the rows; each is read when it is reached."""
        if not self._shape:
            raise TypeError("a tensor without axes cannot be iterated over")
        for row in range(self._shape[0]):
            yield self[row]

    def torch(self, device: Any = "cpu", *, index: Any = ...) -> Any:
        """The indexed part as a torch.Tensor on `device`. Needs neither NumPy nor ml_dtypes.

        f4 becomes torch.float4_e2m1fn_x2, with two elements each: the last axis is half as long, and `index`,
        which counts single elements, selects pairs.

        Raises LibraryError if torch is missing or too old for the dtype, UnsupportedError for f6, which torch
        lacks, and for an index that splits pairs of f4; TypeError for an index without its name: use
        torch(index=slice(10, 20)).
        """
        if device is None or device is Ellipsis or isinstance(device, (slice, tuple)):
            raise TypeError(
                f"{self._key}: torch({device!r}): not a device; pass an index as torch(index={device!r})"
            )
        kind = _dtypes.torch_dtype(self._row)
        torch = _dtypes.import_torch()
        plan = _index.plan(index, self._shape)
        if self._row.number == _abi.TM_F4:
            return self._torch_pairs(torch, kind, plan).to(device)
        out = torch.empty(plan.extent, dtype=kind)
        if out.numel():
            self._fill(plan, out.data_ptr())
        if plan.steps is not None:
            out = out[tuple(slice(None, None, step) for step in plan.steps)].clone()
        if plan.shape != plan.extent:
            out = out.reshape(plan.shape)
        return out if device == "cpu" else out.to(device)

    def lazy(self, reads: Optional[LazyReads] = None) -> LazyTensor:
        """The tensor as a torch.Tensor whose bytes are read when an operation needs them.

        Slices, narrow, transpose and the like only change the box that is read later; `tensormount.torch.LazyTensor`
        lists them. The checkpoint must be open until the read.

        reads   a `tensormount.torch.LazyReads` that counts what is read; None: a new one (`lazy().reads`).

        Raises LibraryError and UnsupportedError as `torch()` does, for a dtype that torch lacks.
        """
        _dtypes.torch_dtype(self._row)  # Names the package if torch is not installed.
        from tensormount.torch._lazy import lazy

        return lazy(self, reads)

    def _torch_pairs(self, torch: Any, kind: Any, plan: _index.Plan) -> Any:
        if plan.steps is not None or plan.shape[-1:] != plan.extent[-1:]:
            raise UnsupportedError(f"{self._key}: f4 elements are read in pairs along the last axis, without steps")
        _dtypes.torch_dims(self._row, tuple(plan.begin))
        # Read as uint8, because many operations of torch do not support the f4 dtype.
        out = torch.empty(_dtypes.torch_dims(self._row, tuple(plan.extent)), dtype=torch.uint8)
        if out.numel():
            self._fill(plan, out.data_ptr())
        return out.reshape(_dtypes.torch_dims(self._row, tuple(plan.shape))).view(kind)

    def dlpack(self) -> Any:
        """Reads all of it into host memory as a DLPack capsule, for CuPy, JAX and others."""
        return self.__dlpack__()

    def __dlpack__(self, **options: Any) -> Any:
        """Reads all of it, for from_dlpack(tensor).

        Uses NumPy, or torch for dtypes that NumPy cannot export (bf16, 8-bit floats, NumPy before 1.22).
        """
        array: Any = None
        if not self._row.ml and self._row.bits % 8 == 0:
            array = self[...]
        if not hasattr(array, "__dlpack__"):
            array = self.torch()
        options.pop("stream", None)  # Host memory has no stream.
        try:
            return array.__dlpack__(**options)
        except TypeError:
            return array.__dlpack__()  # NumPy before 2.1 takes no options.

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)  # The device type kDLCPU, device 0.

    def _fill(self, plan: _index.Plan, address: int,
              strides: Optional[tuple[int, ...]] = None, cut: bool = True) -> None:
        if self._large and cut:
            self._fill_parts(plan, address, strides)
            return
        checkpoint = self._checkpoint
        handle = checkpoint._handle  # The reference keeps the handle until the library has returned.
        if handle is None or handle.process != _getpid():
            handle = checkpoint._opened()
        try:
            frame = _frames.pop()
        except IndexError:
            frame = _abi.Frame()
        begin, extent, _, _, _ = plan
        axes = len(extent)
        frame.begin[:axes] = begin  # type: ignore[call-overload]
        frame.extent[:axes] = extent  # type: ignore[call-overload]
        frame.region.rank = axes
        buffer = frame.buffer
        buffer.dtype = self._row.number
        buffer.rank = axes
        buffer.data = address
        if strides is None:
            buffer.strides = None
        else:
            frame.strides[:axes] = strides  # type: ignore[call-overload]
            buffer.strides = frame.strides_at
        status = checkpoint._read(handle.address, self._name, frame.region_at, frame.buffer_at)
        _frames.append(frame)
        if status:
            _abi.fail(status, _LOOKUP_ERRORS, self._key)


    def _fill_parts(
        self, plan: _index.Plan, address: int, strides: Optional[tuple[int, ...]]
    ) -> None:
        known = _reads.packed(plan.extent) if strides is None else strides
        for begin, extent, offset in _reads.parts(plan.begin, plan.extent, known, self._row.bits):
            if self._stop:
                raise CancelledError(f"{self._key}: the read was cancelled")
            self._fill(
                plan._replace(begin=begin, extent=extent), address + offset, strides, cut=False
            )


class _Mapping:
    """The mapped bytes of a stored tensor. Arrays over them keep it alive."""

    def __init__(self, checkpoint: Checkpoint, tensor: Tensor, offset: int, size: int) -> None:
        lib = checkpoint._lib
        self._handle = checkpoint._opened()  # Stays open even if the checkpoint is closed.
        out = ctypes.c_void_p()
        status = lib.tm_checkpoint_map(
            self._handle.address, tensor._name, offset, size, _addressof(out)
        )
        if status:
            _abi.fail(status, _LOOKUP_ERRORS, tensor._key)
        assert out.value is not None
        _abi.free_with(self, lib.tm_mapping_free, out.value)
        self.__array_interface__ = {
            "version": 3,
            "shape": (size,),
            "typestr": "|u1",
            # With address 0 (an empty mapping) NumPy would allocate writable memory, so another address is given.
            "data": (lib.tm_mapping_data(out.value) or id(self), True),
        }


def _open_again(
    kind: type[Checkpoint], path: str, roots: Sequence[str], names: Optional[bytes]
) -> Checkpoint:
    return kind(path, roots=roots, **_names.options_of(names))


def _reopen(
    kind: type[Checkpoint], path: str, uuid: Optional[str], roots: Sequence[str] = (),
    names: Optional[bytes] = None,
) -> Checkpoint:
    opened = _open_again(kind, path, roots, names)
    if opened.uuid != uuid:
        raise StaleError(f"{path}: the checkpoint was replaced by another one after it was pickled")
    return opened


def _encode(key: object) -> bytes:
    """A key as bytes for the library. KeyNotFoundError: it is not a str, or contains NUL."""
    if not isinstance(key, str):
        raise KeyNotFoundError(f"{key!r}: a key must be a str")
    name = key.encode("utf-8", "surrogateescape")
    if b"\0" in name:
        raise KeyNotFoundError(f"{key!r} does not exist: a key must not contain NUL", key=key)
    return name

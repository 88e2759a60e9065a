# SPDX-License-Identifier: Apache-2.0
"""The ranks of a job: `Group`.

Ranks reach each other over connections of the C library's own (TCP, and Unix sockets on one
machine). To find each other they exchange one address each, once, through what the host program has
already: torch's store, a folder, MPI. No tensor, no pickle and no collective of the host's process
groups is used, so a job that runs on NCCL gives no device memory for it, and nothing waits behind
the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import sys
import threading
import time
import weakref
from typing import Any, NamedTuple, Optional

from tensormount import _abi
from tensormount.errors import (
    BusyError,
    InvalidArgumentError,
    LibraryError,
    PeerTimeout,
    StaleError,
    UnsupportedError,
)

_TOKEN_BYTES = 32

_sequences: dict[str, itertools.count[int]] = {}
# Taken again by a signal handler in the middle of what it guards.
_lock = threading.RLock()


def _next(name: str) -> int:
    """How many groups of that name this process has made before."""
    return next(_sequences.setdefault(name, itertools.count()))


class _Handle:
    """A tm_communicator. Every call that works with it counts from the moment at which it takes it until
    it has returned, or its job is over (`Use`). Once the group is closed the last of them frees it: a call
    that another thread began meanwhile goes on with what is there. Without a lock (_jobs.py)."""

    def __init__(self, address: int, free: Any, owner: Any) -> None:
        self.address = address
        self.owner = owner  # What must outlive the communicator.
        self.working: set[Any] = set()  # Calls that nobody waits for any more (_tasks.py).
        self._free = free  # Here, because at exit the module may be gone before this is.
        self._ended = _abi.ended
        self._uses: list[object] = []
        self._unfreed = [address]
        self._closed = False

    def close(self) -> None:
        self._closed = True
        self._free_unused()

    def take(self) -> object:
        mark = object()
        self._uses.append(mark)
        return mark

    def give_back(self, mark: object) -> None:
        try:
            self._uses.remove(mark)
        except ValueError:
            return
        self._free_unused()

    def _free_unused(self) -> None:
        if not self._closed or self._uses or self._ended[0]:
            return
        try:
            address = self._unfreed.pop()
        except IndexError:
            return
        self._free(address)
        self.owner = None


class Use:
    """One use of a group's communicator: until `release`, the end of `with`, or when it is dropped."""

    def __init__(self, of: _Handle) -> None:
        self._of = of
        self._mark = of.take()

    @property
    def address(self) -> int:
        return self._of.address

    @property
    def working(self) -> set[Any]:
        return self._of.working

    def again(self) -> Use:
        """A further one, which counts by itself."""
        return Use(self._of)

    def release(self) -> None:
        self._of.give_back(self._mark)

    def __enter__(self) -> Use:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


class Group:
    """A fixed group of ranks that save and load together.

    Made by `from_torch`, `from_env`, `from_folder`, `mpi` or `single`, by all its ranks, in the same
    order as other groups. Keep one for a job: connections are made once. Closed by close(), at the
    end of `with`, or when nothing refers to it; saves and loads that are under way end first, and
    so do its savers.

    One thread at a time starts saves and loads of a group; they may run beside each other.
    """

    def __init__(self, address: int, owner: Any = None, kind: str = "tcp") -> None:
        lib = _abi.library()
        self._lib = lib
        self._open: Optional[_Handle] = _Handle(address, lib.tm_communicator_free, owner)
        self._kind = kind
        self._process = os.getpid()
        self._savers: weakref.WeakSet[Any] = weakref.WeakSet()  # Closed before it (_saver.py).
        self._rank = int(lib.tm_communicator_rank(address))
        self._size = int(lib.tm_communicator_size(address))
        self._ended = _abi.ended
        self._cache: Any = None  # Layouts of earlier saves and loads; of _state.py.

    # ---- What it is --------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Of this process, from 0 on."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._size

    @property
    def kind(self) -> str:
        """How ranks reach each other: "single", "tcp", "mpi"."""
        return self._kind

    def __repr__(self) -> str:
        state = "" if self._open is not None else ", closed"
        return f"<tensormount.Group: rank {self._rank} of {self._size} ({self._kind}{state})>"

    def __reduce__(self) -> Any:
        raise UnsupportedError("a Group is of its process; make one in the other process")

    # ---- Its end -----------------------------------------------------------------------------

    def close(self) -> None:
        """Takes leave of the other ranks. What is under way ends first, within its time-outs. May
        be called again."""
        opened = self._open
        if opened is None:
            return
        if _in_hook():
            raise UnsupportedError("a group cannot be closed by a hook of a save or load of it")
        jobs = sys.modules.get("tensormount._jobs")  # Without it there was no job yet.
        if self._process == os.getpid():
            if jobs is not None:
                jobs.await_all_of(self)
            for over in list(opened.working):
                while not over.wait(0.05):
                    pass
        for saver in list(self._savers):
            saver.close()
        self._open = None
        opened.close()

    def __enter__(self) -> Group:
        self._handle().release()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_open", None) is not None and not self._ended[0]:
            self.close()

    def _handle(self) -> Use:
        """For a call of the library: `with group._handle() as handle`, and `handle.address`. Counted until
        then, also where another thread closes the group."""
        opened = self._open
        if opened is None:
            raise StaleError("the group is closed")
        if self._process != os.getpid():
            raise UnsupportedError(
                f"the group belongs to process {self._process}, which this one was forked from: "
                "make one here"
            )
        use = Use(opened)
        if self._open is None:
            use.release()
            raise StaleError("the group is closed")
        return use

    # ---- How it is made ----------------------------------------------------------------------

    @classmethod
    def single(cls) -> Group:
        """A group of this process alone."""
        out = ctypes.c_void_p()
        _check(_abi.library().tm_communicator_self(ctypes.addressof(out)))
        assert out.value is not None
        return cls(out.value, kind="single")

    @classmethod
    def from_torch(cls, group: Any = None, *, timeout: float = 300.0, **options: Any) -> Group:
        """The ranks of a process group of torch.distributed; None: the default one. Uses its store,
        for one address a rank, and none of its collectives, so that any backend will do.

        timeout: seconds that the other ranks have to come. options: as of `from_store`.

        PeerTimeout names a rank that did not come. UnsupportedError without a default group (see
        `from_env`), and where this process is not in `group`.
        """
        distributed = _torch_distributed()
        if not distributed.is_initialized():
            raise UnsupportedError(
                "torch.distributed has no default process group: call init_process_group first, or "
                "use Group.from_env()"
            )
        rank = distributed.get_rank(group)
        if rank < 0:
            raise UnsupportedError("this process is not in that process group")
        size = distributed.get_world_size(group)
        if size == 1:
            return cls.single()
        ranks = distributed.get_process_group_ranks(
            distributed.group.WORLD if group is None else group
        )
        store = distributed.distributed_c10d._get_default_store()
        # Ranks alone name a group: names of process groups differ between ranks that are in others.
        name = "all" if group is None else "-".join(map(str, ranks))
        if len(name) > 200:
            import hashlib

            name = hashlib.sha256(name.encode()).hexdigest()
        return cls.from_store(store, rank, size, name=name, timeout=timeout, **options)

    @classmethod
    def from_env(cls, *, timeout: float = 300.0, **options: Any) -> Group:
        """The ranks that a launcher started, by the environment that it gave them, with or without a
        process group of torch:

        RANK and WORLD_SIZE                       torchrun, and most others
        SLURM_PROCID and SLURM_STEP_NUM_TASKS     srun
        OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE, or PMI_RANK, PMI_SIZE    mpirun

        They find each other at MASTER_ADDR and MASTER_PORT; under srun also without these, at the first
        host of the step and a port made of the numbers of job and step. Needs PyTorch, for its store
        (`Group.mpi()` and `from_folder` do without). Without any of these variables: this process alone.

        UnsupportedError names what is missing. Errors as of `from_torch`.
        """
        found = ranks_of_environment()
        if found is None or found.size == 1:
            return cls.single()
        rank, size = found.rank, found.size
        distributed = _torch_distributed()
        if distributed.is_initialized():
            return cls.from_torch(timeout=timeout, **options)
        host, port = _meeting_point(found)
        from datetime import timedelta

        # torchrun's agent has a store there already; otherwise rank 0 has.
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = distributed.TCPStore(
            host,
            port,
            size,
            is_master=rank == 0 and not agent,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
        )
        made = cls.from_store(store, rank, size, name="env", timeout=timeout, **options)
        assert made._open is not None
        made._open.owner = store  # Rank 0's serves those who come late.
        return made

    @classmethod
    def from_folder(
        cls, folder: str, rank: int, size: int, *, timeout: float = 300.0, **options: Any
    ) -> Group:
        """Ranks that share a folder, which is empty at first and of this group alone; needs neither
        torch nor MPI. Whoever can read the folder can join the group. Removes what it wrote there.

        Errors as of `from_torch`.
        """
        return cls.from_store(_Folder(folder), rank, size, name="", timeout=timeout, **options)

    @classmethod
    def from_store(
        cls,
        store: Any,
        rank: int,
        size: int,
        *,
        name: str = "all",
        timeout: float = 300.0,
        interface: Optional[str] = None,
        address: Optional[str] = None,
        ports: Optional[tuple[int, int]] = None,
        unix_sockets: bool = True,
    ) -> Group:
        """Ranks that share a key-value store with `set(key, value)`, `get(key)`, `check([key])` and
        `delete_key(key)`, as torch's stores have them.

        name: of the group; groups that are made at the same time through one store need different
        ones. timeout: seconds that the other ranks have to come.
        interface: whose address this rank is reached at; None: what GLOO_SOCKET_IFNAME names, else
        any that is up. address: that address itself. ports: the first and the last that may be
        listened on; None: any. unix_sockets: whether ranks of one machine use them.

        The group has a random token, which rank 0 puts into the store and every connection must
        prove to know. Nothing is encrypted (docs/tcp.md). Keys in the store carry the name, how many
        groups of that name there were before, and TORCHELASTIC_RESTART_COUNT; they are deleted.
        """
        if not 0 <= rank < size:
            raise InvalidArgumentError(f"rank {rank} of {size}")
        if size == 1:
            return cls.single()
        lib = _abi.library()
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefix = f"tensormount/{restart}/{name}/{_next(name)}"
        end = time.monotonic() + timeout
        given = _abi.TcpOptions(struct_size=ctypes.sizeof(_abi.TcpOptions))
        given.interface_name = interface.encode() if interface else None
        given.address = address.encode() if address else None
        if ports is not None:
            given.first_port, given.last_port = ports
        given.no_unix_sockets = 0 if unix_sockets else 1
        tcp = ctypes.c_void_p()
        _check(lib.tm_tcp_listen(ctypes.addressof(given), ctypes.addressof(tcp)))
        try:
            own = lib.tm_tcp_address(tcp.value).decode()
            token, addresses = _exchange(store, prefix, rank, size, own, end)
            texts = (ctypes.c_char_p * size)(*(text.encode() for text in addresses))
            secret = ctypes.create_string_buffer(token, _TOKEN_BYTES)
            out = ctypes.c_void_p()
            _check(
                lib.tm_tcp_connect(
                    tcp.value,
                    ctypes.addressof(texts),
                    rank,
                    size,
                    ctypes.addressof(secret),
                    _TOKEN_BYTES,
                    ctypes.addressof(out),
                )
            )
        finally:
            lib.tm_tcp_free(tcp.value)
        assert out.value is not None
        return cls(out.value)

    @classmethod
    def mpi(cls) -> Group:
        """The processes of an MPI job. LibraryError where the library has no part with MPI, or this
        machine not the MPI that it was built with."""
        session = _MpiSession.get()
        out = ctypes.c_void_p()
        _check(session.lib.tm_mpi_world(session.address, ctypes.addressof(out)))
        assert out.value is not None
        return cls(out.value, owner=session, kind="mpi")


class Launched(NamedTuple):
    """This process among those that a launcher started, and the variables that say so."""

    rank: int
    size: int
    names: str


# A batch script has SLURM_PROCID and SLURM_NTASKS, too, without being a task: only the variables of a
# step count.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


def ranks_of_environment() -> Optional[Launched]:
    """What the environment says; None where it says nothing. Of several launchers the first that has
    more than one rank counts: torchrun within a batch job, mpirun within a step of one task."""
    found: Optional[Launched] = None
    for rank_name, size_name in _LAUNCHERS:
        if size_name not in os.environ:
            if rank_name == "RANK" and rank_name in os.environ:
                raise UnsupportedError("the environment has RANK, but no WORLD_SIZE")
            continue
        size = _number(size_name)
        rank = _number(rank_name) if size != 1 else 0
        if not 0 <= rank < size:
            raise InvalidArgumentError(f"the environment has {rank_name}={rank}, {size_name}={size}")
        launched = Launched(rank, size, f"{rank_name}, {size_name}")
        if rank_name == "RANK" or size > 1:
            return launched
        found = found or launched
    return found


def launched_among_others() -> Optional[Launched]:
    """As `ranks_of_environment`, for whoever only asks whether there are other ranks: a variable alone,
    or a pair that makes no sense, is no answer. None: this process is alone."""
    for rank_name, size_name in _LAUNCHERS:
        try:
            rank, size = _number(rank_name), _number(size_name)
        except InvalidArgumentError:
            continue
        if 0 <= rank < size and (rank_name == "RANK" or size > 1):
            return Launched(rank, size, f"{rank_name}, {size_name}") if size > 1 else None
    return None


def _meeting_point(found: Launched) -> tuple[str, int]:
    """Host and port of the store by which ranks find each other."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if not missing:
        return os.environ["MASTER_ADDR"], _number("MASTER_PORT")
    nodes = os.environ.get("SLURM_STEP_NODELIST", "")
    if found.names.startswith("SLURM") and nodes and "SLURM_JOB_ID" in os.environ:
        host = os.environ.get("MASTER_ADDR") or _first_host(nodes)
        step = os.environ.get("SLURM_STEP_ID", "0")
        number = 31 * _number("SLURM_JOB_ID") + (int(step) if step.isdigit() else 0)
        # Below the ports that systems give to connections, above those of services.
        return host, _number("MASTER_PORT") if "MASTER_PORT" in os.environ else 12000 + number % 18000
    raise UnsupportedError(
        f"the environment has {found.names}, but no {' and no '.join(missing)}: set "
        "MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there, the same on all ranks"
    )


def _first_host(nodes: str) -> str:
    """Of a list of hosts as Slurm writes it: "gpu[003-007,012],login" is gpu003 first."""
    head, bracket, rest = nodes.partition("[")
    if not bracket or "," in head:
        return head.split(",")[0]
    inside, _, tail = rest.partition("]")
    first = re.split("[-,]", inside)[0]
    after = tail.split(",")[0]
    if "[" in after:  # More than one range in a name, which few sites have.
        return head + first + _first_host(tail)
    return head + first + after


def _in_hook() -> bool:
    jobs = sys.modules.get("tensormount._jobs")  # Without it there was no job yet.
    return jobs is not None and jobs.in_hook()


def _check(status: int) -> None:
    if status:
        _abi.fail(status)


def _torch_distributed() -> Any:
    try:
        import torch.distributed as distributed
    except ImportError as error:
        raise LibraryError(
            f"PyTorch is needed for the ranks to find each other ({error}); "
            "Group.from_folder() does without"
        ) from None
    if not distributed.is_available():
        raise UnsupportedError("this PyTorch is built without torch.distributed")
    return distributed


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    try:
        return int(text)
    except ValueError:
        raise InvalidArgumentError(f"the environment's {name} is {text!r}, no number") from None


# ---- Finding each other ------------------------------------------------------------------------


def _exchange(
    store: Any, prefix: str, rank: int, size: int, own: str, end: float
) -> tuple[bytes, list[str]]:
    """The token and everybody's address. One key a rank to rank 0, and one from it that all read: a
    thousand ranks that read each other's would be a million requests."""
    lib = _abi.library()
    if rank != 0:
        store.set(f"{prefix}/{rank}", own)
        if not _await(store, f"{prefix}/all", end):
            raise PeerTimeout(
                "waiting for the addresses of the group: rank 0 did not come, or waits for another "
                "rank",
                rank=0,
            )
        found = _text(store.get(f"{prefix}/all")).split("\n")
        # Deleted by the last who read it.
        if store.add(f"{prefix}/read", 1) == size - 1:
            for key in (f"{prefix}/all", f"{prefix}/read"):
                store.delete_key(key)
        if len(found) != size + 1:
            raise StaleError(f"the store has the addresses of {len(found) - 1} ranks, not of {size}")
        return bytes.fromhex(found[0]), found[1:]
    addresses = [own]
    for other in range(1, size):
        key = f"{prefix}/{other}"
        if not _await(store, key, end):
            missing = [r for r in range(other, size) if not store.check([f"{prefix}/{r}"])]
            named = ", ".join(map(str, missing[:16])) + (" and more" if len(missing) > 16 else "")
            raise PeerTimeout(
                f"waiting for the addresses of the group: rank{'s' if len(missing) > 1 else ''} "
                f"{named} did not come",
                rank=missing[0] if missing else other,
            )
        addresses.append(_text(store.get(key)))
        store.delete_key(key)
    token = ctypes.create_string_buffer(_TOKEN_BYTES)
    _check(lib.tm_tcp_token(ctypes.addressof(token), _TOKEN_BYTES))
    store.set(f"{prefix}/all", "\n".join([token.raw.hex(), *addresses]))
    return token.raw, addresses


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, (bytes, bytearray)) else str(value)


def _await(store: Any, key: str, end: float) -> bool:
    """Looks until the key is there, so that signals are handled meanwhile; False at `end`."""
    pause = 0.001
    while not store.check([key]):
        left = end - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(pause * 1.5, 0.05)
    return True


class _Folder:
    """The few functions of a store of torch's that are used here, over a shared folder."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        os.makedirs(folder, exist_ok=True)

    def _path(self, key: str) -> str:
        return os.path.join(self._folder, key.replace("/", "-"))

    def set(self, key: str, value: str) -> None:
        path = self._path(key)
        temporary = f"{path}.{os.getpid()}"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(value)
        os.rename(temporary, path)

    def get(self, key: str) -> str:
        with open(self._path(key)) as file:
            return file.read()

    def check(self, keys: list[str]) -> bool:
        # A listing, and no look-up by name: network filesystems remember that a name was not there.
        there = set(os.listdir(self._folder))
        return all(os.path.basename(self._path(key)) in there for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Counts by files, one a call."""
        assert amount == 1
        # Not by `set`: its temporary file would be counted, and deleted by who counts it as the last.
        mark = self._path(f"{key}/{os.getpid()}-{threading.get_ident()}-{time.monotonic_ns()}")
        os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        begin = os.path.basename(self._path(key)) + "-"
        return sum(1 for name in os.listdir(self._folder) if name.startswith(begin))

    def delete_key(self, key: str) -> bool:
        begin = os.path.basename(self._path(key))
        found = False
        for name in os.listdir(self._folder):
            if name == begin or name.startswith(begin + "-"):
                try:
                    os.unlink(os.path.join(self._folder, name))
                    found = True
                except FileNotFoundError:
                    pass  # Two ranks were the last at the same time.
        return found


class _MpiSession:
    """MPI of this process: initialised once, and finalised at its end unless something failed."""

    _one: Optional[_MpiSession] = None
    _begins = False

    def __init__(self) -> None:
        self.process = os.getpid()
        self.lib = _abi.mpi_library()
        out = ctypes.c_void_p()
        _check(self.lib.tm_mpi_init(ctypes.addressof(out)))
        self.address = out.value

    @classmethod
    def get(cls) -> _MpiSession:
        with _lock:
            if cls._begins:
                raise BusyError("MPI is being initialised by the code that this signal handler interrupted")
            if cls._one is None:
                import atexit

                cls._begins = True
                try:
                    cls._one = cls()
                finally:
                    cls._begins = False
                atexit.register(cls._one._end)
            return cls._one

    def _end(self) -> None:
        if self.process != os.getpid():
            return  # A forked child has none.
        jobs = sys.modules.get("tensormount._jobs")
        if jobs is not None:
            jobs.end_all()  # Saves under way need MPI.
        self.lib.tm_mpi_free(self.address)

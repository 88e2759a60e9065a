# SPDX-License-Identifier: Apache-2.0
"""The ranks of a job: `Group`.

Ranks reach each other over the C library's own connections: TCP, and Unix sockets on one machine. Each rank
publishes its address once, through torch's store or a directory. No collective of the program's process groups
is used, so that a job on NCCL gives up no device memory. `mpi` and `from_callbacks` use other transports.
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
from collections.abc import Sequence
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

_sequences: dict[str, itertools.count[int]] = {}
# Reentrant: a signal handler may need the lock while the code that it interrupts holds it.
_lock = threading.RLock()


def _next_number(name: str) -> int:
    """The number of groups of that name that this process has made before."""
    return next(_sequences.setdefault(name, itertools.count()))


class _Handle:
    """A tm_communicator, freed when the group is closed and the last `Use` has ended, so that calls on other
    threads can finish. Works without a lock (see _jobs.py)."""

    def __init__(self, address: int, free: Any, owner: Any) -> None:
        self.address = address
        self.owner = owner  # Must outlive the communicator.
        self.working: set[Any] = set()  # Calls under way on threads of _tasks.py.
        self._free = free  # Kept here, because at exit the names of modules may be gone.
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
    """One use of a group's communicator. It ends with `release`, with the end of `with`, or when it is dropped."""

    _of: Any = None  # A _Handle; None: __init__ was interrupted.
    _mark: Any = None

    def __init__(self, of: _Handle) -> None:
        self._of = of
        self._mark = of.take()

    @property
    def address(self) -> int:
        return int(self._of.address)

    @property
    def working(self) -> set[Any]:
        found: set[Any] = self._of.working
        return found

    def another(self) -> Use:
        """Another use of the same communicator, which ends separately."""
        return Use(self._of)

    def release(self) -> None:
        if self._of is not None:
            self._of.give_back(self._mark)

    def __enter__(self) -> Use:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


class Group:
    """A fixed group of ranks that save and load together.

    All its ranks make it, by `from_torch`, `from_env`, `from_folder`, `from_store`, `from_callbacks`, `mpi`
    or `single`, in the same order as other groups. Keep one for a job: connections are made once. It is
    closed by close(), at the end of `with`, or when nothing refers to it. Saves and loads under way end
    first, and so do its savers.

    One thread at a time may start saves and loads of a group. Several saves and loads may be under way at a time.
    """

    def __init__(self, address: int, owner: Any = None, kind: str = "tcp") -> None:
        lib = _abi.library()
        self._lib = lib
        self._kind = kind
        self._process = os.getpid()
        self._savers: weakref.WeakSet[Any] = weakref.WeakSet()  # They are closed before the group (_saver.py).
        self._ended = _abi.ended
        # After the attributes that close() needs: a signal handler that raises may end this function at any line.
        self._open: Optional[_Handle] = _Handle(address, lib.tm_communicator_free, owner)
        self._rank = int(lib.tm_communicator_rank(address))
        self._size = int(lib.tm_communicator_size(address))
        self._cache: Any = None  # Layouts of earlier saves and loads (_state.py).

    # ---- Properties --------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The rank of this process, from 0."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._size

    @property
    def kind(self) -> str:
        """How the ranks reach each other: "single", "tcp", "mpi", "callbacks"."""
        return self._kind

    def __repr__(self) -> str:
        state = "" if self._open is not None else ", closed"
        return f"<tensormount.Group: rank {self._rank} of {self._size} ({self._kind}{state})>"

    def __reduce__(self) -> Any:
        raise UnsupportedError("a Group cannot be pickled: it belongs to its process; make one in the other process")

    # ---- Closing -----------------------------------------------------------------------------

    def close(self) -> None:
        """Closes the group. Calls under way end first, within their timeouts. May be called again."""
        opened = self._open
        if opened is None:
            return
        if _in_hook():
            raise UnsupportedError("a group cannot be closed in a hook of its own save or load")
        jobs = sys.modules.get("tensormount._jobs")  # None: this process has made no job yet.
        if self._process == os.getpid():
            if jobs is not None:
                jobs.await_jobs_of(self)
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
        """A use of the communicator for one call: `with group._handle() as handle`, and `handle.address`.

        StaleError: the group is closed. UnsupportedError: this process is a forked child.
        """
        opened = self._open
        if opened is None:
            raise StaleError("the group is closed")
        if self._process != os.getpid():
            raise UnsupportedError(
                f"the group belongs to process {self._process}, which forked this one: make a new "
                "group in this process"
            )
        use = Use(opened)
        if self._open is None:
            use.release()
            raise StaleError("the group is closed")
        return use

    # ---- Construction ----------------------------------------------------------------------

    @classmethod
    def single(cls) -> Group:
        """A group of this process alone."""
        out = ctypes.c_void_p()
        _check(_abi.library().tm_communicator_self(ctypes.addressof(out)))
        assert out.value is not None
        return cls(out.value, kind="single")

    @classmethod
    def from_torch(cls, group: Any = None, *, timeout: float = 300.0, **options: Any) -> Group:
        """The ranks of a process group of torch.distributed; None: the default process group.

        Uses the store of the default process group, for one address per rank, and no collectives: any backend
        works.

        timeout   seconds to wait for the other ranks. options: as for `from_store`.

        Raises PeerTimeout with a rank that did not come; UnsupportedError if there is no default process group
        (see `from_env`), or this process is not in `group`.
        """
        distributed = _torch_distributed()
        check_process_group(group, "of from_torch")
        if not distributed.is_initialized():
            raise UnsupportedError(
                "torch.distributed has no default process group: call init_process_group first, or "
                "use Group.from_env()"
            )
        if distributed.get_rank(group) < 0:
            raise UnsupportedError("this process is not in that process group")
        ranks = distributed.get_process_group_ranks(
            distributed.group.WORLD if group is None else group
        )
        # The name is made of the ranks, because PyTorch's name of a group differs between ranks that are members of
        # other groups.
        name = "all" if group is None else "-".join(map(str, ranks))
        if len(name) > 200:
            import hashlib

            name = hashlib.sha256(name.encode()).hexdigest()
        return cls._of_torch_ranks(ranks, name, timeout=timeout, **options)

    @classmethod
    def _of_torch_ranks(
        cls, ranks: Sequence[int], name: str, *, timeout: float = 300.0, **options: Any
    ) -> Group:
        """Some ranks of the default process group, this one among them. `name`: the same on all of them."""
        distributed = _torch_distributed()
        if len(ranks) == 1:
            return cls.single()
        rank = list(ranks).index(distributed.get_rank())
        store = distributed.distributed_c10d._get_default_store()
        return cls.from_store(store, rank, len(ranks), name=name, timeout=timeout, **options)

    @classmethod
    def from_env(cls, *, timeout: float = 300.0, **options: Any) -> Group:
        """The ranks that a launcher started, from its environment variables.

        RANK and WORLD_SIZE                       torchrun, and most others
        SLURM_PROCID and SLURM_STEP_NUM_TASKS     srun
        OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE, or PMI_RANK, PMI_SIZE    mpirun

        Works with or without a process group of torch. Without any of these variables: this process alone.

        Ranks meet at MASTER_ADDR and MASTER_PORT. Under srun these are optional: the default is the first host
        of the step, and a port derived from the numbers of job and step. Needs PyTorch, for its store
        (`Group.mpi()` and `from_folder` do not).

        UnsupportedError names a missing variable. Other errors as for `from_torch`.
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

        # torchrun's agent already serves a store at this address; without the agent rank 0 serves one.
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
        made._open.owner = store  # Rank 0's store must go on to serve late ranks.
        return made

    @classmethod
    def from_folder(
        cls, folder: str, rank: int, size: int, *, timeout: float = 300.0, **options: Any
    ) -> Group:
        """Ranks that share a directory; needs neither torch nor MPI.

        The directory must be empty and used by this group alone. Every process that can read it can join the group.
        The files that the ranks write there are removed again. Errors as for `from_torch`.
        """
        return cls.from_store(_DirectoryStore(folder), rank, size, name="", timeout=timeout, **options)

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
        """Ranks that share a key-value store, like torch's stores.

        store     has `set(key, value)`, `get(key)`, `check([key])`, `add(key, 1)` and `delete_key(key)`.
        name      the name of the group; groups made at the same time through one store need different names.
        timeout   seconds to wait for the other ranks.
        interface the network interface whose address this rank is reached at; None: the one that
                  GLOO_SOCKET_IFNAME names, else any that is up. address: the address itself.
        ports     the first and last port to listen on; None: any.
        unix_sockets   whether ranks of one machine use them.

        Rank 0 puts a random token into the store, and every connection must prove that it knows it. Nothing is
        encrypted (docs/tcp.md). Keys in the store contain the name, the number of earlier groups of that name,
        and TORCHELASTIC_RESTART_COUNT; they are deleted again.
        """
        if not 0 <= rank < size:
            raise InvalidArgumentError(f"rank={rank}, size={size}: the rank must be from 0 to size - 1")
        if size == 1:
            return cls.single()
        lib = _abi.library()
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefix = f"tensormount/{restart}/{name}/{_next_number(name)}"
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
            secret = ctypes.create_string_buffer(token, _abi.TM_TCP_TOKEN_BYTES)
            out = ctypes.c_void_p()
            _check(
                lib.tm_tcp_connect(
                    tcp.value,
                    ctypes.addressof(texts),
                    rank,
                    size,
                    ctypes.addressof(secret),
                    _abi.TM_TCP_TOKEN_BYTES,
                    ctypes.addressof(out),
                )
            )
        finally:
            lib.tm_tcp_free(tcp.value)
        assert out.value is not None
        return cls(out.value)

    @classmethod
    def from_callbacks(
        cls, host: Any, rank: int, size: int, *, tag: int = 0, leave_wait: float = 5.0
    ) -> Group:
        """Ranks that exchange messages over your own transport (docs/extending.md).

        host       has `send(to, tag, data)` and `receive(source, tag, into)`, which begin to move all of a
                   memoryview and return a request (any object), and `test(request)`, which returns True once
                   the request is done. These never wait for another rank; an exception means that the rank is
                   gone. Optional: `cancel(request)`, after which the memory is not touched any more.
        tag        the tag of all messages of this group.
        leave_wait seconds that close() waits for the other ranks to close theirs.

        The methods are called on any thread, one at a time, and must not use the group.
        """
        host = _HostCallbacks(host)
        given = _abi.Callbacks(struct_size=ctypes.sizeof(_abi.Callbacks), tag=tag)
        for name, function in host.functions.items():
            setattr(given, name, ctypes.cast(function, ctypes.c_void_p))
        given.leave_wait_ms = max(1, int(leave_wait * 1000))
        out = ctypes.c_void_p()
        _check(
            _abi.library().tm_communicator_from_callbacks(
                ctypes.c_void_p(ctypes.addressof(given)), rank, size,
                ctypes.c_void_p(ctypes.addressof(out)),
            )
        )
        assert out.value is not None
        return cls(out.value, owner=host, kind="callbacks")

    @classmethod
    def mpi(cls) -> Group:
        """The processes of an MPI job.

        LibraryError: the library was built without MPI, or this machine lacks the MPI that it was built with.
        """
        session = _MpiSession.get()
        out = ctypes.c_void_p()
        _check(session.lib.tm_mpi_world(session.address, ctypes.addressof(out)))
        assert out.value is not None
        return cls(out.value, owner=session, kind="mpi")


_Start = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint64,
    ctypes.POINTER(ctypes.c_uint64),
)
_Test = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64)
_Cancel = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint64)


class _HostCallbacks:
    """The functions of tm_callbacks, over an object of the caller. Its requests are kept by number."""

    def __init__(self, host: Any) -> None:
        self._test = host.test
        self._requests: dict[int, Any] = {}
        self._numbers = itertools.count(1)
        self.functions: dict[str, Any] = {
            "send": _Start(self._start(host.send)), "receive": _Start(self._start(host.receive)),
            "test": _Test(self._test_request),
        }
        if hasattr(host, "cancel"):
            self.functions["cancel"] = _Cancel(lambda _, number: host.cancel(self._requests.pop(number)))

    def _start(self, begin: Any) -> Any:
        def start(_: Any, other: int, tag: int, data: int, size: int, request: Any) -> int:
            number = next(self._numbers)
            try:
                memory = memoryview((ctypes.c_char * size).from_address(data)).cast("B")
                self._requests[number] = begin(other, tag, memory)
            except Exception as error:
                return self._failed(error)
            request[0] = number
            return 0

        return start

    def _test_request(self, _: Any, number: int) -> int:
        try:
            if not self._test(self._requests[number]):
                return 0
            found = 1
        except Exception as error:
            found = self._failed(error)
        del self._requests[number]
        return found

    @staticmethod
    def _failed(error: Exception) -> int:
        from tensormount._jobs import log

        log.error("a callback of the group raised an exception: %s: %s", type(error).__name__, error)
        return -1


class Launched(NamedTuple):
    """Rank and number of the processes that a launcher started. `names`: the environment variables."""

    rank: int
    size: int
    names: str


# For srun a variable that only steps have is needed (SLURM_STEP_NUM_TASKS): a batch script is not a task, but has
# SLURM_PROCID and SLURM_NTASKS, too.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


def ranks_of_environment() -> Optional[Launched]:
    """The rank that the environment variables of a launcher give; None: there are none. RANK counts first, then
    the first launcher with more than one rank (mpirun within a step of one task)."""
    found: Optional[Launched] = None
    for rank_name, size_name in _LAUNCHERS:
        if size_name not in os.environ:
            if rank_name == "RANK" and rank_name in os.environ:
                raise UnsupportedError("the environment has RANK, but no WORLD_SIZE")
            continue
        size = _number(size_name)
        rank = _number(rank_name) if size != 1 else 0
        if not 0 <= rank < size:
            raise InvalidArgumentError(
                f"the environment has {rank_name}={rank}, {size_name}={size}: the rank must be at least "
                "0 and less than the number of ranks"
            )
        launched = Launched(rank, size, f"{rank_name}, {size_name}")
        if rank_name == "RANK" or size > 1:
            return launched
        found = found or launched
    return found


def launched_with_others() -> Optional[Launched]:
    """As `ranks_of_environment`, but incomplete or inconsistent variables are ignored. None: this process is
    alone."""
    for rank_name, size_name in _LAUNCHERS:
        try:
            rank, size = _number(rank_name), _number(size_name)
        except InvalidArgumentError:
            continue
        if 0 <= rank < size and (rank_name == "RANK" or size > 1):
            return Launched(rank, size, f"{rank_name}, {size_name}") if size > 1 else None
    return None


def _meeting_point(found: Launched) -> tuple[str, int]:
    """Host and port of the store through which the ranks exchange addresses. UnsupportedError: a variable is
    missing."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if not missing:
        return os.environ["MASTER_ADDR"], _number("MASTER_PORT")
    nodes = os.environ.get("SLURM_STEP_NODELIST", "")
    if found.names.startswith("SLURM") and nodes and "SLURM_JOB_ID" in os.environ:
        host = os.environ.get("MASTER_ADDR") or _first_host(nodes)
        step = os.environ.get("SLURM_STEP_ID", "0")
        number = 31 * _number("SLURM_JOB_ID") + (int(step) if step.isdigit() else 0)
        # A port from 12000 to 29999: above the ports of services, below the ephemeral ports.
        return host, _number("MASTER_PORT") if "MASTER_PORT" in os.environ else 12000 + number % 18000
    raise UnsupportedError(
        f"the environment has {found.names}, but no {' and no '.join(missing)}: set "
        "MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there, the same on all ranks"
    )


def _first_host(nodes: str) -> str:
    """The first host of a host list of Slurm: gpu003 for "gpu[003-007,012],login"."""
    head, bracket, rest = nodes.partition("[")
    if not bracket or "," in head:
        return head.split(",")[0]
    inside, _, tail = rest.partition("]")
    first = re.split("[-,]", inside)[0]
    after = tail.split(",")[0]
    if "[" in after:  # A name with several ranges.
        return head + first + _first_host(tail)
    return head + first + after


def _in_hook() -> bool:
    jobs = sys.modules.get("tensormount._jobs")  # None: this process has made no job yet.
    return jobs is not None and jobs.in_hook()


def _check(status: int) -> None:
    if status:
        _abi.fail(status)


def check_process_group(group: Any, where: str) -> None:
    """InvalidArgumentError: neither None nor a process group of torch. UnsupportedError: one without this process."""
    if group is None:
        return
    distributed = _torch_distributed()
    if isinstance(group, distributed.ProcessGroup):
        return
    if group is distributed.GroupMember.NON_GROUP_MEMBER:
        raise UnsupportedError(f"group {where}: this process is not in that process group")
    hint = ": pass the process group of the mesh, mesh.get_group()" if type(group).__name__ == "DeviceMesh" else ""
    raise InvalidArgumentError(
        f"group {where} must be a process group of torch.distributed, not {type(group).__name__}{hint}"
    )


def _torch_distributed() -> Any:
    try:
        import torch.distributed as distributed
    except ImportError as error:
        raise LibraryError(
            f"PyTorch is needed for the ranks to find each other ({error}); "
            "Group.from_folder() works without it"
        ) from None
    if not distributed.is_available():
        raise UnsupportedError("this PyTorch is built without torch.distributed")
    return distributed


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    try:
        return int(text)
    except ValueError:
        raise InvalidArgumentError(f"the environment variable {name} is {text!r}, not a number") from None


# ---- Exchange of addresses ------------------------------------------------------------------------


def _exchange(
    store: Any, prefix: str, rank: int, size: int, own: str, end: float
) -> tuple[bytes, list[str]]:
    """The token and the addresses of all ranks. Rank 0 collects one key of each rank and publishes one key with
    all addresses: if each rank read the keys of all others, a thousand ranks would send a million requests.

    PeerTimeout: a rank did not come before `end` (time.monotonic()).
    """
    lib = _abi.library()
    if rank != 0:
        store.set(f"{prefix}/{rank}", own)
        if not _await(store, f"{prefix}/all", end):
            raise PeerTimeout(
                "waiting for the addresses of the group: rank 0 did not arrive, or waits for another "
                "rank",
                rank=0,
            )
        found = _text(store.get(f"{prefix}/all")).split("\n")
        # The last reader deletes the keys.
        if store.add(f"{prefix}/read", 1) == size - 1:
            for key in (f"{prefix}/all", f"{prefix}/read"):
                store.delete_key(key)
        if len(found) != size + 1:
            raise StaleError(f"torch's key-value store has the addresses of {len(found) - 1} ranks instead of {size}")
        return bytes.fromhex(found[0]), found[1:]
    addresses = [own]
    for other in range(1, size):
        key = f"{prefix}/{other}"
        if not _await(store, key, end):
            missing = [r for r in range(other, size) if not store.check([f"{prefix}/{r}"])]
            named = ", ".join(map(str, missing[:16])) + (" and more" if len(missing) > 16 else "")
            raise PeerTimeout(
                f"waiting for the addresses of the group: rank{'s' if len(missing) > 1 else ''} "
                f"{named} did not arrive",
                rank=missing[0] if missing else other,
            )
        addresses.append(_text(store.get(key)))
        store.delete_key(key)
    token = ctypes.create_string_buffer(_abi.TM_TCP_TOKEN_BYTES)
    _check(lib.tm_tcp_token(ctypes.addressof(token), _abi.TM_TCP_TOKEN_BYTES))
    store.set(f"{prefix}/all", "\n".join([token.raw.hex(), *addresses]))
    return token.raw, addresses


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, (bytes, bytearray)) else str(value)


def _await(store: Any, key: str, end: float) -> bool:
    """Polls until the key exists, so that signal handlers run meanwhile. False: it did not exist by `end`."""
    pause = 0.001
    while not store.check([key]):
        left = end - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(pause * 1.5, 0.05)
    return True


class _DirectoryStore:
    """The methods of torch's stores that `_exchange` uses, over a shared directory."""

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
        # Lists the directory, because network filesystems cache failed look-ups of a name.
        there = set(os.listdir(self._folder))
        return all(os.path.basename(self._path(key)) in there for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Counts the calls for a key, by one file for each call."""
        assert amount == 1
        # Does not use `set`: other processes would count its temporary file, and the process that reaches the full
        # count would delete it.
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
                    pass  # Another rank has deleted it.
        return found


class _MpiSession:
    """MPI of this process: initialised once, finalised at exit."""

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
            return  # MPI belongs to the parent of a forked child.
        jobs = sys.modules.get("tensormount._jobs")
        if jobs is not None:
            jobs.end_all()  # Saves under way need MPI, so they end first.
        self.lib.tm_mpi_free(self.address)

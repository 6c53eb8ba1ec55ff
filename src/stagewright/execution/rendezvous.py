"""Where the ranks of a run meet: in a private folder of one machine, or in the store of a launcher on several.

On one machine nothing listens but gloo's (or NCCL's) own connections, on the loopback interface: addresses are exchanged
through a file. Under a launcher such as torchrun its store serves; what is posted there is sealed with STAGEWRIGHT_TOKEN.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from stagewright.errors import RunError
from stagewright.execution.heartbeat import Board, FileBoard, Seal, StoreBoard, places

if TYPE_CHECKING:
    import torch.distributed as dist

TOKEN = "STAGEWRIGHT_TOKEN"
"""Environment variable: the secret that the ranks of one run share."""

STARTED_HERE, LAUNCHER = "STAGEWRIGHT_RENDEZVOUS", "STAGEWRIGHT_LAUNCHER"


@dataclass(frozen=True)
class Meeting:
    """The ranks of a run on this machine: their private folder, the secret they share and the process that started them."""

    folder: Path
    token: str
    launcher: int

    @classmethod
    def new(cls, folder: Path) -> Meeting:
        """For ranks that this process starts."""
        return cls(folder, secrets.token_hex(), os.getpid())

    @classmethod
    def joined(cls) -> Meeting | None:
        """The one this process was started for; None under a launcher of others."""
        folder = os.environ.get(STARTED_HERE)
        if folder is None:
            return None
        return cls(Path(folder), os.environ[TOKEN], int(os.environ[LAUNCHER]))

    def environment(self) -> Mapping[str, str]:
        """What a rank finds it by; its connections stay on this machine."""
        loopback = loopback_interface()
        return {
            STARTED_HERE: str(self.folder),
            TOKEN: self.token,
            LAUNCHER: str(self.launcher),
            "GLOO_SOCKET_IFNAME": loopback,
            "NCCL_SOCKET_IFNAME": loopback,
        }

    def is_orphaned(self) -> bool:
        """Whether the process that started the ranks, of which this is one, has ended."""
        return os.getppid() != self.launcher

    def board(self, num_ranks: int) -> FileBoard:
        """Raises `RunError` where the folder is gone: the launcher was killed, and a rank has cleared up behind it."""
        try:
            return FileBoard(self.folder / "board", places(num_ranks), Seal(self.token))
        except FileNotFoundError:
            raise RunError(f"the process that started the run ({self.launcher}) has ended") from None


def loopback_interface() -> str:
    """The name of the interface that leads nowhere but to this machine.

    >>> import socket
    >>> loopback_interface() in {name for _, name in socket.if_nameindex()}
    True
    """
    return "lo0" if sys.platform == "darwin" else "lo"


def board_of(meeting: Meeting | None, num_ranks: int, start_s: float) -> Board:
    """Where this rank posts. Imports torch under a launcher of others, whose store has `start_s` seconds to answer."""
    if meeting is not None:
        return meeting.board(num_ranks)
    return StoreBoard(own_store(start_s), own_seal())


def own_seal() -> Seal:
    """Under a launcher of others: of the secret that the user has given to all ranks, if any."""
    return Seal(os.environ.get(TOKEN, ""))


def group_store(meeting: Meeting | None, num_ranks: int, timeout_s: float) -> dist.Store:
    """A connection through which the process group exchanges addresses."""
    import torch.distributed as dist

    if meeting is None:
        return dist.PrefixStore("group", own_store(max(timeout_s, 60.0)))
    store = dist.FileStore(str(meeting.folder / "store"), num_ranks)
    store.set_timeout(timedelta(seconds=max(timeout_s, 60.0)))
    return dist.PrefixStore("group", store)


def has_own_store() -> bool:
    """Whether the launcher, like torchrun, hosts the rendezvous store itself."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def hosted_store(timeout_s: float) -> dist.Store | None:
    """The rendezvous store, for as long as it is held, where this process has to be the one that hosts it: the first of a
    launcher that has none of its own. Raises `RunError` where it cannot be reached within `timeout_s`."""
    import torch.distributed as dist

    if has_own_store() or os.environ["RANK"] != "0":
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    _wait_for_name(host, timeout_s)
    limit = timedelta(seconds=timeout_s)
    with _answering(host, port, timeout_s):
        return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=limit)


def own_store(timeout_s: float = 30.0) -> dist.Store:
    """A connection to the launcher's store that no other thread of this process uses. Raises `RunError` where the store does
    not answer in time."""
    import torch.distributed as dist

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    _wait_for_name(host, timeout_s)
    limit = timedelta(seconds=timeout_s)
    with _answering(host, port, timeout_s):
        store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
    return dist.PrefixStore(f"stagewright/{_attempt()}", store)


@contextmanager
def _answering(host: str, port: int, timeout_s: float) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch's DistError is one
        said = str(error).strip().splitlines()[0]
        raise RunError(
            f"the rendezvous store at {host}:{port} did not answer within {timeout_s:.0f} s ({said}): see that rank 0 was "
            "started, and that this host reaches its port"
        ) from None


_ASK_AGAIN_S = 0.5


def _wait_for_name(host: str, timeout_s: float) -> None:
    """Returns once the name of a host has an address, which may come when the host does: torch asks for it far longer than
    its limit, and prints a trace each time. Raises `RunError` where it has none within `timeout_s`."""
    has_address, reasons = threading.Event(), ["its name servers do not answer"]

    def ask() -> None:
        while not has_address.is_set() and time.monotonic() < deadline:
            try:
                socket.getaddrinfo(host, None)
                has_address.set()
            except (OSError, UnicodeError) as error:
                reasons.append(str(error))
                time.sleep(_ASK_AGAIN_S)

    deadline = time.monotonic() + timeout_s
    threading.Thread(target=ask, daemon=True).start()
    if not has_address.wait(timeout_s):
        raise RunError(
            f"MASTER_ADDR is {host!r}, which had no address within {timeout_s:.0f} s ({reasons[-1]}): name the host of rank "
            "0 as the others reach it"
        )


def _attempt() -> str:
    """The part of the store that this start of the ranks has to itself: torchrun starts them again with the same store, on
    which what earlier ones posted still stands, and with fewer of them when a host is gone.

    Source: `torch.distributed.rendezvous`, which goes by the count of restarts too. Ignores: a host that comes back while no
    rank has failed; then what stands there ends the run, and torchrun counts its restart.
    """
    count, size = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), os.environ.get("WORLD_SIZE", "1")
    return f"{count}/{size}"


def is_unsealed() -> bool:
    """Whether ranks of several machines share no secret."""
    num_here = os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])
    return Meeting.joined() is None and TOKEN not in os.environ and num_here != os.environ["WORLD_SIZE"]

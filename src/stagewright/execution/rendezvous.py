"""The rendezvous of a run's ranks: in a private folder on one machine, or in the store of a launcher on several.

On one machine only gloo's (or NCCL's) own connections listen, on the loopback interface: addresses are exchanged through a
file. Under a launcher such as torchrun, its store is used; posts there are sealed with STAGEWRIGHT_TOKEN.
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
"""Environment variable with the secret that the ranks of a run share."""

STARTED_HERE, LAUNCHER = "STAGEWRIGHT_RENDEZVOUS", "STAGEWRIGHT_LAUNCHER"


@dataclass(frozen=True)
class Meeting:
    """The rendezvous of a run on one machine: its private folder, its secret and the process that started the ranks."""

    folder: Path
    token: str
    launcher: int

    @classmethod
    def new(cls, folder: Path) -> Meeting:
        """Return a rendezvous for ranks that this process starts."""
        return cls(folder, secrets.token_hex(), os.getpid())

    @classmethod
    def joined(cls) -> Meeting | None:
        """Return the rendezvous for which this process was started, or None under a foreign launcher."""
        folder = os.environ.get(STARTED_HERE)
        if folder is None:
            return None
        return cls(Path(folder), os.environ[TOKEN], int(os.environ[LAUNCHER]))

    def environment(self) -> Mapping[str, str]:
        """Return the environment variables by which a rank finds it; connections stay on this machine."""
        loopback = loopback_interface()
        return {
            STARTED_HERE: str(self.folder),
            TOKEN: self.token,
            LAUNCHER: str(self.launcher),
            "GLOO_SOCKET_IFNAME": loopback,
            "NCCL_SOCKET_IFNAME": loopback,
        }

    def is_orphaned(self) -> bool:
        """Return whether the process that started this rank has ended."""
        return os.getppid() != self.launcher

    def board(self, num_ranks: int) -> FileBoard:
        """Open the board. Raises `RunError` where the folder is gone: the launcher was killed, and a rank has cleaned up."""
        try:
            return FileBoard(self.folder / "board", places(num_ranks), Seal(self.token))
        except FileNotFoundError:
            raise RunError(f"the process that started the run ({self.launcher}) has ended") from None


def loopback_interface() -> str:
    """Return the name of the loopback interface.

    >>> import socket
    >>> loopback_interface() in {name for _, name in socket.if_nameindex()}
    True
    """
    return "lo0" if sys.platform == "darwin" else "lo"


def board_of(meeting: Meeting | None, num_ranks: int, start_s: float) -> Board:
    """Return the board of this rank. Imports torch under a foreign launcher, whose store has `start_s` seconds to answer."""
    if meeting is not None:
        return meeting.board(num_ranks)
    return StoreBoard(own_store(start_s), own_seal())


def own_seal() -> Seal:
    """Return the seal under a foreign launcher: by the secret that the user has given to all ranks, if any."""
    return Seal(os.environ.get(TOKEN, ""))


def group_store(meeting: Meeting | None, num_ranks: int, timeout_s: float) -> dist.Store:
    """Return a store through which the process group exchanges addresses."""
    import torch.distributed as dist

    if meeting is None:
        return dist.PrefixStore("group", own_store(max(timeout_s, 60.0)))
    store = dist.FileStore(str(meeting.folder / "store"), num_ranks)
    store.set_timeout(timedelta(seconds=max(timeout_s, 60.0)))
    return dist.PrefixStore("group", store)


def has_own_store() -> bool:
    """Return whether the launcher, like torchrun, hosts the rendezvous store itself."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def hosted_store(timeout_s: float) -> dist.Store | None:
    """Host the rendezvous store, for as long as the result is held, if this is the first process of a launcher that does
    not host it; otherwise return None. Raises `RunError` where it cannot be reached within `timeout_s`."""
    import torch.distributed as dist

    if has_own_store() or os.environ["RANK"] != "0":
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    _wait_for_name(host, timeout_s)
    limit = timedelta(seconds=timeout_s)
    with _answering(host, port, timeout_s):
        return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=limit)


def own_store(timeout_s: float = 30.0) -> dist.Store:
    """Return a separate connection to the launcher's store, for one thread of this process. Raises `RunError` where the
    store does not answer in time."""
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
        reason = str(error).strip().splitlines()[0]
        raise RunError(
            f"the rendezvous store at {host}:{port} did not answer within {timeout_s:.0f} s ({reason}): check that rank 0 "
            "was started, and that this host reaches its port"
        ) from None


_ASK_AGAIN_S = 0.5


def _wait_for_name(host: str, timeout_s: float) -> None:
    """Wait until the name of a host has an address, which may appear only when the host starts: torch would ask for it far
    longer than its limit, and print a trace each time. Raises `RunError` where it has none within `timeout_s`."""
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
            f"MASTER_ADDR is {host!r}, which had no address within {timeout_s:.0f} s ({reasons[-1]}): set it to the name by "
            "which the other hosts reach that of rank 0"
        )


def _attempt() -> str:
    """Return the prefix of this start of the ranks in the store: torchrun restarts them with the same store, which still
    holds the posts of earlier starts, and with fewer of them when a host is gone.

    Source: `torch.distributed.rendezvous`, which uses the count of restarts too. Ignores: a host that comes back while no
    rank has failed; then the old posts end the run, and torchrun counts its restart.
    """
    count, size = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), os.environ.get("WORLD_SIZE", "1")
    return f"{count}/{size}"


def is_unsealed() -> bool:
    """Return whether the ranks run on several machines without a shared secret."""
    num_here = os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])
    return Meeting.joined() is None and TOKEN not in os.environ and num_here != os.environ["WORLD_SIZE"]

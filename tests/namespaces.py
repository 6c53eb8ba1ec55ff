"""Several hosts on one machine: network namespaces on a bridge, with links shaped by `tc`, pair by pair and way by way.

Needs Linux, root, `ip` and `tc`, and a kernel with veth, bridges and HTB. Latency needs netem too, which few small
kernels have: bandwidth alone is shaped where it is missing.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch.distributed as dist

_CLONE_NEWNET = 0x40000000
_ADDRESS = "10.213.7.{}"


@dataclass(frozen=True)
class Host:
    """A network namespace with one interface, `eth0`."""

    namespace: str
    address: str

    def command(self, *words: str) -> list[str]:
        """The command that runs `words` on this host."""
        return ["ip", "netns", "exec", self.namespace, *words]


@contextmanager
def hosts(
    num_hosts: int, rate: str, slow: Mapping[tuple[int, int], str] | None = None
) -> Iterator[list[Host]]:
    """Hosts that send to each other at `rate` (as `tc` writes it), but for the pairs (sender, receiver) in `slow`.

    Each host's adapter is as fast as `rate` allows to every other host at the same time: links do not share.
    """
    prefix = f"sw{os.getpid()}"
    switch = f"{prefix}-switch"
    made = [Host(f"{prefix}-{number}", _ADDRESS.format(number + 1)) for number in range(num_hosts)]
    try:
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for number, host in enumerate(made):
            _connect(host, switch, f"port{number}")
        for sender in range(num_hosts):
            rates = [(slow or {}).get((sender, receiver), rate) for receiver in range(num_hosts)]
            _shape(made, sender, rates)
        yield made
    finally:
        for namespace in (*(host.namespace for host in made), switch):
            with suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "del", namespace)


def _connect(host: Host, switch: str, port: str) -> None:
    _run("ip", "netns", "add", host.namespace)
    _run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "eth0", "netns", host.namespace)
    _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
    _run("ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
    for device in ("eth0", "lo"):
        _run("ip", "-n", host.namespace, "link", "set", device, "up")


def _shape(made: list[Host], sender: int, rates: Sequence[str]) -> None:
    """One HTB class per receiver."""
    tc = ("tc", "-n", made[sender].namespace)
    _run(*tc, "qdisc", "add", "dev", "eth0", "root", "handle", "1:", "htb", "default", "ffff")
    for receiver, rate in enumerate(rates):
        if receiver == sender:
            continue
        place, minor = ("dev", "eth0", "parent", "1:"), f"1:{receiver + 16:x}"
        _run(
            *tc,
            "class",
            "add",
            *place,
            "classid",
            minor,
            "htb",
            "rate",
            rate,
            "burst",
            "64kb",
            "quantum",
            "60000",
        )
        match = ("match", "ip", "dst", f"{made[receiver].address}/32")
        _run(*tc, "filter", "add", *place, "protocol", "ip", "u32", *match, "flowid", minor)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


@functools.cache
def why_not() -> str | None:
    """Why this machine cannot have hosts; None where it can."""
    if sys.platform != "linux" or not shutil.which("ip") or not shutil.which("tc"):
        return "needs Linux with ip and tc"
    try:
        with hosts(2, "1gbit"):
            return None
    except subprocess.CalledProcessError as error:
        return f"needs root and a kernel with namespaces and HTB: {error.stderr.decode().strip()}"


def join(host: Host, rank: int, num_ranks: int) -> None:
    """Move this process, a rank started by `run_ranks`, to `host` and make it a member of the group.

    The connection to the rendezvous store is made before, where the store is.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False)
    with open(f"/run/netns/{host.namespace}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    os.environ["GROUP_RANK"] = host.namespace.rpartition("-")[2]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)

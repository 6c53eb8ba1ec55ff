"""Links between two devices, with latency and bandwidth, and collectives over such links inside a node."""

from __future__ import annotations

from typing import Literal

from stagewright.cluster.device import ByteRate, Seconds
from stagewright.cluster.schema import SourcedModel, StrictModel

_FULL_PART = 1.5e6
"""Bytes of a rank's part at which half of the pipeline fill time applies."""

_FILL_POWER = 0.4
"""The fill time grows with this power of the number of steps: parts follow each other closely."""

_PAIR_SHARE = 0.59
"""Fraction of the bandwidth that is lost, times the number of ranks: 30 % for two ranks."""

_REDUCTION_GAIN = 1.15
"""Bandwidth of an all-reduce with reduction in a switch, over one around a ring."""

_RANKS = 8
"""Ranks of the node whose bandwidth is stated."""


class NodeCollectives(StrictModel):
    """Model of a library's collectives by size, for nodes with a link between every two ranks."""

    start_s: Seconds
    """Seconds of any collective for launch and synchronisation of the ranks."""
    step_s: Seconds
    """Seconds of a step from one rank to the next."""
    bandwidth: ByteRate
    """Bytes/s of every rank of a node of eight in a long all-gather, sending and receiving at once."""
    fill_s: Seconds
    """Seconds to fill the pipeline of parts between two ranks, in a long collective."""
    reduces_in_network: bool = False
    """Whether a switch performs reductions of more than two ranks."""

    def seconds(
        self, kind: Literal["one way", "all to all", "all-reduce"], num_ranks: int, num_bytes: float
    ) -> float:
        """Return the seconds of an all-gather or reduce-scatter (one way) of `num_bytes` in total, or of an all-to-all or
        all-reduce of `num_bytes` on every rank.

        Source: steps and volume of ring algorithms (Thakur, Rabenseifner and Gropp 2005); fit of NCCL's times by size on
        A100, H100, H200 and B200 published with aiconfigurator. Ignores: differences between the protocols of the library;
        other traffic.
        """
        rounds = 2 if kind == "all-reduce" else 1
        steps = rounds * (num_ranks - 1)
        part = num_bytes / num_ranks
        bandwidth = self.ring_bandwidth(num_ranks)
        if kind == "all-reduce" and self.adds_in_switch(num_ranks):
            bandwidth *= _REDUCTION_GAIN
        fill = self.fill_s * part / (part + _FULL_PART) * steps**_FILL_POWER
        return self.start_s + self.step_s * steps + steps * part / bandwidth + fill

    def ring_bandwidth(self, num_ranks: int) -> float:
        """Return bytes/s of each of `num_ranks` ranks in a long ring."""
        return self.bandwidth * (1 - _PAIR_SHARE / num_ranks) / (1 - _PAIR_SHARE / _RANKS)

    def adds_in_switch(self, num_ranks: int) -> bool:
        """Whether a switch performs reductions of `num_ranks` ranks of a node."""
        return self.reduces_in_network and num_ranks > 2


class Link(SourcedModel):
    """A link of one device in one direction: `latency_s` per message and `bandwidth` in bytes/s.

    >>> Link(latency_s=1e-5, bandwidth=2e10).seconds(2e9)
    0.10001
    """

    latency_s: Seconds
    """Seconds per message, and per step of a collective."""
    bandwidth: ByteRate
    """Bytes/s of one message between two devices."""
    ring_bandwidth: ByteRate | None = None
    """Bytes/s of each device when all take part in a collective, if that differs from `bandwidth`: more if a pair of
    devices is joined by only a part of the links, less if devices share a bus.
    """
    collectives: NodeCollectives | None = None
    """Model of collectives of one node; None: rings with steps of `latency_s` at this bandwidth."""

    def __hash__(self) -> int:
        return hash((self.latency_s, self.bandwidth, self.ring_bandwidth))

    @property
    def collective_bandwidth(self) -> float:
        """Bytes/s per device and direction in a collective."""
        return self.ring_bandwidth or self.bandwidth

    def group_bandwidth(self, num_ranks: int) -> float:
        """Return bytes/s per device and direction in a collective of `num_ranks` ranks: if each pair of devices has its own
        link, ranks use only the links among them.

        >>> Link(latency_s=0, bandwidth=100.0, ring_bandwidth=250.0).group_bandwidth(2)
        100.0
        """
        return min(self.collective_bandwidth, self.bandwidth * max(1, num_ranks - 1))

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds of one message, alone on the link.

        Source: the latency-bandwidth model (Hockney, "The communication challenge for MPP: Intel Paragon
        and Meiko CS-2", Parallel Computing 20, 1994). Ignores: protocol switches at small sizes and
        contention.
        """
        return self.latency_s + num_bytes / self.bandwidth

    def slower(self, other: Link) -> Link:
        """Return the worse of two links, figure by figure: the link of a path over both."""
        return Link.model_construct(
            latency_s=max(self.latency_s, other.latency_s),
            bandwidth=min(self.bandwidth, other.bandwidth),
            ring_bandwidth=min(self.collective_bandwidth, other.collective_bandwidth),
            collectives=self.collectives if self.collectives == other.collectives else None,
        )

    def shared(self, num_flows: float) -> Link:
        """Return this link divided evenly between `num_flows` messages (at least one)."""
        share = max(1.0, num_flows)
        return Link.model_construct(
            latency_s=self.latency_s,
            bandwidth=self.bandwidth / share,
            ring_bandwidth=self.collective_bandwidth / share,
        )

"""A link between two devices: a latency and a bandwidth; and how collectives go over such links inside a node."""

from __future__ import annotations

from typing import Literal

from stagewright.cluster.device import ByteRate, Seconds
from stagewright.cluster.strict import SourcedModel, StrictModel

_FULL_PART = 1.5e6
"""Bytes of a rank's part at which half of the filling of its pipeline is there."""

_FILL_POWER = 0.4
"""The filling grows with this power of the steps: parts follow each other closely."""

_PAIR_SHARE = 0.59
"""Part of the bandwidth that is lost between one rank and itself, over the number of ranks: 30 % of two ranks."""

_REDUCTION_GAIN = 1.15
"""Of an all-reduce whose sums a switch makes, over one around a ring."""

_RANKS = 8
"""Of the node whose bandwidth is stated."""


class NodeCollectives(StrictModel):
    """What a library's collectives take where every two ranks of a node have a link, by their size."""

    start_s: Seconds
    """Of any collective: launch, and the ranks' agreement."""
    step_s: Seconds
    """Of a step, from one rank to the next."""
    bandwidth: ByteRate
    """Of every rank of a node of eight in a long all-gather, sending and receiving at once."""
    fill_s: Seconds
    """To fill the pipeline of parts between two ranks, in a long collective."""
    reduces_in_network: bool = False
    """Whether a switch adds up what more than two ranks reduce."""

    def seconds(
        self, kind: Literal["one way", "all to all", "all-reduce"], num_ranks: int, num_bytes: float
    ) -> float:
        """Time of an all-gather or reduce-scatter (one way) of `num_bytes` together, or of an all-to-all or all-reduce of as
        many on every rank.

        Source: steps and volume of ring algorithms (Thakur, Rabenseifner and Gropp 2005); fit of NCCL's times by size on
        A100, H100, H200 and B200 published with aiconfigurator. Ignores: protocols of the library, each by itself; other
        traffic.
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
        """Bytes/s of each of so many ranks in a long ring."""
        return self.bandwidth * (1 - _PAIR_SHARE / num_ranks) / (1 - _PAIR_SHARE / _RANKS)

    def adds_in_switch(self, num_ranks: int) -> bool:
        """Whether a switch adds up what so many ranks of a node reduce."""
        return self.reduces_in_network and num_ranks > 2


class Link(SourcedModel):
    """What one device attains in one direction: `latency_s` per message and `bandwidth` in bytes/s.

    >>> Link(latency_s=1e-5, bandwidth=2e10).seconds(2e9)
    0.10001
    """

    latency_s: Seconds
    """Per message, and per step of a collective."""
    bandwidth: ByteRate
    """Of one message between two devices."""
    ring_bandwidth: ByteRate | None = None
    """What each device attains when all take part in a collective, where that differs from `bandwidth`:
    more where a pair of devices is joined by a part of the links only, less where devices share a bus.
    """
    collectives: NodeCollectives | None = None
    """Of ranks of one node; None: rings of steps of `latency_s` at this bandwidth."""

    def __hash__(self) -> int:
        return hash((self.latency_s, self.bandwidth, self.ring_bandwidth))

    @property
    def collective_bandwidth(self) -> float:
        """Bytes/s per device and direction in a collective."""
        return self.ring_bandwidth or self.bandwidth

    def group_bandwidth(self, num_ranks: int) -> float:
        """Bytes/s per device and direction in a collective of so many ranks: of links that join pairs of devices each ranks
        use those among them.

        >>> Link(latency_s=0, bandwidth=100.0, ring_bandwidth=250.0).group_bandwidth(2)
        100.0
        """
        return min(self.collective_bandwidth, self.bandwidth * max(1, num_ranks - 1))

    def seconds(self, num_bytes: float) -> float:
        """Time of one message, alone on the link.

        Source: the latency-bandwidth model (Hockney, "The communication challenge for MPP: Intel Paragon
        and Meiko CS-2", Parallel Computing 20, 1994). Ignores: protocol switches at small sizes and
        contention.
        """
        return self.latency_s + num_bytes / self.bandwidth

    def slower(self, other: Link) -> Link:
        """The worse of two links, figure by figure: what a path over both attains."""
        return Link.model_construct(
            latency_s=max(self.latency_s, other.latency_s),
            bandwidth=min(self.bandwidth, other.bandwidth),
            ring_bandwidth=min(self.collective_bandwidth, other.collective_bandwidth),
            collectives=self.collectives if self.collectives == other.collectives else None,
        )

    def shared(self, num_flows: float) -> Link:
        """This link divided evenly between `num_flows` messages (fewer than one leaves it whole)."""
        share = max(1.0, num_flows)
        return Link.model_construct(
            latency_s=self.latency_s,
            bandwidth=self.bandwidth / share,
            ring_bandwidth=self.collective_bandwidth / share,
        )

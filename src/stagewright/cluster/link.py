"""A link between two devices: a latency and a bandwidth."""

from __future__ import annotations

from stagewright.cluster.device import ByteRate, Seconds
from stagewright.cluster.strict import SourcedModel


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

    def __hash__(self) -> int:
        return hash((self.latency_s, self.bandwidth, self.ring_bandwidth))

    @property
    def collective_bandwidth(self) -> float:
        """Bytes/s per device and direction in a collective."""
        return self.ring_bandwidth or self.bandwidth

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
        )

    def shared(self, num_flows: float) -> Link:
        """This link divided evenly between `num_flows` messages (fewer than one leaves it whole)."""
        share = max(1.0, num_flows)
        return Link.model_construct(
            latency_s=self.latency_s,
            bandwidth=self.bandwidth / share,
            ring_bandwidth=self.collective_bandwidth / share,
        )

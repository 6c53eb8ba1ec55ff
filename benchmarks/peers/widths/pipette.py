"""Pipette's latency formula (DATE 2024) and the GPipe-like one it compares with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PipetteTimes:
    """What the formulas need; seconds.

    Args:
        forward, backward: of one microbatch on a stage; stages are taken to be equal.
        pp, num_microbatches: stages, and microbatches of a replica.
        pipeline_transfers: of one microbatch there and back through all stages of the slowest pipeline.
        inner_reduce, outer_reduce: all-reduce of gradients inside a node and between nodes.
    """

    forward: float
    backward: float
    pp: int
    num_microbatches: int
    pipeline_transfers: float = 0.0
    inner_reduce: float = 0.0
    outer_reduce: float = 0.0

    @property
    def _both(self) -> float:
        return self.forward + self.backward

    @property
    def _reduces(self) -> float:
        return self.inner_reduce + self.outer_reduce


def pipette_seconds(times: PipetteTimes) -> float:
    """Seconds of a step under 1F1B, whose transfers are exposed once per group of `pp` microbatches.

    Source: Yim et al. 2024, "Pipette" (DATE), estimator "iterl_split_opt" of github.com/yimjinkyu1/date2024_pipette; with
    fewer microbatches than stages its "iterl", because the other drops the pipeline's own term there.
    Ignores: microbatches beyond the last full group; uneven stages; embeddings; the optimizer; overlap.

    >>> pipette_seconds(PipetteTimes(1.0, 2.0, pp=4, num_microbatches=8, pipeline_transfers=0.5))
    34.0
    """
    groups = times.num_microbatches // times.pp
    through = times.pp * times._both + times.pipeline_transfers
    if groups == 0:
        return through + (times.num_microbatches - 1) * times._both + times._reduces
    return groups * through + (times.pp - 1) * times._both + times._reduces


def gpipe_like_seconds(times: PipetteTimes) -> float:
    """Pipette's account of AMP: transfers are exposed once per step.

    Source: estimator "split" of github.com/yimjinkyu1/date2024_pipette, with measured forward and backward times.
    Ignores: as `pipette_seconds`, and that 1F1B exposes transfers repeatedly.

    >>> gpipe_like_seconds(PipetteTimes(1.0, 2.0, pp=4, num_microbatches=8, pipeline_transfers=0.5))
    33.5
    """
    passes = (times.num_microbatches - 1 + times.pp) * times._both
    return passes + times.pipeline_transfers + times._reduces

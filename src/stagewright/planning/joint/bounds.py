"""Proven lower bounds on the makespan over every partition, placement and schedule of a problem.

Throughout, layer `l` takes ``f_l``, ``i_l`` and ``w_l`` seconds per microbatch at speed 1, `M` microbatches run
on `P` ranks, and `v` is the fastest rank's speed. Transfers and overheads only add time, so bounds without them hold with
them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stagewright.arrays import Floats
from stagewright.planning.joint.packing import Packing, pack
from stagewright.planning.joint.problem import JointProblem


@dataclass(frozen=True)
class Bound:
    """A lower bound: no schedule is shorter than `seconds`; `why` names the argument for it."""

    seconds: float
    why: str

    def gap(self, makespan_s: float) -> float:
        """Return the relative difference between a makespan and the bound.

        >>> Bound(2.0, "load").gap(2.5)
        0.25
        """
        return makespan_s / self.seconds - 1.0 if self.seconds > 0 else 0.0


def lower_bound(problem: JointProblem, packing: Packing | None = None) -> Bound:
    """Return the largest of all bounds below and that of `packing` (computed by default)."""
    packed = packing or pack(problem)
    bounds = (
        Bound(chain_bound(problem), "one microbatch, its forwards and backwards in a row"),
        Bound(load_bound(problem), "all work shared by all ranks, none starting early"),
        Bound(layer_bound(problem), "all work of one layer on one rank, fill and drain around it"),
        Bound(memory_bound(problem), "what microbatches keep in memory, and for how long"),
        Bound(packed.seconds, "whole layers packed into ranks, none starting early"),
    )
    return max(bounds, key=lambda bound: bound.seconds)


def chain_bound(problem: JointProblem) -> float:
    """Return the bound of one microbatch, which goes through all forwards, then all input gradients, then the first layer's
    weight gradient, one after the other: ``(sum f + sum i + w_0) / v``."""
    layers = problem.layers
    chain = layers.forward_s.sum() + layers.input_grad_s.sum() + layers.weight_grad_s[0]
    return float(chain / problem.speed.max())


def load_bound(problem: JointProblem) -> float:
    """Return the bound of all work divided among all ranks, none of which begins before its first layer's input arrives.

    Sort the ranks by their first layer: the first layer of the j-th (from 0) is at least layer j, so it idles
    at least ``(f_0 + ... + f_{j-1}) / v`` at the start. At full speed from there on, the ranks do
    ``sum_r v_r (T - idle_r) >= M sum c``. The sum of ``v_r idle_r`` is least when the fastest ranks begin
    first.
    """
    speed = np.sort(problem.speed)[::-1]
    idle = _forward_before(problem)[: problem.num_ranks] / speed[0]
    work = problem.num_microbatches * problem.layers.seconds.sum()
    return float((work + (speed * idle).sum()) / speed.sum())


def layer_bound(problem: JointProblem) -> float:
    """Return the bound of a layer: one rank does all its work, and the layers before it run before and after that.

    The rank of layer `l` starts it after ``sum_{k<l} f_k / v``; its last input gradient is followed by those of
    all layers before. Let `n` be the number of its weight gradients after that input gradient; whatever `n`,
    ``T >= (sum_{k<l} f_k + M (f_l + i_l) + max(M w_l, sum_{k<l} i_k)) / v``: the work of the layer alone gives
    the first term of the maximum, the chain of the last microbatch the second. The first input gradient
    cannot start before the last layer's forward and the input gradients from there down to `l`, after which
    all M input gradients follow: this gives the same with ``sum f + sum_{k>l} i_k`` in front and without
    ``M f_l``.
    """
    layers, M = problem.layers, problem.num_microbatches
    before_f = _forward_before(problem)
    before_i = np.cumsum(layers.input_grad_s) - layers.input_grad_s
    after_i = layers.input_grad_s.sum() - before_i - layers.input_grad_s
    tail = np.maximum(M * layers.weight_grad_s, before_i)
    early = before_f + M * (layers.forward_s + layers.input_grad_s) + tail
    late = layers.forward_s.sum() + after_i + M * layers.input_grad_s + tail
    return float(np.maximum(early, late).max() / problem.speed.max())


def memory_bound(problem: JointProblem) -> float:
    """Return the bound of bytes times seconds: what the microbatches keep, over what the ranks can keep.

    A microbatch keeps ``saved_l`` from the start of layer l's forward to the end of its input gradient, hence
    at least for ``sum_{k>=l} (f_k + i_k) / v``, and ``held_l`` for another ``w_l / v``. All this lies within T
    seconds on ranks with the memory that the parameters leave. Ranks that recompute save no less than those of the table
    that recomputes most, for no less time, and hold no less than where `held_l w_l` is least.
    """
    layers = problem.layers
    headroom = float(problem.memory_bytes.sum() - layers.parameter_bytes.sum())
    if not np.isfinite(headroom):
        return 0.0
    seconds = layers.forward_s + layers.input_grad_s
    stay = np.cumsum(seconds[::-1])[::-1]
    tables = (layers, *problem.recomputing)
    held = np.min([table.held_bytes * table.weight_grad_s for table in tables], axis=0)
    kept = (tables[-1].saved_bytes * stay + held).sum()
    if headroom <= 0:
        return float("inf")
    return float(problem.num_microbatches * kept / problem.speed.max() / headroom)


def _forward_before(problem: JointProblem) -> Floats:
    """Return the seconds of the forwards before each layer, at speed 1."""
    return np.cumsum(problem.layers.forward_s) - problem.layers.forward_s

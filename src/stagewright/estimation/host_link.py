"""How long the functions of a stage wait for what they move to the host and back."""

from __future__ import annotations

from collections.abc import Iterable

from stagewright.estimation.liveness import Lookup
from stagewright.estimation.time import Costing
from stagewright.graph import Node
from stagewright.graph.added import ARRIVED, FETCH, LEFT, MOVES, OFFLOAD


def waiting_seconds(nodes: Iterable[Node], value: Lookup, costing: Costing) -> float:
    """Seconds by which `nodes`, run one after the other, take longer because the link to the host is late.

    Each direction of the link moves one storage after the other beside the computations, from when the device gets to
    `OFFLOAD` or `FETCH`; the device waits in front of `LEFT` and `ARRIVED`. A CPU copies in between.

    Ignores: transfers between stages and of the optimizer's state over the same link; the bandwidth of memory that the
    copies take; what comes back while a rank waits for other ranks between R and its backward.
    """
    nodes = list(nodes)
    if not any(node.op in MOVES for node in nodes):
        return 0.0
    costs = [costing.of(node, value) for node in nodes]
    by_device = sum(cost.device_s for cost in costs) >= sum(cost.host_s for cost in costs)
    device, now, waits = costing.device, 0.0, 0.0
    free = {OFFLOAD: 0.0, FETCH: 0.0}
    done: dict[int, float] = {}
    for node, cost in zip(nodes, costs, strict=True):
        now += cost.device_s if by_device else cost.host_s
        if node.op in free and node.outputs[0] is not None:
            num_bytes = _num_bytes(node, value)
            if device.kind == "cpu":
                waits += device.memory_seconds(2.0 * num_bytes)
                continue
            free[node.op] = max(free[node.op], now) + num_bytes / device.host_link_bandwidth
            done[node.outputs[0]] = free[node.op]
        elif node.op in (LEFT, ARRIVED):
            late = max(0.0, done.get(node.inputs[0 if node.op == LEFT else 1], 0.0) - now)
            now, waits = now + late, waits + late
    return waits


def _num_bytes(node: Node, value: Lookup) -> int:
    if node.op == OFFLOAD:
        return dict(node.kwargs)["num_bytes"]
    (storage,) = (output for output in node.outputs if output is not None)
    return value(storage).meta.storage_bytes

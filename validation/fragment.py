"""A few operator calls outside any traced graph, so that the product's cost functions can be asked about them."""

from __future__ import annotations

from typing import Any

from stagewright.cluster import Device
from stagewright.estimation.operators import work
from stagewright.estimation.time import cost
from stagewright.graph import Node, Origin, Part, Ref, Value
from stagewright.graph.added_nodes import ACCUMULATE
from stagewright.graph.tensor import contiguous


class Fragment:
    """Operator calls on contiguous tensors; `Fragment.seconds` is what the product says they take."""

    def __init__(self, dtype: str = "float16") -> None:
        self.dtype = dtype
        self.values: list[Value] = []
        self.nodes: list[Node] = []

    def tensor(self, *shape: int, dtype: str | None = None) -> Ref:
        """A tensor that exists already."""
        number = len(self.values)
        meta = contiguous(shape, dtype or self.dtype)
        self.values.append(Value(number, meta, number, Origin.INPUT))
        return Ref(number)

    def call(
        self, op: str, *args: Any, makes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...] = ()
    ) -> Ref:
        """Call ``aten.op.default``; returns the first of its results, which have shapes `makes`."""
        names = dtypes or (self.dtype,) * len(makes)
        outputs = [self.tensor(*shape, dtype=name) for shape, name in zip(makes, names, strict=True)]
        inputs = tuple(argument.value for argument in args if isinstance(argument, Ref))
        self.nodes.append(
            Node(
                len(self.nodes), f"aten.{op}.default", args, (), inputs, tuple(out.value for out in outputs),
                Part.FORWARD, -1, "", 0, -1,
            )
        )  # fmt: skip
        return outputs[0]

    def accumulate(self, *shape: int) -> None:
        """Add a tensor of `shape` to a gradient that is there."""
        tensor = self.tensor(*shape)
        self.nodes.append(
            Node(
                len(self.nodes),
                ACCUMULATE,
                (tensor,),
                (),
                (tensor.value,),
                (),
                Part.WEIGHT_GRAD,
                -1,
                "",
                0,
                -1,
            )
        )

    def seconds(self, device: Device) -> float:
        """Time of the calls in eager execution: the device's or the host's, whichever is longer."""
        costs = [cost(work(node, self.values.__getitem__), device) for node in self.nodes]
        return max(sum(item.device_s for item in costs), sum(item.host_s for item in costs))

    def device_seconds(self, device: Device) -> float:
        """Time of the calls one after the other on the device, however long the host takes to issue them."""
        return sum(cost(work(node, self.values.__getitem__), device).device_s for node in self.nodes)

    def seconds_alone(self, device: Device) -> float:
        """Time of the products among the calls, replayed one after the other on a device that does nothing else."""
        found = [work(node, self.values.__getitem__) for node in self.nodes]
        return sum(
            device.launch_overhead_s
            + device.shaped_matmul_seconds(
                one.shapes, one.dtype, one.bytes_moved, alone=True, grouped=one.grouped
            )
            for one in found
        )

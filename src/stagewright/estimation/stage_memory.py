"""Memory of the functions of one stage, and its messages, for memory replays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from stagewright.estimation.liveness import FunctionMemory, function_memory
from stagewright.graph.added_nodes import ACCUMULATE, HOST_COPIES
from stagewright.graph.graph import Node, made_by
from stagewright.graph.messages import Message, messages
from stagewright.graph.stage import Function, Stage
from stagewright.schedule import Kind

Channel = tuple[Kind, int, int]
"""``SEND_F`` or ``SEND_B``, source stage, target stage."""


class StageMemory:
    """Memory of the functions of one stage, each computed once.

    With `hands_over`, a backward keeps the gradients of parameters until it has all of them, and accumulates them then.
    """

    def __init__(self, stage: Stage, hands_over: bool = False) -> None:
        self.stage = stage
        self.hands_over = hands_over

    @cached_property
    def forward(self) -> FunctionMemory:
        return function_memory(self.stage.forward, self.stage)

    @cached_property
    def input_grad(self) -> FunctionMemory:
        return self._of_backward(self.stage.input_grad)

    @cached_property
    def weight_grad(self) -> FunctionMemory:
        return self._of_backward(self._handing_over(self.stage.weight_grad))

    @cached_property
    def backward(self) -> FunctionMemory:
        return self._of_backward(self._handing_over(self.stage.backward))

    @cached_property
    def rebuild(self) -> FunctionMemory:
        return self._of_backward(self.stage.rebuild)

    @cached_property
    def static(self) -> FunctionMemory:
        """Memory of the static values that the stage keeps."""
        return self._kept(self.stage.static)

    @cached_property
    def derived(self) -> FunctionMemory:
        """Memory of the derived values that the stage keeps."""
        return self._kept(self.stage.derived)

    @cached_property
    def _used(self) -> frozenset[int]:
        """Values that the actions of the stage use or return."""
        stage = self.stage
        functions = (stage.forward, stage.input_grad, stage.weight_grad, stage.backward)
        used = (node.inputs for function in functions for node in function.nodes)
        return frozenset[int]().union(*used, *(function.outputs for function in functions))

    def _kept(self, nodes: Sequence[Node]) -> FunctionMemory:
        """Return the memory of `nodes`, whose used results stay."""
        kept = tuple(sorted(made_by(nodes) & self._used))
        return function_memory(Function(tuple(nodes), (), kept), self.stage)

    def _handing_over(self, function: Function) -> Function:
        if not self.hands_over:
            return function
        return replace(function, nodes=tuple(sorted(function.nodes, key=lambda node: node.op == ACCUMULATE)))

    def _of_backward(self, function: Function) -> FunctionMemory:
        nodes = (*self.stage.rebuild.nodes, *self.stage.recomputed.nodes)
        again = frozenset(node.id for node in nodes if node.op not in HOST_COPIES)
        return function_memory(function, self.stage, again)

    @cached_property
    def saved_bytes(self) -> int:
        """Bytes that F saves, on the device or the host, for the backward of one microbatch, without received values and
        user inputs."""
        homes = {self.forward.outputs[value] for value in self.stage.saved if value in self.forward.outputs}
        arrived = {value for transfer in self.stage.receives for value in transfer.values}
        arrived = {self.stage.value(value).storage for value in arrived}
        moved = [v for v in self.stage.offloaded if self.stage.value(v).storage not in arrived]
        return sum(self.forward.kept.get(home, 0) for home in homes) + self.stage.held_bytes(moved)

    @cached_property
    def messages(self) -> dict[Channel, tuple[Message, ...]]:
        """Messages of this stage on each of its channels."""
        stage = self.stage
        pairs = ((Kind.SEND_F, stage.sends), (Kind.SEND_B, stage.grad_sends))
        return {
            (kind, stage.index, transfer.stage): messages(stage.value(value) for value in transfer.values)
            for kind, transfers in pairs
            for transfer in transfers
        }

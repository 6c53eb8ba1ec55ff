"""Stacks: whose execution is predicted, and the allocations that its training step makes.

A stack says what the runtime around a model does: when gradients exist, what an optimizer step makes for a moment, what
the training loop holds on to. Validation selects a stack and computes nothing of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby

from stagewright.cluster import Device
from stagewright.errors import InputError, nearest
from stagewright.estimation.allocator import Block, CachingAllocator
from stagewright.estimation.operators import short_name
from stagewright.estimation.time import Costing
from stagewright.graph import Node, OperatorGraph, Origin, Part


@dataclass(frozen=True)
class Stack:
    """One way of running a training step on a single device.

    * `step_copies`: copies of all gradients' bytes that are there at the height of the optimizer step, one made after the
      other and freed at its end; weight decay makes one more.
    * `step_passes`: times that the optimizer step reads or writes as many elements as there are parameters; weight decay
      makes three more.
    * `num_moments`: tensors of the optimizer's state per parameter, made in the first step.
    * `adds_in_place`: cotangents of a value with several uses are added into the first of them.
    """

    name: str
    step_copies: int
    step_passes: int
    num_moments: int
    adds_in_place: bool


_DECAY_COPIES, _DECAY_PASSES = 1, 3

STACKS = {
    stack.name: stack
    for stack in (
        # torch.optim.Adam(foreach): the roots of the second moments are a copy. It passes over elements in lerp (3), mul
        # (2), addcmul (3), sqrt (2), div (2), add (2) and addcdiv (4); decay makes one more list.
        # Source: torch/optim/adam.py, _multi_tensor_adam; torch/csrc/autograd/input_buffer.cpp.
        Stack("torch-eager", step_copies=1, step_passes=18, num_moments=2, adds_in_place=True),
    )
}


def find_stack(name: str) -> Stack:
    """The stack called `name`; raises `InputError` naming the nearest.

    >>> find_stack("torch-eager").num_moments
    2
    """
    if name not in STACKS:
        raise InputError(f"no stack '{name}'{nearest(name, STACKS)}: use one of {', '.join(STACKS)}")
    return STACKS[name]


_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
_FORWARD = frozenset({Part.STATIC, Part.DERIVED, Part.PROLOGUE, Part.FORWARD})


class Phase(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class StepMemory:
    """Peaks of a few steps on one device, in bytes; `at` says during which phase and operator the active peak is."""

    active_peak_bytes: int
    reserved_peak_bytes: int
    at: str
    num_steps: int


@dataclass(frozen=True)
class _Call:
    """One operator as it is run: `again` where it is the repetition of a checkpointed forward."""

    node: Node
    again: bool = False


def step_memory(
    graph: OperatorGraph,
    stack: Stack,
    workspace_bytes: int = 0,
    checkpointed: Sequence[str] = (),
    returned: Sequence[str] = (),
    decays_weights: bool = True,
    num_steps: int = 3,
    capacity_bytes: int | None = None,
) -> StepMemory:
    """Replay `num_steps` training steps of `graph` on one device through the caching allocator.

    Args:
        workspace_bytes: the matrix library's workspace, one per thread, made in front of its first product and kept.
        checkpointed: paths of modules that keep only their inputs and compute the rest again in the backward; a module
            inside another of them belongs to the outer one, which comes first.
        returned: paths of linear layers whose results the model returns beside the loss (logits, keys and values of a
            cache), so that they stay until the forward is over.
        decays_weights: whether the optimizer decays weights by adding them to copies of the gradients.
        capacity_bytes: what the driver can give; None: no limit.
    """
    allocator = CachingAllocator(capacity_bytes)
    num_copies = stack.step_copies + decays_weights * _DECAY_COPIES
    replay = _Replay(graph, stack, workspace_bytes, checkpointed, allocator, frozenset(returned), num_copies)
    for _ in range(num_steps):
        replay.step()
    return StepMemory(allocator.peak_active_bytes, allocator.peak_reserved_bytes, replay.at, num_steps)


def step_seconds(
    graph: OperatorGraph,
    stack: Stack,
    device: Device,
    checkpointed: Sequence[str] = (),
    decays_weights: bool = True,
) -> float:
    """Time of one training step of `graph` on `device`: the device's work or the host's, whichever takes longer.

    Ignores: fetching the batch; that the device waits where the host falls behind for a while only.
    """
    segments = _segments(graph, checkpointed)
    nodes = [call.node for call in _with_repeats(_in_order(graph), segments)]
    parameters = [graph.values[value] for value in graph.parameter_values]
    num_bytes = sum(value.meta.payload_bytes for value in parameters if value.needs_grad)
    passes = stack.step_passes + decays_weights * _DECAY_PASSES
    return Costing(graph, device).seconds(nodes) + device.memory_seconds(passes * num_bytes)


Held = tuple[int, bool]
"""A storage of the graph, and whether it is the one made when a checkpointed forward is repeated."""


class _Replay:
    def __init__(
        self,
        graph: OperatorGraph,
        stack: Stack,
        workspace_bytes: int,
        checkpointed: Sequence[str],
        allocator: CachingAllocator,
        returned: frozenset[str] = frozenset(),
        num_copies: int = 2,
    ) -> None:
        self.num_copies = num_copies
        self.graph = graph
        self.returned = returned
        self.stack = stack
        self.workspace_bytes = workspace_bytes
        self.workspaces: set[bool] = set()
        self.allocator = allocator
        self.at = ""
        self.peak = 0
        self.has_state = False
        order = list(_in_order(graph))
        self.alias = _in_place(graph, order) if stack.adds_in_place else {}
        self.segment = _segments(graph, checkpointed)
        self.calls = list(_with_repeats(order, self.segment))
        self.last_use = self._last_uses()
        self.gradient_of = self._gradients()
        self.trainable = [value for value in graph.parameter_values if graph.values[value].needs_grad]
        self._load()

    def step(self) -> None:
        """One training step: batch, forward, backward, optimizer, gradients freed."""
        graph, batch = self.graph, {}
        for value in graph.inputs.values():
            batch[value] = self._make(graph.values[value].meta.storage_bytes, "inputs")
        blocks: dict[Held, Block] = {}
        gradients = self._compute(blocks)
        self._optimize()
        for block in (*gradients.values(), *blocks.values(), *batch.values()):
            self.allocator.free(block)

    def _load(self) -> None:
        graph = self.graph
        for value in graph.values:
            fixed = value.origin in (Origin.PARAMETER, Origin.BUFFER, Origin.CONSTANT)
            if fixed and value.storage == value.id:
                self._make(graph.storage_bytes[value.id], "loading")

    def _make(self, num_bytes: int, where: str) -> Block:
        block = self.allocator.allocate(num_bytes)
        if self.allocator.active_bytes > self.peak:
            self.peak, self.at = self.allocator.active_bytes, where
        return block

    def _root(self, value: int) -> int:
        storage = self.graph.values[value].storage
        while storage in self.alias:
            storage = self.alias[storage]
        return storage

    def _held(self, value: int, call: _Call) -> Held:
        """The storage that `call` means by `value`: inside a checkpointed module backwards and repeats use the repeat's."""
        root = self._root(value)
        maker = self.graph.values[root].node
        inside = self.segment.get(maker, -1)
        if inside < 0:
            return root, False
        node = call.node
        own = self.segment.get(node.id if node.part in _FORWARD else node.forward, -1)
        return root, own == inside and (call.again or node.part not in _FORWARD)

    def _last_uses(self) -> dict[Held, int]:
        """Storage -> place in the order of the call that frees it.

        Autograd differentiates an operator in one go: what it saved and the gradients that came in are freed when all
        gradients that go out are there.
        """
        found: dict[Held, int] = {}
        ends = _ends(self.calls)
        made: dict[Held, int] = {}
        for place, call in enumerate(self.calls):
            for output in call.node.outputs:
                if output is not None:
                    made.setdefault(self._held(output, call), place)
            for value in (*call.node.inputs, *(output for output in call.node.outputs if output is not None)):
                held = self._held(value, call)
                first, end = ends[place]
                inside = made.get(held, -1) >= first
                found[held] = max(found.get(held, -1), place if inside else end)
        forward_end = next(
            (place for place, call in enumerate(self.calls) if call.node.part not in _FORWARD),
            len(self.calls),
        )
        for held in self._until_forward_ends():
            found[held] = max(found[held], forward_end - 1)
        return found

    def _until_forward_ends(self) -> Iterator[Held]:
        """What the model returns, and the casts of parameters that autocast keeps until its context is left.

        Source: aten/src/ATen/autocast_mode.cpp, cached_cast.
        """
        for call in self.calls:
            node = call.node
            if call.again or node.part not in _FORWARD:
                continue
            is_result = node.module in self.returned and short_name(node.op) in _PRODUCTS
            if is_result or _casts_parameter(self.graph, node):
                yield from (self._held(output, call) for output in node.outputs if output is not None)

    def _gradients(self) -> dict[int, int]:
        """Storage of the first contribution to a gradient -> the parameter; it is freed after the step only."""
        found: dict[int, int] = {}
        for target, gradient in self.graph.gradients.items():
            contributions = self.graph.contributions.get(gradient, ())
            if contributions and self.graph.values[target].origin is Origin.PARAMETER:
                found[self._first_share(contributions[0][1])] = target
        return found

    def _first_share(self, value: int) -> int:
        """The storage a gradient is collected in; that of a derived value is the first share of its own gradient."""
        root = self._root(value)
        shares = self.graph.contributions.get(root, ())
        return self._first_share(shares[0][1]) if shares else root

    def _compute(self, blocks: dict[Held, Block]) -> dict[int, Block]:
        """Forward and backward; returns the blocks of gradients, and leaves in `blocks` what outlives them."""
        gradients: dict[int, Block] = {}
        freed: dict[int, list[Held]] = {}
        for held, place in self.last_use.items():
            freed.setdefault(place, []).append(held)
        for place, call in enumerate(self.calls):
            node = call.node
            for output in node.outputs:
                if output is None:
                    continue
                held = root, _ = self._held(output, call)
                if root == output and held not in blocks and root not in gradients:
                    made = self._make(self.graph.storage_bytes[root], f"{node.part.name.lower()} {node.name}")
                    if root in self.gradient_of:
                        gradients[root] = made
                    else:
                        blocks[held] = made
            self._workspace(node)
            for held in freed.get(place, ()):
                if held in blocks and not self._is_kept(held[0]):
                    self.allocator.free(blocks.pop(held))
        return gradients

    def _is_kept(self, storage: int) -> bool:
        return storage == self.graph.values[self.graph.loss].storage

    def _workspace(self, node: Node) -> None:
        """A workspace for each thread that multiplies: the one that runs the forward, and autograd's."""
        thread = node.part in _FORWARD
        if thread not in self.workspaces and short_name(node.op) in _PRODUCTS:
            self.workspaces.add(thread)
            self._make(self.workspace_bytes, "workspace")

    def _optimize(self) -> None:
        """State on the first step; then copies of everything, list after list, as foreach kernels make them."""
        sizes = [self.graph.storage_bytes[value] for value in self.trainable]
        if not self.has_state:
            for size in sizes:
                for _ in range(self.stack.num_moments):
                    self._make(size, "optimizer state")
            self.has_state = True
        copies = [self._make(size, "optimizer step") for _ in range(self.num_copies) for size in sizes]
        for block in copies:
            self.allocator.free(block)


def _ends(calls: Sequence[_Call]) -> list[tuple[int, int]]:
    """For each call the first and the last place of the backward it is part of; its own place in the forward."""
    found: list[tuple[int, int]] = []
    begin = 0
    while begin < len(calls):
        node, end = calls[begin].node, begin
        while (
            node.part not in _FORWARD
            and end + 1 < len(calls)
            and calls[end + 1].node.part not in _FORWARD
            and calls[end + 1].node.forward == node.forward
        ):
            end += 1
        found += [(begin, end)] * (end + 1 - begin)
        begin = end + 1
    return found


def _segments(graph: OperatorGraph, checkpointed: Sequence[str]) -> dict[int, int]:
    """Forward node -> which of the checkpointed modules it belongs to; casts of its parameters do as well."""
    places = {path: index for index, path in enumerate(checkpointed)}
    found: dict[int, int] = {}
    for node in graph.nodes:
        if node.part is Part.FORWARD or _casts_parameter(graph, node):
            parts = node.module.split(".")
            prefixes = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
            outer = next((places[prefix] for prefix in prefixes if prefix in places), None)
            if outer is not None:
                found[node.id] = outer
    return found


def _casts_parameter(graph: OperatorGraph, node: Node) -> bool:
    return (
        node.part in _FORWARD
        and short_name(node.op) == "_to_copy"
        and graph.values[node.inputs[0]].origin is Origin.PARAMETER
    )


def _with_repeats(order: Iterable[Node], segment: Mapping[int, int]) -> Iterator[_Call]:
    """The order in which operators run, with each checkpointed forward once more in front of its backward."""
    forwards: dict[int, list[Node]] = {}
    repeated: set[int] = set()
    for node in order:
        if node.part in _FORWARD and node.id in segment:
            forwards.setdefault(segment[node.id], []).append(node)
        index = -1 if node.part in _FORWARD else segment.get(node.forward, -1)
        if index >= 0 and index not in repeated:
            repeated.add(index)
            yield from (_Call(again, True) for again in forwards[index])
        yield _Call(node)


def _in_order(graph: OperatorGraph) -> Iterator[Node]:
    """The nodes as eager execution meets them.

    What the graph makes in advance is made in front of its first use, and the gradient through it as soon as all parts of
    it are there.
    """
    early = {Part.STATIC, Part.DERIVED}
    is_early = {node.id for node in graph.nodes if node.part in early}
    waiting = {
        output: node
        for node in graph.nodes
        if node.part in early
        for output in node.outputs
        if output is not None
    }
    late = [node for node in graph.nodes if node.part not in _FORWARD and node.forward in is_early]
    is_late = {node.id for node in late}
    done: set[int] = set()

    def ready(node: Node) -> Iterator[Node]:
        for value in node.inputs:
            maker = waiting.get(value)
            if maker is not None and maker.id not in done:
                done.add(maker.id)
                yield from ready(maker)
                yield maker

    followers = _Followers(graph, late)
    for group in _groups(node for node in graph.nodes if node.part not in early and node.id not in is_late):
        for node in _by_operand(graph, group, is_early):
            yield from ready(node)
            yield node
        for node in followers.after(group):
            yield from ready(node)
            yield node


def _groups(nodes: Iterable[Node]) -> Iterator[list[Node]]:
    """Nodes one by one, but those of one operator's backward together."""
    for _, group in groupby(
        nodes, lambda node: (node.part in _FORWARD, node.id if node.part in _FORWARD else node.forward)
    ):
        yield list(group)


class _Followers:
    """Nodes that run as soon as all their inputs are there."""

    def __init__(self, graph: OperatorGraph, nodes: Sequence[Node]) -> None:
        makers = {output for node in graph.nodes if node.part not in _FORWARD for output in node.outputs}
        self.missing = {node.id: len(set(node.inputs) & makers) for node in nodes}
        self.users: dict[int, list[Node]] = {}
        for node in nodes:
            for value in set(node.inputs) & makers:
                if value is not None:
                    self.users.setdefault(value, []).append(node)

    def after(self, group: Iterable[Node]) -> Iterator[Node]:
        for node in group:
            for output in node.outputs:
                ready = self.users.get(output, ()) if output is not None else ()
                for user in ready:
                    self.missing[user.id] -= 1
                    if not self.missing[user.id]:
                        yield user
                        yield from self.after([user])


def _by_operand(graph: OperatorGraph, group: list[Node], is_early: set[int]) -> list[Node]:
    """One operator's backward in the order of its operands: gradients of parameters come first where they do.

    Source: torch/csrc/autograd/Functions.cpp, whose generated functions compute gradients operand after operand.
    """
    if len(group) < 2 or group[0].part in _FORWARD:
        return group
    forward = graph.nodes[group[0].forward]
    is_parameter = [
        graph.values[value].origin is Origin.PARAMETER or graph.values[value].node in is_early
        for value in forward.inputs
    ]
    if is_parameter != sorted(is_parameter, reverse=True) or all(is_parameter) or not any(is_parameter):
        return group
    weights = [node for node in group if node.part is Part.WEIGHT_GRAD]
    others = [node for node in group if node.part is not Part.WEIGHT_GRAD]
    made = {output for node in others for output in node.outputs}
    return group if any(made & set(node.inputs) for node in weights) else weights + others


def _in_place(graph: OperatorGraph, order: list[Node]) -> dict[int, int]:
    """Sum of cotangents -> the first addend, into which autograd adds when nothing else uses it later."""
    last = {value: place for place, node in enumerate(order) for value in node.inputs}
    found: dict[int, int] = {}
    for place, node in enumerate(order):
        if node.part is not Part.INPUT_GRAD or node.op != "aten.add.Tensor" or len(node.inputs) != 2:
            continue
        first, output = node.inputs[0], node.outputs[0]
        same = output is not None and graph.values[first].meta == graph.values[output].meta
        if same and output is not None and last[first] == place and graph.values[first].storage == first:
            found[output] = first
    return found

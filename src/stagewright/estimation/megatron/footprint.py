"""The memory of every pipeline rank under a Megatron stack: its program's passes over what each stage keeps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from stagewright.estimation.megatron.layer import Layers, Step, backward_peak, saved_bytes, weight_bytes
from stagewright.estimation.megatron.layout import Layout
from stagewright.estimation.megatron.shape import Shape
from stagewright.estimation.megatron.stack import MegatronStack
from stagewright.schedule import Action, Kind, Program
from stagewright.schedule.families import build


@dataclass(frozen=True)
class RankFootprint:
    """Allocated bytes of one pipeline rank (any of its tensor- and data-parallel devices) at the peak."""

    rank: int
    num_parameters: int
    categories: dict[str, int]
    at: str
    """The pass during which the peak is reached."""
    layer_activation_bytes: int
    """Of `activations`, what layers keep: without embedding, head and loss."""

    @property
    def peak_bytes(self) -> int:
        return sum(self.categories.values())

    @property
    def state_bytes(self) -> int:
        """Parameters, gradients and optimizer state."""
        return sum(self.categories[name] for name in ("parameters", "gradients", "optimizer"))


@dataclass(frozen=True)
class _Stage:
    before: list[Step]
    layers: list[Step]
    after: list[Step]
    num_parameters: int
    num_expert_parameters: int

    @cached_property
    def saved(self) -> int:
        return saved_bytes(self._steps)

    @cached_property
    def saved_by_layers(self) -> int:
        return saved_bytes(self.layers)

    @cached_property
    def transient(self) -> int:
        """The most that a backward needs beside what the forward kept."""
        return backward_peak(self._steps) - self.saved

    @cached_property
    def for_weights(self) -> int:
        return weight_bytes(self._steps)

    @property
    def _steps(self) -> list[Step]:
        return [*self.before, *self.layers, *self.after]


@dataclass
class _Alive:
    """Bytes of microbatches in flight: all, and those of layers alone; and the moment with the most."""

    total: int = 0
    layers: int = 0
    peak: tuple[int, int, int, Action | None] = (0, 0, 0, None)

    def observe(self, transient: int, at: Action) -> None:
        if self.total + transient > self.peak[0] + self.peak[1]:
            self.peak = (self.total, transient, self.layers, at)

    def add(self, total: int, layers: int) -> None:
        self.total += total
        self.layers += layers


def footprints(
    shape: Shape, layout: Layout, stack: MegatronStack, program: Program | None = None
) -> tuple[RankFootprint, ...]:
    """The peak of every pipeline rank; `program` in place of the layout's schedule.

    Source: Korthikanti et al. 2022 (arXiv 2205.05198), sections 4 and 5, for what layers keep; the rest as each step of
    `stagewright.estimation.megatron.layer` says.
    Ignores: fragmentation, buffers of the collectives' library and the driver's context.

    Raises:
        InputError: widths that do not divide the model.
        ScheduleError: the schedule cannot be built.
    """
    layout.checked(shape.num_heads, shape.experts.num_experts if shape.experts else 0)
    layers = Layers(shape, layout, stack)
    stages = _stages(layers)
    program = program or _program(layout)
    return tuple(_footprint(rank, program, stages, layers) for rank in range(layout.pp))


@dataclass(frozen=True)
class StageBytes:
    """What one microbatch keeps in a stage: from F to its backward, and from I to W where the backward is split."""

    saved: int
    for_weights: int


def stage_bytes(shape: Shape, layout: Layout, stack: MegatronStack) -> tuple[StageBytes, ...]:
    """The memory that schedules which are made for given stages need to know."""
    return tuple(
        StageBytes(stage.saved, stage.for_weights) for stage in _stages(Layers(shape, layout, stack))
    )


def _program(layout: Layout) -> Program:
    chunks = layout.num_chunks if layout.num_chunks > 1 else None
    return build(layout.schedule, layout.pp, layout.num_microbatches, chunks)


def _stages(layers: Layers) -> list[_Stage]:
    layout = layers.layout
    counts = layout.layers(layers.shape.num_layers)
    again = layout.recomputed_layers or tuple(count * (layout.recompute == "full") for count in counts)
    num_dense = layers.shape.num_dense if layers.shape.experts else 0
    kinds: dict[bool, tuple[tuple[int, int], tuple[list[Step], list[Step]]]] = {}

    def kind(index: int) -> tuple[tuple[int, int], tuple[list[Step], list[Step]]]:
        """Parameters and steps, plain and recomputed, of a layer; equal ones are made once."""
        dense = index < num_dense
        if dense not in kinds:
            kinds[dense] = (layers.parameters(index), (layers.layer(index, False), layers.layer(index, True)))
        return kinds[dense]

    found, first = [], 0
    for stage, count in enumerate(counts):
        is_first, is_last = stage == 0, stage == len(counts) - 1
        numbers = range(first, first + count)
        parameters = [kind(index)[0] for index in numbers]
        found.append(
            _Stage(
                layers.embedding() if is_first else [],
                [
                    step
                    for place, index in enumerate(numbers)
                    for step in kind(index)[1][place < again[stage]]
                ],
                layers.head() if is_last else [],
                sum(rest for _, rest in parameters) + layers.edge_parameters(is_first, is_last),
                sum(experts for experts, _ in parameters),
            )
        )
        first += count
    return found


def _footprint(rank: int, program: Program, stages: list[_Stage], layers: Layers) -> RankFootprint:
    own = [stages[stage] for stage in program.placement.stages_of(rank)]
    alive = _Alive()
    for action in program.actions(rank):
        for part in (action,) if action.beside is None else action.parts:
            _act(alive, part, stages[part.stage])
    total, transient, of_layers, at = alive.peak
    stack = layers.stack
    spreads = layers.shape.experts is not None and layers.layout.num_expert_shards > 1
    buffers = stack.dispatch_tokens * stack.element_bytes * layers.shape.hidden if spreads else 0
    categories = _state_bytes(own, layers) | {
        "activations": total,
        "transient": transient,
        "workspace": stack.workspace_bytes + buffers,
    }
    count = sum(stage.num_parameters + stage.num_expert_parameters for stage in own)
    return RankFootprint(rank, count, categories, "" if at is None else str(at), of_layers)


def _act(alive: _Alive, action: Action, stage: _Stage) -> None:
    """Change what is alive as one pass does; a split backward leaves what gradients of weights need."""
    left = stage.for_weights
    match action.kind:
        case Kind.F:
            alive.add(stage.saved, stage.saved_by_layers)
            alive.observe(0, action)
        case Kind.B:
            alive.observe(stage.transient, action)
            alive.add(-stage.saved, -stage.saved_by_layers)
        case Kind.I:
            alive.observe(stage.transient, action)
            alive.add(left - stage.saved, left - stage.saved_by_layers)
        case Kind.W:
            alive.add(-left, -left)


def _state_bytes(own: list[_Stage], layers: Layers) -> dict[str, int]:
    layout, stack = layers.layout, layers.stack
    dense = sum(stage.num_parameters for stage in own)
    experts = sum(stage.num_expert_parameters for stage in own)
    shards = layout.dp * layout.cp if layout.shards_optimizer else 1
    expert_shards = max(1, shards // layout.ep)
    engine = {"engine": stack.engine_bytes * (dense + experts)} if stack.engine_bytes else {}
    return engine | {
        "parameters": stack.element_bytes * (dense + experts),
        "gradients": stack.gradient_element_bytes(layout.fp32_gradients) * (dense + experts),
        "optimizer": stack.optimizer_bytes * dense // shards
        + stack.optimizer_bytes * experts // expert_shards,
    }

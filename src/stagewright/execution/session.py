"""A run of a plan on one rank: set up, train, measure."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stagewright.errors import InputError, RunError
from stagewright.execution.accelerator import accelerator_of
from stagewright.execution.allocation import cause_of
from stagewright.execution.base_model import BaseModelIdentity
from stagewright.execution.checkpoint_folder import digest
from stagewright.execution.clock import ClockOffset
from stagewright.execution.collectives import check_same_graphs, check_same_weights, exchange, is_ordered
from stagewright.execution.data.batches import Batches, counted, open_batches
from stagewright.execution.data.prefetch import Prefetcher, PrefetchRequest
from stagewright.execution.data.prepared import LABELS, Data, ready
from stagewright.execution.data.synthetic import SyntheticBatches
from stagewright.execution.data_identity import DataIdentity
from stagewright.execution.lengths import AtLength, Lengths
from stagewright.execution.loading import StartingTensors, StoredAdapters, StoredWeights, part_of
from stagewright.execution.mesh import STAGE, Groups, Mesh, connect_everyone
from stagewright.execution.metering import Metering, TimedStep
from stagewright.execution.model_files import ModelFiles
from stagewright.execution.optimizer import LossScale, Optimizer
from stagewright.execution.options import OnNan
from stagewright.execution.out_of_memory import alive_bytes, explained, forget
from stagewright.execution.rank_runner import BatchResult, PipelineRank, RankRunner, stage_edges
from stagewright.execution.record import RankRecord
from stagewright.execution.shards import Shards
from stagewright.execution.stage_runner import StageOptions
from stagewright.execution.stragglers import pace_of
from stagewright.execution.watchdog import Report
from stagewright.execution.weight_files import base_model_of
from stagewright.execution.weights import TiedGroups, Weights
from stagewright.graph import OperatorGraph
from stagewright.graph.flat_buffers import flats, of_stages
from stagewright.graph.split import split_graph
from stagewright.graph.stage import Stage
from stagewright.graph.tensor_parallel import parallelism
from stagewright.graph.verify import verify_stages
from stagewright.planning.lengths import check_same_operators
from stagewright.planning.plan import Plan
from stagewright.planning.plan_stages import stage_cuts, stage_policies, stage_program
from stagewright.schedule.action import COMPUTE
from stagewright.schedule.lanes import check_lanes, lanes_of
from stagewright.schedule.lower import insert_communication, receives_ahead
from stagewright.schedule.program import Program
from stagewright.tracing.arguments import DTYPES
from stagewright.tracing.cache import trace
from stagewright.tracing.models.build import DeferredModel


@dataclass(frozen=True)
class StepResult:
    loss: float
    gradient_norm: float
    learning_rate: float = 0.0
    is_skipped: bool = False
    """Whether it changed no parameter, because the loss or a gradient was not finite."""
    seconds: float = 0.0
    votes: frozenset[str] = frozenset()
    """Which of the questions of `Session.votes` a rank said yes to; all ranks see the same."""
    paces: tuple[float, ...] = ()
    """How many times as long as planned each rank took to compute, known to every rank; zero of metered steps."""
    memory_bytes: int = 0
    """Of the rank that has taken most from its device so far; on a CPU the most that its process has had."""
    has_scale: bool = False

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradients are finite; with a scaled loss its overflows do not count."""
        return math.isfinite(self.loss) and (math.isfinite(self.gradient_norm) or self.has_scale)


class Session:
    """Everything one rank needs to train a plan; `dist` must be initialised with ``pp * dp * tp`` processes.

    With a `reader` data is read by it, that of the next step while a step is trained; without, and synthetic data, when a
    step begins.

    Raises:
        InputError: the model is not the one that the plan was made for.
        PlanError: the plan does not fit the model.
        RunError: other than the plan's number of processes.
    """

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        data: Data = None,
        random_weights: bool = False,
        watch: Report = lambda position, **details: None,
        report: Callable[[str], None] = lambda stage: None,
        on_nan: OnNan = "warn",
        reader: Prefetcher | None = None,
    ) -> None:
        self.plan = plan
        self.passed_over = 0
        """By how many batches the data is ahead of the steps, because the run went back to a checkpoint."""
        self._reader = None if data is None else reader
        self._wants_number = on_nan != "warn"
        self.votes: dict[str, Callable[[], bool]] = {}
        """Questions that every rank answers for itself after each step, all with the same ones in the same order."""
        self.device = device
        self._report_position = watch
        self.position = "starting"
        accelerator_of(device).allow_tf32(plan.job.products == "tf32")
        self.mesh = Mesh(plan.pp, plan.dp, dist.get_rank(), plan.tp, plan.shard_size)
        if dist.get_world_size() != self.mesh.size:
            raise RunError(
                f"the plan needs {self.mesh.size} processes (pp {plan.pp} x dp {plan.dp} x tp {plan.tp}), but "
                f"{dist.get_world_size()} were started: start that many, or plan for as many devices as there are"
            )
        reference = self.reference = plan.model.resolved()
        job = plan.job
        data = ready(data, plan)
        report("tracing")
        self._further = (
            {"further_inputs": data.further_inputs} if data is not None and data.further_inputs else {}
        )
        # As the plan was: the CPU traces for GPUs. A plan for CPUs has the kernels of the device.
        self._tracer = device.type if plan.cluster.kind == "cpu" else "cpu"
        traced: dict[str, Any] = plan.traced() | self._further
        self.is_from_files = reference.weights is not None and not random_weights
        self.graph = trace(reference, plan.microbatch_size, device=self._tracer, report=report, **traced)
        self.stages = split_graph(self.graph, stage_cuts(plan, self.graph), stage_policies(plan, self.graph))
        verify_stages(self.stages)
        # Before there are weights: what communicators take of the device is outside of PyTorch's allocator.
        accelerator = accelerator_of(device)
        free_before, _ = accelerator.free_and_total_bytes() if accelerator.counts_bytes else (0, 0)
        connect_everyone(device, self.watch)
        check_same_graphs(self.stages, digest(plan.model_dump(mode="json", exclude={"predictions"})))
        self.program = stage_program(plan)
        lowered = self.lowered(self.program, self.stages)
        lanes = lanes_of(lowered)
        if is_ordered():
            check_lanes(lowered, stage_edges(self.stages))
        rank = self.mesh.pipeline_rank
        self.watch("creating process groups")
        self.groups = Groups.of(self.mesh)
        tied = TiedGroups(self.stages, plan.placement, rank, self.mesh.groups(STAGE), self.groups.all)
        tied.count_elsewhere(self._counted_elsewhere())
        self._tied = tied
        self.groups.connect(lanes, rank, device, self.watch)
        self._communicator_bytes: int | None = None
        if accelerator.counts_bytes:
            self._communicator_bytes = max(0, free_before - accelerator.free_and_total_bytes()[0])
        report("building the weights of this rank")
        size = plan.microbatch_size
        model = DeferredModel(reference, size, job.sequence_length, job.torch_name, seed=job.seed)
        self.own = own = [stage for stage in self.stages if plan.placement[stage.index] == rank]
        self._needed = {stage.value(value).name for stage in own for value in stage.inputs}
        self.data = _agreed_data(DataIdentity(kind="synthetic") if data is None else data.identity)
        self.batches = None
        if self._needed:
            self.batches = (
                SyntheticBatches(model.inputs, job.seed) if data is None else open_batches(data, job)
            )
        takes_labels = {LABELS, "input_ids"} <= self.graph.inputs.keys()  # which a loop of one's own may mask
        is_masked = job.documents_apart or takes_labels or (data is not None and data.is_masked)
        self._is_weighted = is_masked and reference.kind == "config"
        shards = self.mesh.num_shards
        copies, dims = plan.dp // shards, job.least_decayed_dims
        every = flats(self.stages, plan.sharding, shards, copies, dims) if plan.dp > 1 else ()
        mine = of_stages(every, (stage.index for stage in own))
        stored = None
        if reference.weights is not None and self.is_from_files:
            stored = StoredWeights(reference.weights, model.module, reference.config or {})
        adapters = None
        if reference.lora is not None and reference.lora.folder is not None and not random_weights:
            adapters = StoredAdapters(Path(reference.lora.folder), model.module)
        accumulate = torch.float32 if job.dtype in ("bf16", "fp16") else None
        starting = StartingTensors(model, own, stored, self.part, adapters, self._copied())
        self.weights = Weights(own, starting, device, accumulate, mine)
        self.model_files = ModelFiles.of(model, reference, self.stages, plan.placement, rank, stored)
        reduce_dtype = None if plan.reduce_torch_name is None else DTYPES[plan.reduce_torch_name]
        self.shards = Shards(mine, self.weights, self.groups.replicas, starting, reduce_dtype)
        self.watch("comparing weights with the other ranks")
        self._check_same_weights(starting.checksums)
        del starting, model, stored, adapters
        self.loss_scale = LossScale(job.loss_scale, job.loss_scale_window) if job.dtype == "fp16" else None
        longest = AtLength(self.graph, self.runner_of(self.stages))
        self.lengths = Lengths(job.sequence_length, longest, self._at_length)
        on_host = rank in plan.host_optimizer
        if accelerator.is_asynchronous:
            predicted = [own.offloaded_bytes for own in plan.predictions.ranks if own.rank == rank]
            accelerator.arena.reserve(sum(predicted))
        self.optimizer = Optimizer(
            self.weights,
            job,
            tied,
            self.groups.model,
            self.shards,
            self.loss_scale,
            on_host,
            self._wants_number,
        )
        self.metering = Metering()
        self._unread: TimedStep | None = None

    @cached_property
    def base_model(self) -> BaseModelIdentity | None:
        """Of adapters, the model that they are for, whose files are read for it."""
        return base_model_of(self.reference, self.plan.job.seed, not self.is_from_files)

    def watch(self, position: str, **details: Any) -> None:
        """This rank is now at `position`; `details` are those of `Watchdog.at`."""
        self.position = position
        self._report_position(position, **details)

    def follow(self, plan: Plan) -> None:
        """Go on in the order of passes of a plan that differs from the present one in nothing else that counts."""
        self.plan, self.program = plan, stage_program(plan)
        program = self.lowered(self.program, self.stages)
        if is_ordered():
            check_lanes(program, stage_edges(self.stages))
        for runner in self.lengths.runners:
            runner.follow(program)

    def close(self) -> None:
        """Destroy the process groups; every rank must call this, and nothing is trained here any more."""
        self.groups.all.destroy()

    @property
    def runner(self) -> RankRunner:
        """Runs the batches of the present length."""
        return self.lengths.now.runner

    # -- set-up -----------------------------------------------------------------------------------------------------

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """What this rank holds of a tensor of the whole model."""
        found = parallelism(self.graph)
        how = found.shards.get(name) if found else None
        return whole if how is None else part_of(whole, how, self.mesh.tp, self.mesh.tensor_rank)

    def _copied(self) -> set[str]:
        """Names of this rank's tensors that other ranks start with too."""
        copied = self._on_several_pipeline_ranks()
        if self.mesh.dp * self.mesh.tp > 1:
            named = {
                stage.value(value).name
                for stage in self.stages
                for value in (*stage.parameters, *stage.buffers)
            }
            copied |= named if self.mesh.dp > 1 else named - self._sharded()
        return copied

    def _sharded(self) -> set[str]:
        """Names of the tensors of which every tensor-parallel rank has another part."""
        parallel = parallelism(self.graph)
        return set(parallel.shards) if parallel else set()

    def _on_several_pipeline_ranks(self) -> set[str]:
        ranks: dict[str, set[int]] = {}
        for stage in self.stages:
            for value in (*stage.parameters, *stage.buffers):
                ranks.setdefault(stage.value(value).name, set()).add(self.plan.placement[stage.index])
        return {name for name, where in ranks.items() if len(where) > 1}

    def _check_same_weights(self, checksums: Mapping[str, int]) -> None:
        """See that this rank starts with the same tensors as all ranks that have copies; every rank must call this."""
        mesh, sharded, on_several = self.mesh, self._sharded(), self._on_several_pipeline_ranks()
        named = {
            name: f"part {mesh.tensor_rank} of {name}" if name in sharded else name for name in checksums
        }
        groups: dict[str, list[str]] = {}
        for name, own_name in named.items():
            part = mesh.tensor_rank if name in sharded else "all"
            groups.setdefault(f"{mesh.pipeline_rank} {part}", []).append(own_name)
            if name in on_several:
                groups[own_name] = [own_name]
        check_same_weights({named[name]: checksum for name, checksum in checksums.items()}, groups)

    @staticmethod
    def lowered(program: Program, stages: Sequence[Stage]) -> Program:
        """Return a program of these stages with its sends and receives."""
        return insert_communication(program, stage_edges(stages), ahead=receives_ahead(is_ordered()))

    def runner_of(self, stages: Sequence[Stage], program: Program | None = None) -> RankRunner:
        """Runs a lowered `program`, by default the plan's, on stages of this model, of whatever length; compiled if the
        plan says so, which takes minutes."""
        plan = self.plan
        if program is None:
            program = self.lowered(self.program, stages)
        place = PipelineRank(self.mesh.pipeline_rank, self.groups.pipeline, self.groups.lane)
        first = self.mesh.replica * plan.num_microbatches
        options = StageOptions(self.cotangent, plan.job.seed, first, plan.job.compiled)
        runner = RankRunner(
            stages, program, place, self.weights, self.device, options, self.watch, self.shards
        )
        if plan.job.compiled:
            self.watch("compiling stage functions")
            runner.prepare()
        return runner

    def _at_length(self, length: int) -> AtLength:
        """The model for samples of `length` tokens, cut as the plan says, on this rank's weights. Raises `PlanError` where
        it has other operators than for the longest."""
        self.watch(f"tracing for {length} tokens")
        asked = self.plan.at_length(length)
        traced: dict[str, Any] = asked.traced() | self._further
        graph = trace(self.reference, asked.microbatch_size, device=self._tracer, **traced)
        check_same_operators(self.graph, graph, length)
        stages = split_graph(graph, stage_cuts(asked, graph), stage_policies(asked, graph))
        return AtLength(graph, self.runner_of(stages))

    def _counted_elsewhere(self) -> set[int]:
        """Parameters that the first of the tensor parallel ranks counts in the norm of the gradient."""
        found = parallelism(self.graph)
        if found is None or self.mesh.tensor_rank == 0:
            return set()
        names = {value: name for name, value in self.graph.parameters.items()}
        return {value for value, name in names.items() if name not in found.shards}

    # -- training ---------------------------------------------------------------------------------------------------

    @property
    def cotangent(self) -> float:
        """Of the loss of each microbatch, so that gradients are those of the mean loss, or of the scaled one."""
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        return scale / (self.plan.num_microbatches * self.plan.dp)

    def microbatches(
        self, step: int, graph: OperatorGraph, batches: Batches | None = None
    ) -> list[dict[str, torch.Tensor]]:
        """What this rank's stages need of this replica's microbatches of a step, as long as those of `graph`, out of
        `batches` in place of the data trained on if they are given."""
        wanted = self._wanted(step, graph, batches)
        if wanted is None:
            return [{} for _ in range(self.plan.num_microbatches)]
        self.watch("reading data")
        found = wanted.read() if self._reader is None else self._reader.take(wanted)
        to_device = accelerator_of(self.device).to_device
        return [{name: to_device(tensor) for name, tensor in batch.items()} for batch in found]

    def _wanted(
        self, step: int, graph: OperatorGraph, batches: Batches | None = None
    ) -> PrefetchRequest | None:
        """What `microbatches` reads; None where that is nothing."""
        source = self.batches if batches is None else batches
        if source is None or not self._needed:
            return None
        count, size = self.plan.num_microbatches, self.plan.microbatch_size
        first = self.mesh.replica * count
        firsts = tuple((first + index) * size for index in range(count))
        ahead = self.passed_over if batches is None else 0
        return PrefetchRequest(source, step + ahead, firsts, graph, frozenset(self._needed))

    def _read_ahead(self, step: int) -> None:
        """Begin to read the data of a step, if there is such a step."""
        if self._reader is None or step >= self.plan.job.num_steps:
            return
        graph = self.lengths.graph_of(self.plan.job.length_of(step))
        if graph is not None and (wanted := self._wanted(step, graph)) is not None:
            self._reader.read_ahead(wanted)

    def own_part(
        self, batch: Mapping[str, torch.Tensor], length: int | None = None
    ) -> list[dict[str, torch.Tensor]]:
        """What this rank reads of its replica's microbatches of a whole batch, by the name of the model's input, of samples
        as long as the longest or of another `length`. Raises `InputError` where the batch lacks inputs, or has another
        number of samples."""
        plan = self.plan
        graph = self.lengths.turn_to(length or plan.job.sequence_length).graph
        if missing := [name for name in graph.inputs if name not in batch]:
            raise InputError(
                f"the batch has no '{missing[0]}': the model takes {', '.join(map(repr, graph.inputs))}"
            )
        if unknown := [name for name in batch if name not in graph.inputs]:
            raise InputError(
                f"the batch has '{unknown[0]}', which the model as it was traced does not take: it takes "
                f"{', '.join(map(repr, graph.inputs))}"
            )
        size, first = plan.microbatch_size, self.mesh.replica * plan.num_microbatches * plan.microbatch_size
        for name, value in graph.inputs.items():
            wanted = (plan.job.global_batch, *graph.values[value].meta.shape[1:])
            if tuple(batch[name].shape) != wanted:
                raise InputError(
                    f"input '{name}' of the batch has shape {list(batch[name].shape)}, and the plan is for {list(wanted)}: "
                    "give whole batches, of which each rank takes its own samples"
                )
        to_device = accelerator_of(self.device).to_device
        return [
            {
                name: to_device(
                    batch[name][first + index * size : first + (index + 1) * size].to(
                        DTYPES[graph.values[value].meta.dtype]
                    )
                )
                for name, value in graph.inputs.items()
                if name in self._needed
            }
            for index in range(plan.num_microbatches)
        ]

    def train_step(
        self, step: int, metered: bool = False, inputs: list[dict[str, torch.Tensor]] | None = None
    ) -> StepResult:
        """One optimizer step, on microbatches `inputs` in place of the data's where they are given; with `metered`, the
        bytes alive at the worst moment are counted (and the step is slow)."""
        length = self.plan.job.length_of(step)
        graph = self.lengths.turn_to(length).graph
        if inputs is None:
            inputs = self.microbatches(step, graph)
            self._read_ahead(step + 1)
        self._begin_together()
        try:
            counting = self.metering.counting(
                length, self.device, lambda: self._lasting(inputs), self.optimizer.updater.host_state
            )
            with counting if metered else nullcontext():
                return self._step(step, inputs, metered)
        except Exception as error:
            failed = cause_of(error)
            if failed is None:
                raise
            alive = alive_bytes(self.runner, self.weights, self.shards, self.optimizer, inputs)
            forget(error, self.runner.drop)
        raise explained(failed, self.position, alive, self.plan, self.mesh.pipeline_rank, length)

    def accumulate(self, step: int) -> float:
        """Add up the gradients of one batch, summed over tied copies and replicas; returns the mean loss.

        Nothing is clipped and no parameter changes. `gradients` gives what was added up.
        """
        now = self.lengths.turn_to(self.plan.job.length_of(step))
        inputs = self.microbatches(step, now.graph)
        self._begin_together()
        shares = self._shares(inputs)
        batch = self.runner.run_batch(step, inputs, self._cotangents(shares))
        self.watch("summing gradients")
        self.optimizer.reduce()
        return self._agreed(self._own_loss(batch, shares), None, 0.0, shares is not None).loss

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients of this rank's parameters by name, whole; every rank must call this."""
        found = self.shards.whole_gradients(self.weights)
        if self.loss_scale is not None:
            found = {value: gradient / self.loss_scale.value for value, gradient in found.items()}
        named = {value: stage.value(value).name for stage in self.own for value in stage.parameters}
        return {named[value]: gradient for value, gradient in found.items()}

    def _begin_together(self) -> None:
        """Wait for the other ranks of the pipeline, so that the times of a step do not count that one of them reads data. A
        device that works behind its host is not kept waiting: what the step sends and receives keeps ranks together."""
        if not self._is_asynchronous:
            self.watch("waiting for all to begin the step")
            dist.barrier(self.groups.model)

    @property
    def _is_asynchronous(self) -> bool:
        return accelerator_of(self.device).is_asynchronous

    def _step(self, step: int, inputs: list[dict[str, torch.Tensor]], metered: bool) -> StepResult:
        """The host waits for the device once, at the end, when all ranks agree; and before it where the update may be left
        out."""
        start = time.perf_counter()
        shares = self._shares(inputs)
        timer = self.runner.timer
        batch = self.runner.run_batch(step, inputs, self._cotangents(shares))
        computed = timer.mark()
        self.watch("optimizer step")
        cotangent = self.cotangent
        rate = self.plan.job.rate_of(step)
        loss = self._own_loss(batch, shares)
        norm, is_skipped = self.optimizer.step(rate, self._num_lost(loss) if self._wants_number else None)
        if self.cotangent != cotangent:
            self.lengths.scale_loss(self.cotangent)
        end = timer.mark()
        length = self.plan.job.length_of(step)
        timed = TimedStep(length, replace(batch, losses={}), start, 0.0)
        pace = self._pace(timed, metered)
        self.watch("agreeing on the loss")
        agreed = self._agreed(loss, norm, pace, shares is not None)
        seconds = timer.seconds(end)
        self.metering.took(replace(timed, optimizer_seconds=seconds - timer.seconds(computed)))
        return replace(agreed, learning_rate=rate, is_skipped=is_skipped, seconds=seconds - start)

    def _pace(self, timed: TimedStep, metered: bool) -> float:
        """How many times as long as planned this rank took to compute; where the device has not done the step yet, it is the
        pace of the step before. Zero of metered steps."""
        current = None if metered else timed
        read, self._unread = (self._unread, current) if self._is_asynchronous else (current, None)
        return 0.0 if read is None else pace_of(read.batch, self.plan, self.mesh.pipeline_rank, read.length)

    def _lasting(self, inputs: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        resident = [tensor for runner in self.runner.runners.values() for tensor in runner.resident.values()]
        return [
            *resident,
            *self.weights.tensors.values(),
            *self.weights.gradients.values(),
            *self.shards.tensors(),
            *self.optimizer.updater.state(),
            *(tensor for microbatch in inputs for tensor in microbatch.values()),
        ]

    def _shares(self, inputs: list[dict[str, torch.Tensor]]) -> torch.Tensor | None:
        """Of the tokens that the whole batch is to learn, the part that is in each of this replica's microbatches, where
        some are not to be learnt; every rank must call this."""
        if not self._is_weighted:
            return None
        counts = torch.zeros(self.plan.num_microbatches, dtype=torch.float64, device=self.device)
        if self.stages[-1] in self.own:
            is_next = bool(self._further) or self.plan.job.documents_apart
            counts = torch.stack([counted(one[LABELS], is_next) for one in inputs]).double()
        total = counts.sum() / self.mesh.tp
        dist.all_reduce(total)
        return counts / total.clamp(min=1)

    def _cotangents(self, shares: torch.Tensor | None) -> torch.Tensor | None:
        """Of the loss of each microbatch, where they are not all the same."""
        if shares is None:
            return None
        return shares if self.loss_scale is None else self.loss_scale.value * shares

    def _own_loss(self, result: BatchResult, shares: torch.Tensor | None) -> torch.Tensor:
        """Of all microbatches whose loss this rank has."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for microbatch, loss in result.losses.items():
            if shares is None:
                total += loss
            else:  # a mean over no tokens is not a number
                total += torch.where(shares[microbatch] > 0, loss * shares[microbatch], 0.0)
        return total

    def _num_lost(self, loss: torch.Tensor) -> torch.Tensor:
        """Ranks with a loss that is not finite; every rank must call this."""
        lost = (~loss.isfinite()).double()
        dist.all_reduce(lost)
        return lost

    def _agreed(
        self, loss: torch.Tensor, norm: torch.Tensor | None, pace: float, is_weighted: bool
    ) -> StepResult:
        """What every rank knows of a step: the mean loss over all microbatches of all replicas (of all learnt tokens where
        it `is_weighted`), the norm of the gradient, and what each rank tells. Waits for the device."""
        num_ranks, votes = dist.get_world_size(), list(self.votes.items())
        told = torch.zeros(2 + len(votes) + 2 * num_ranks, dtype=torch.float64)
        told[2 : 2 + len(votes)] = torch.tensor([float(is_yes()) for _, is_yes in votes])
        of_ranks = told[2 + len(votes) :].view(2, num_ranks)
        of_ranks[:, self.mesh.rank] = torch.tensor(
            [pace, accelerator_of(self.device).peak_reserved_bytes()], dtype=torch.float64
        )
        told = accelerator_of(self.device).to_device(told)
        told[0] = loss
        if norm is not None and self.mesh.rank == 0:
            told[1] = norm
        dist.all_reduce(told)
        loss_sum, norm_value, *others = told.tolist()
        yes = frozenset(name for (name, _), count in zip(votes, others, strict=False) if count)
        paces, taken = others[len(votes) : -num_ranks], others[-num_ranks:]
        num_losses = 1 if is_weighted else self.plan.num_microbatches * self.plan.dp
        return StepResult(
            loss=loss_sum / (num_losses * self.plan.tp),
            gradient_norm=math.nan if norm is None else norm_value,
            votes=yes,
            paces=tuple(paces),
            memory_bytes=int(max(taken)),
            has_scale=self.loss_scale is not None,
        )

    # -- record -----------------------------------------------------------------------------------------------------

    def rank_record(self, offset: ClockOffset) -> RankRecord:
        """What this rank measured, its times by the first rank's clock."""
        timed = self.metering.timed
        assert timed is not None, "a record is of one step at least"
        moments, began = timed.batch.moments(), timed.began
        return RankRecord(
            rank=self.mesh.rank,
            pipeline_rank=self.mesh.pipeline_rank,
            replica=self.mesh.replica,
            allocated_peak_bytes=self.metering.peak_bytes,
            peak_of_length=self.metering.peak_of_length if self.plan.job.sequence_lengths else {},
            reserved_peak_bytes=self.metering.reserved_bytes,
            communicator_bytes=self._communicator_bytes,
            busy_seconds=sum(m.end - m.start for m in moments if m.action.kind in COMPUTE),
            sent_bytes=self.lengths.num_bytes_sent,
            **(vars(self.shards.replicas.traffic) if self.shards.replicas is not None else {}),
            actions=tuple((str(m.action), m.start - began, m.end - began) for m in moments),
            began_seconds=began + offset.seconds,
            clock_error_seconds=offset.error_seconds,
            optimizer_seconds=timed.optimizer_seconds,
        )


def _agreed_data(own: DataIdentity) -> DataIdentity:
    """What all ranks are trained on; every rank must call this. Raises `InputError` where files of the same path differ
    between hosts."""
    told = [DataIdentity(**one) for one in exchange(own.model_dump())]
    for rank, other in enumerate(told):
        if not other.is_same(told[0]):
            raise InputError(
                f"rank {rank} has other data than rank 0, {other} and {told[0]}: copy one to all hosts"
            )
    return own

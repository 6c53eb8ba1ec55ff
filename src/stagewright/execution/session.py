"""The session of a rank: set-up, training steps and measurements of a run of a plan."""

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
from stagewright.execution.loading import StartingTensors, StoredAdapters, StoredWeights, part_of
from stagewright.execution.mesh import STAGE, Groups, Mesh, connect_everyone
from stagewright.execution.metering import Metering, TimedStep
from stagewright.execution.model_files import ModelFiles
from stagewright.execution.optimizer import LossScale, Optimizer
from stagewright.execution.options import OnNan
from stagewright.execution.out_of_memory import alive_bytes, explained, forget
from stagewright.execution.rank_runner import BatchResult, PipelineRank, RankRunner, stage_edges
from stagewright.execution.record import RankRecord
from stagewright.execution.sequence_lengths import AtLength, RunnersByLength
from stagewright.execution.shards import Shards
from stagewright.execution.stage_runner import StageOptions
from stagewright.execution.stragglers import slowdown_of
from stagewright.execution.watchdog import Report
from stagewright.execution.weight_files import base_model_of
from stagewright.execution.weights import TiedGroups, Weights
from stagewright.graph import OperatorGraph
from stagewright.graph.flat_buffers import flats, of_stages
from stagewright.graph.split import split_graph
from stagewright.graph.stage import Stage
from stagewright.graph.tensor_parallel import parallelism
from stagewright.graph.verify import verify_stages
from stagewright.planning.plan import Plan
from stagewright.planning.plan_stages import stage_cuts, stage_policies, stage_program
from stagewright.planning.sequence_lengths import check_same_operators
from stagewright.schedule.action import COMPUTE
from stagewright.schedule.lanes import check_lanes, lanes_of
from stagewright.schedule.lower import insert_communication, receives_ahead
from stagewright.schedule.program import Program
from stagewright.tracing.arguments import DTYPES
from stagewright.tracing.cache import trace
from stagewright.tracing.models.build import DeferredModel


@dataclass(frozen=True)
class StepResult:
    """The figures of a step, the same on all ranks."""

    loss: float
    gradient_norm: float
    learning_rate: float = 0.0
    is_skipped: bool = False
    """Whether it changed no parameter because the loss or a gradient was NaN or Inf."""
    seconds: float = 0.0
    votes: frozenset[str] = frozenset()
    """Names of the questions of `Session.votes` that a rank answered with yes; the same on all ranks."""
    slowdowns: tuple[float, ...] = ()
    """Ratio of each rank's computing time to its planned time, the same on all ranks; zero for metered steps."""
    memory_by_rank: tuple[int, ...] = ()
    """Peak bytes that each rank has reserved on its device so far; on a CPU, of its process."""
    has_scale: bool = False

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradients are finite; overflows of a scaled loss do not count."""
        return math.isfinite(self.loss) and (math.isfinite(self.gradient_norm) or self.has_scale)


class Session:
    """Everything that a rank needs to train a plan; `dist` must be initialised with ``pp * dp * tp`` processes.

    With a `reader`, data of the next step is read during a step; without one, or with synthetic data, at the start of a
    step.

    Raises:
        InputError: the model is not the one that the plan was made for.
        PlanError: the plan does not fit the model.
        RunError: the number of processes is not the plan's.
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
        """Number of batches by which the data is ahead of the steps, because the run went back to a checkpoint."""
        self._reader = None if data is None else reader
        self._wants_number = on_nan != "warn"
        self.votes: dict[str, Callable[[], bool]] = {}
        """Questions that every rank answers after each step; all ranks have the same questions in the same order."""
        self.device = device
        self._report_position = watch
        self.metering = Metering()
        self.position = "starting"
        accelerator_of(device).allow_tf32(plan.job.matmul_precision == "tf32")
        self.mesh = Mesh(plan.pp, plan.dp, dist.get_rank(), plan.tp, plan.shard_size)
        if dist.get_world_size() != self.mesh.size:
            raise RunError(
                f"the plan needs {self.mesh.size} processes (pp {plan.pp} x dp {plan.dp} x tp {plan.tp}), but "
                f"{dist.get_world_size()} were started: start that many, or plan for the number of available devices"
            )
        reference = self.reference = plan.model.resolved()
        job = plan.job
        data = ready(data, plan)
        report("tracing")
        self._further = (
            {"further_inputs": data.further_inputs} if data is not None and data.further_inputs else {}
        )
        # As for the plan: the CPU traces for GPUs. A plan for CPUs has the kernels of the device.
        self._tracer = device.type if plan.cluster.kind == "cpu" else "cpu"
        traced: dict[str, Any] = plan.traced() | self._further
        self.is_from_files = reference.weights is not None and not random_weights
        self.graph = trace(reference, plan.microbatch_size, device=self._tracer, report=report, **traced)
        self.stages = split_graph(self.graph, stage_cuts(plan, self.graph), stage_policies(plan, self.graph))
        verify_stages(self.stages)
        # Before there are weights: the device memory of communicators is outside of PyTorch's allocator.
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
        self.own_stages = own_stages = [stage for stage in self.stages if plan.placement[stage.index] == rank]
        self._needed = {stage.value(value).name for stage in own_stages for value in stage.inputs}
        self.data = _agreed_data(DataIdentity(kind="synthetic") if data is None else data.identity)
        self.batches = None
        if self._needed:
            self.batches = (
                SyntheticBatches(model.inputs, job.seed) if data is None else open_batches(data, job)
            )
        has_tokens = reference.kind == "config"
        self._is_masked = has_tokens and (job.documents_apart or (data is not None and data.is_masked))
        takes_labels = has_tokens and {LABELS, "input_ids"} <= self.graph.inputs.keys()
        self._may_be_masked = self._is_masked or takes_labels  # by a user's loop
        shards = self.mesh.num_shards
        copies, dims = plan.dp // shards, job.least_decayed_dims
        on_host = plan.updated_on_host if plan.streamed else None
        has_flats = plan.dp > 1 or plan.streamed
        every = flats(self.stages, plan.sharding, shards, copies, dims, on_host) if has_flats else ()
        mine = of_stages(every, (stage.index for stage in own_stages))
        stored = None
        if reference.weights is not None and self.is_from_files:
            stored = StoredWeights(reference.weights, model.module, reference.config or {})
        adapters = None
        if reference.lora is not None and reference.lora.folder is not None and not random_weights:
            adapters = StoredAdapters(Path(reference.lora.folder), model.module)
        accumulate = torch.float32 if job.dtype in ("bf16", "fp16") else None
        starting = StartingTensors(model, own_stages, stored, self.part, adapters, self._copied(), device)
        self.weights = Weights(own_stages, starting, device, accumulate, mine)
        self.model_files = ModelFiles.of(model, reference, self.stages, plan.placement, rank, stored)
        reduce_dtype = None if plan.reduce_torch_name is None else DTYPES[plan.reduce_torch_name]
        self.shards = Shards(mine, self.weights, self.groups.replicas, starting, reduce_dtype)
        self.watch("comparing weights with the other ranks")
        self._check_same_weights(starting.checksums)
        del starting, model, stored, adapters
        self.loss_scale = LossScale(job.loss_scale, job.loss_scale_window) if job.dtype == "fp16" else None
        longest = AtLength(self.graph, self.runner_of(self.stages))
        self.by_length = RunnersByLength(job.sequence_length, longest, self._at_length)
        on_host = rank in plan.host_optimizer
        if accelerator.is_asynchronous:
            predicted = [
                rank_predictions.offloaded_bytes
                for rank_predictions in plan.predictions.ranks
                if rank_predictions.rank == rank
            ]
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
        self._unread: TimedStep | None = None

    @cached_property
    def base_model(self) -> BaseModelIdentity | None:
        """Identity of the base model of adapters, whose files are read for it."""
        return base_model_of(self.reference, self.plan.job.seed, not self.is_from_files)

    def watch(self, position: str, **details: Any) -> None:
        """Report that this rank is now at `position`; `details` are those of `Watchdog.at`."""
        self.position = position
        self.metering.at(position)
        self._report_position(position, **details)

    def follow(self, plan: Plan) -> None:
        """Continue with the order of actions of `plan`, which must have the same stages as the present plan."""
        self.plan, self.program = plan, stage_program(plan)
        program = self.lowered(self.program, self.stages)
        if is_ordered():
            check_lanes(program, stage_edges(self.stages))
        for runner in self.by_length.runners:
            runner.follow(program)

    def close(self) -> None:
        """Destroy the process groups; every rank must call this, and the session cannot train any more."""
        self.groups.all.destroy()

    @property
    def runner(self) -> RankRunner:
        """Runner of batches of the present sequence length."""
        return self.by_length.now.runner

    # -- set-up -----------------------------------------------------------------------------------------------------

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor of the whole model."""
        parallel = parallelism(self.graph)
        how = parallel.shards.get(name) if parallel else None
        return whole if how is None else part_of(whole, how, self.mesh.tp, self.mesh.tensor_rank)

    def _copied(self) -> set[str]:
        """Return the names of this rank's tensors that other ranks start with too."""
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
        """Return the names of the tensors that are sharded over tensor parallel ranks."""
        parallel = parallelism(self.graph)
        return set(parallel.shards) if parallel else set()

    def _on_several_pipeline_ranks(self) -> set[str]:
        ranks: dict[str, set[int]] = {}
        for stage in self.stages:
            for value in (*stage.parameters, *stage.buffers):
                ranks.setdefault(stage.value(value).name, set()).add(self.plan.placement[stage.index])
        return {name for name, where in ranks.items() if len(where) > 1}

    def _check_same_weights(self, checksums: Mapping[str, int]) -> None:
        """Check that this rank starts with the same tensors as all ranks that have copies; every rank must call this."""
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
        """Return `program` with the sends and receives between these stages inserted."""
        return insert_communication(program, stage_edges(stages), ahead=receives_ahead(is_ordered()))

    def runner_of(self, stages: Sequence[Stage], program: Program | None = None) -> RankRunner:
        """Return a runner of a lowered `program`, by default the plan's, on stages of this model of any sequence length;
        compiled if the plan says so, which takes minutes."""
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
        """Trace the model for samples of `length` tokens, cut as the plan says, on this rank's weights. Raises `PlanError`
        where it has other operators than for the longest."""
        self.watch(f"tracing for {length} tokens")
        length_plan = self.plan.at_length(length)
        traced: dict[str, Any] = length_plan.traced() | self._further
        graph = trace(self.reference, length_plan.microbatch_size, device=self._tracer, **traced)
        check_same_operators(self.graph, graph, length)
        stages = split_graph(graph, stage_cuts(length_plan, graph), stage_policies(length_plan, graph))
        return AtLength(graph, self.runner_of(stages))

    def _counted_elsewhere(self) -> set[int]:
        """Return the parameters that the first tensor parallel rank counts in the norm of the gradient for this rank."""
        parallel = parallelism(self.graph)
        if parallel is None or self.mesh.tensor_rank == 0:
            return set()
        names = {value: name for name, value in self.graph.parameters.items()}
        return {value for value, name in names.items() if name not in parallel.shards}

    # -- training ---------------------------------------------------------------------------------------------------

    @property
    def cotangent(self) -> float:
        """Cotangent of each microbatch's loss, for gradients of the mean loss, or of the scaled mean loss."""
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        return scale / (self.plan.num_microbatches * self.plan.dp)

    def microbatches(
        self, step: int, graph: OperatorGraph, batches: Batches | None = None
    ) -> list[dict[str, torch.Tensor]]:
        """Return the inputs that this rank's stages need of this replica's microbatches of a step, of the sequence length of
        `graph`, from `batches` if given, else from the training data."""
        wanted = self._wanted(step, graph, batches)
        if wanted is None:
            return [{} for _ in range(self.plan.num_microbatches)]
        self.watch("reading data")
        batches_read = wanted.read() if self._reader is None else self._reader.take(wanted)
        to_device = accelerator_of(self.device).to_device
        return [{name: to_device(tensor) for name, tensor in batch.items()} for batch in batches_read]

    def _wanted(
        self, step: int, graph: OperatorGraph, batches: Batches | None = None
    ) -> PrefetchRequest | None:
        """Return the request that `microbatches` reads, or None where this rank needs no data."""
        source = self.batches if batches is None else batches
        if source is None or not self._needed:
            return None
        count, size = self.plan.num_microbatches, self.plan.microbatch_size
        first = self.mesh.replica * count
        firsts = tuple((first + index) * size for index in range(count))
        ahead = self.passed_over if batches is None else 0
        return PrefetchRequest(source, step + ahead, firsts, graph, frozenset(self._needed))

    def _read_ahead(self, step: int) -> None:
        """Begin to read the data of a step, unless the run ends before it."""
        if self._reader is None or step >= self.plan.job.num_steps:
            return
        graph = self.by_length.graph_of(self.plan.job.length_of(step))
        if graph is not None and (wanted := self._wanted(step, graph)) is not None:
            self._reader.read_ahead(wanted)

    def own_part(
        self, batch: Mapping[str, torch.Tensor], length: int | None = None
    ) -> list[dict[str, torch.Tensor]]:
        """Return this rank's inputs of its replica's microbatches of a whole batch, by the name of the model's input, for
        samples of the longest sequence length or of `length`. Raises `InputError` where the batch lacks inputs, or has
        another number of samples."""
        plan = self.plan
        graph = self.by_length.turn_to(length or plan.job.sequence_length).graph
        if missing := [name for name in graph.inputs if name not in batch]:
            raise InputError(
                f"the batch has no '{missing[0]}': the model takes {', '.join(map(repr, graph.inputs))}"
            )
        if unknown := [name for name in batch if name not in graph.inputs]:
            raise InputError(
                f"the batch has '{unknown[0]}', which the traced model does not take: it takes "
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
        """Take an optimizer step, on microbatches `inputs` if given, else on the data's; with `metered`, the peak of live
        bytes is counted (which makes the step slow)."""
        length = self.plan.job.length_of(step)
        graph = self.by_length.turn_to(length).graph
        is_weighted = self._is_masked if inputs is None else self._may_be_masked
        if inputs is None:
            inputs = self.microbatches(step, graph)
            self._read_ahead(step + 1)
        self._begin_together()
        try:
            counting = self.metering.counting(
                length, self.device, lambda: self._lasting(inputs), self._on_host
            )
            with counting if metered else nullcontext():
                return self._step(step, inputs, is_weighted, metered)
        except Exception as error:
            failed = cause_of(error)
            if failed is None:
                raise
            alive = alive_bytes(self.runner, self.weights, self.shards, self.optimizer, inputs)
            forget(error, self.runner.drop)
        raise explained(
            failed, self.position, alive, self.plan, self.mesh.rank, length, self._bytes_of_others()
        )

    def _bytes_of_others(self) -> int:
        """Return the bytes of this rank's device that other programs hold; 0 on a CPU, whose memory is not one process's."""
        if self.device.type == "cpu":
            return 0
        accelerator = accelerator_of(self.device)
        free, total = accelerator.free_and_total_bytes()
        context = self.plan.cluster.load().device_of(self.plan.device_of(self.mesh.rank)).context_bytes
        return max(0, total - free - accelerator.reserved_bytes() - context)

    def accumulate(self, step: int) -> float:
        """Accumulate the gradients of a batch, summed over tied copies and replicas, and return the mean loss.

        Nothing is clipped and no parameter changes. `gradients` returns the sums.
        """
        now = self.by_length.turn_to(self.plan.job.length_of(step))
        inputs = self.microbatches(step, now.graph)
        self._begin_together()
        shares = self._shares(inputs) if self._is_masked else None
        batch = self.runner.run_batch(step, inputs, self._cotangents(shares))
        self.watch("summing gradients")
        self.optimizer.reduce()
        return self._agreed(self._own_loss(batch, shares), None, 0.0, shares is not None).loss

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the whole gradients of this rank's parameters by name; every rank must call this."""
        by_value = self.shards.whole_gradients(self.weights)
        if self.loss_scale is not None:
            by_value = {value: gradient / self.loss_scale.value for value, gradient in by_value.items()}
        named = {value: stage.value(value).name for stage in self.own_stages for value in stage.parameters}
        return {named[value]: gradient for value, gradient in by_value.items()}

    def _begin_together(self) -> None:
        """Wait for the other ranks of the pipeline, so that the times of a step do not include their reading of data. With
        an asynchronous device there is no wait: the transfers of the step keep ranks together."""
        if not self._is_asynchronous:
            self.watch("waiting for all to begin the step")
            dist.barrier(self.groups.model)

    @property
    def _is_asynchronous(self) -> bool:
        return accelerator_of(self.device).is_asynchronous

    def _step(
        self, step: int, inputs: list[dict[str, torch.Tensor]], is_weighted: bool, metered: bool
    ) -> StepResult:
        """Run a step; if it `is_weighted`, each microbatch has the weight of its counted tokens. The host waits for the
        device once, at the end, when all ranks agree, and also before the update if it may be skipped."""
        start = time.perf_counter()
        shares = self._shares(inputs) if is_weighted else None
        timer = self.runner.timer
        batch = self.runner.run_batch(step, inputs, self._cotangents(shares))
        computed = timer.mark()
        self.watch("optimizer step")
        cotangent = self.cotangent
        rate = self.plan.job.rate_of(step)
        loss = self._own_loss(batch, shares)
        norm, is_skipped = self.optimizer.step(rate, self._num_lost(loss) if self._wants_number else None)
        if self.cotangent != cotangent:
            self.by_length.scale_loss(self.cotangent)
        end = timer.mark()
        length = self.plan.job.length_of(step)
        timed = TimedStep(length, replace(batch, losses={}), start, 0.0)
        slowdown = self._slowdown(timed, metered)
        self.watch("agreeing on the loss")
        agreed = self._agreed(loss, norm, slowdown, shares is not None)
        seconds = timer.seconds(end)
        self.metering.took(replace(timed, optimizer_seconds=seconds - timer.seconds(computed)))
        return replace(agreed, learning_rate=rate, is_skipped=is_skipped, seconds=seconds - start)

    def _slowdown(self, timed: TimedStep, metered: bool) -> float:
        """Return the ratio of this rank's computing time to the planned time; where the device has not done the step yet,
        that of the previous step. Zero for metered steps."""
        current = None if metered else timed
        read, self._unread = (self._unread, current) if self._is_asynchronous else (current, None)
        return (
            0.0 if read is None else slowdown_of(read.batch, self.plan, self.mesh.pipeline_rank, read.length)
        )

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

    def _on_host(self) -> list[torch.Tensor]:
        """Return the tensors in host memory that a device's memory does not include."""
        return [*self.shards.host_tensors(), *self.optimizer.updater.host_state()]

    def _shares(self, inputs: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        """Return the share of the whole batch's counted tokens in each of this replica's microbatches; every rank must call
        this."""
        counts = torch.zeros(self.plan.num_microbatches, dtype=torch.float64, device=self.device)
        if self.stages[-1] in self.own_stages:
            is_next = bool(self._further) or self.plan.job.documents_apart
            counts = torch.stack([counted(microbatch[LABELS], is_next) for microbatch in inputs]).double()
        total = counts.sum() / self.mesh.tp
        dist.all_reduce(total)
        return counts / total.clamp(min=1)

    def _cotangents(self, shares: torch.Tensor | None) -> torch.Tensor | None:
        """Return the cotangent of each microbatch's loss, or None where all are the same."""
        if shares is None:
            return None
        return shares if self.loss_scale is None else self.loss_scale.value * shares

    def _own_loss(self, result: BatchResult, shares: torch.Tensor | None) -> torch.Tensor:
        """Return the summed loss of all microbatches whose loss this rank has."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for microbatch, loss in result.losses.items():
            if shares is None:
                total += loss
            else:  # a mean over no tokens is NaN
                total += torch.where(shares[microbatch] > 0, loss * shares[microbatch], 0.0)
        return total

    def _num_lost(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the number of ranks whose loss is NaN or Inf; every rank must call this."""
        lost = (~loss.isfinite()).double()
        dist.all_reduce(lost)
        return lost

    def _agreed(
        self, loss: torch.Tensor, norm: torch.Tensor | None, slowdown: float, is_weighted: bool
    ) -> StepResult:
        """Return the figures of a step that all ranks share: the mean loss over all microbatches of all replicas (over all
        counted tokens where it `is_weighted`), the norm of the gradient, and each rank's own figures. Waits for the
        device."""
        num_ranks, votes = dist.get_world_size(), list(self.votes.items())
        totals = torch.zeros(2 + len(votes) + 2 * num_ranks, dtype=torch.float64)
        totals[2 : 2 + len(votes)] = torch.tensor([float(is_yes()) for _, is_yes in votes])
        of_ranks = totals[2 + len(votes) :].view(2, num_ranks)
        of_ranks[:, self.mesh.rank] = torch.tensor(
            [slowdown, accelerator_of(self.device).peak_reserved_bytes()], dtype=torch.float64
        )
        totals = accelerator_of(self.device).to_device(totals)
        totals[0] = loss
        if norm is not None and self.mesh.rank == 0:
            totals[1] = norm
        dist.all_reduce(totals)
        loss_sum, norm_value, *figures = totals.tolist()
        yes = frozenset(name for (name, _), count in zip(votes, figures, strict=False) if count)
        slowdowns, taken = figures[len(votes) : -num_ranks], figures[-num_ranks:]
        num_losses = 1 if is_weighted else self.plan.num_microbatches * self.plan.dp
        return StepResult(
            loss=loss_sum / (num_losses * self.plan.tp),
            gradient_norm=math.nan if norm is None else norm_value,
            votes=yes,
            slowdowns=tuple(slowdowns),
            memory_by_rank=tuple(map(int, taken)),
            has_scale=self.loss_scale is not None,
        )

    # -- record -----------------------------------------------------------------------------------------------------

    def rank_record(self, offset: ClockOffset) -> RankRecord:
        """Return this rank's measurements, with times by the first rank's clock."""
        timed = self.metering.timed
        assert timed is not None, "a record has at least one step"
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
            sent_bytes=self.by_length.num_bytes_sent,
            **(vars(self.shards.replicas.traffic) if self.shards.replicas is not None else {}),
            actions=tuple((str(m.action), m.start - began, m.end - began) for m in moments),
            memory=tuple((held.position, held.peak, held.after) for held in self.metering.actions),
            began_seconds=began + offset.seconds,
            clock_error_seconds=offset.error_seconds,
            optimizer_seconds=timed.optimizer_seconds,
        )


def _agreed_data(identity: DataIdentity) -> DataIdentity:
    """Check that all ranks have the same data and return its identity; every rank must call this. Raises `InputError` where
    files of the same path differ between hosts."""
    by_rank = [DataIdentity(**document) for document in exchange(identity.model_dump())]
    for rank, other in enumerate(by_rank):
        if not other.is_same(by_rank[0]):
            raise InputError(
                f"rank {rank} has other data than rank 0, {other} instead of {by_rank[0]}: copy the same files to all hosts"
            )
    return identity

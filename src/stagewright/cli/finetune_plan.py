"""What `stagewright finetune` prepares before it trains: the machine, the tokens and the plan."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagewright.cli.finetune_options import DTYPES, QUANTISED, FinetuneRequest
from stagewright.cli.options import warn
from stagewright.cli.progress import Progress
from stagewright.errors import InputError, PlanError
from stagewright.files import make_writable, write_whole
from stagewright.text import plural, say
from stagewright.tracing.models.quantised import FP8
from stagewright.units import format_bytes

if TYPE_CHECKING:
    from stagewright.cluster import Cluster
    from stagewright.execution.data.store import TokenStore
    from stagewright.planning.job import Job
    from stagewright.planning.plan import Plan
    from stagewright.planning.search_result import SearchResult
    from stagewright.planning.space import Space, Streamed
    from stagewright.report.finetuning import DataSummary
    from stagewright.tracing.models.reference import ModelReference

_GLOBAL_BATCH, _LENGTH = 16, 2048
_MULTIPLE = 64
"""Sequence lengths that are not given are multiples of this."""
_TIGHT = 0.5
"""Share of the memory that weights take up, from which on smaller ones may be faster, as they leave more for activations."""
_GLANCE_S = 5.0
"""Seconds of the search for such a plan, to be mentioned."""
_FASTER = 1.2
"""How many times as fast such a plan must be to be mentioned."""


class Preparation:
    """What comes before training, machine, data and plan, each made once and kept in the folder of the fine-tuning."""

    def __init__(self, request: FinetuneRequest) -> None:
        self.request = request
        self.folder = request.folder
        self.verbs: list[str] = []
        """Commands that ran, in order."""
        self._alternatives: list[str] = []
        """Lines about other kinds of plans that were made now."""

    def continue_or_begin(self) -> None:
        """Take the files of an earlier start of the same fine-tuning, without its plan if options of machine or parallelism
        changed; say so.

        Raises:
            InputError: the folder has another fine-tuning, or its description is damaged.
        """
        from stagewright.documents import read_json
        from stagewright.execution.checkpoint_folder import differences
        from stagewright.execution.data.documents import data_files
        from stagewright.execution.data_identity import contents_digest

        make_writable(self.folder, "--out")
        path, data = self.folder / "finetune.json", self.request.data.data
        digests = [] if data is None else [contents_digest(file) for file in data_files(Path(data))]
        now = {"what": self.request.identity(" ".join(digests)), "way": self.request.way}
        now = json.loads(json.dumps(now, default=str))
        if path.exists():
            was = read_json(path, "description of a fine-tuning", "remove its folder")
            if not isinstance(was, dict) or not all(isinstance(was.get(key), dict) for key in now):
                raise InputError(
                    f"'{path}' does not describe a fine-tuning: remove its folder, or name a new one with --out"
                )
            if changed := list(differences(was["what"], now["what"])):
                raise InputError(
                    f"'{self.folder}' has another fine-tuning ({'; '.join(changed)}): name a new folder with --out, or "
                    "remove it"
                )
            if changed := list(differences(was["way"], now["way"])):
                say(f"planning again: {'; '.join(changed)}")
                for name in ("plan.json", "machine.toml"):
                    (self.folder / name).unlink(missing_ok=True)
            elif (self.folder / "plan.json").exists():
                say(f"continuing in '{self.folder}'")
        write_whole(path, json.dumps(now, indent=1) + "\n")

    def ran(self, *words: object) -> None:
        """Say and keep the command that does the same as the next step."""
        command = "stagewright " + " ".join(shlex.quote(str(word)) for word in words if word is not None)
        self.verbs.append(command)
        say(f"{len(self.verbs)}. {command}")

    # -- machine ------------------------------------------------------------------------------------------------------

    @cached_property
    def cluster(self) -> Cluster:
        """The cluster to plan for, as measured at the first start."""
        from stagewright.cluster import load_cluster, save_cluster
        from stagewright.execution.accelerator import num_devices
        from stagewright.execution.kept_probe import this_machine

        machine, path = self.request.machine, self.folder / "machine.toml"
        if machine.cluster is not None:
            return load_cluster(machine.cluster)
        if path.exists():
            return load_cluster(path)
        device = machine.device
        if device == "auto":
            device = "cuda" if num_devices("cuda") else "cpu"
        processes = machine.processes or (num_devices("cuda") if device == "cuda" else 1)
        self.ran("probe", "--device", device, "--processes", processes, "-o", path)
        with Progress("looking at this machine") as progress:
            cluster, is_new = this_machine(device, processes, lambda what, done: progress(what, done))
        say("   measured" if is_new else "   measured before: the hardware is the same")
        warn(cluster.cautions)
        save_cluster(cluster, path, "This machine, as measured by `stagewright probe`.")
        return cluster

    # -- data ---------------------------------------------------------------------------------------------------------

    @property
    def data_folders(self) -> tuple[Path, Path | None]:
        """Folders of the tokens to train on, and of held-out tokens if there are any."""
        from stagewright.execution.data.store import HELD_OUT, TRAIN

        folder = self.folder / "data"
        return (folder / TRAIN, folder / HELD_OUT) if self.request.data.held_out else (folder, None)

    @cached_property
    def stores(self) -> tuple[TokenStore, TokenStore | None]:
        """Tokens to train on, and held-out tokens if there are any."""
        from stagewright.execution.data.prepared import tokenised_in_parts
        from stagewright.execution.data.store import open_store

        data, folder = self.request.data, self.folder / "data"
        assert data.data is not None, "there is data"
        share = data.held_out or None
        if not folder.exists():
            tokenizer = self.request.tokenizer
            given = {"--tokenizer": tokenizer, "--text-field": data.text_field, "--held-out": share}
            options = (word for name, value in given.items() if value is not None for word in (name, value))
            self.ran("tokenize", data.data, *options, "-o", folder)
            with Progress(f"tokenising {data.data}") as progress:
                return tokenised_in_parts(
                    Path(data.data), tokenizer, data.text_field, folder, share, progress
                )
        training, held_out = self.data_folders
        return open_store(training), None if held_out is None else open_store(held_out)

    def tokenise(self) -> None:
        """Tokenise the data now, so that its faults are found before the machine is measured."""
        if self.request.data.data is not None:
            _ = self.stores

    @cached_property
    def sequence_length(self) -> int:
        """Tokens per sample: as given, or those of the longest document within limits."""
        from stagewright.tracing.models.overrides import of_text

        if self.request.data.sequence_length is not None:
            return self.request.data.sequence_length
        config = of_text(self.request.model.config or {})
        context = next(
            (config[key] for key in ("max_position_embeddings", "n_positions") if key in config), _LENGTH
        )
        most = min(_LENGTH, context)
        if self.request.data.data is None:
            return most
        longest = max(store.manifest.longest for store in self.stores if store is not None)
        return min(most, -(-longest // _MULTIPLE) * _MULTIPLE)

    @cached_property
    def summary(self) -> DataSummary | None:
        """The data in samples; None without data."""
        from stagewright.execution.data.samples import samples_of
        from stagewright.report.finetuning import DataSummary

        data = self.request.data
        if data.data is None:
            return None
        store, held_out = self.stores
        training = self.request.training
        num_samples = samples_of(
            store, self.sequence_length, training.seed, is_apart=data.documents_apart
        ).size
        if not num_samples:
            raise InputError(
                f"'{data.data}' has {store.manifest.num_tokens} tokens to train on, fewer than one sample of "
                f"{self.sequence_length}: give more data or a smaller --sequence-length"
            )
        return DataSummary(
            name=Path(data.data).name,
            num_documents=store.manifest.num_documents,
            num_held_out=0 if held_out is None else held_out.manifest.num_documents,
            num_samples=num_samples,
            num_tokens=store.manifest.num_tokens,
            num_learnt=store.manifest.num_learnt,
            num_cut=store.num_longer(self.sequence_length) if store.manifest.is_masked else 0,
        )

    # -- plan ---------------------------------------------------------------------------------------------------------

    def job(self, dtype: str) -> Job:
        """Return the job with the model in `dtype`."""
        from stagewright.planning.job import load_job

        data, training = self.request.data, self.request.training
        num_samples = None if self.summary is None else self.summary.num_samples
        batch = training.global_batch or min(_GLOBAL_BATCH, num_samples or _GLOBAL_BATCH)
        steps = data.steps or max(1, round(data.epochs * (num_samples or batch) / batch))
        warmup = (
            round(training.warmup_ratio * steps) if training.warmup_steps is None else training.warmup_steps
        )
        keys = {
            **self.request.job,
            "global_batch": batch, "sequence_length": self.sequence_length, "dtype": dtype,
            "documents_apart": data.documents_apart, "num_steps": steps, "warmup_steps": warmup,
            "memory_limit": self.request.machine.memory_limit,
            "memory_to_spare": self.request.machine.memory_to_spare,
            **{name: getattr(training, name) for name in ("learning_rate", "lr_schedule", "weight_decay", "seed")},
        }  # fmt: skip
        return load_job(None, {key: value for key, value in keys.items() if value is not None})

    def plan(self) -> Plan:
        """Return the plan of the first start, or the best one in the most exact precision that fits; written with its job.

        Where the model fits in none, its weights are streamed from the host: in the most exact precision whose copies take
        no longer than the computations, or the fastest.

        Raises:
            PlanError: the model fits in none.
        """
        from stagewright.planning.plan import load_plan

        path = self.folder / "plan.json"
        if path.exists():
            return load_plan(path)
        refusals: list[str] = []
        streams = self.request.space.streamed
        plan = self._on_devices(refusals) if streams != "always" else None
        if plan is None and streams != "never":
            plan = self._from_host(refusals)
        if plan is not None:
            plan.save(path)
            return plan
        devices, usable = plural(self.cluster.num_devices, "device"), format_bytes(self._usable_bytes)
        raise PlanError(
            f"{self.request.model.name} does not fit {self.cluster.name}, whose {devices} have {usable} usable: "
            f"{'; '.join(refusals)}. Give a smaller --sequence-length, more devices or a smaller model"
        )

    def _on_devices(self, refusals: list[str]) -> Plan | None:
        """Return the best plan that keeps the weights on the devices, in the most exact precision that fits."""
        for base in self._bases():
            weights = self._weight_bytes(base)
            what = f"in {base} ({format_bytes(weights)} of weights)"
            if weights >= self._usable_bytes:
                refusals.append(what)
                continue
            try:
                plan = self._planned(base, "never")
            except PlanError as error:
                refusals.append(f"{what}: {error}")
                continue
            return plan if weights < _TIGHT * self._usable_bytes else self._or_faster(base, plan)
        return None

    def _or_faster(self, base: str, plan: Plan) -> Plan:
        """Return `plan`, with weights in `base`, or a faster one with the same numbers in fp8 where they are published so;
        keep a line about one with rounded weights that is much faster."""
        smaller = tuple(self._bases())
        smaller = smaller[smaller.index(base) + 1 :]
        if not smaller:
            return plan
        other = FP8 if FP8 in smaller else smaller[-1]
        within = self.request.machine.within
        try:
            self._weight_bytes(other)  # traced here, so that the time is that of the search
            result = self._search(other, "never", within if other == FP8 else min(_GLANCE_S, within))
        except (InputError, PlanError):
            return plan
        ratio = plan.mean_step_seconds / result.plans[0].mean_step_seconds
        if other == FP8 and ratio > 1:
            self._say_search(other, "never")
            return self._taken(result)
        if ratio >= _FASTER:
            self._alternatives.append(
                f"In {other} it would be at least {ratio:.1f} times as fast, with rounded weights: --base {other}."
            )
        return plan

    def _from_host(self, refusals: list[str]) -> Plan | None:
        """Return the best plan that streams the weights from the host."""
        from stagewright.planning.memory.host_optimizer import may_stream
        from stagewright.planning.plan_stages import hides_copies

        if not may_stream(self.cluster):
            return None
        plans: list[Plan] = []
        for base in self._bases():
            try:
                plans.append(self._planned(base, "always"))
            except (InputError, PlanError) as error:
                refusals.append(f"{base} streamed from the host: {error}")
                continue
            if hides_copies(plans[-1]):
                break
        return min(plans, key=lambda plan: plan.mean_step_seconds, default=None)

    def _bases(self) -> Iterator[str]:
        """Yield what the frozen model may be held in, from the most exact to the smallest."""
        if self.request.training.base == "auto":
            yield from (self._dtype, *self.request.quantised)
        else:
            yield self.request.training.base

    @property
    def _dtype(self) -> str:
        """The type that the model is computed in unless another one was asked for."""
        devices = [group.device for group in self.cluster.nodes]
        if self.request.training.base in DTYPES:
            return self.request.training.base
        if self.cluster.kind == "cpu":
            return "fp32"
        return "bf16" if all(device.peak_flops.bf16 is not None for device in devices) else "fp16"

    def _weight_bytes(self, base: str) -> int:
        """Return the bytes of the weights as they are stored."""
        from stagewright.tracing.cache import trace

        traced = self.job(self._dtype).traced(self.cluster.kind)
        graph = trace(self._model(base), 1, **traced)  # as the search traces it
        return sum(graph.values[value].meta.storage_bytes for value in graph.parameter_values)

    @cached_property
    def _usable_bytes(self) -> int:
        """Bytes that a plan may use on all devices together."""
        job, cluster = self.job(self._dtype), self.cluster
        return sum(job.usable_bytes(cluster.device_of(rank)) for rank in range(cluster.num_devices))

    def _model(self, base: str) -> ModelReference:
        """Return the model with its linear layers stored in `base`."""
        return self.request.models[base if base in self.request.models else None]

    def _planned(self, base: str, streamed: Streamed) -> Plan:
        self._say_search(base, streamed)
        return self._taken(self._search(base, streamed, self.request.machine.within))

    def _taken(self, result: SearchResult) -> Plan:
        """Return the best plan of a search; print its warnings and keep a line about the next kind of plan."""
        from stagewright.report.finetuning import alternative_line
        from stagewright.report.plans import tight_warnings

        warn([*result.warnings, *tight_warnings(result.plans[0])])
        alternative = alternative_line(result.plans)
        self._alternatives = [] if alternative is None else [alternative]
        return result.plans[0]

    def _say_search(self, base: str, streamed: Streamed) -> None:
        """Write the job, and say the command that searches for the plan."""
        from stagewright.cluster.load import write_toml

        job, path, model = self.job(self._dtype), self.folder / "job.toml", self._model(base)
        document = job.model_dump(mode="json", exclude_unset=True, exclude_none=True)
        write_toml(path, document, "The job of `stagewright finetune`.")
        machine = self.request.machine
        settings = [
            word for key, value in model.overrides.items() for word in ("--set", f"{key}={json.dumps(value)}")
        ]
        self.ran(
            "plan", model.text, *settings, *_adapter_words(model),
            "--cluster", machine.cluster or self.folder / "machine.toml", "--job", path, *self._space_words(streamed),
            "--within", f"{machine.within:g}", "-o", self.folder / "plan.json",
        )  # fmt: skip

    def _search(self, base: str, streamed: Streamed, patience_s: float) -> SearchResult:
        from stagewright.planning.search import plan as search

        job, model, space = self.job(self._dtype), self._model(base), self._space(streamed)
        with Progress(f"planning {model.name} in {base}") as progress:
            return search(model, self.cluster, job, space, report=progress, patience_s=patience_s)

    def _space(self, streamed: Streamed) -> Space:
        """Return the space of the search; with streamed weights without tensor parallelism, whose traffic is on the same
        links."""
        space = replace(self.request.space, streamed=streamed)
        return replace(space, tp=space.tp or 1) if streamed == "always" else space

    def _space_words(self, streamed: Streamed) -> list[str]:
        """Return the options of the space as words of a command."""
        words = list(self.request.space_words)
        if "--streamed" in words:
            del words[(place := words.index("--streamed")) : place + 2]
        if streamed == "always" and self.request.space.tp is None:
            words += ["--tp", "1"]
        return words if self.cluster.kind == "cpu" else [*words, "--streamed", streamed]

    def plan_lines(self, plan: Plan) -> Iterator[Any]:
        """Yield the plan in about ten lines."""
        from stagewright.report import finetuning

        yield finetuning.model_line(plan, self._why(plan))
        if self.summary is not None:
            yield from finetuning.data_lines(self.summary, plan)
        yield finetuning.device_table(plan)
        yield from finetuning.speed_lines(plan, self.summary is not None)
        yield from self._alternatives

    def _why(self, plan: Plan) -> str:
        """Return why the model is held in the plan's precision."""
        from stagewright.report.finetuning import held_in

        if self.request.training.base != "auto":
            return "as asked"
        base = held_in(plan)
        if plan.streamed:
            return "streamed from the host, as the model does not fit the devices"
        if base == FP8:
            return "the numbers that are published"
        if base in QUANTISED:
            quantised = self.request.quantised
            larger = (plan.job.dtype, *quantised[: quantised.index(base)])
            return f"as it does not fit in {' or '.join(larger)}"
        return {
            "bf16": "which fits, so nothing is rounded further", "fp16": "as not all devices compute in bf16",
            "fp32": "as on CPUs nothing else is faster",
        }[base]  # fmt: skip


def _adapter_words(model: ModelReference) -> list[object]:
    """Return the options that give a model its adapters."""
    lora = model.lora
    assert lora is not None, "adapters are trained"
    base: list[object] = [] if lora.base is None else ["--lora-base", lora.base]
    if lora.folder is not None:
        return ["--lora-from", lora.folder, *base]
    words: list[object] = ["--lora", lora.rank, "--lora-alpha", f"{lora.alpha:g}"]
    if lora.targets:
        words += ["--lora-targets", lora.targets if isinstance(lora.targets, str) else ",".join(lora.targets)]
    if lora.dropout:
        words += ["--lora-dropout", lora.dropout]
    return words + base

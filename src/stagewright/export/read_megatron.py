"""Arguments of Megatron-LM's `pretrain_gpt.py`, from a shell file or a list of words, as a configuration.

A shell file is not run: the options are those of the command in it that starts training, expanded as a shell would. Of a
file without such a command they are all that it has.

Source: Megatron-LM core_v0.19.0, of which `formats/megatron.toml` names the options. Ignores: what a script computes by
other programs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from itertools import pairwise
from typing import Any

from stagewright.documents import parse_toml
from stagewright.errors import InputError, nearest
from stagewright.export.megatron import RUNTIME
from stagewright.export.megatron_layout import read_layout
from stagewright.export.read_megatron_model import read_model
from stagewright.export.reading import Reading
from stagewright.export.shell import Script, Word, read_script
from stagewright.planning.configuration import Configuration, Recomputed

_WORD = re.compile(r"--[A-Za-z][\w-]*(=.*)?", re.DOTALL)
_LAUNCHER = frozenset({
    "nproc-per-node", "nnodes", "node-rank", "master-addr", "master-port", "rdzv-id", "rdzv-backend", "rdzv-endpoint",
    "standalone", "max-restarts", "tee", "log-dir", "redirects", "role", "local-ranks-filter", "monitor-interval",
})  # fmt: skip
"""Options of `torchrun`."""


@dataclass(frozen=True)
class Given:
    """An option as a file gives it."""

    values: tuple[str, ...]
    where: str
    """The place, for messages."""


@dataclass(frozen=True)
class Known:
    """The options of Megatron-LM."""

    version: str
    configuration: Mapping[str, str]
    model: Mapping[str, str]
    without_influence: frozenset[str]
    not_predicted: frozenset[str]

    @property
    def all_names(self) -> list[str]:
        return [*self.configuration, *self.model, *sorted(self.without_influence | self.not_predicted)]


@cache
def known_options() -> Known:
    """Those of the version that is read and written."""
    file = resources.files("stagewright.export") / "formats" / "megatron.toml"
    table = parse_toml(file.read_text(encoding="utf-8"), "megatron.toml")
    return Known(
        table["version"],
        table["configuration"],
        table["model"],
        frozenset(table["without_influence"]),
        frozenset(table["not_predicted"]),
    )


def read_arguments(text: str, origin: str) -> Reading:
    """What the options in a text say.

    Raises:
        InputError: there is none, or one has a value that it cannot have; names the line.
    """
    script = read_script(text, origin)
    launch = _launch(script)
    if launch is None:
        return _reading(_options([*script.variables, *script.commands], origin), origin, script.notes)
    options = _options([launch], origin)
    unused = [
        f"--{name} ({given[-1].where}) does not reach the command that starts training"
        for name, given in _options(script.variables, origin).items()
        if name not in options
    ]
    return _reading(options, origin, (*script.notes, *_unset(launch), *unused))


def read_argv(words: Sequence[Any], origin: str) -> Reading:
    """The same of a list of words, as ``argv.json`` has it."""
    if not all(isinstance(word, str | int | float) for word in words):
        raise InputError(
            f"{origin}: a list of arguments has texts and numbers only: write it as argv.json of an export"
        )
    return _reading(_options([[Word(str(word), 0) for word in words]], origin), origin)


def _launch(script: Script) -> Sequence[Word] | None:
    """The last command that starts a Python program with options of Megatron-LM; None where there is none."""
    known = known_options()
    names = known.configuration.keys() | known.model.keys()
    for command in reversed(script.commands):
        parts = [part for word in command for part in _parts(word.text)]
        starts_program = any(word.text.endswith(".py") or word.text == "-m" for word in command)
        if starts_program and any(
            part[2:].replace("_", "-") in names for part in parts if part.startswith("--")
        ):
            return command
    return None


def _unset(words: Sequence[Word]) -> Iterator[str]:
    """Sentences on variables that stand for options and that the file does not set."""
    for before, word in pairwise(words):
        is_value = before.text.startswith("--") and "=" not in before.text and _takes_value(before.text)
        if word.text.startswith("$") and not is_value:
            yield f"{word.text} (line {word.line}), which the file does not set, is taken as empty"


def _takes_value(option: str) -> bool:
    known, name = known_options(), option[2:].replace("_", "-")
    return {**known.configuration, **known.model}.get(name, "str") != "flag"


def _parts(word: str) -> list[str]:
    """An option and its value in one pair of quotes, or with an equals sign between, are two words.

    >>> _parts("--fp8-format hybrid"), _parts("--seq-length=4096"), _parts("Et*2|t L")
    (['--fp8-format', 'hybrid'], ['--seq-length', '4096'], ['Et*2|t L'])
    """
    if not word.startswith("--"):
        return [word]
    name, *values = word.split()
    name, equals, value = name.partition("=")
    return [name, *([value] if equals else []), *values]


def _options(commands: Iterable[Sequence[Word]], origin: str) -> dict[str, list[Given]]:
    """Every option by its name, with the words after it."""
    options: dict[str, list[Given]] = {}
    for command in commands:
        words = [Word(part, word.line) for word in command for part in _parts(word.text)]
        starts = [index for index, word in enumerate(words) if _WORD.fullmatch(word.text)]
        for start, stop in pairwise([*starts, len(words)]):
            values = tuple(word.text for word in words[start + 1 : stop] if word.text)
            line = words[start].line
            where = f"{origin}, line {line}" if line else origin
            name = words[start].text[2:].replace("_", "-")
            options.setdefault(name, []).append(Given(values, where))
    return options


def _reading(options: Mapping[str, list[Given]], origin: str, notes: Sequence[str] = ()) -> Reading:
    known = known_options()
    if not known.configuration.keys() & options.keys():
        raise InputError(
            f"{origin}: there is no option of Megatron-LM in it, such as --tensor-model-parallel-size: give the script with "
            "its arguments, or argv.json"
        )
    said = Said({name: given[-1] for name, given in options.items()}, {**known.configuration, **known.model})
    configuration, job = _configuration(said), _job(said)
    if said.has("grad-reduce-in-bf16"):
        said.notes.append(
            "--grad-reduce-in-bf16 is predicted for sums over replicas alone: gradients are kept in fp32"
        )
    if (optimizer := said.text("optimizer")) not in (None, "adam"):
        said.notes.append(f"--optimizer {optimizer} is predicted as adam")
    model = {name: " ".join(options[name][-1].values) for name in known.model if name in options}
    return Reading(
        what=f"arguments of Megatron-LM ({known.version})",
        runtime=RUNTIME,
        job=job,
        configuration=configuration,
        num_read=len(known.configuration.keys() & options.keys()),
        num_without_influence=len((known.without_influence | _LAUNCHER) & options.keys()),
        notes=(*said.notes, *notes, *_repeated(options), *_not_taken(options, known)),
        model=model,
        read_model=lambda: read_model(model, said.text("tokenizer-type"), origin),
    )


def _repeated(options: Mapping[str, list[Given]]) -> Iterator[str]:
    for name, given in options.items():
        if len({one.values for one in given}) > 1:
            yield f"--{name} is given {len(given)} times: the last is taken, {' '.join(given[-1].values)}"


def _not_taken(options: Mapping[str, list[Given]], known: Known) -> Iterator[str]:
    for name, given in options.items():
        if name in known.not_predicted:
            yield f"--{name} is not in the prediction"
        elif name not in _LAUNCHER and name not in known.all_names:
            yield f"--{name} is not known{nearest(name, known.all_names)} ({given[-1].where})"


@dataclass
class Said:
    """Options with their values; what of them is not taken goes to `notes`."""

    options: Mapping[str, Given]
    kinds: Mapping[str, str]
    notes: list[str] = field(default_factory=list)

    def has(self, name: str) -> bool:
        return name in self.options

    def number(self, name: str, default: int) -> int:
        """A whole number above 0.

        Raises:
            InputError: it is none; names the line.
        """
        given = self.options.get(name)
        if given is None:
            return default
        value = given.values[0] if given.values else ""
        if "$" in value:
            self.notes.append(f"--{name} is {value}, which the file does not set: {default} is taken")
            return default
        if not value.isdecimal() or int(value[:12]) < 1:
            raise InputError(
                f"{given.where}: --{name} {value or 'has no value'}: give a whole number of at least 1"
            )
        return int(value[:12])

    def text(self, name: str) -> str | None:
        given = self.options.get(name)
        return None if given is None or not given.values else given.values[0]


def _configuration(said: Said) -> Configuration:
    tp, pp, cp = (
        said.number(f"{kind}-size", 1) for kind in ("tensor-model-parallel", "pipeline-model-parallel", "context-parallel")
    )  # fmt: skip
    ep = said.number("expert-model-parallel-size", 1)
    dp = _replicas(said, tp * pp * cp, ep)
    layers, chunks = _stages(said, pp)
    return Configuration(
        pp=pp,
        dp=dp,
        tp=tp,
        cp=cp,
        ep=ep,
        sequence_parallel=said.has("sequence-parallel") and tp > 1,
        microbatch=said.number("micro-batch-size", 1),
        schedule="interleaved-1f1b" if chunks > 1 else "1f1b",
        chunks=chunks if chunks > 1 else None,
        layers_per_stage=layers,
        recompute=_recompute(said),
        zero=_level(said),
        reduce_dtype="bf16" if said.has("grad-reduce-in-bf16") else None,
        shard_size=_shard_size(said, dp, cp),
    )


def _job(said: Said) -> dict[str, Any]:
    dtype = (
        "fp8"
        if said.has("fp8-format")
        else "fp16"
        if said.has("fp16")
        else "bf16"
        if said.has("bf16")
        else "fp32"
    )
    named = {"global_batch": "global-batch-size", "sequence_length": "seq-length"}
    found = {key: said.number(name, 0) for key, name in named.items() if said.has(name)}
    return {**{key: value for key, value in found.items() if value}, "dtype": dtype}


def _replicas(said: Said, width: int, ep: int) -> int | None:
    """Where the launch line says how many processes there are, as many as the widths need."""
    names = ("nproc-per-node", "nnodes")
    if not all((said.text(name) or "").isdecimal() for name in names):
        return None
    processes = said.number(names[0], 1) * said.number(names[1], 1)
    if processes % width or processes // width % ep:
        said.notes.append(
            f"the {processes} processes of the launch line are too few for tp x pp x cp = {width} and ep {ep}: replicas "
            "follow the cluster"
        )
        return None
    return processes // width


def _stages(said: Said, pp: int) -> tuple[tuple[int, ...] | None, int]:
    """Layers of every stage where they are not even, and stages of a rank."""
    if pp == 1:
        return None, 1
    if (layout := said.text("pipeline-model-parallel-layout")) is not None:
        counts = read_layout(layout)
        if len(counts) % pp:
            raise InputError(
                f"{said.options['pipeline-model-parallel-layout'].where}: layout '{layout}' has {len(counts)} stages, no "
                f"multiple of the {pp} pipeline ranks: give as many on each"
            )
        return counts, len(counts) // pp
    chunks = _chunks(said, pp)
    ends = [said.has(f"account-for-{end}-in-pipeline-split") for end in ("embedding", "loss")]
    if any(ends):
        return _shortened(_num_layers(said), pp * chunks, *ends), chunks
    names = ("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers")
    if any(map(said.has, names)):
        return _uneven(said, names, pp, chunks), chunks
    return None, chunks


def _chunks(said: Said, pp: int) -> int:
    if said.has("num-virtual-stages-per-pipeline-rank"):
        return said.number("num-virtual-stages-per-pipeline-rank", 1)
    if not said.has("num-layers-per-virtual-pipeline-stage"):
        return 1
    layers = said.number("num-layers-per-virtual-pipeline-stage", 1)
    return max(1, _num_layers(said) // (pp * layers))


def _num_layers(said: Said) -> int:
    if not (found := said.number("num-layers", 0)):
        where = next(given.where for name, given in said.options.items() if "pipeline" in name)
        raise InputError(
            f"{where}: the layers of every stage follow from --num-layers, which is missing: add it"
        )
    return found


def _shortened(num_layers: int, num_stages: int, embedding: bool, loss: bool) -> tuple[int, ...]:
    """Even stages, of which embedding and loss are a layer each.

    >>> _shortened(14, 4, True, True)
    (3, 4, 4, 3)
    """
    each = (num_layers + embedding + loss) // num_stages
    return (each - embedding, *(each,) * (num_stages - 2), each - loss)


def _uneven(said: Said, names: tuple[str, str], pp: int, chunks: int) -> tuple[int, ...] | None:
    """First and last rank as given, those between even."""
    if chunks > 1:
        said.notes.append(
            f"--{names[0]} and --{names[1]} with several stages a rank are predicted as even stages"
        )
        return None
    ends = [said.number(name, 0) for name in names]
    between = pp - sum(map(bool, ends))
    each = (_num_layers(said) - sum(ends)) // max(between, 1)
    return (ends[0] or each, *(each,) * (pp - 2), ends[1] or each)


def _recompute(said: Said) -> Recomputed:
    way = said.text("recompute-granularity") or ("selective" if said.has("recompute-activations") else None)
    if way == "selective":
        modules = said.options.get("recompute-modules")
        of = " ".join(modules.values) if modules else "core_attn"
        said.notes.append(f"--recompute-granularity selective (of {of}) is predicted as none")
        return "none"
    if way == "full":
        layers = said.number("recompute-num-layers", 1)
        method = said.text("recompute-method") or "uniform"
        if (method, layers) != ("uniform", 1):
            said.notes.append(
                f"--recompute-method {method} of {layers} layers is predicted as uniform of 1: every layer by itself"
            )
        return "full"
    if way is not None:
        where = said.options["recompute-granularity"].where
        raise InputError(
            f"{where}: --recompute-granularity {way}{nearest(way, ('full', 'selective'))}: give full or selective"
        )
    return "none"


_STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def _level(said: Said) -> int | None:
    if said.has("use-megatron-fsdp"):
        return _STRATEGIES.get(said.text("data-parallel-sharding-strategy") or "no_shard", 0)
    return 1 if said.has("use-distributed-optimizer") else None


def _shard_size(said: Said, dp: int | None, cp: int) -> int | None:
    groups = said.number("num-distributed-optimizer-instances", 1)
    if groups == 1:
        return None
    if dp is None:
        said.notes.append(
            "--num-distributed-optimizer-instances needs --nproc-per-node and --nnodes: one group is taken"
        )
        return None
    return dp * cp // groups

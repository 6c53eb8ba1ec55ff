"""Import of arguments of Megatron-LM's `pretrain_gpt.py` from a shell script or a list of words.

A shell script is not run: its options are those of the command that starts training, expanded as a shell would. If there
is no such command, all options in the script are read.

Source: Megatron-LM core_v0.19.0, whose options `formats/megatron.toml` lists. Ignores: output of programs that a script
calls.
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
from stagewright.estimation.runtime import load_runtime
from stagewright.export.megatron import RUNTIME, RUNTIME_BF16
from stagewright.export.megatron_layout import read_layout
from stagewright.export.read_megatron_model import read_model
from stagewright.export.reading import Reading
from stagewright.export.shell import Script, Word, read_script
from stagewright.planning.configuration import Configuration, Recompute

_WORD = re.compile(r"--[A-Za-z][\w-]*(=.*)?", re.DOTALL)
_LAUNCHER = frozenset({
    "nproc-per-node", "nnodes", "node-rank", "master-addr", "master-port", "rdzv-id", "rdzv-backend", "rdzv-endpoint",
    "standalone", "max-restarts", "tee", "log-dir", "redirects", "role", "local-ranks-filter", "monitor-interval",
})  # fmt: skip
"""Options of `torchrun`."""
_OTHER_MODELS = re.compile(
    r"pretrain_(bert|t5|ict|retro|biencoder|mamba|hybrid|vision\w*|\w*(vl|vlm|vlms|llava|omni)(_\w+)?)\.py"
)
"""Programs that train no decoder of text; people name the others, their own `pretrain_gpt.py`, after a family."""
_UNSET = re.compile(r"\$(\{?[\w@*#]+(\[[^]]*\])?[^/}]*\}?)")
"""A word that is a variable."""


@dataclass(frozen=True)
class GivenOption:
    """An option in a file."""

    values: tuple[str, ...]
    where: str
    """Its place in the file, for messages."""


@dataclass(frozen=True)
class MegatronOptions:
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
def known_options() -> MegatronOptions:
    """Return the options of the supported version."""
    file = resources.files("stagewright.export") / "formats" / "megatron.toml"
    table = parse_toml(file.read_text(encoding="utf-8"), "megatron.toml")
    return MegatronOptions(
        table["version"],
        table["configuration"],
        table["model"],
        frozenset(table["without_influence"]),
        frozenset(table["not_predicted"]),
    )


def read_arguments(text: str, origin: str, arguments: Sequence[str] = ()) -> Reading:
    """Return the configuration in the options of a text, a script that is started with `arguments`.

    Raises:
        InputError: there are none, or one has an invalid value; names the line.
    """
    script = read_script(text, origin, arguments)
    launch = _launch(script)
    if launch is None:
        return _reading(_options([*script.variables, *script.commands], origin), origin, script.notes)
    program = _program(launch)
    if _OTHER_MODELS.fullmatch(name := launch[program].text.rpartition("/")[2]):
        raise InputError(
            f"{origin} starts {name}, which trains no decoder of text: only pretrain_gpt.py and the like are read"
        )
    launcher = _options([launch[:program]], origin)
    options = {name: given for name, given in launcher.items() if name in _LAUNCHER} | _options(
        [launch[program:]], origin
    )
    unused = [
        f"--{name} ({given[-1].where}) does not reach the command that starts training"
        for name, given in _options(script.variables, origin).items()
        if name not in options.keys() | launcher.keys()
    ]
    return _reading(options, origin, (*script.notes, *_unset(launch), *unused))


def read_argv(words: Sequence[Any], origin: str) -> Reading:
    """Return the same for a list of words, such as ``argv.json``."""
    if not all(isinstance(word, str | int | float) for word in words):
        raise InputError(
            f"{origin}: arguments must be strings or numbers: write the list as in the argv.json of an export"
        )
    return _reading(_options([[Word(str(word), 0) for word in words]], origin), origin)


def _launch(script: Script) -> Sequence[Word] | None:
    """Return the last command that starts a Python program with options of Megatron-LM; None if there is none."""
    megatron = known_options()
    names = megatron.configuration.keys() | megatron.model.keys()
    for command in reversed(script.commands):
        parts = [part for word in command for part in _parts(word.text)]
        starts_program = any(word.text.endswith(".py") or word.text == "-m" for word in command)
        if starts_program and any(
            part[2:].replace("_", "-") in names for part in parts if part.startswith("--")
        ):
            return command
    return None


def _program(command: Sequence[Word]) -> int:
    """Return the index of the word that names the Python program of a command; options before it are the launchers'."""
    files = [index for index, word in enumerate(command) if word.text.endswith(".py")]
    modules = [index + 1 for index, word in enumerate(command[:-1]) if word.text == "-m"]
    return files[0] if files else modules[-1] if modules else 0


def _unset(words: Sequence[Word]) -> Iterator[str]:
    """Yield a sentence for each variable that stands for options and that the file does not set."""
    for before, word in pairwise(words):
        is_value = before.text.startswith("--") and "=" not in before.text and _takes_value(before.text)
        if _UNSET.fullmatch(word.text) and not is_value:
            yield f"{word.text} (line {word.line}), which the file does not set, is taken as empty"


def _takes_value(option: str) -> bool:
    megatron, name = known_options(), option[2:].replace("_", "-")
    return {**megatron.configuration, **megatron.model}.get(name, "str") != "flag"


def _parts(word: str) -> list[str]:
    """Return the words in one word: an option and its value may be joined by quotes or an equals sign.

    >>> _parts("--fp8-format hybrid"), _parts("--seq-length=4096"), _parts("Et*2|t L")
    (['--fp8-format', 'hybrid'], ['--seq-length', '4096'], ['Et*2|t L'])
    """
    if not word.startswith("--"):
        return [word]
    name, *values = word.split()
    name, equals, value = name.partition("=")
    return [name, *([value] if equals else []), *values]


def _options(commands: Iterable[Sequence[Word]], origin: str) -> dict[str, list[GivenOption]]:
    """Return every option by name, with the words after it."""
    options: dict[str, list[GivenOption]] = {}
    for command in commands:
        words = [Word(part, word.line) for word in command for part in _parts(word.text)]
        starts = [index for index, word in enumerate(words) if _WORD.fullmatch(word.text)]
        for start, stop in pairwise([*starts, len(words)]):
            values = tuple(word.text for word in words[start + 1 : stop] if word.text)
            line = words[start].line
            where = f"{origin}, line {line}" if line else origin
            name = words[start].text[2:].replace("_", "-")
            options.setdefault(name, []).append(GivenOption(values, where))
    return options


def _reading(options: Mapping[str, list[GivenOption]], origin: str, notes: Sequence[str] = ()) -> Reading:
    megatron = known_options()
    if not megatron.configuration.keys() & options.keys():
        raise InputError(
            f"{origin}: it has no option of Megatron-LM, such as --tensor-model-parallel-size: give the script with "
            "its arguments, or argv.json"
        )
    arguments = Arguments(
        {name: given[-1] for name, given in options.items()}, {**megatron.configuration, **megatron.model}
    )
    configuration, job = _configuration(arguments), _job(arguments)
    arguments.notes += _differently(arguments)
    model = {name: " ".join(options[name][-1].values) for name in megatron.model if name in options}
    return Reading(
        what=f"arguments of Megatron-LM ({megatron.version})",
        runtime=RUNTIME_BF16 if arguments.has("grad-reduce-in-bf16") else RUNTIME,
        job=job,
        configuration=configuration,
        num_read=len(megatron.configuration.keys() & options.keys()),
        num_without_influence=len((megatron.without_influence | _LAUNCHER) & options.keys()),
        notes=(*arguments.notes, *notes, *_repeated(options), *_not_taken(options, megatron)),
        model=model,
        read_model=lambda: read_model(model, _tokenizer(arguments), origin),
    )


def _tokenizer(arguments: Arguments) -> str | None:
    """Return the type of the tokenizer; GPT-2's is the default where its files are given."""
    return arguments.text("tokenizer-type") or ("GPT2BPETokenizer" if arguments.has("merge-file") else None)


def _differently(arguments: Arguments) -> Iterator[str]:
    """Yield settings that the runtime's prediction has otherwise, a sentence each."""
    if not load_runtime(RUNTIME).overlaps_reduction:
        for name in ("overlap-grad-reduce", "overlap-param-gather"):
            if arguments.has(name):
                yield f"--{name} is not in the prediction: collectives of replicas are predicted after the backward"
    if not arguments.has("cross-entropy-loss-fusion"):
        yield "the loss is predicted with --cross-entropy-loss-fusion, without which it takes more memory"
    if (width := arguments.number("expert-tensor-parallel-size", 1)) > 1:
        yield f"--expert-tensor-parallel-size {width} is predicted as 1"
    if (dispatcher := arguments.text("moe-token-dispatcher-type")) not in (None, "alltoall"):
        yield f"--moe-token-dispatcher-type {dispatcher} is predicted as alltoall"
    if (optimizer := arguments.text("optimizer")) not in (None, "adam"):
        yield f"--optimizer {optimizer} is predicted as adam"


def _repeated(options: Mapping[str, list[GivenOption]]) -> Iterator[str]:
    for name, given in options.items():
        if len({option.values for option in given}) > 1:
            yield f"--{name} is given {len(given)} times: the last is taken, {' '.join(given[-1].values)}"


def _not_taken(options: Mapping[str, list[GivenOption]], megatron: MegatronOptions) -> Iterator[str]:
    for name, given in options.items():
        if name in megatron.not_predicted:
            yield f"--{name} is not in the prediction"
        elif name not in _LAUNCHER and name not in megatron.all_names:
            yield f"--{name} is not known{nearest(name, megatron.all_names)} ({given[-1].where})"


@dataclass
class Arguments:
    """Options with their values; `notes` collects those that are ignored or changed."""

    options: Mapping[str, GivenOption]
    kinds: Mapping[str, str]
    notes: list[str] = field(default_factory=list)

    def has(self, name: str) -> bool:
        return name in self.options

    def number(self, name: str, default: int) -> int:
        """Return a whole number above 0.

        Raises:
            InputError: the value is invalid; names the line.
        """
        given = self.options.get(name)
        if given is None:
            return default
        value = given.values[0] if given.values else ""
        if "$" in value:
            self.notes.append(f"--{name} is {value}, which the file does not set: {default} is assumed")
            return default
        if not value.isdecimal() or int(value[:12]) < 1:
            raise InputError(
                f"{given.where}: --{name} {value or 'has no value'}: give a whole number of at least 1"
            )
        return int(value[:12])

    def text(self, name: str) -> str | None:
        given = self.options.get(name)
        return None if given is None or not given.values else given.values[0]


def _configuration(arguments: Arguments) -> Configuration:
    tp, pp, cp = (
        arguments.number(f"{kind}-size", 1) 
        for kind in ("tensor-model-parallel", "pipeline-model-parallel", "context-parallel")
    )  # fmt: skip
    ep = arguments.number("expert-model-parallel-size", 1)
    dp = _replicas(arguments, tp * pp * cp, ep)
    layers, chunks = _stages(arguments, pp)
    return Configuration(
        pp=pp,
        dp=dp or 0,
        tp=tp,
        cp=cp,
        ep=ep,
        sequence_parallel=arguments.has("sequence-parallel") and tp > 1,
        microbatch=arguments.number("micro-batch-size", 1),
        schedule="interleaved-1f1b" if chunks > 1 else "1f1b",
        chunks=chunks if chunks > 1 else None,
        layers_per_stage=layers,
        recompute=_recompute(arguments),
        zero=_level(arguments),
        shard_size=_shard_size(arguments, dp, cp),
    )


def _job(arguments: Arguments) -> dict[str, Any]:
    dtype = (
        "fp8"
        if arguments.has("fp8-format")
        else "fp16"
        if arguments.has("fp16")
        else "bf16"
        if arguments.has("bf16")
        else "fp32"
    )
    named = {"global_batch": "global-batch-size", "sequence_length": "seq-length"}
    numbers = {key: arguments.number(name, 0) for key, name in named.items() if arguments.has(name)}
    return {**{key: value for key, value in numbers.items() if value}, "dtype": dtype}


def _replicas(arguments: Arguments, model_parallel_size: int, ep: int) -> int | None:
    """Return the replicas of the processes in the launch line; None if it does not give their number."""
    names = ("nproc-per-node", "nnodes")
    if not all((arguments.text(name) or "").isdecimal() for name in names):
        return None
    processes = arguments.number(names[0], 1) * arguments.number(names[1], 1)
    if processes % model_parallel_size or processes // model_parallel_size % ep:
        arguments.notes.append(
            f"the {processes} processes of the launch line are too few for tp x pp x cp = {model_parallel_size} and ep "
            f"{ep}: replicas follow the cluster"
        )
        return None
    return processes // model_parallel_size


def _stages(arguments: Arguments, pp: int) -> tuple[tuple[int, ...] | None, int]:
    """Return the layers of every stage (None if even), and the stages per rank."""
    if pp == 1:
        return None, 1
    if (layout := arguments.text("pipeline-model-parallel-layout")) is not None:
        counts = read_layout(layout)
        if len(counts) % pp:
            raise InputError(
                f"{arguments.options['pipeline-model-parallel-layout'].where}: layout '{layout}' has {len(counts)} "
                f"stages, not a multiple of the {pp} pipeline ranks: give as many on each"
            )
        return counts, len(counts) // pp
    chunks = _chunks(arguments, pp)
    ends = [arguments.has(f"account-for-{end}-in-pipeline-split") for end in ("embedding", "loss")]
    if any(ends):
        return _shortened(_num_layers(arguments), pp * chunks, *ends), chunks
    names = ("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers")
    if any(map(arguments.has, names)):
        return _uneven(arguments, names, pp, chunks), chunks
    return None, chunks


def _chunks(arguments: Arguments, pp: int) -> int:
    if arguments.has("num-virtual-stages-per-pipeline-rank"):
        return arguments.number("num-virtual-stages-per-pipeline-rank", 1)
    if not arguments.has("num-layers-per-virtual-pipeline-stage"):
        return 1
    layers = arguments.number("num-layers-per-virtual-pipeline-stage", 1)
    return max(1, _num_layers(arguments) // (pp * layers))


def _num_layers(arguments: Arguments) -> int:
    if not (num_layers := arguments.number("num-layers", 0)):
        where = next(given.where for name, given in arguments.options.items() if "pipeline" in name)
        raise InputError(
            f"{where}: the layers of every stage follow from --num-layers, which is missing: add it"
        )
    return num_layers


def _shortened(num_layers: int, num_stages: int, embedding: bool, loss: bool) -> tuple[int, ...]:
    """Return the layers of even stages, if embedding and loss count as a layer each.

    >>> _shortened(14, 4, True, True)
    (3, 4, 4, 3)
    """
    layers = (num_layers + embedding + loss) // num_stages
    return (layers - embedding, *(layers,) * (num_stages - 2), layers - loss)


def _uneven(arguments: Arguments, names: tuple[str, str], pp: int, chunks: int) -> tuple[int, ...] | None:
    """Return the layers of the first and last rank as given, and even ones between."""
    if chunks > 1:
        arguments.notes.append(
            f"--{names[0]} and --{names[1]} with several stages a rank are predicted as even stages"
        )
        return None
    ends = [arguments.number(name, 0) for name in names]
    between = pp - sum(map(bool, ends))
    layers = (_num_layers(arguments) - sum(ends)) // max(between, 1)
    return (ends[0] or layers, *(layers,) * (pp - 2), ends[1] or layers)


def _recompute(arguments: Arguments) -> Recompute:
    way = arguments.text("recompute-granularity") or (
        "selective" if arguments.has("recompute-activations") else None
    )
    if way == "selective":
        modules = arguments.options.get("recompute-modules")
        of = " ".join(modules.values) if modules else "core_attn"
        arguments.notes.append(f"--recompute-granularity selective (of {of}) is predicted as none")
        return "none"
    if way == "full":
        layers = arguments.number("recompute-num-layers", 1)
        method = arguments.text("recompute-method") or "uniform"
        if (method, layers) != ("uniform", 1):
            arguments.notes.append(
                f"--recompute-method {method} of {layers} layers is predicted as uniform of 1: every layer by itself"
            )
        return "full"
    if way is not None:
        where = arguments.options["recompute-granularity"].where
        raise InputError(
            f"{where}: --recompute-granularity {way}{nearest(way, ('full', 'selective'))}: give full or selective"
        )
    return "none"


_STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def _level(arguments: Arguments) -> int | None:
    if arguments.has("use-megatron-fsdp"):
        return _STRATEGIES.get(arguments.text("data-parallel-sharding-strategy") or "no_shard", 0)
    return 1 if arguments.has("use-distributed-optimizer") else None


def _shard_size(arguments: Arguments, dp: int | None, cp: int) -> int | None:
    groups = arguments.number("num-distributed-optimizer-instances", 1)
    if groups == 1:
        return None
    if dp is None:
        arguments.notes.append(
            "--num-distributed-optimizer-instances needs --nproc-per-node and --nnodes: one group is assumed"
        )
        return None
    return dp * cp // groups

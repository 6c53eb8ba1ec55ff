"""Names in a plan are whatever somebody wrote: in files of other programs they are words and comments, and nothing else.

Files are read by the parsers of their languages and have the shape that they have for a harmless name; shell scripts are run
in an empty folder, which stays empty.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from stagewright.cluster import load_cluster
from stagewright.errors import InputError, ScheduleError
from stagewright.execution.preflight import default_folder
from stagewright.export import deepspeed, megatron, torchtitan
from stagewright.export.megatron_bridge import bridge_files
from stagewright.export.megatron_model import model_options
from stagewright.export.slurm import slurm_script
from stagewright.export.torch_pipelining import _readme
from stagewright.export.translation import Translation
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job
from stagewright.planning.plan import ModelSection, Plan, load_plan
from stagewright.planning.plan_stages import configuration_of
from stagewright.schedule import Program, read_torch_csv
from stagewright.tracing.models.reference import resolve

COMMANDS = (
    "touch PWNED",
    "$(touch PWNED)",
    "`touch PWNED`",
    "; touch PWNED;",
    "| touch PWNED",
    "&& touch PWNED #",
)
NAMES = (
    *(f"x{before}{command}{after}" for command in COMMANDS[:3] for before, after in ("\n\n", "''", '""', "\r\r")),
    *COMMANDS, "'; touch PWNED; '", '"; touch PWNED; "', "}}\"; touch PWNED; #", "x\\\ntouch PWNED\n", "x\\", "x'", 'x"',
    '"""\nimport os; os.mkdir("PWNED")\n"""', "\\\"\"\"\nimport os; os.mkdir('PWNED')\n#", "'''", "{title}{plan}%s{{7*7}}",
    "#SBATCH --wrap=touch", "x\n#SBATCH --wrap='touch PWNED'\n", "x\nname: y\nrun: touch PWNED\n", "*anchor", "&a b",
    "!!python", "- x", "? x", "null", "true", "123", "1e3", "~", "-x", "--wrap", "../../../up", "/etc/passwd", "..", ".", "",
    " ", "\x00", "\x1b]0;owned\x07", "\x7f", "\x85touch PWNED", "\u2028touch PWNED", "\u202e", "\ufeff", "\ud800", "a" * 300,
    "層 🙂 ß٣", '"\n[job]\ndump_folder = "PWNED"\n#', "${PLAN:-x}", "$HOME", "~root", "a b\tc", "*", "?", "[ab]", "{a,b}",
    "!x", "%(x)s",
)  # fmt: skip


@cache
def plan() -> Plan:
    small = {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1024}
    job = Job(global_batch=16, sequence_length=128, dtype="bf16")
    return estimate(
        resolve("llama-3-8b", small), load_cluster("2x8x-h100"), job, pp=4, dp=4, tp=1, microbatch=1
    )


def called(name: str, schedule: str | None = None) -> Translation:
    """The plan with `name` wherever a plan has one, also as its schedule, where loading it would refuse that."""
    harmless = plan()
    model = harmless.model.model_copy(update={"name": name})
    cluster = harmless.cluster.model_copy(update={"name": name})
    hostile = harmless.model_copy(update={"model": model, "schedule": schedule or name, "cluster": cluster})
    configuration = configuration_of(harmless)
    whole = replace(configuration, layers_per_stage=(1, 1, 1, 1), program=None)
    return Translation(hostile, whole, (f"the order is that of {name}",), f"{name} costs 1 %")


RUN = """
torchrun() { printf '%s\\n' "$@" END >> "$LOG"; }
srun() { "$@"; }
scontrol() { echo host; }
exec() { "$@"; }
for script in "$@"; do (set --; eval "$script") || echo "failed: $script" >&2; done
"""


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """Runs scripts in an empty folder, which must stay empty; returns the arguments of `torchrun` in each."""
    empty, log = tmp_path / "empty", tmp_path / "log"
    empty.mkdir()
    environment = {
        "PATH": os.environ["PATH"], "LOG": str(log), "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "host",
        "SLURM_JOB_NUM_NODES": "1",
    }  # fmt: skip

    def run_scripts(*texts: str) -> list[list[str]]:
        command = ["bash", "-c", RUN, "bash", *texts]
        done = subprocess.run(
            command, cwd=empty, env=environment, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0 and not done.stderr, done.stderr
        assert not list(empty.iterdir()) and not (tmp_path / "PWNED").exists()
        calls = log.read_text().removesuffix("END\n").split("END\n")
        assert len(calls) == len(texts)
        log.unlink()
        return [call.splitlines() for call in calls]

    return run_scripts


def words(arguments: list[str]) -> str:
    """The plan in the command line of `stagewright run`."""
    return arguments[arguments.index("run") + 1]


def shape(value: Any) -> Any:
    """A document without its texts, which depend on names."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value]
    return str if isinstance(value, str) else value


def test_slurms_script_starts_the_plan_and_nothing_else(run: Any) -> None:
    harmless = slurm_script(plan(), "plan.json")
    as_file = [
        name for name in NAMES if "/" not in name and name.isprintable() and name not in ("", ".", "..")
    ]
    assert len(as_file) > 30
    scripts, plans = [], []
    for number, name in enumerate(NAMES):
        file = f"{as_file[number % len(as_file)]}.json"
        script = slurm_script(called(name).plan, file)
        assert re.search(r"^#SBATCH --job-name=[a-z]([a-z0-9-]{0,38}[a-z0-9])?$", script, re.MULTILINE)
        assert len(script.splitlines()) == len(harmless.splitlines())
        assert script.count("\n#SBATCH") == harmless.count("\n#SBATCH")
        scripts.append(script)
        plans.append(f"./{file}" if file.startswith("-") else file)
    assert list(map(words, run(*scripts))) == plans


@pytest.mark.parametrize("name", ["a\nb.json", "a\x1b.json", "a\u202eb.json"])
def test_files_whose_names_cannot_be_seen_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"characters in its name that cannot be seen.*rename it"):
        slurm_script(plan(), name)


def test_megatrons_script_has_its_options_and_nothing_else(run: Any) -> None:
    harmless, scripts = megatron.megatron_files(called("plan")), []
    for name in NAMES:
        files = megatron.megatron_files(called(name))
        code = [line for line in files["train.sh"].splitlines() if not line.startswith("#")]
        assert code == [line for line in harmless["train.sh"].splitlines() if not line.startswith("#")]
        assert files["argv.json"] == harmless["argv.json"]
        scripts.append(files["train.sh"])
    options, *others = run(harmless["train.sh"], *scripts)
    assert all(other == options for other in others)
    assert options[-3:] == ["--mock-data", "--tokenizer-type", "NullTokenizer"]
    assert json.loads(harmless["argv.json"]) == options[options.index("./pretrain_gpt.py") + 1 : -3]


@pytest.mark.parametrize("value", ["0.02; touch PWNED", "0.02 --load elsewhere", ["x"], "0.02"])
def test_options_take_numbers_where_a_config_has_them(value: Any) -> None:
    config = dict(resolve("llama-3-8b").config or {})
    model_options(config | {"initializer_range": 0.01}, 128)
    for key in ("initializer_range", "num_hidden_layers", "rms_norm_eps"):
        with pytest.raises(
            InputError, match=rf"megatron: {key} of this model's config is .* which is not a number"
        ):
            model_options(config | {key: value}, 128)


def test_a_recipe_is_the_same_code_whatever_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    harmless = ast.dump(ast.parse(bridge_files(called("plan"))["recipe.py"]))
    for name in NAMES:
        assert ast.dump(ast.parse(bridge_files(called(name))["recipe.py"])) == harmless
    reference = resolve("llama-3-8b")
    config = dict(reference.config or {}) | {"notes": list(NAMES)}
    monkeypatch.setattr(ModelSection, "reference", lambda self: replace(reference, config=config))
    module = ast.parse(bridge_files(called("plan"))["recipe.py"])
    (model,) = (node for node in module.body if isinstance(node, ast.Assign))
    assert isinstance(model.value, ast.Call)
    assert json.loads(ast.literal_eval(model.value.args[0]))["notes"] == list(NAMES)


def test_a_toml_has_the_same_keys_whatever_the_names() -> None:
    harmless = shape(tomllib.loads(torchtitan.toml_files(called("plan", "1f1b"))["train.toml"]))
    for name in NAMES:
        files = torchtitan.toml_files(called(name, "1f1b"))
        assert shape(tomllib.loads(files["train.toml"])) == harmless


def test_a_python_configuration_is_the_same_code_whatever_the_names() -> None:
    def code(name: str) -> str:
        """The code without its texts, two of which are names."""
        module = ast.parse(torchtitan.torchtitan_files(called(name, "1f1b"))["train_config.py"])
        for node in ast.walk(module):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                node.value = ""
        return ast.dump(module)

    assert all(code(name) == code("plan") for name in NAMES)


def test_readmes_have_as_many_lines_whatever_the_names() -> None:
    def lines(expressed: Translation) -> list[int]:
        texts = [deepspeed.deepspeed_files(expressed)["README.md"], _readme(expressed.plan)]
        return [len(text.splitlines()) for text in texts]

    assert all(lines(called(name)) == lines(called("plan")) for name in NAMES)


def test_a_run_leaves_its_files_in_runs_whatever_the_model_is_called() -> None:
    for name in NAMES:
        folder = default_folder(called(name).plan)
        assert folder.parent == Path("runs") and folder.name not in ("", ".", "..")
        assert len(os.fsencode(folder.name)) < 256


def test_schedules_have_names_in_one_line(tmp_path: Path) -> None:
    document = json.loads(plan().model_dump_json()) | {"schedule": "x\ntouch PWNED\n#"}
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with pytest.raises(
        InputError, match=r"'x\\ntouch PWNED\\n#' is not a valid name of a schedule: use one line"
    ):
        load_plan(tmp_path / "plan.json")
    program = {"name": "x\x1b[2J", "rank_of_stage": [0], "num_microbatches": 1, "ranks": [["0F0", "0B0"]]}
    with pytest.raises(ScheduleError, match="is not a valid name of a schedule"):
        Program.from_document(program)
    with pytest.raises(ScheduleError, match="is not a valid name of a schedule"):
        read_torch_csv("0F0,0B0\n", "a\nb")

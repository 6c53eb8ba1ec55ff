"""Arguments of Megatron-LM read: what they configure, what of them is not taken, and what is wrong with them."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from stagewright.cluster import load_cluster
from stagewright.errors import InputError
from stagewright.export.megatron_model import model_options
from stagewright.export.reading import Reading, read_configuration
from stagewright.export.settings import settings_files
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan
from stagewright.planning.plan_stages import configuration_of
from stagewright.tracing.models.reference import resolve

JOB = Job(global_batch=64, sequence_length=512, runtime="megatron-core+te", learning_rate=1e-4)
SMALL = {"num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1024}
SCRIPT = """\
#!/bin/bash
TP=4        # within a node
PP=${PP:-2}
export MICRO="1"
ARGS=(
    --tensor-model-parallel-size $TP --sequence-parallel
    --pipeline-model-parallel-size ${PP}
    --micro-batch-size $MICRO \\
    --global-batch-size 128   # samples
    --lr 3e-4
)
ARGS+=("--fp8-format hybrid" --bf16 --use-distributed-optimizer)
torchrun --nproc_per_node 8 --nnodes 4 pretrain_gpt.py ${ARGS[@]} --seq-length=4096 \\
    --num-layers 32 --moe-router-fusion --tensor-model-parallel 8
"""


def read(folder: Path, text: str, name: str = "train.sh") -> Reading:
    path = folder / name
    path.write_text(text)
    return read_configuration(path)


def test_a_script_is_read_with_its_variables(tmp_path: Path) -> None:
    found = read(tmp_path, SCRIPT)
    asked = found.configuration
    assert (asked.tp, asked.pp, asked.dp, asked.microbatch, asked.zero) == (4, 2, 4, 1, 1)
    assert asked.sequence_parallel and asked.schedule == "1f1b" and asked.recompute == "none"
    assert found.job == {"global_batch": 128, "sequence_length": 4096, "dtype": "fp8"}
    assert found.runtime == "megatron-core+te" and found.model == {"num-layers": "32"}
    assert (found.num_read, found.num_without_influence) == (9, 3)


def test_what_is_not_taken_is_said_by_name(tmp_path: Path) -> None:
    notes = read(tmp_path, SCRIPT).notes
    assert "--moe-router-fusion is not in the prediction" in notes
    (unknown,) = (note for note in notes if "not known" in note)
    assert unknown.startswith(
        "--tensor-model-parallel is not known (did you mean 'tensor-model-parallel-size'"
    )
    assert "line 13" in unknown  # where the continued line begins
    again = read(tmp_path, SCRIPT.rstrip() + " --micro-batch-size 2 --micro-batch-size $3\n")
    assert any("--micro-batch-size is given 3 times" in note for note in again.notes)
    assert any("$3, which the file does not set" in note for note in again.notes)


PROGRAM = "torchrun --nproc-per-node 8 --nnodes 1 pretrain_gpt.py"
OPTIONS = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --micro-batch-size 3 --bf16 "
    "--cross-entropy-loss-fusion"
)


@pytest.mark.parametrize(
    ("script", "notes"),
    [
        (f'ARGS=" {OPTIONS}"\n{PROGRAM} $ARGS', []),
        (f'ARGS="\n  {OPTIONS} \\\n  "\n# --fp16\necho --fp16 it\n{PROGRAM} ${{ARGS}}', []),
        (f'A=({OPTIONS} # --fp16\n)\nA+=(--num-layers 4)\n{PROGRAM} "${{A[@]}}"', []),
        (f'A=" {OPTIONS}"\nA+=" --num-layers 4"\nrun="{PROGRAM}\n $A"\necho $run\neval $run', []),
        (f"CMD='{PROGRAM} {OPTIONS}'; srun --ntasks 2 bash -c \"$CMD\"", []),
        (f"run() {{ local N=$2; {PROGRAM} {OPTIONS.replace(' 3', ' $N')} \"$@\"; }}\nrun --num-layers 3", []),
        (f"MBS=$((1 + 2 * MBS1)) MBS1=1\nMBS=$((2 + MBS1)); {PROGRAM} {OPTIONS.replace(' 3', ' ${MBS:-1}')} \"$@\"", []),
        (f'S=7B\nif [[ ${{S}} == "7B" && $S != 8* ]]; then TP=2; elif [ $S = 70B ]; then TP=8; fi\n'
         f"{PROGRAM} {OPTIONS.replace('size 2', 'size $TP')}", []),
        (f"case ${{S:-7B}} in 70B) TP=8 ;; 7*|8B) TP=2;; *) exit 1;; esac\n"
         f"{PROGRAM} {OPTIONS.replace('size 2', 'size $TP')}", []),
        (f"if [ $# -lt 2 ]; then echo usage; exit 1; fi\n[ -z \"$MBS\" ] && MBS=3\n"
         f"{PROGRAM} {OPTIONS.replace(' 3', ' $MBS')}",
         [r"\$MBS of line 2, which the file does not set, is taken as empty"]),
        (f"if [ $1 = 7B ]; then TP=2; else TP=8; fi\n{PROGRAM} {OPTIONS.replace('size 2', 'size $TP')}",
         [r"the condition of line 1 \(\[ \$1 = 7B \]\) depends on more: its first branch is taken"]),
        (f"if [ $1 = fp8 ]; then MORE=--fp8-format; fi\n{PROGRAM} {OPTIONS} $MORE",
         ["the condition of line 1 .* its branch is not taken", r"\$MORE \(line 2\), which the file does not set"]),
        (f"case $1 in a) TP=2;; b) TP=8;; esac\nsource env.sh\n{PROGRAM} {OPTIONS.replace('size 2', 'size $TP')}",
         ["the case of line 1 .* first branch", "line 2 reads 'env.sh', which is not followed"]),
        (f"while [ $# -gt 0 ]; do X=1; shift; done\nfor n in 3 4; do {PROGRAM} {OPTIONS.replace(' 3', ' $n')}; done",
         ["loop of line 1 is not followed", "loop of line 2 is followed for its first round alone"]),
        (f"OFF='--recompute-granularity full'\ncat <<EOF > x\n--fp16 it's\nEOF\n{PROGRAM} {OPTIONS} > log 2>&1 &",
         [r"--recompute-granularity \(.*line 1\) does not reach the command that starts training"]),
        (f"MBS=$(nproc)\n{PROGRAM} {OPTIONS} --num-layers `cat n` | tee log --append", []),
        (f'options=" \\\n    {OPTIONS} \\\n"\n\nrun="cd $DIR && python -u ${{DIR}}/pretrain_gpt.py ${{options}}"\n'
         'srun -l --mpi=pmix --container-image "i" --output=o.log --nodes 1 sh -c "${run}"', []),
        (f'OPTIONS=" \\\n    {OPTIONS} \\\n"\neval "{PROGRAM} $OPTIONS"', []),
        (f'COMMAND="nsys profile -s none --sample=none --capture-range cudaProfilerApi {PROGRAM} {OPTIONS}"\n$COMMAND', []),
    ],
)  # fmt: skip
def test_a_script_is_expanded_as_a_shell_does(tmp_path: Path, script: str, notes: list[str]) -> None:
    reading = read(tmp_path, script)
    asked = reading.configuration
    dp = 1 if "nproc" in script.replace("$(nproc)", "") else 0  # not in the launch line
    assert (asked.tp, asked.pp, asked.dp, asked.microbatch) == (2, 4, dp, 3)
    assert reading.job["dtype"] == "bf16" and asked.recompute == "none"
    assert len(reading.notes) == len(notes)
    for note, match in zip(reading.notes, notes, strict=True):
        assert re.search(match, note)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("A='--bf16\n", r"line 1: a quote \('\) has no end"),
        ("\nif true; then\necho", "line 2: an 'if' has no 'fi'"),
        ("A=(--bf16\n", "line 1: a bracket has no end"),
        ("run ${A", "line 1: a bracket has no end"),
        ("f() { f; f; }; f", "line 1: the script has no end"),
        ("A=xxxxxxxxxxxxxxxx; " + "A=$A$A$A$A$A$A; " * 12, "line 1: a word expands to more than"),
        ("case x in a", "line 1: a pattern of 'case'"),
        (")", "line 1: .*closes nothing"),
        ("(" * 5000, "nests commands too deep|bracket has no end"),
    ],
)  # fmt: skip
def test_a_script_that_is_none_is_refused_by_its_line(tmp_path: Path, script: str, why: str) -> None:
    with pytest.raises(InputError, match=rf"train\.sh.*({why})"):
        read(tmp_path, script)


def test_what_megatron_does_otherwise_than_predicted_is_said(tmp_path: Path) -> None:
    further = (
        "--overlap-grad-reduce --expert-tensor-parallel-size 2 --moe-token-dispatcher-type flex --optimizer muon "
        "--moe-permute-fusion"
    )
    options = OPTIONS.replace("--cross-entropy-loss-fusion", "")
    notes = read(tmp_path, f"{PROGRAM} {options} {further}").notes
    assert [note.split(" is ")[0] for note in notes] == [
        "--overlap-grad-reduce",
        "the loss",
        "--expert-tensor-parallel-size 2", "--moe-token-dispatcher-type flex", "--optimizer muon", "--moe-permute-fusion",
    ]  # fmt: skip


def test_gradients_are_kept_in_the_type_they_are_reduced_in(tmp_path: Path) -> None:
    words = f"{PROGRAM} {OPTIONS} --use-distributed-optimizer"
    usual, half = (read(tmp_path, f"{words} {option}") for option in ("", "--grad-reduce-in-bf16"))
    assert half.notes == usual.notes == () and half.configuration == usual.configuration
    held = [
        estimate(
            resolve("llama-3-8b", SMALL), load_cluster("8x-h100"),
            Job(global_batch=6, sequence_length=64, runtime=reading.runtime or ""), reading.configuration,
        ).predictions.ranks[0].categories["gradients"]
        for reading in (usual, half)
    ]  # fmt: skip
    assert held[0] == 2 * held[1]
    job = JOB.model_copy(update={"runtime": half.runtime})
    plan = estimate(resolve("llama-3-8b", SMALL), load_cluster("2x8x-h100"), job, pp=4, dp=4, tp=1, zero=1)
    files, translation = settings_files("megatron", plan)
    assert translation.differences == () and "--grad-reduce-in-bf16" in json.loads(files["argv.json"])
    assert read(tmp_path, files["train.sh"]).runtime == plan.job.runtime


@pytest.mark.parametrize("name", ["bert", "vlm", "qwen2_vl", "llava_mcore"])
def test_programs_that_train_no_decoder_of_text_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"starts pretrain_{name}\.py, which trains no decoder of text"):
        read(tmp_path, f"{PROGRAM.replace('gpt', name)} {OPTIONS}")


def test_a_script_is_read_with_the_arguments_it_is_started_with(tmp_path: Path) -> None:
    path = tmp_path / "run qwen.sh"
    path.write_text(
        f"""SIZE=$1 TP=${{2}} PP=${{10}}
        if [ $SIZE = 7B ]; then TYPE="--bf16"; else TYPE="--fp16"; fi
        options=" \\
            --tensor-model-parallel-size ${{TP}} --pipeline-model-parallel-size ${{PP}} ${{TYPE}}"
        run="{PROGRAM.replace("gpt", "qwen")} {OPTIONS} ${{options}}"
        eval $run"""
    )
    reading = read_configuration(f"'{path}' 7B 2 a b c d e f g 4")
    assert (reading.configuration.tp, reading.configuration.pp, reading.job["dtype"]) == (2, 4, "bf16")
    reading = read_configuration(f"'{path}' 3B 1 {'a' * 300} b c d e f g 2")
    assert (reading.configuration.tp, reading.configuration.pp, reading.job["dtype"]) == (1, 2, "fp16")


@pytest.mark.parametrize(
    ("options", "layers", "chunks"),
    [
        ('--pipeline-model-parallel-layout "Et*3|(t*4|)*2tL"', (3, 4, 4, 1), None),
        ('--pipeline-model-parallel-layout "Et|(t*2|)*6tL"', (1, *[2] * 6, 1), 2),
        ("--num-virtual-stages-per-pipeline-rank 3", None, 3),
        ("--num-layers 32 --num-layers-per-virtual-pipeline-stage 2", None, 4),
        (
            "--num-layers 14 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
            (3, 4, 4, 3),
            None,
        ),
        ("--num-layers 12 --decoder-first-pipeline-num-layers 2", (2, 3, 3, 3), None),
    ],
)
def test_all_ways_to_lay_stages_out(tmp_path: Path, options: str, layers: Any, chunks: int | None) -> None:
    found = read(tmp_path, f"--pipeline-model-parallel-size 4 {options}").configuration
    assert (found.layers_per_stage, found.chunks) == (layers, chunks)
    assert found.schedule == ("1f1b" if chunks is None else "interleaved-1f1b")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "--pipeline-model-parallel-size two",
            "line 1: --pipeline-model-parallel-size two: give a whole number",
        ),
        ("\n--micro-batch-size 0", "line 2: --micro-batch-size 0"),
        ("--seq-length 1 --recompute-granularity ful", r"'full'.*: give full or selective"),
        (
            '--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout "Et|t|tL"',
            "3 stages, not a multiple of the 2",
        ),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
            "--num-layers, which is missing",
        ),
        ("echo hello", "no option of Megatron-LM"),
        ("", "no option of Megatron-LM"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(InputError, match=why) as caught:
        read(tmp_path, text)
    assert "train.sh" in str(caught.value)


def planned(**widths: Any) -> Plan:
    options: Any = {"tp": 2, "pp": 4, "dp": 2, "zero": 1, "sequence_parallel": True, "microbatch": 2} | widths
    return estimate(resolve("llama-3-8b", SMALL), load_cluster("2x8x-h100"), JOB, **options)


WAYS: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "chunks": {"schedule": "interleaved-1f1b", "chunks": 2},
    "uneven": {"layers_per_stage": (1, 3, 3, 1)},
    "recomputed": {"recompute": "full", "zero": None},
    "groups": {"pp": 2, "dp": 4, "shard_size": 2},
    "context": {"cp": 2, "dp": 1},
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_exported_is_read_as_the_same_configuration(tmp_path: Path, way: str) -> None:
    plan = planned(**WAYS[way])
    files, found = settings_files("megatron", plan)
    assert found.differences == () and found.cost is None
    asked = configuration_of(plan)
    for name, text in files.items():
        back = read(tmp_path, text, name)
        has_launch_line = name == "train.sh"
        layers = back.configuration.layers_per_stage
        assert layers in (None, WAYS[way].get("layers_per_stage"))
        expected = {**vars(asked), "layers_per_stage": layers}
        if not has_launch_line:  # the number of replicas is on it
            expected |= {"dp": 0, "shard_size": None}
        assert vars(back.configuration) == expected
        assert has_launch_line <= (back.notes == ())
        assert back.job == {"global_batch": 64, "sequence_length": 512, "dtype": "bf16"}
    assert json.loads(files["argv.json"])[:2] == ["--num-layers", "8"]


def test_the_shell_file_is_one(tmp_path: Path) -> None:
    files, _ = settings_files("megatron", planned())
    script = tmp_path / "train.sh"
    script.write_text(files["train.sh"])
    subprocess.run(["bash", "-n", str(script)], check=True)
    torchrun = tmp_path / "torchrun"
    torchrun.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    torchrun.chmod(0o755)
    done = subprocess.run(
        ["bash", str(script), "--data-path", "my data"], capture_output=True, text=True, check=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "MEGATRON": "/opt/m", "NODE_RANK": "1"},
    )  # fmt: skip
    words = done.stdout.splitlines()
    assert words[:6] == ["--nproc-per-node", "8", "--nnodes", "2", "--node-rank", "1"]
    start = words.index("/opt/m/pretrain_gpt.py") + 1
    assert words[start:] == [*json.loads(files["argv.json"]), "--data-path", "my data"]


def options_of(name: str, **settings: Any) -> list[str]:
    """The words of a model, and one option of a configuration."""
    config = resolve(name, settings).config
    assert config is not None
    options = model_options(config, 512)
    return ["--micro-batch-size", "1", *(word.strip('"') for option in options for word in option.split())]


@pytest.mark.parametrize(
    "name",
    [
        "llama-2-7b",
        "llama-3-8b",
        "llama-3-405b",
        "qwen2.5-7b",
        "qwen3-8b",
        "mixtral-8x7b",
        "qwen3-30b-a3b",
        "deepseek-v3",
        "gpt2",
        "gpt2-xl",
    ],
)
def test_the_model_of_its_options_is_read_back(name: str, tmp_path: Path) -> None:
    found = read(tmp_path, json.dumps(options_of(name)), "argv.json").read_model()
    assert (found.text, found.settings, found.notes) == (name, {}, ())


def without_vocabulary(name: str, **settings: Any) -> list[str]:
    words = options_of(name, **settings)
    start = words.index("--vocab-size")
    return words[:start] + words[start + 2 :]


def test_a_vocabulary_follows_from_all_other_sizes_or_from_the_tokenizer(tmp_path: Path) -> None:
    model = read(tmp_path, json.dumps(without_vocabulary("llama-2-7b")), "argv.json").read_model()
    assert (model.text, model.settings) == ("llama-2-7b", {})
    assert model.notes == (
        "--vocab-size is missing: that of llama-2-7b, which has all other sizes, is taken",
    )
    for name in ("llama-2-70b", "llama-3-70b"):  # of equal sizes, and of other bases of the rotary embedding
        model = read(tmp_path, json.dumps(without_vocabulary(name)), "argv.json").read_model()
        assert (model.text, model.settings) == (name, {})
    other_base = without_vocabulary("llama-2-70b")
    other_base[other_base.index("--rotary-base") + 1] = "123"
    with pytest.raises(InputError, match="does not say --vocab-size, so its model is not known"):
        read(tmp_path, json.dumps(other_base), "argv.json").read_model()
    changed = without_vocabulary("llama-2-7b", num_hidden_layers=20)
    with pytest.raises(InputError, match="does not say --vocab-size"):
        read(tmp_path, json.dumps(changed), "argv.json").read_model()
    model = read(
        tmp_path, json.dumps([*changed, "--tokenizer-type", "Llama2Tokenizer"]), "argv.json"
    ).read_model()
    assert (model.text, model.settings) == ("llama-2-7b", {"num_hidden_layers": 20})
    files = ["--vocab-file", "gpt2-vocab.json", "--merge-file", "gpt2-merges.txt"]
    large = without_vocabulary("gpt2-xl", n_layer=96, n_embd=12288, n_head=96, n_positions=2048)
    model = read(tmp_path, json.dumps([*large, *files]), "argv.json").read_model()
    assert (
        model.text.startswith("gpt2")
        and "vocab_size" not in model.settings
        and model.settings["n_layer"] == 96
    )


def test_a_model_of_other_sizes_is_the_nearest_with_these(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 20, "num_key_value_heads": 4, "vocab_size": 50_000}
    found = read(tmp_path, json.dumps(options_of("llama-3-8b", **sizes)), "argv.json").read_model()
    assert found.text == "llama-3-8b" and found.settings == sizes
    assert str(found) == "llama-3-8b with num_hidden_layers = 20, vocab_size = 50000, num_key_value_heads = 4"
    changed = resolve(found.text, found.settings).config
    assert changed is not None and model_options(changed, 512) == model_options(
        resolve("llama-3-8b", sizes).config or {}, 512
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "does not say --vocab-size"),
        (["--num-layers", "$LAYERS", "--vocab-size", "9"], "it is '$LAYERS'"),
        (
            ["--num-attention-heads", "0", "--vocab-size", "9"],
            "--num-attention-heads as a number of at least 1",
        ),
        (["--attention-dropout", "nan", "--vocab-size", "9"], "--attention-dropout as a number from 0"),
        (
            ["--vocab-size", "9", "--qk-layernorm", "--add-qkv-bias"],
            "no model of a family that is known here",
        ),
    ],
)
def test_options_that_say_too_little_of_a_model_are_refused(
    words: list[str], says: str, tmp_path: Path
) -> None:
    options = [
        "--micro-batch-size",
        "1",
        "--num-layers",
        "2",
        "--hidden-size",
        "64",
        "--num-attention-heads",
        "4",
    ]
    options += ["--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope", *words]
    found = read(tmp_path, json.dumps(options), "argv.json")
    with pytest.raises(InputError, match=re.escape(says)) as raised:
        found.read_model()
    assert str(raised.value).endswith("name MODEL")


def test_what_a_model_that_is_read_has_not_is_said(tmp_path: Path) -> None:
    words = [word for word in options_of("mixtral-8x7b") if word != "--disable-bias-linear"]
    words[words.index("--hidden-dropout") + 1] = "0.1"
    words += ["--moe-layer-freq", "2"]
    notes = read(tmp_path, json.dumps(words), "argv.json").read_model().notes
    assert [note.split()[0] for note in notes] == ["--hidden-dropout", "biases", "--moe-layer-freq"]
    words = [*options_of("gpt2"), "--kv-channels", "32", "--disable-bias-linear"]
    notes = read(tmp_path, json.dumps(words), "argv.json").read_model().notes
    assert [note.split()[0] for note in notes] == ["--kv-channels", "--disable-bias-linear"]
    gpt = [word for word in options_of("gpt2") if word not in ("--vocab-size", "50257")]
    gpt += ["--tokenizer-type", "GPT2BPETokenizer"]
    assert read(tmp_path, json.dumps(gpt), "argv.json").read_model().text == "gpt2"


@pytest.mark.parametrize("further", [["--position-embedding-type", "none"], ["--group-query-attention"]])
def test_a_gpt_without_positions_or_with_shared_heads_is_not_taken_for_gpt2(
    further: list[str], tmp_path: Path
) -> None:
    found = read(tmp_path, json.dumps([*options_of("gpt2"), *further]), "argv.json")
    with pytest.raises(InputError, match="no model of a family that is known here"):
        found.read_model()

"""What people read at the terminal: hints that lead on, short reprs, refusals that are true."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stagewright.cli.app import app
from stagewright.cluster import load_cluster
from stagewright.errors import InputError
from stagewright.execution.data.request import DataRequest
from stagewright.tracing.models.reference import resolve


def test_a_device_of_two_sizes_is_answered_with_both() -> None:
    with pytest.raises(InputError, match="did you mean '8x-a100-40' or '8x-a100-80'"):
        load_cluster("a100")
    with pytest.raises(InputError, match="did you mean 'a100-40' or 'a100-80'"):
        load_cluster("8x-a100")


def test_bytes_as_tokens_of_a_large_vocabulary_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    from stagewright.execution.data.prepared import _say_bytes

    request = DataRequest.of("some.jsonl")
    assert request is not None
    _say_bytes(request, resolve("llama-3-8b"))
    assert "the bytes of 'some.jsonl' are the tokens: 256 of the 128,256" in capsys.readouterr().err
    _say_bytes(request, resolve("llama-3-8b", {"vocab_size": 512}))
    assert not capsys.readouterr().err


def test_figures_that_no_machine_has_blame_the_load() -> None:
    from stagewright.execution.probe import _impossible

    text = str(_impossible(ValueError("peak_flops: must be positive"), 1.6))
    assert "too busy" in text and "other programs used 1.6 cores" in text and "peak_flops" in text


def test_a_config_may_have_a_range_without_an_end(tmp_path: Path) -> None:
    text = '{"model_type": "falcon_h1", "time_step_limit": [0.0, Infinity]}'
    (tmp_path / "config.json").write_text(text)
    config = resolve(str(tmp_path)).config
    assert config is not None and config["time_step_limit"] == [0.0, float("inf")]
    (tmp_path / "config.json").write_text(text.replace("Infinity", "NaN"))
    with pytest.raises(InputError, match="NaN is not a finite number"):
        resolve(str(tmp_path))


def test_doctor_names_what_will_not_work_and_how_to_mend_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from stagewright.execution import examination

    facts = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)["facts"]
    assert {"torch", "backends", "processors", "memory"} <= set(facts)
    monkeypatch.setattr(examination, "free_bytes", lambda: 2.0**20)
    monkeypatch.setattr(examination.dist, "is_gloo_available", lambda: False)
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert "will not work: this torch has no gloo" in done.stdout
    assert "only 1.0 MiB of memory are free" in done.stdout


def test_doctor_names_what_keeps_ranks_from_their_gpus() -> None:
    pytest.importorskip("torch")
    from stagewright.execution.examination import _of_environment

    variables = {"LOCAL_RANK": "4", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_SOCKET_IFNAME": "ib"}
    interfaces = ["lo", "eth0"]
    rank, connections, interface = _of_environment(variables, 4, interfaces)
    assert rank.is_fatal and rank.what == "LOCAL_RANK is 4, and the process sees 4 GPUs (0 to 3)"
    assert not connections.is_fatal and "CUDA_DEVICE_MAX_CONNECTIONS is 1" in connections.what
    assert interface.is_fatal and interface.what.endswith("'ib', and this machine has only lo, eth0")
    good = {"LOCAL_RANK": "3", "CUDA_DEVICE_MAX_CONNECTIONS": "32", "NCCL_SOCKET_IFNAME": "eth"}
    assert not _of_environment(good, 4, interfaces)
    assert not _of_environment({"LOCAL_RANK": "4"}, 1, interfaces), "one visible GPU is every rank's own"
    assert not _of_environment(variables, 0, interfaces), "nothing of it matters on CPUs"


def test_models_say_their_family_and_size() -> None:
    lines = CliRunner().invoke(app, ["models"]).stdout.splitlines()
    (line,) = [one for one in lines if one.split()[:1] == ["llama-3-8b"]]
    assert line.split() == ["llama-3-8b", "llama", "8.03", "B", "32", "4096", "32", "128256"]


def shown(*words: str) -> str:
    done = CliRunner().invoke(app, words, env={"COLUMNS": "120"})
    assert done.exit_code == 0, done.output
    return done.stdout


def test_one_model_is_shown_whole() -> None:
    facts = dict(line.strip().split("  ", 1) for line in shown("models", "qwen3-30b-a3b").splitlines())
    facts = {key: value.strip() for key, value in facts.items()}
    assert facts["parameters"] == "30.53 B (30,532,122,624)" and facts["source"] == "Qwen/Qwen3-30B-A3B"
    assert (facts["layers"], facts["experts per token"], facts["context length"]) == ("48", "8", "40960")
    document = json.loads(shown("models", "gpt2", "--json"))
    assert (document["parameters"], document["context_length"]) == (124439808, 1024)
    assert document["config"]["n_embd"] == document["width"] == 768
    done = CliRunner().invoke(app, ["models", "llama-3-9b"])
    assert done.exit_code == 2 and "did you mean 'llama-3-8b'" in done.stderr


def test_one_cluster_is_shown_with_its_sources_and_guesses(tmp_path: Path) -> None:
    text = shown("clusters", "64x-h100")
    for title in (
        "64x-h100: 64 devices on 8 nodes",
        "Links between h100",
        "Network of",
        "Host of",
        "Device h100",
    ):
        assert title in text
    assert "9.894e+14" not in text and "989.4 TFLOP/s" in text and "guess: " in text
    document = json.loads(shown("clusters", "64x-h100", "--json"))
    assert document["num_nodes"] == 8 and "nodes[0].device.memory_efficiency" in document["guesses"]
    assert "nodes[0].intra_node.bandwidth" not in document["guesses"]
    assert document["nodes"][0]["device"]["sources"]["memory_bandwidth"] == "NVIDIA H100 SXM datasheet, dense"
    assert "Device h100" in shown("clusters", "h100")
    path = tmp_path / "box.toml"
    path.write_text('[[nodes]]\ndevices = ["rtx3090", "rtx4090"]\n')
    text = shown("clusters", str(path))
    assert "In the same node: 1 rtx4090" in text and "No host is described" in text
    done = CliRunner().invoke(app, ["clusters", "8x-h1000"])
    assert done.exit_code == 2 and "did you mean 'h100'" in done.stderr

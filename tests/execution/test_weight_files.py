"""Weights a run starts from: those in the files, whatever way they are stored in, or a refusal before any process starts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from plans import make_plan
from safetensors.torch import load_file, save_file
from test_finetuning import saved as published_model
from typer.testing import CliRunner

from stagewright.cli.app import app
from stagewright.errors import InputError, StagewrightWarning
from stagewright.execution.loading import StartingTensors, StoredWeights
from stagewright.execution.weight_files import INDEX, WeightFiles, check_weights
from stagewright.graph.split import split_graph
from stagewright.planning.plan import ModelSection, Plan
from stagewright.tracing.cache import trace
from stagewright.tracing.models.adapter_names import base_name
from stagewright.tracing.models.build import DeferredModel, build
from stagewright.tracing.models.lora import Lora
from stagewright.tracing.models.quantised import refuse_quantised
from stagewright.tracing.models.quantised_base import packed_weights
from stagewright.tracing.models.reference import resolve

SMALL = {"num_hidden_layers": 2, "hidden_size": 48, "intermediate_size": 80, "vocab_size": 64, "num_attention_heads": 4,
         "num_key_value_heads": 2}  # fmt: skip
BLOCK = 32
PROJECTION = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small Llama as transformers saves it, in one file."""
    return saved(tmp_path / "model", "tiny-llama", SMALL)


def saved(folder: Path, model: str, overrides: Mapping[str, Any]) -> Path:
    reference = resolve(model, overrides)
    net: Any = build(reference, 1, 8, seed=5).module.net
    folder.mkdir()
    tensors = {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(reference.config or {})))
    return folder


def change(folder: Path, changed: Callable[[dict[str, torch.Tensor]], object], **config: Any) -> None:
    """Write the folder's tensors again, changed, with more in its config."""
    tensors = load_file(folder / "model.safetensors")
    changed(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    now = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(now | config))


def split(folder: Path, **where: str) -> None:
    """An index over the folder's one file, with other files for some tensors."""
    names = load_file(folder / "model.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors") | where}))


def plan_of(folder: Path, at: Path) -> Plan:
    """A plan whose model is the one in `folder`; nothing is traced."""
    plan = _plan().model_copy(update={"model": ModelSection.of(resolve(str(folder)))})
    plan.save(at)
    return plan


@cache
def _plan() -> Plan:
    with TemporaryDirectory() as scratch:
        return make_plan(
            Path(scratch) / "plan.json", overrides=SMALL, pp=1, num_microbatches=1, sequence_length=8
        )


def starting(folder: Path, dtype: str = "float32") -> dict[str, torch.Tensor]:
    """All that a single rank starts from."""
    reference = resolve(str(folder))
    assert reference.weights is not None
    model = DeferredModel(reference, 1, 8, dtype)
    stages = split_graph(trace(reference, 1, 8, dtype), [])
    stored = StoredWeights(reference.weights, model.module, reference.config or {})
    return dict(StartingTensors(model, stages, stored))


def refused(folder: Path, match: str) -> None:
    """By the command, before there is a process or a folder of the run; and not with random weights."""
    plan = folder.parent / "plan.json"
    loaded = plan_of(folder, plan)
    with pytest.raises(InputError, match=match):
        check_weights(loaded, random_weights=False, is_resumed=False)
    done = CliRunner().invoke(app, ["run", str(plan), "--out", str(folder.parent / "out"), "--device", "cpu"])
    assert done.exit_code == 2, done.output
    assert not (folder.parent / "out").exists()
    check_weights(loaded, random_weights=True, is_resumed=False)


def test_weights_are_those_of_the_files(folder: Path) -> None:
    stored, got = load_file(folder / "model.safetensors"), starting(folder)
    assert stored and all(torch.equal(got[f"net.{name}"], tensor) for name, tensor in stored.items())


# -- quantised ----------------------------------------------------------------------------------------------------------


def quantise(tensors: dict[str, torch.Tensor], size: int = BLOCK) -> None:
    """Projections in blocks of float8 with their scales, the last blocks cut off, as transformers stores them."""
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        weight = tensors[name]
        rows, columns = (-(-length // size) * size for length in weight.shape)
        padded = torch.zeros(rows, columns)
        padded[: weight.shape[0], : weight.shape[1]] = weight
        blocks = padded.view(rows // size, size, columns // size, size)
        scale = blocks.abs().amax(dim=(1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        small = (blocks / scale[:, None, :, None]).view(rows, columns)
        tensors[name] = small[: weight.shape[0], : weight.shape[1]].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale


FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}}


IN_BLOCKS = {"quantization_config": FP8["quantization_config"] | {"weight_block_size": [128, 128]}}


def test_fp8_weights_are_those_that_were_quantised(folder: Path, tmp_path: Path) -> None:
    """Within what four bits of mantissa keep, for blocks that do not divide the matrices too."""
    wanted = load_file(folder / "model.safetensors")
    change(folder, quantise, **FP8)
    check_weights(plan_of(folder, tmp_path / "plan.json"), random_weights=False, is_resumed=False)
    got = starting(folder)
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[f"net.{name}"], tensor, rtol=2**-4, atol=1e-4)
    assert not torch.equal(got[f"net.{PROJECTION}"], wanted[PROJECTION])


def test_fp8_weights_are_those_of_transformers(tmp_path: Path) -> None:
    """To the last bit; with matrices that blocks divide, since it reads no others."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    folder = saved(tmp_path / "model", "tiny-llama", SMALL | {"hidden_size": 64, "intermediate_size": 96})
    change(folder, quantise, **FP8)
    stored, got = load_file(folder / "model.safetensors"), starting(folder, "bfloat16")
    for name in [name for name in stored if name.endswith("proj.weight")]:
        parts: Any = {"weight": stored[name], "weight_scale_inv": stored[f"{name}_scale_inv"]}
        (wanted,) = Fp8Dequantize(None).convert(parts).values()
        assert isinstance(wanted, torch.Tensor)
        assert torch.equal(got[f"net.{name}"], wanted.to(torch.bfloat16)), name


@pytest.mark.parametrize("expert_size", [128, 80])
def test_a_base_of_fp8_keeps_the_numbers_and_scales_of_the_files(expert_size: int, tmp_path: Path) -> None:
    """Also of experts stored one by one, unless their blocks do not stay whole in the tensor of all of them."""
    sizes = {
        "hidden_size": 160,
        "intermediate_size": 288,
        "moe_intermediate_size": expert_size,
        "num_experts": 3,
    }
    published = published_model("qwen3_moe", tmp_path / "model", mlp_only_layers=[0], **sizes)
    change(tmp_path / "model", partial(quantise, size=128), **IN_BLOCKS)
    stored = load_file(tmp_path / "model" / "model.safetensors")
    reference = resolve(str(tmp_path / "model")).adapted(Lora.of(4, targets="q_proj", base="fp8"))
    module = DeferredModel(reference, 1, 8).module
    weights = StoredWeights(tmp_path / "model", module, reference.config or {})
    packed = packed_weights(module)
    read = {base_name(name): weights.read_packed(name, how) for name, how in packed.items()}
    dense = [name for name in stored if f"net.{name}" in read]
    assert {name.rsplit(".", 2)[-2] for name in dense} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    for name in dense:
        assert_kept(read[f"net.{name}"], [stored[name]], [stored[f"{name}_scale_inv"]])
    experts = "model.layers.1.mlp.experts"
    for joined, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        names = [f"{experts}.{expert}.{part}.weight" for expert in range(3) for part in parts]
        name = f"net.{experts}.{joined}"
        if expert_size == 128 or joined == "down_proj":
            assert_kept(
                read[name], [stored[part] for part in names], [stored[f"{part}_scale_inv"] for part in names]
            )
        wanted = dict(published.named_parameters())[name.removeprefix("net.")]
        torch.testing.assert_close(packed[name].unpack(read[name]), wanted, rtol=2**-3, atol=1e-3)


def assert_kept(
    packed: torch.Tensor, numbers: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]
) -> None:
    wanted = torch.cat([part.flatten().view(torch.uint8) for part in numbers])
    assert torch.equal(packed[-len(wanted) :], wanted)
    wanted = torch.cat([part.flatten() for part in scales])
    assert torch.equal(packed[: 4 * len(wanted)].view(torch.float32), wanted)


def test_mxfp4_weights_are_read(tmp_path: Path) -> None:
    """GPT-OSS's experts: two numbers of four bits a byte, 32 with one scale, stored the other way round."""
    config = {"model_type": "gpt_oss", "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 64,
              "num_local_experts": 2, "num_experts_per_tok": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
              "head_dim": 16, "layer_types": ["full_attention"]}  # fmt: skip
    (tmp_path / "small.json").write_text(json.dumps(config))
    folder = saved(tmp_path / "model", str(tmp_path / "small.json"), {})
    experts = "model.layers.0.mlp.experts.down_proj"
    generator = torch.Generator().manual_seed(0)

    def pack(tensors: dict[str, torch.Tensor]) -> None:
        count, inputs, outputs = tensors.pop(experts).shape
        sizes = {
            "blocks": (0, 256, (count, outputs, inputs // 32, 16)),
            "scales": (120, 130, (count, outputs, inputs // 32)),
        }
        for name, (least, end, shape) in sizes.items():
            drawn = torch.randint(least, end, shape, generator=generator, dtype=torch.uint8)
            tensors[f"{experts}_{name}"] = drawn

    change(folder, pack, quantization_config={"quant_method": "mxfp4"})
    reference = resolve(str(folder))
    types = WeightFiles.of(folder).types()
    refuse_quantised(types, "mxfp4", str(folder))
    with pytest.raises(
        InputError, match=f"tensor '{experts}_(blocks|scales)', which belongs to quantised weights"
    ):
        refuse_quantised(types, None, str(folder))
    got, rounded = (
        StoredWeights(folder, DeferredModel(reference, 1, 8, dtype).module, reference.config or {}).read(
            f"net.{experts}"
        )
        for dtype in ("float32", "bfloat16")
    )
    assert rounded.dtype == torch.bfloat16 and torch.equal(rounded.float(), got)
    stored = load_file(folder / "model.safetensors")
    blocks, scales = stored[f"{experts}_blocks"], stored[f"{experts}_scales"]
    values = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)  # of the format E2M1
    for expert, output, group, place in ((1, 3, 0, 5), (0, 31, 1, 15)):
        byte, scale = (
            int(blocks[expert, output, group, place]),
            2.0 ** (int(scales[expert, output, group]) - 127),
        )
        for half, bits in enumerate((byte & 15, byte >> 4)):
            assert float(got[expert, 32 * group + 2 * place + half, output]) == values[bits] * scale


def to_int8(tensors: dict[str, torch.Tensor]) -> None:
    scale = tensors[PROJECTION].abs().amax(1, keepdim=True) / 127
    tensors[PROJECTION] = (tensors[PROJECTION] / scale).round().to(torch.int8)
    tensors[f"{PROJECTION}_scale"] = scale


QUANTISED = {
    "gptq": {"quant_method": "gptq", "bits": 4},
    "awq": {"quant_method": "awq"},
    "bitsandbytes": {"load_in_4bit": True},
    "compressed-tensors": {"quant_method": "compressed-tensors"},
    "fbgemm_fp8": {"quant_method": "fbgemm_fp8"},
    "torchao": {"quant_method": "torchao"},
}


@pytest.mark.parametrize("method", QUANTISED)
def test_other_methods_are_refused_by_name(method: str, folder: Path) -> None:
    plan = folder.parent / "plan.json"
    plan_of(folder, plan)
    change(folder, to_int8, quantization_config=QUANTISED[method])
    with pytest.raises(
        InputError, match=f"quantised by the method '{method}' .*only fp8, mxfp4 and nf4 of"
    ) as refusal:
        resolve(str(folder))
    planning = [str(folder), "--cluster", "1x-t4", "--global-batch", "1", "--sequence-length", "8"]
    out = ["--out", str(folder.parent / "out"), "--device", "cpu"]
    for command in (
        ["trace", str(folder)],
        ["plan", *planning],
        ["estimate", *planning],
        ["run", str(plan), *out],
    ):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 2 and " ".join(done.stderr.split()) == f"error: {refusal.value}", command
    assert not (folder.parent / "out").exists()


def test_quantised_weights_are_passed_over_if_the_model_is_to_have_none(folder: Path) -> None:
    change(folder, to_int8, quantization_config=QUANTISED["bitsandbytes"])
    plain = resolve(str(folder), {"quantization_config": None})
    loaded = _plan().model_copy(update={"model": ModelSection.of(plain)})
    with pytest.raises(InputError, match=f"has tensor .{PROJECTION}"):
        check_weights(loaded, random_weights=False, is_resumed=False)
    check_weights(loaded, random_weights=True, is_resumed=False)


@pytest.mark.parametrize(
    ("leftover", "dtype"),
    [
        (f"{PROJECTION}_scale", torch.float32),
        (PROJECTION.replace("weight", "SCB"), torch.float32),
        (PROJECTION.replace("weight", "qzeros"), torch.int32),
        (PROJECTION.replace("weight", "g_idx"), torch.int32),
        (f"{PROJECTION}.absmax", torch.uint8),
        (f"{PROJECTION}.quant_state.bitsandbytes__nf4", torch.uint8),
        (f"{PROJECTION}_scale_inv", torch.float32),
        (f"{PROJECTION}_packed", torch.int32),
    ],
)
def test_scales_that_the_config_does_not_speak_of_are_refused(
    leftover: str, dtype: torch.dtype, folder: Path
) -> None:
    change(folder, lambda tensors: tensors.update({leftover: torch.ones(4, dtype=dtype)}))
    refused(folder, "which belongs to quantised weights")


def to_float64(tensors: dict[str, torch.Tensor]) -> None:
    tensors.update({name: tensor.double() for name, tensor in tensors.items()})


def test_weights_in_float64_are_read(folder: Path, tmp_path: Path) -> None:
    before = starting(folder)
    change(folder, to_float64)
    check_weights(plan_of(folder, tmp_path / "plan.json"), random_weights=False, is_resumed=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in starting(folder).items())


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def tied(folder: Path) -> Path:
    """A model whose config ties its head to its embedding, with the head in its files too."""
    change(
        folder, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}), tie_word_embeddings=True
    )
    return folder


def test_a_tied_tensor_is_read_under_whichever_name_it_has(tied: Path) -> None:
    twice = starting(tied)
    change(tied, lambda tensors: tensors.pop(EMBEDDING))
    head_alone = starting(tied)
    assert all(torch.equal(tensor, twice[name]) for name, tensor in head_alone.items())
    change(tied, lambda tensors: tensors.update({EMBEDDING: tensors.pop(HEAD)}))
    assert torch.equal(starting(tied)[f"net.{EMBEDDING}"], twice[f"net.{EMBEDDING}"])
    change(tied, lambda tensors: tensors.pop(EMBEDDING))
    with pytest.raises(InputError, match=r"has no tensor 'model.embed_tokens.weight'"):
        starting(tied)


def test_a_tied_tensor_with_two_contents_is_refused(tied: Path) -> None:
    change(tied, lambda tensors: tensors[HEAD].mul_(2))
    with pytest.raises(InputError, match="but the model ties them: set tie_word_embeddings to false"):
        starting(tied)


def test_tensors_that_the_model_lacks_are_named_once(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors |= {
            f"model.layers.{n}.self_attn.{p}_proj.bias": torch.zeros(2) for n in (0, 1) for p in "qkv"
        }
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)

    starting(folder)
    assert capsys.readouterr().err == ""
    change(folder, add)
    starting(folder)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert (
        "has 6 tensors that the model lacks, which are not read: 'model.layers.0.self_attn.k_proj.bias'"
        in said
    )
    assert "and 2 more" in said
    monkeypatch.setenv("RANK", "1")
    starting(folder)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_small_numbers_without_scales_are_refused(dtype: torch.dtype, folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({PROJECTION: tensors[PROJECTION].to(dtype)}))
    refused(folder, rf"tensor '{PROJECTION}' as \w+, without the scales")
    change(folder, lambda tensors: None, **FP8)
    refused(folder, rf"tensor '{PROJECTION}' as \w+, without the scales")


def test_what_only_the_model_can_tell_is_refused_by_the_rank(folder: Path) -> None:
    """Integers of any width where the model has none, and scales beside a weight by a name that others may have."""
    change(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(48, dtype=torch.int32)}))
    with pytest.raises(
        InputError, match=r"'model.norm.weight' .*stored as torch.int32, but the model has torch.float32"
    ):
        starting(folder)
    change(
        folder,
        lambda tensors: tensors.update(
            {"model.norm.weight": torch.ones(48), "model.norm.scale": torch.ones(1)}
        ),
    )
    with pytest.raises(
        InputError, match=r"'model.norm.scale' next to 'model.norm.weight', which is therefore quantised"
    ):
        starting(folder)


def test_fp8_of_other_blocks_is_refused(folder: Path) -> None:
    change(folder, quantise, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 16]})
    with pytest.raises(InputError, match=r"does not fit blocks of \[128, 16\]"):
        starting(folder)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"weight_block_size": None}, r"weight_block_size = None .* keeps weights with \[128, 128\] there"),
        ({"weight_block_size": [1, 32]}, r"weight_block_size = \[1, 32\]"),
        (
            {"activation_scheme": "static"},
            "activation_scheme = 'static' .* keeps weights with 'dynamic' there",
        ),
        ({"expert_dtype": "fp4"}, "expert_dtype = 'fp4'"),
    ],
)
def test_fp8_that_no_base_keeps_is_refused_with_the_remedy(
    settings: dict[str, Any], match: str, folder: Path, tmp_path: Path
) -> None:
    change(folder, quantise, quantization_config=IN_BLOCKS["quantization_config"] | settings)
    words = [
        "plan",
        str(folder),
        "--cluster",
        "1x-h100",
        "--global-batch",
        "1",
        "--lora",
        "4",
        "--lora-base",
        "fp8",
    ]
    done = CliRunner().invoke(app, [*words, "-o", str(tmp_path / "plan.json")])
    assert done.exit_code == 2 and not (tmp_path / "plan.json").exists()
    said = " ".join(done.stderr.split())
    assert re.search(match, said) and said.endswith("quantise these with --lora-base int8 or nf4"), said


# -- buffers ------------------------------------------------------------------------------------------------------------


def test_lasting_buffers_are_those_of_the_files(tmp_path: Path) -> None:
    """Such as the routers' biases of DeepSeek-V3, which training adjusts though they are no parameters."""
    folder = saved(tmp_path / "model", "tiny-deepseek-v3", {})
    bias = next(
        name for name in load_file(folder / "model.safetensors") if name.endswith("e_score_correction_bias")
    )
    change(folder, lambda tensors: tensors[bias].fill_(3.0))
    assert starting(folder)[f"net.{bias}"].unique().tolist() == [3.0]
    change(folder, lambda tensors: tensors.pop(bias))
    with pytest.warns(StagewrightWarning, match=f"has no tensor '{bias}': it starts as in a new model"):
        starting(folder)


# -- files --------------------------------------------------------------------------------------------------------------


def test_files_that_are_missing_are_named(folder: Path) -> None:
    split(folder, **{PROJECTION: "model-00002-of-00002.safetensors"})
    refused(folder, r"names files that are missing: 'model-00002-of-00002.safetensors'; .*--random-weights")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / INDEX).unlink()
    refused(folder, r"has 'model-00001-of-00002.safetensors' and lacks 'model-00002-of-00002.safetensors'")


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.Q4_K_M.gguf"]
)
def test_weights_of_another_format_are_named(name: str, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / name)
    refused(
        folder, rf"are in '{name}', and only safetensors files are supported: convert them .*save_pretrained"
    )


def test_an_index_alone_promises_weights(folder: Path) -> None:
    split(folder)
    (folder / "model.safetensors").unlink()
    refused(folder, r"names files that are missing: 'model.safetensors'")


def test_a_config_alone_starts_from_the_seed_and_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "model.safetensors").unlink()
    plan = plan_of(folder, folder.parent / "plan.json")
    check_weights(plan, random_weights=False, is_resumed=False)
    assert (
        f"there are no weights next to the config of '{folder}': they are drawn from seed 0"
        in capsys.readouterr().err
    )
    check_weights(plan, random_weights=True, is_resumed=False)
    assert capsys.readouterr().err == ""


def test_two_sets_of_weights_are_refused(folder: Path) -> None:
    (folder / "copy.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    refused(folder, "has tensor '.*' in 'copy.safetensors' and in 'model.safetensors'")
    split(folder)
    index = json.loads((folder / INDEX).read_text())
    where = dict.fromkeys(index["weight_map"], "copy.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))
    refused(folder, "has two sets of weights")


@pytest.mark.parametrize(
    "name", ["../other.safetensors", "/etc/other.safetensors", "deeper/../../other.safetensors"]
)
def test_an_index_that_leads_out_is_refused(name: str, folder: Path) -> None:
    (folder.parent / "other.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    split(folder, **{PROJECTION: name})
    refused(folder, f"'{name}' lies outside of")


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": ["b"]}}',
     '{"weight_map": {"a": "b\\u0000c"}}', "[" * 100_000],
)  # fmt: skip
def test_an_index_that_is_none_is_refused(content: str, folder: Path) -> None:
    (folder / INDEX).write_text(content)
    (folder / "model.safetensors").unlink()
    refused(
        folder,
        r"has no weight_map|is not valid JSON|nests values|which is not a name|is not a valid file name",
    )


def test_links_may_lead_within_the_cache_of_a_model_alone(folder: Path, tmp_path: Path) -> None:
    """As the hub's cache does, whose snapshots are links to its blobs."""
    repository = tmp_path / "hub" / "models--owner--name"
    snapshot, blobs = repository / "snapshots" / "abc", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (folder / "model.safetensors").rename(blobs / "0123")
    (folder / "config.json").rename(blobs / "4567")
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs/0123"))
    (snapshot / "config.json").symlink_to(Path("../../blobs/4567"))
    check_weights(plan_of(snapshot, tmp_path / "plan.json"), random_weights=False, is_resumed=False)
    starting(snapshot)
    (blobs / "0123").rename(tmp_path / "elsewhere")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    refused(snapshot, "'model.safetensors' lies outside of")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(snapshot / "model.safetensors")
    refused(snapshot, "is not a valid file name|is missing")


def test_weights_of_a_hub_id_are_those_in_the_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them: one that was not downloaded is missed."""
    hub = tmp_path / "hub"
    repository = hub / "models--owner--name"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    split(folder)
    folder.rename(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    plan = _plan().model_copy(update={"model": ModelSection.of(resolve("owner/name"))})
    assert resolve("owner/name").weights == snapshot
    check_weights(plan, random_weights=False, is_resumed=False)
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(
        InputError, match=r"names files that are missing: 'model.safetensors'; copy or download"
    ):
        check_weights(plan, random_weights=False, is_resumed=False)


def test_files_that_lie_about_themselves_are_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    overlapping = {
        name: {**entry, "data_offsets": [0, 4]} if name == PROJECTION else entry
        for name, entry in header.items()
    }
    text = json.dumps(overlapping).encode()
    for content in (
        b"", whole[:100], whole[:-1], whole + b"x", (2**62).to_bytes(8, "little") + whole[8:], bytes(len(whole)),
        len(text).to_bytes(8, "little") + text + whole[8 + length :],
    ):  # fmt: skip
        path.write_bytes(content)
        refused(folder, r"weights '.*model.safetensors' cannot be read \(.*copy or download it again")
    path.unlink()
    path.mkdir()
    refused(folder, r"weights '.*model.safetensors' is a folder, not a file")


def test_an_index_of_other_files_is_refused(folder: Path) -> None:
    split(folder, another="model.safetensors")
    refused(folder, r"lists 'another' in '.*model.safetensors', which lacks them")


def test_weights_do_not_change_with_the_file_that_they_came_from(folder: Path) -> None:
    got = starting(folder)[f"net.{PROJECTION}"]
    before = got.clone()
    with (folder / "model.safetensors").open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(size // 2)
        file.write(b"\xff" * (size - size // 2))
    assert torch.equal(got, before)

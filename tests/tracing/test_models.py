"""How a MODEL argument becomes a model: resolution without torch, building, sizes, and errors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import pytest
import torch

from stagewright.errors import InputError, TraceError
from stagewright.tracing.cache import trace
from stagewright.tracing.models.build import MicrobatchShape, build
from stagewright.tracing.models.grouped_mm import allow_tracing
from stagewright.tracing.models.reference import bundled_names, bundled_sources, resolve
from stagewright.tracing.private import FakeTensor, FakeTensorMode

# Parameters in billions as published in the model cards, their weights' totals and papers; BERT and ViT with their training
# heads, Gemma 3 without the part for images.
PUBLISHED = {
    "llama-2-7b": (6.74, 0.005),
    "llama-2-13b": (13.016, 0.0005),
    "llama-2-70b": (68.977, 0.0005),
    "llama-3-8b": (8.03, 0.005),
    "llama-3-70b": (70.55, 0.01),
    "llama-3-405b": (405.85, 0.01),
    "llama-3.1-8b": (8.0303, 0.00005),
    "llama-3.1-70b": (70.554, 0.0005),
    "llama-3.2-1b": (1.2358, 0.00005),
    "llama-3.2-3b": (3.2127, 0.00005),
    "llama-3.3-70b": (70.554, 0.0005),
    "gpt2": (0.124, 0.001),
    "gpt2-xl": (1.56, 0.005),
    "gpt-oss-20b": (20.91, 0.005),
    "gpt-oss-120b": (116.83, 0.005),
    "gemma-2b": (2.51, 0.005),
    "gemma-3-270m": (0.2681, 0.00005),
    "gemma-3-1b": (1.0, 0.005),
    "gemma-3-4b": (4.30008 - 0.41982, 0.00005),
    "gemma-3-12b": (12.18733 - 0.42129, 0.00005),
    "gemma-3-27b": (27.43241 - 0.42306, 0.00005),
    "mistral-7b": (7.248, 0.001),
    "mistral-nemo-12b": (12.248, 0.0005),
    "mistral-small-24b": (23.572, 0.0005),
    "mistral-large-123b": (122.61, 0.005),
    "mixtral-8x7b": (46.7, 0.05),
    "mixtral-8x22b": (140.62, 0.005),
    "deepseek-v2-lite": (15.706, 0.0005),
    "deepseek-v3": (671.0, 0.5),
    "nemotron-h-8b": (8.1, 0.05),
    "olmo-2-1b": (1.485, 0.0005),
    "olmo-2-7b": (7.299, 0.0005),
    "olmo-2-13b": (13.716, 0.0005),
    "olmo-2-32b": (32.234, 0.0005),
    "phi-1.5": (1.4183, 0.00005),
    "phi-2": (2.7797, 0.00005),
    "phi-3-mini": (3.8211, 0.00005),
    "phi-3-medium": (13.96, 0.005),
    "phi-4": (14.66, 0.005),
    "qwen2.5-0.5b": (0.494, 0.0005),
    "qwen2.5-1.5b": (1.5437, 0.00005),
    "qwen2.5-3b": (3.0859, 0.00005),
    "qwen2.5-7b": (7.616, 0.001),
    "qwen2.5-14b": (14.77, 0.005),
    "qwen2.5-32b": (32.764, 0.0005),
    "qwen2.5-72b": (72.706, 0.0005),
    "qwen3-0.6b": (0.596, 0.0005),
    "qwen3-1.7b": (1.7206, 0.00005),
    "qwen3-4b": (4.0225, 0.00005),
    "qwen3-8b": (8.19, 0.005),
    "qwen3-14b": (14.768, 0.0005),
    "qwen3-32b": (32.762, 0.0005),
    "qwen3-30b-a3b": (30.5, 0.05),
    "qwen3-235b-a22b": (235.09, 0.005),
    "smollm2-135m": (0.1345, 0.00005),
    "smollm2-360m": (0.3618, 0.00005),
    "smollm2-1.7b": (1.7114, 0.00005),
    "smollm3-3b": (3.0751, 0.00005),
    "bert-large": (0.3375, 0.0025),
    "t5-large": (0.738, 0.001),
    "vit-huge": (0.632, 0.001),
    "mamba2-2.7b": (2.7, 0.01),
}
TINY = [name for name in bundled_names() if name.startswith("tiny")]


def num_parameters(name: str) -> int:
    built = build(resolve(name), 1, 32, "bfloat16", fake=True)
    return sum(parameter.numel() for parameter in built.module.parameters())


# Resolution


def test_resolving_needs_no_torch():
    code = (
        "import sys; from stagewright.tracing.models.reference import resolve; resolve('llama-3-8b');"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_bundled_directory_and_file_name_the_same_model(tmp_path):
    bundled = resolve("tiny-llama")
    directory = tmp_path / "my-llama"
    directory.mkdir()
    config = dict(bundled.config) | {"torch_dtype": "bfloat16", "_name_or_path": "elsewhere"}
    (directory / "config.json").write_text(json.dumps(config))
    (tmp_path / "other.json").write_text(json.dumps(dict(reversed(config.items()))))
    in_directory, file = resolve(str(directory)), resolve(str(tmp_path / "other.json"))
    assert (bundled.name, in_directory.name, file.name) == ("tiny-llama", "my-llama", "other")
    assert bundled.digest == in_directory.digest == file.digest
    assert in_directory.weights is None
    (directory / "model.safetensors").touch()
    assert resolve(str(directory)).weights == directory


def test_overrides_change_the_digest_and_use_the_spelling_of_the_config():
    plain, short = resolve("gpt2"), resolve("gpt2", {"num_hidden_layers": 2})
    assert short.config["n_layer"] == 2 and "num_hidden_layers" not in short.config
    assert plain.digest != short.digest != resolve("gpt2", {"num_hidden_layers": 3}).digest
    assert resolve("gpt2", {"dropout": 0}).digest != plain.digest


def test_the_common_depth_means_encoder_and_decoder(tmp_path):
    path = tmp_path / "t5.json"
    path.write_text(json.dumps(dict(resolve("tiny-t5").config) | {"num_decoder_layers": 3}))
    config = resolve(str(path), {"num_hidden_layers": 2}).config
    assert (config["num_layers"], config["num_decoder_layers"]) == (2, 2)
    assert resolve(str(path), {"num_layers": 1}).config["num_decoder_layers"] == 3


def test_a_new_depth_cuts_per_layer_lists():
    assert resolve("tiny-nemotron-h", {"num_hidden_layers": 3}).config["hybrid_override_pattern"] == "M-M"
    with pytest.raises(InputError, match="'hybrid_override_pattern' describes 8"):
        resolve("tiny-nemotron-h", {"num_hidden_layers": 9})
    with pytest.raises(InputError, match="number of layers is 0"):
        resolve("tiny-llama", {"num_hidden_layers": 0})


# Building


@pytest.mark.parametrize("name", bundled_names())
def test_parameter_counts_are_those_that_are_stated(name):
    assert num_parameters(name) == bundled_sources()[name]["parameters"]


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_stated_parameter_counts_are_the_published_ones(name):
    expected, tolerance = PUBLISHED[name]
    assert bundled_sources()[name]["parameters"] / 1e9 == pytest.approx(expected, abs=tolerance)


def test_every_large_config_has_a_published_count_and_model():
    large = {name for name in bundled_names() if not name.startswith("tiny")}
    assert (
        large == set(PUBLISHED) == {name for name, source in bundled_sources().items() if "model" in source}
    )
    assert set(bundled_sources()) == set(bundled_names())


@pytest.mark.parametrize("name", TINY)
def test_tiny_models_train_and_fake_builds_mirror_them(name):
    real = build(resolve(name), 2, 64)
    fake = build(resolve(name), 2, 64, fake=True)
    state, fake_state = real.module.state_dict(), fake.module.state_dict()
    assert {key: (value.shape, value.dtype) for key, value in state.items()} == {
        key: (value.shape, value.dtype) for key, value in fake_state.items()
    }
    assert all(key.startswith("net.") for key in state)
    assert all(isinstance(value, FakeTensor) for value in [*fake_state.values(), *fake.inputs.values()])
    assert all(value.shape[0] == 2 for value in real.inputs.values())
    assert {key: value.shape for key, value in real.inputs.items()} == {
        key: value.shape for key, value in fake.inputs.items()
    }
    loss = real.module(**real.inputs)
    classes = real.module.net.config.num_labels if "pixel_values" in real.inputs else 256
    assert loss.shape == () and 0.8 < loss.item() / torch.tensor(float(classes)).log().item() < 3
    loss.backward()
    assert all(p.grad is not None for p in real.module.parameters() if p.requires_grad)


def test_tiny_llama_has_about_five_million_parameters():
    assert 4e6 < num_parameters("tiny-llama") < 6e6


def test_weights_come_from_the_seed_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = build(resolve("tiny-llama"), 1, 16, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    second, other = build(resolve("tiny-llama"), 1, 16, seed=1), build(resolve("tiny-llama"), 1, 16, seed=2)
    for (key, a), b, c in zip(
        first.module.state_dict().items(),
        second.module.state_dict().values(),
        other.module.state_dict().values(),
        strict=True,
    ):
        assert torch.equal(a, b)
        assert "norm" in key or not torch.equal(a, c)
    assert torch.equal(first.inputs["input_ids"], second.inputs["input_ids"])


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-t5", "tiny-bert", "tiny-vit", "tiny-mixtral"])
def test_loss_is_the_one_transformers_computes(name):
    built = build(resolve(name, {"dropout": 0}), 2, 32)
    labels = built.inputs.get("labels", built.inputs.get("input_ids"))
    inputs = {key: value for key, value in built.inputs.items() if key != "labels"}
    expected = built.module.net(**inputs, labels=labels).loss
    assert built.module(**built.inputs).item() == pytest.approx(expected.item(), rel=1e-6)


def test_router_loss_is_added_when_the_config_asks_for_it():
    reference = resolve("tiny-mixtral", {"output_router_logits": True, "router_aux_loss_coef": 0.5})
    built = build(reference, 2, 32)
    output = built.module.net(**built.inputs, use_cache=False)
    plain = build(resolve("tiny-mixtral"), 2, 32)
    expected = plain.module(**plain.inputs) + 0.5 * output.aux_loss
    assert built.module(**built.inputs).item() == pytest.approx(expected.item(), rel=1e-6)


def test_dropout_override_reaches_every_probability():
    def rates(overrides):
        module = build(resolve("tiny-gpt2", overrides), 1, 16, fake=True).module
        return {m.p for m in module.modules() if isinstance(m, torch.nn.Dropout)}

    assert rates({}) == {0.1}
    assert rates({"dropout": 0}) == {0.0}
    t5 = build(resolve("tiny-t5", {"dropout": 0}), 1, 16)
    assert t5.module(**t5.inputs).item() == t5.module(**t5.inputs).item()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_dtype_is_that_of_every_parameter(dtype):
    built = build(resolve("tiny-llama"), 1, 16, dtype, fake=True)
    assert {p.dtype for p in built.module.parameters()} == {getattr(torch, dtype)}


def test_tokens_of_one_microbatch():
    tokens = {name: build(resolve(name), 2, 32, fake=True).num_tokens for name in TINY}
    assert (tokens["tiny-llama"], tokens["tiny-t5"], tokens["tiny-vit"]) == (64, 128, 2)


# Tracing: what the exported graph looks like


def exported(
    name: str, sequence_length: int = 64, dtype: str = "float32", **overrides
) -> list[torch.fx.Node]:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    built = build(resolve(name, overrides), 2, sequence_length, dtype, fake_mode=mode)
    with mode:
        program = torch.export.export(built.module, (), kwargs=built.inputs, strict=False)
    return [node for node in program.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("name", bundled_names())
def test_every_bundled_config_exports_without_data_dependent_shapes(name):
    depth = {"deepseek-v3": 4, "gemma-3-1b": 6, "nemotron-h-8b": 8, "tiny-nemotron-h": 8}.get(name, 2)
    nodes = exported(name, num_hidden_layers=depth)
    assert not any(node.meta.get("unbacked_bindings") for node in nodes)
    targets = Counter(str(node.target) for node in nodes)
    assert not any("grouped_mm_fallback" in target for target in targets)
    if any(family in name for family in ("mixtral", "deepseek", "-a3b", "-a22b", "gpt-oss")):
        assert targets["aten._grouped_mm.default"] >= 2
    if (
        "mamba2" not in name and "gpt-oss" not in name
    ):  # whose attention has sinks, which no such kernel takes
        assert targets["aten.scaled_dot_product_attention.default"] >= 1


@pytest.mark.parametrize(
    "name", ["tiny-llama", "tiny-gpt2", "tiny-gemma", "tiny-mixtral", "tiny-deepseek-v3"]
)
def test_causal_attention_is_left_to_the_kernel(name):
    attention = [node for node in exported(name) if "scaled_dot_product" in str(node.target)]
    assert attention
    for node in attention:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        arguments = dict(zip(names, node.args, strict=False)) | node.kwargs
        assert arguments.get("attn_mask") is None
        assert arguments.get("is_causal") is True


def test_a_window_shorter_than_the_sequence_keeps_its_mask():
    def masked(sequence_length):
        nodes = exported("gemma-3-1b", sequence_length, num_hidden_layers=6)
        attention = [node for node in nodes if "scaled_dot_product" in str(node.target)]
        return sum(
            (node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")) is not None
            for node in attention
        )

    assert masked(256) == 0
    assert masked(1024) == 5


def test_the_exported_model_computes_what_the_model_computes():
    built = build(resolve("tiny-mixtral"), 2, 32)
    program = torch.export.export(built.module, (), kwargs=built.inputs, strict=False)
    assert torch.equal(program.module()(**built.inputs), built.module(**built.inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("columns", [16, 10])
def test_fake_grouped_products_are_laid_out_as_real_ones(dtype, columns):
    allow_tracing()
    offsets = torch.tensor([4, 4, 10, 16], dtype=torch.int32)

    def product_and_gradients(rows, weight):
        output = torch.nn.functional.grouped_mm(rows, weight.transpose(-2, -1), offs=offsets)
        if columns % 8:
            return [output]  # the backward kernels want cotangents with padded rows, too
        return [output, *torch.autograd.grad(output, (rows, weight), torch.ones(16, columns, dtype=dtype))]

    rows, weight = torch.randn(16, 8, dtype=dtype), torch.randn(4, columns, 8, dtype=dtype)
    real = product_and_gradients(rows.requires_grad_(), weight.requires_grad_())
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = product_and_gradients(mode.from_tensor(rows), mode.from_tensor(weight))
    layout = [[(value.shape, value.stride(), value.dtype) for value in values] for values in (real, fake)]
    assert layout[0] == layout[1]


# Factories

FACTORY = """
import copy
import torch
from torch import nn

def with_loss(microbatch_size, width=8):
    net = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))
    targets = torch.zeros(microbatch_size, dtype=torch.long)
    return net, (torch.randn(microbatch_size, 4), targets), nn.functional.cross_entropy

class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 1)
    def forward(self, x, *, scale):
        return (self.inner(x) * scale).mean()

def scalar():
    return Scalar(), {"x": torch.randn(3, 4), "scale": torch.arange(3.0)[:, None]}

def vector():
    return nn.Linear(4, 2), (torch.randn(3, 4),)

def broken():
    missing = {}
    return missing["key"]

def wrong():
    return nn.Linear(4, 2)

def unused():
    return Scalar(), {"x": torch.randn(3, 4), "scael": torch.randn(3, 1)}

class Mean(nn.Sequential):
    def forward(self, x):
        return super().forward(x).mean()

def copied():
    layer = nn.Linear(4, 4)
    x = torch.randn(3, 4)
    x[:, 0] = 0
    return Mean(*(copy.deepcopy(layer) for _ in range(3))), {"x": x}

def hooked():
    return Mean(*(nn.utils.spectral_norm(nn.Linear(4, 4)) for _ in range(3))), {"x": torch.randn(3, 4)}

class Peeking(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.row = self.inner.weight.data[0]
    def forward(self, x):
        return (self.inner(x) * self.row).mean()

def peeking():
    return Peeking(), {"x": torch.randn(3, 4)}

class Listing(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.rows = [torch.arange(4.0)]
    def forward(self, x):
        return (self.inner(x) * self.rows[0]).mean()

def listing():
    return Listing(), {"x": torch.randn(3, 4)}

number = 3
"""


@pytest.fixture
def factory(tmp_path):
    path = tmp_path / "nets.py"
    path.write_text(FACTORY)
    return lambda name, overrides=None: resolve(f"{path}:{name}", overrides)


def test_factory_with_a_loss_function(factory):
    reference = factory("with_loss", {"width": 16})
    built = build(reference, 5, 32)
    assert (reference.kind, reference.name, built.num_tokens) == ("factory", "with_loss", 5)
    assert {key: value.shape[0] for key, value in built.inputs.items()} == {"input": 5, "target_0": 5}
    assert built.module(**built.inputs).dim() == 0
    assert built.module.get_parameter("net.0.weight").shape == (16, 4)
    fake = build(reference, 5, 32, fake=True)
    assert all(isinstance(value, FakeTensor) for value in [*fake.module.parameters(), *fake.inputs.values()])


def test_a_sequence_length_is_needed_where_samples_have_one(tmp_path):
    path = tmp_path / "nets.py"
    path.write_text(
        "def images(microbatch_size): ...\ndef texts(width=1, *, sequence_length): ...\nothers = texts\n"
    )
    needs = {name: resolve(f"{path}:{name}").has_sequence for name in ("images", "texts", "others")}
    assert needs == {"images": False, "texts": True, "others": True}
    vision = {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "image_size": 32,
        "num_channels": 3,
    }
    (tmp_path / "config.json").write_text(json.dumps(vision))
    assert not resolve(str(tmp_path / "config.json")).has_sequence and resolve("tiny-llama").has_sequence


def test_factory_inputs_are_brought_to_the_microbatch_and_dtype(factory):
    built = build(factory("scalar"), 5, 1, "float64")
    assert {key: tuple(value.shape) for key, value in built.inputs.items()} == {"x": (5, 4), "scale": (5, 1)}
    assert torch.equal(built.inputs["x"][0], built.inputs["x"][3])
    assert built.module(**built.inputs).dtype == torch.float64
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = build(factory("scalar"), 5, 1, "float64", fake_mode=mode)
    with mode:
        program = torch.export.export(fake.module, (), kwargs=fake.inputs, strict=False)
    assert any("mean" in str(node.target) for node in program.graph.nodes)


LANGUAGE_MODEL = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from stagewright.tracing.models.losses import CausalLanguageModel

def made(microbatch_size, sequence_length):
    config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
    tokens = torch.randint(0, 32, (microbatch_size, sequence_length))
    return CausalLanguageModel(LlamaForCausalLM(config)), {"input_ids": tokens}
"""


def test_a_factory_of_a_language_model_is_split_as_one_with_a_config(tmp_path):
    path = tmp_path / "nets.py"
    path.write_text(LANGUAGE_MODEL)
    config = {
        "model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "vocab_size": 32,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    for degrees in ({"tp": 2}, {"cp": 2}, {"loss_pieces": 2}):
        ours, others = (
            trace(resolve(str(text)), 2, 16, target="cuda", **degrees)
            for text in (f"{path}:made", tmp_path / "config.json")
        )
        assert [node.op for node in ours.nodes] == [node.op for node in others.nodes]
        assert {ours.values[value].meta.shape for value in ours.parameters.values()} == {
            others.values[value].meta.shape for value in others.parameters.values()
        }


def test_modules_that_a_factory_copies_stay_of_one_fake_mode(factory):
    """A copied mode frees storages twice, and the process dies some time later."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    built = build(factory("copied"), 3, 1, fake_mode=mode)
    assert all(parameter.fake_mode is mode for parameter in built.module.parameters())


def test_views_that_hooks_leave_are_no_buffers(factory):
    buffers = dict(build(factory("hooked"), 3, 1).module.named_buffers())
    assert {name.rpartition(".")[2] for name in buffers} == {"weight_u", "weight_v"}
    assert trace(factory("hooked").text, 3, 1, use_cache=False).loss
    with pytest.raises(TraceError, match=r"reads 'net.row', a tensor that is a view of a parameter"):
        trace(factory("peeking").text, 3, 1, use_cache=False)
    with pytest.raises(TraceError, match=r"in a list, a dict or an object: register it as a buffer"):
        trace(factory("listing").text, 3, 1, use_cache=False)


def test_factory_by_module_path_and_its_digest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "my_factory_module.py"
    source.write_text(FACTORY)
    first = resolve("my_factory_module:scalar")
    assert build(first, 2, 1).module.get_parameter("net.inner.weight").shape == (1, 4)
    assert resolve("my_factory_module:vector").digest != first.digest
    source.write_text(FACTORY + "# changed\n")
    assert resolve("my_factory_module:scalar").digest != first.digest


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("broken", {}, r"failed at .*nets\.py, line \d+ \(broken\): KeyError: 'key'"),
        ("wrong", {}, r"returned a Linear: return \(module, inputs\)"),
        ("unused", {}, r"scael that its module's forward does not take \(it takes x, scale\)"),
        ("scaler", {}, r"has no 'scaler' \(did you mean 'scalar'\?\)"),
        ("number", {}, r"is a int, not a function"),
        ("with_loss", {"widht": 3}, r"takes no 'widht' \(did you mean 'width'\?\)"),
    ],
)
def test_bad_factories_say_what_to_change(factory, name, overrides, message):
    with pytest.raises(InputError, match=message):
        build(factory(name, overrides), 2, 8)


def test_factory_without_a_scalar_loss(factory):
    built = build(factory("vector"), 3, 1)
    with pytest.raises(InputError, match=r"returned a torch.float32 tensor of shape \(3, 2\).*loss_fn"):
        built.module(**built.inputs)


def test_factory_that_cannot_be_imported(tmp_path):
    path = tmp_path / "syntax.py"
    path.write_text("import torch\n\ndef f(:\n")
    with pytest.raises(InputError, match=r"syntax\.py, line 3: SyntaxError"):
        build(resolve(f"{path}:f"), 1, 1)
    path.write_text("import no_such_module_anywhere\n")
    with pytest.raises(InputError, match=r"syntax\.py, line 1.*ModuleNotFoundError.*install"):
        build(resolve(f"{path}:f"), 1, 1)
    with pytest.raises(InputError, match="there is no file"):
        resolve(f"{tmp_path}/none.py:f")
    with pytest.raises(InputError, match=r"module 'no_such_package\.models' cannot be found"):
        resolve("no_such_package.models:f")


PACKED = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

def packed():
    size = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=1)
    net = LlamaForCausalLM(LlamaConfig(**size, vocab_size=64, use_cache=False))
    tokens = torch.randint(0, 64, (2, 8))
    inputs = {"input_ids": tokens, "position_ids": (torch.arange(8) % 4).expand(2, 8), "labels": tokens}
    return net, inputs, lambda output: output.loss
"""


def test_packed_sequences_of_a_factory_stay_apart(tmp_path):
    (tmp_path / "nets.py").write_text(PACKED)
    built = build(resolve(f"{tmp_path / 'nets.py'}:packed"), 2, 8)
    loss = built.module(**built.inputs)
    assert torch.equal(loss, built.module.net(**built.inputs).loss)
    program = torch.export.export(built.module, (), kwargs=built.inputs, strict=False)
    assert program.module()(**built.inputs).item() == pytest.approx(loss.item(), rel=1e-5)


# Bad input


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"model_type": "llama",\n "hidden_size": }', "line 2, column 17"),
        ('{"hidden_size": 8}', "no 'model_type'"),
        ("[1]", "holds a JSON list, not an object"),
    ],
)
def test_malformed_configs(tmp_path, content, message):
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(InputError, match=message) as error:
        resolve(str(path))
    assert str(path) in str(error.value)


def test_python_without_a_function_is_no_config(tmp_path):
    path = tmp_path / "net.py"
    path.write_text("def build(): ...\n")
    with pytest.raises(InputError, match=r"name the function in it .* as .*net\.py:FUNCTION"):
        resolve(str(path))


def test_names_that_lead_nowhere(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match=r"did you mean 'llama-3-8b'\?"):
        resolve("llama-3-8")
    with pytest.raises(InputError, match=r"no file or directory '\./none\.json'"):
        resolve("./none.json")
    with pytest.raises(InputError, match=r"holds no config\.json"):
        resolve(str(tmp_path))
    with pytest.raises(InputError, match=r"bundled config.*path.*Hugging Face id.*offline.*give its path"):
        resolve("nobody-at-all/llama-3-8b-of-mine")
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8"):
        resolve(str(tmp_path))


def test_unknown_model_type_names_the_nearest(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "lama"}')
    with pytest.raises(InputError, match=r"no model_type 'lama' \(did you mean 'llama'\?\)"):
        build(resolve(str(path)), 1, 8, fake=True)


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        (
            "tiny-llama",
            {"num_hiden_layers": 2},
            r"no key 'num_hiden_layers' \(did you mean 'num_hidden_layers'\?\)",
        ),
        ("tiny-llama", {"hidden_size": "big"}, "hidden_size"),
        ("tiny-llama", {"hidden_act": "rleu"}, "rleu"),
        ("tiny-gpt2", {"dropout": 2}, "probability"),
        ("tiny-llama", {"architectures": ["LlamaForTokenClassification"]}, "no loss is known for"),
    ],
)
def test_overrides_that_cannot_be(name, overrides, message):
    with pytest.raises(InputError, match=message):
        build(resolve(name, overrides), 1, 8, fake=True)


def test_jobs_that_cannot_be():
    with pytest.raises(InputError, match=r"'float23' \(did you mean 'float32'\?\)"):
        MicrobatchShape(1, 8, "float23")
    with pytest.raises(InputError, match="microbatch_size is 0"):
        MicrobatchShape(0, 8)
    with pytest.raises(InputError, match="600 exceeds the 512 learned positions"):
        build(resolve("tiny-gpt2"), 1, 600, fake=True)
    with pytest.raises(InputError, match="no float64 kernel"):
        build(resolve("tiny-mixtral"), 1, 8, "float64", fake=True)

"""Names that are not part of torch's or transformers' public interface: when one changes, the test says what to do."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch

from stagewright.tracing import private
from stagewright.tracing.models import grouped_mm, transformers_patches
from stagewright.tracing.recipes import recorded

# Where a name lives, the file of ours that uses it, and what it is used for.
USED = [
    ("torch._subclasses.fake_tensor", "FakeTensorMode", "private.py", "tracing without computing"),
    (
        "torch._subclasses.fake_tensor",
        "FakeTensorMode.avoid_device_init",
        "private.py",
        "knowing where there is no GPU",
    ),
    ("torch._subclasses.fake_tensor", "FakeTensor", "private.py", "recognising what is traced already"),
    (
        "torch._subclasses.fake_tensor",
        "DataDependentOutputException",
        "private.py",
        "initialisation that looks at values",
    ),
    (
        "torch._subclasses.fake_tensor",
        "DynamicOutputShapeException",
        "private.py",
        "initialisation that looks at values",
    ),
    ("torch._C", "_dispatch_has_kernel_for_dispatch_key", "private.py", "recognising composite operators"),
    ("torch._ops", "OpOverload", "private.py", "operators by name"),
    (
        "torch.utils._python_dispatch",
        "_disable_current_modes",
        "models/deferred.py",
        "copies of real tensors",
    ),
    ("torch", "Tensor._use_count", "private.py", "waiting until a backend has let go of a tensor"),
    ("torch._C", "_storage_Use_Count", "private.py", "noticing tensors that a layer keeps"),
    (
        "torch.multiprocessing.reductions",
        "StorageWeakRef",
        "private.py",
        "noticing tensors that a layer keeps",
    ),
    ("torch._C", "_len_torch_dispatch_stack", "private.py", "compiling nothing while bytes are counted"),
    ("torch._C", "_ExcludeDispatchKeyGuard", "private.py", "calling an operator without autocast"),
    ("torch._C", "_dispatch_get_all_op_names", "private.py", "which operators autocast has rules for"),
    (
        "torch.utils.checkpoint",
        "_checkpoint_without_reentrant_generator",
        "private.py",
        "regions of a model's code",
    ),
    ("torch.utils.checkpoint", "CheckpointFunction", "private.py", "reentrant regions of a model's code"),
    (
        "torch.utils.checkpoint",
        "_CachingTorchDispatchMode",
        "private.py",
        "policies of selective checkpointing",
    ),
    ("torch.export.exported_program", "_collect_all_valid_cia_ops", "private.py", "faster exports"),
    ("torch._C", "_dispatch_get_registrations_for_dispatch_key", "private.py", "faster exports"),
    ("torch.fx._lazy_graph_module", "_use_lazy_graph_module", "private.py", "faster exports"),
    ("torch.utils.checkpoint", "SAC_IGNORED_OPS", "private.py", "operators that no policy is asked about"),
    ("torch._C", "_VariableFunctions", "private.py", "calling operators in their cheapest form"),
    ("torch._C", "_nn", "private.py", "calling operators in their cheapest form"),
    ("torch._C", "TensorBase", "private.py", "calling operators in their cheapest form"),
    ("torch.utils", "_pytree", "blocks.py", "arguments and results of blocks, flat"),
    ("torch.utils._python_dispatch", "TorchDispatchMode", "execution/random.py", "keyed random numbers"),
    (
        "torch._meta_registrations",
        "_meta_grouped_mm_common",
        "models/grouped_mm.py",
        "layouts of grouped products",
    ),
    (
        "transformers.masking_utils",
        "is_torchdynamo_exporting",
        "models/transformers_patches.py",
        "no mask for export",
    ),
    ("transformers.masking_utils", "is_tracing", "models/transformers_patches.py", "no mask for tracing"),
    (
        "transformers.masking_utils",
        "find_packed_sequence_indices",
        "models/transformers_patches.py",
        "no packing",
    ),
    (
        "transformers.integrations.moe",
        "is_torchdynamo_compiling",
        "models/transformers_patches.py",
        "grouped experts",
    ),
]


def changed(what: str, file: str, use: str) -> str:
    return (
        f"{what} is gone (torch {torch.__version__}); stagewright's {file} uses it for {use}: find its new name "
        "in the release notes, try both names there, and run tests/tracing and tests/graph on every version"
    )


@pytest.mark.parametrize(("module", "name", "file", "use"), USED, ids=[f"{row[0]}.{row[1]}" for row in USED])
def test_the_name_is_there(module: str, name: str, file: str, use: str) -> None:
    try:
        found = importlib.import_module(module)
    except ImportError:
        pytest.fail(changed(module, file, use))
    for part in name.split("."):
        found = getattr(found, part, None)
    assert found is not None, changed(f"{module}.{name}", file, use)


def test_everything_private_imports_is_listed_here() -> None:
    listed = {name for _, name, file, _ in USED if file == "private.py"}
    imported = {
        name
        for name, item in vars(private).items()
        if getattr(item, "__module__", "").startswith("torch.") and not name.startswith("_")
    }
    assert imported <= listed, "add the new names to USED, with what they are used for"


def test_every_patch_of_transformers_is_listed_here() -> None:
    patched = {(module.__name__, name) for module, name in transformers_patches._REPLACEMENTS}
    listed = {(module, name) for module, name, *_ in USED if module.startswith("transformers")}
    assert patched == listed


# What the names must still do


def test_composite_operators_are_told_from_those_with_a_derivative() -> None:
    assert private.is_composite(torch.ops.aten.linear.default)
    assert private.is_composite(torch.ops.aten.scaled_dot_product_attention.default)
    assert not private.is_composite(torch.ops.aten.addmm.default)
    assert not private.is_composite(torch.ops.aten.native_layer_norm.default)


def test_schemas_tell_what_is_written_and_where_arguments_are() -> None:
    assert private.is_mutable(torch.ops.aten.relu_.default)
    assert not private.is_mutable(torch.ops.aten.relu.default)
    assert not private.is_mutable("getitem")
    assert private.argument_place(torch.ops.aten.native_layer_norm_backward.default, "output_mask") == 7
    assert private.argument_place(torch.ops.aten.relu.default, "output_mask") is None


def test_a_storage_has_one_identity_also_when_it_is_fake() -> None:
    with private.FakeTensorMode():
        base = torch.empty(4, 4)
        assert private.storage_key(base) == private.storage_key(base.t()[1:])
        assert private.storage_key(base) != private.storage_key(base.clone())


def test_those_who_refer_to_a_tensor_are_counted() -> None:
    lent = torch.zeros(4).detach()
    others = lent
    assert private.num_holders(lent) == private.num_holders(others) == 1
    held = [lent, others]
    assert private.num_holders(lent) == 1, "all of Python is one"
    view = lent[1:]
    assert private.num_holders(lent) == 2
    del view, held
    assert private.num_holders(lent) == 1


def test_composite_operators_that_were_registered_since_are_kept_by_exports_too() -> None:
    """A function of the user's own that other operators define, as aten's are."""
    library = torch.library.Library("stagewright_test", "FRAGMENT")

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.stagewright_test.twice(x).relu() if self.training else x.relu()

    def exported(model: torch.nn.Module) -> list[str]:
        with private.light_exports():
            program = torch.export.export(model, (torch.randn(3),), strict=False).run_decompositions({})
        return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]

    assert exported(Model().eval()) == ["aten.relu.default"]
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x + x, "CompositeImplicitAutograd")
    assert exported(Model()) == ["stagewright_test.twice.default", "aten.relu.default"]


def test_backward_formulas_can_be_traced_on_fake_tensors() -> None:
    with private.FakeTensorMode(), torch.enable_grad():
        x = torch.empty(3, requires_grad=True)

        def gradient(x: torch.Tensor) -> list[torch.Tensor]:
            return list(torch.autograd.grad(x.tanh().sum(), [x]))

        graph = recorded(gradient, [x])
    assert "aten.tanh_backward.default" in {str(node.target) for node in graph.nodes}


@pytest.mark.parametrize(
    ("entered", "region"),
    [
        (lambda: torch.no_grad(), "set_grad_enabled"),
        (lambda: torch.autocast("cpu", dtype=torch.bfloat16), "wrap_with_autocast"),
    ],
    ids=["no_grad", "autocast"],
)
def test_export_says_which_operators_were_inside_a_region(entered, region: str) -> None:
    """`capture` reads from an exported node's `torch_fn` whether it ran without gradients or under autocast."""

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            with entered():
                inside = x @ weight
            return inside.sum() + x.exp().sum()

    program = torch.export.export(Model(), (torch.randn(2, 2), torch.randn(2, 2)), strict=False)
    nodes = {str(node.target): node for node in program.run_decompositions({}).graph.nodes}
    inside = nodes.get("aten.mm.default", nodes.get("aten.matmul.default"))
    assert inside is not None
    assert region in str(inside.meta["torch_fn"][0]), changed(f"the mark '{region}'", "capture.py", "regions")
    assert region not in str(nodes["aten.exp.default"].meta["torch_fn"][0])


def test_the_shape_function_of_grouped_products_still_takes_two_matrices_first() -> None:
    from torch import _meta_registrations

    names = list(inspect.signature(_meta_registrations._meta_grouped_mm_common).parameters)
    assert names[:2] == ["mat_a", "mat_b"], changed("its signature", "models/grouped_mm.py", "layouts")
    grouped_mm.allow_tracing()
    with private.FakeTensorMode():
        offsets = torch.empty(2, dtype=torch.int32)
        product = torch._grouped_mm(torch.empty(6, 8), torch.empty(2, 3, 8).transpose(1, 2), offs=offsets)
    assert tuple(product.shape) == (6, 3)
    assert product.stride() == (4, 1)  # rows are padded to 16 bytes


def test_what_an_interrupted_trace_left_replaced_lasts_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import masking_utils

    from stagewright.tracing.models import transformers_patches

    find = masking_utils.find_packed_sequence_indices
    monkeypatch.setattr(
        masking_utils, "find_packed_sequence_indices", transformers_patches._no_packed_sequences
    )
    with transformers_patches.trace_as_run(packed=True):
        assert masking_utils.find_packed_sequence_indices is find
    with transformers_patches.trace_as_run():
        assert masking_utils.find_packed_sequence_indices is transformers_patches._no_packed_sequences

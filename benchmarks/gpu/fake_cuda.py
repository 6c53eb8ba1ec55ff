"""Graphs traced for CUDA beside the plans' graphs of the same models: names and operators, without a GPU.

    python benchmarks/gpu/fake_cuda.py [--models gpt2 ...] [--dtype bfloat16] [--length 128] [--no-modules] [--json]

Needs a CUDA build of torch (``pip install torch===2.13.0`` takes it from PyPI), the packages of requirements.lock, a C
compiler, and neither a GPU nor a driver. A library of a few lines stands in for the driver, so that torch finds a device of
`CAPABILITY`; all tensors are fake, and nothing is computed.

Every bundled model, with and without dropout, and every module of tests/nasty.py is traced twice for GPUs: by the CPU, as
`stagewright plan` and `stagewright run` do, and by CUDA. Exits with 1 if names or operators of forward or backward differ.
Layouts that differ are named: a model that asks which device it is on is answered by the CPU in plans and runs alike.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

CAPABILITY = (9, 0)
ROOT = Path(__file__).parents[2]

DRIVER = """
#include <cuda_runtime_api.h>
#include <string.h>
cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0; *greatest = -5; return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    memset(properties, 0, sizeof *properties);
    strcpy(properties->name, "stand-in");
    properties->major = %d; properties->minor = %d;
    properties->multiProcessorCount = 132; properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024; properties->maxThreadsPerMultiProcessor = 2048;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 0; return 0; }
"""
"""What tracing asks of CUDA. Autograd asks which devices have a context: none."""

_NOT_FAILING = "int {name}(void) {{ return 100; }}"  # cudaErrorNoDevice


def stand_in_driver() -> None:
    """Let this process find one CUDA device; to be called before torch is imported.

    Raises:
        SystemExit: there is no CUDA build of torch, or no C compiler.
    """
    site = next(
        (Path(path) for path in sys.path if (Path(path) / "torch" / "lib" / "libtorch_cuda.so").exists()),
        None,
    )
    if site is None:
        raise SystemExit(
            "this torch is no CUDA build: pip install torch===2.13.0 from PyPI (3 GB with its libraries)"
        )
    # The runtime's package lacks a header of the compiler's, which Triton's has.
    include = [
        next(site.glob("nvidia/*/include/cuda_runtime_api.h")).parent,
        site / "triton/backends/nvidia/include",
    ]
    loader = site / "torch" / "lib" / "libcaffe2_nvrtc.so"
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", loader], check=True, capture_output=True, text=True
    )
    driver_calls = {
        line.split()[-1].partition("@")[0] for line in listed.stdout.splitlines() if " cu" in line
    }
    failing = sorted(name for name in driver_calls if f" {name}(" not in DRIVER)
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "driver.c", Path(folder) / "libcuda.so.1"
        source.write_text(
            "\n".join([DRIVER % CAPABILITY, *(_NOT_FAILING.format(name=name) for name in failing)])
        )
        subprocess.run(
            [
                "cc",
                "-shared",
                "-fPIC",
                *(f"-I{path}" for path in include),
                "-Wl,-soname,libcuda.so.1",
                "-o",
                library,
                source,
            ],
            check=True,
        )
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


stand_in_driver()
sys.path[:0] = [str(ROOT / "tests")]

import torch  # noqa: E402

torch.cuda.is_available = lambda: False  # no context is made, and tensors are fake
torch.cuda.get_device_capability = lambda *device: CAPABILITY
torch.cuda.is_bf16_supported = lambda *given: True
torch.cuda.amp.common.amp_definitely_not_available = lambda: False

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from attending import ATTENDING, microbatch  # noqa: E402
from nasty import NASTY  # noqa: E402
from stagewright.graph import OperatorGraph  # noqa: E402
from stagewright.tracing import joint  # noqa: E402
from stagewright.tracing.arguments import decode, meta_of  # noqa: E402
from stagewright.tracing.attention import _run, _run_backward  # noqa: E402
from stagewright.tracing.cache import trace  # noqa: E402
from stagewright.tracing.models.build import fake_twin  # noqa: E402
from stagewright.tracing.models.reference import bundled_names  # noqa: E402
from stagewright.tracing.private import converting_in_place  # noqa: E402
from stagewright.tracing.rules import OperatorRules  # noqa: E402
from stagewright.tracing.trace import trace_module  # noqa: E402

joint.contents = lambda tensor: b""  # which nobody knows of a fake tensor on a GPU

Graphs = dict[str, OperatorGraph]
"""By the type of the device that traced."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=bundled_names(), help="bundled models")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--no-modules", action="store_true", help="leave out the modules of the tests")
    parser.add_argument("--json", action="store_true", help="a line of JSON per case")
    options = parser.parse_args()
    cases: dict[str, Any] = {
        f"{name}, dropout {dropout}": partial(bundled, name, dropout, options.dtype, options.length)
        for name in options.models
        for dropout in (0.0, 0.1)
    }
    if not options.no_modules:
        cases |= {
            f"nasty {name}": partial(of_module, lambda one=one: (one.model(), one.batch()))
            for name, one in NASTY.items()
        }
        cases |= {
            f"attention {name}": partial(
                of_module, lambda make=make: (make().bfloat16(), microbatch(torch.bfloat16))
            )
            for name, make in ATTENDING.items()
        }
    num_equal = num_layouts = 0
    for name, graphs_of in cases.items():
        start = time.perf_counter()
        try:
            outcome = compared(graphs_of())
        except Exception as error:  # one model must not hide the others
            outcome = {"equal": False, "error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        num_equal += outcome["equal"]
        num_layouts += outcome["equal"] and "layouts" not in outcome
        outcome = {"case": name, **outcome, "seconds": round(time.perf_counter() - start, 1)}
        print(json.dumps(outcome) if options.json else _line(outcome), flush=True)
    print(
        f"of {len(cases)} {num_equal} have equal names and operators, {num_layouts} equal layouts too "
        f"(torch {torch.__version__}, sm_%d%d)" % CAPABILITY
    )
    return int(num_equal < len(cases))


def bundled(name: str, dropout: float, dtype: str, length: int) -> Graphs:
    changes = {"dropout": dropout}
    return {
        device: trace(name, 1, length, dtype, changes, device=device, target="cuda", use_cache=False)
        for device in ("cpu", "cuda")
    }


def of_module(make: Callable[[], tuple[torch.nn.Module, dict[str, torch.Tensor]]]) -> Graphs:
    graphs: Graphs = {}
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model, batch = make()
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with converting_in_place():
            twin = fake_twin(model, mode)
            with mode, torch.device(device), autocast_on(device):
                twin.to(device)
                inputs = {key: mode.from_tensor(tensor).to(device) for key, tensor in batch.items()}
                graphs[device] = trace_module(twin, inputs, facts={"target": "cuda"})
    return graphs


@contextmanager
def autocast_on(device: str) -> Iterator[None]:
    """``autocast("cpu")`` of a module that was written for a CPU means `device`."""
    original = torch.autocast.__init__
    torch.autocast.__init__ = lambda self, kind, *args, **kwargs: original(self, device, *args, **kwargs)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autocast.__init__ = original


def compared(graphs: Graphs) -> dict[str, Any]:
    """Whether two graphs have equal names and operators, and where these or the layouts first differ."""
    planned, run = graphs["cpu"], graphs["cuda"]
    differs = _first_difference(_named(planned), _named(run)) or _wrong_kernel(run)
    layouts = None if differs else _first_difference(_layouts(planned), _layouts(run))
    outcome = {
        "equal": differs is None,
        "operators": len(run.forward_ids),
        "differs": differs,
        "layouts": layouts,
    }
    return {key: value for key, value in outcome.items() if value is not None}


def _named(graph: OperatorGraph) -> list[str]:
    return [
        f"{node.name if node.forward == node.id else ''} {node.op} {node.part.name}" for node in graph.nodes
    ]


def _layouts(graph: OperatorGraph) -> list[str]:
    makers = {value: node.op for node in graph.nodes for value in node.outputs}
    return [
        f"{makers.get(value.id, value.origin)} {value.meta} {value.meta.stride}" for value in graph.values
    ]


def _first_difference(planned: Sequence[str], run: Sequence[str]) -> str | None:
    pairs = zip_longest(planned, run, fillvalue="nothing")
    return next((f"planned {a}, on CUDA {b}" for a, b in pairs if a != b), None)


def _wrong_kernel(graph: OperatorGraph) -> str | None:
    """What is wrong with the kernels that attention has on the device: their arguments, or the layouts of their results."""
    rules = OperatorRules(FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"), "cuda")
    for node in {
        node.signature: node for node in graph.nodes if node.op.startswith("stagewright.attention")
    }.values():
        with rules.mode, torch.no_grad():
            tensors = {value: rules.fake(graph.values[value].meta) for value in node.inputs}
            results = KERNELS[node.op](*decode(node.args, tensors.__getitem__, rules.device))
        for value, result in zip(node.outputs, results, strict=True):
            if value is not None and meta_of(result) != graph.values[value].meta:
                return (
                    f"{node.op} declares {graph.values[value].meta}, and its kernel makes {meta_of(result)}"
                )
    return None


KERNELS = {"stagewright.attention.default": _run, "stagewright.attention_backward.default": _run_backward}


def _line(outcome: dict[str, Any]) -> str:
    verdict = "equal" if outcome["equal"] else outcome.get("error") or outcome["differs"]
    if "layouts" in outcome:
        verdict += f"; layouts differ: {outcome['layouts']}"
    return f"{outcome['case']:40} {outcome.get('operators', 0):6} operators {outcome['seconds']:7.1f} s  {verdict}"


if __name__ == "__main__":
    sys.exit(main())

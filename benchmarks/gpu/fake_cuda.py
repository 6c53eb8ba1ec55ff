"""Graphs traced for CUDA beside the plans' graphs of the same models: names and operators, without a GPU.

    python benchmarks/gpu/fake_cuda.py [--models gpt2 ...] [--dtype bfloat16] [--length 128] [--json]

Needs a CUDA build of torch (``pip install torch===2.13.0`` takes it from PyPI), the packages of requirements.lock, a C
compiler, and neither a GPU nor a driver. A library of a few lines stands in for the driver, so that torch finds a device of
`CAPABILITY`; all tensors are fake, and nothing is computed.

Every bundled model, with and without dropout, and every module of tests/nasty.py is traced twice for GPUs: by the CPU, as
`stagewright plan` does on a laptop, and by CUDA, as `stagewright run` does on a GPU. Compared are the names and operators
of the forward, which plans name, the operators of the backward, and the layouts of all values. Exits with 1 if any differ.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
import time
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
    site = next((Path(path) for path in sys.path if (Path(path) / "torch" / "lib" / "libtorch_cuda.so").exists()), None)
    if site is None:
        raise SystemExit("this torch is no CUDA build: pip install torch===2.13.0 from PyPI (3 GB with its libraries)")
    # The runtime's package lacks a header of the compiler's, which Triton's has.
    include = [next(site.glob("nvidia/*/include/cuda_runtime_api.h")).parent, site / "triton/backends/nvidia/include"]
    loader = site / "torch" / "lib" / "libcaffe2_nvrtc.so"
    listed = subprocess.run(["nm", "-D", "--undefined-only", loader], check=True, capture_output=True, text=True)
    driver_calls = {line.split()[-1].partition("@")[0] for line in listed.stdout.splitlines() if " cu" in line}
    failing = sorted(name for name in driver_calls if f" {name}(" not in DRIVER)
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "driver.c", Path(folder) / "libcuda.so.1"
        source.write_text("\n".join([DRIVER % CAPABILITY, *(_NOT_FAILING.format(name=name) for name in failing)]))
        subprocess.run(
            ["cc", "-shared", "-fPIC", *(f"-I{path}" for path in include), "-Wl,-soname,libcuda.so.1", "-o", library, source],
            check=True,
        )
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


stand_in_driver()

import torch  # noqa: E402

torch.cuda.is_available = lambda: False

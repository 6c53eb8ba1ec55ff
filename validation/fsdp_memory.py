"""Whether what PyTorch's FSDP trained without recomputation on 80 GB is predicted to fit there.

MPT models of llm-foundry, as GPT-2 with the same widths: bf16, learned positions, fused attention, no dropout. What their
runs reserved was not published; that they ran is known, so a prediction above the device's memory is too high.
Ignores: that MPT has no biases, and that llm-foundry's fused loss makes a gradient in bf16 from bf16 logits, where three
copies of the logits in float32 are counted here; with the former every run is predicted to fit.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median

from stagewright import estimate
from stagewright.cluster import load_cluster
from stagewright.planning.job import Job
from stagewright.tracing.models.reference import resolve

DATA = Path(__file__).parent / "data" / "fsdp"
DEVICES = {"h100_80gb": "h100", "a100_80gb": "a100-80"}
LEVELS = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2}
GIB = 2**30


@dataclass(frozen=True)
class Row:
    """One run: bytes predicted, what the allocator may reserve on its device, seconds predicted and measured."""

    label: str
    allocated: int
    reserved: int
    capacity: int
    num_units: int
    seconds: float
    measured_seconds: float

    @property
    def share(self) -> float:
        """The part of the device that is predicted."""
        return self.reserved / self.capacity


def rows(folder: Path = DATA, only: str = "") -> Iterator[Row]:
    """Of each run without recomputation on 80 GB, those whose label begins with `only`."""
    seen: set[str] = set()
    with (folder / "mpt_fsdp_llmfoundry.csv").open(newline="", encoding="utf-8") as file:
        for record in csv.DictReader(file):
            if record.get("act_ckpt_full_block") == "True" or record["gpu"] not in DEVICES:
                continue
            label = (
                f"{record['model']} {record['seq_len']} tokens x {record['micro_batch_per_gpu']} x {record['grad_accum']} "
                f"{record['n_gpus']}x-{DEVICES[record['gpu']]}"
            )
            if record["precision"] != "amp_fp8" and label not in seen and label.startswith(only):
                seen.add(label)
                yield row(label, record)


def row(label: str, record: dict[str, str]) -> Row:
    """What a run is predicted to take."""
    cluster = load_cluster(f"{record['n_gpus']}x-{DEVICES[record['gpu']]}")
    length, microbatch = int(record["seq_len"]), int(record["micro_batch_per_gpu"])
    settings = {
        "n_embd": int(record["hidden"]), "n_layer": int(record["layers"]), "n_head": int(record["heads"]),
        "vocab_size": int(record["vocab"]), "n_positions": length, "activation_function": "gelu",
        "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    }  # fmt: skip
    batch = cluster.num_devices * microbatch * int(record["grad_accum"])
    job = Job(global_batch=batch, sequence_length=length, dtype="bf16")
    found = estimate(
        resolve("gpt2", settings), cluster, job, dp=cluster.num_devices, pp=1, microbatch=microbatch,
        zero=LEVELS[record["fsdp_strategy"]],
    )  # fmt: skip
    rank = found.predictions.ranks[0]
    capacity = cluster.device.memory_bytes
    return Row(
        label, rank.allocated_peak_bytes, rank.reserved_peak_bytes, capacity, found.num_stages,
        found.predictions.step_seconds, float(record["step_time_s"]),
    )  # fmt: skip


def main() -> None:
    """Print every run and which are predicted not to fit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA, help="Folder of a CSV with the same columns.")
    parser.add_argument("--only", default="", help="Runs whose label begins so.")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found: list[Row] = []
    for one in rows(given.data, given.only):
        found.append(one)
        if not given.json:
            beyond = "  BEYOND" if one.share > 1 else ""
            print(
                f"{one.label:52} allocated {one.allocated / GIB:6.1f} reserved {one.reserved / GIB:6.1f} of "
                f"{one.capacity / GIB:.1f} GiB ({one.share:4.0%}), {one.num_units:2} units, step {one.seconds:6.2f} s "
                f"(measured {one.measured_seconds:6.2f}){beyond}",
                flush=True,
            )
    if given.json:
        print(json.dumps([asdict(one) | {"share": one.share} for one in found], indent=1))
        return
    shares = [one.share for one in found]
    beyond = [one.label for one in found if one.share > 1]
    print(
        f"{len(found)} runs: predicted {mean(shares):.0%} of the device in the mean, {median(shares):.0%} median, "
        f"{max(shares):.0%} worst; {len(beyond)} beyond it"
    )


if __name__ == "__main__":
    main()

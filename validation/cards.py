"""Verification cards: what is claimed of a set of measurements, how to check it, what came out, and what was not checked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Card:
    """What a person says of a set; the rest of a card is what its script prints."""

    title: str
    claim: str
    unchecked: str


CARDS: dict[str, dict[str, Card]] = {
    "other_pipelines": {
        "nanotron_bench_cluster.csv": Card(
            "nanotron: a Llama of 1.1 B on 8 to 64 H100",
            "`--runtime nanotron` predicts step times within 10 % and allocated peaks within 4 %, and orders the "
            "configurations of one node as they ran. With pp 8 the slowest stage is the head alone: 50,257 logits, an "
            "odd number, leave cuBLAS kernels of two generations before Hopper.",
            "Which tensors its compiled activation keeps (18 of the hidden width a layer are predicted, 19 measured). "
            "Why a microbatch of 16 replicas takes 45 ms longer than predicted. Every row was seen when the rate of "
            "odd matmuls, a message's 0.5 ms and the bandwidth of a pair of GPUs between nodes were chosen.",
        ),
        "torchtitan_autopartition_3090.csv": Card(
            "torchtitan's pipelines on four RTX 3090",
            "`--runtime torchtitan-pipeline` predicts step times of 1F1B, interleaved 1F1B and interleaved zero-bubble"
            " within 12 %, and by what a balanced cut is faster than torchtitan's own within 4 points on average.",
            "That it computes in float32 (its files cast nothing). The machine's processor: 50 µs an operator and half"
            " the rate of attention are chosen with rows at hidden sizes of 256 and 1,024. One pair of them (256, 12 "
            "layers) gains nothing where 20 % is predicted.",
        ),
        "flagperf_pipelines.csv": Card(
            "FlagPerf: memory of every stage, Megatron and PaddlePaddle",
            "Nothing is claimed yet: memory by stage is 17 % too low for PaddlePaddle, the only framework that "
            "publishes it. Each of its column-parallel matmuls keeps a copy of its input, which is three more tensors "
            "of the hidden width a layer than a graph that shares them; its order over the stages is right.",
            "PaddlePaddle's allocator and what `nvidia-smi` shows beside it. How tokens were routed in the mixtures. "
            "FlagScale's kernels, which are taken to be those of Megatron-LM.",
        ),
        "roundpipe_consumer_gpus.csv": Card(
            "Megatron on eight RTX 4090 over PCIe and on eight A800",
            "Step times are predicted within 15 %, and that three runs ran out of memory. Tensor parallelism over PCIe "
            "without peer-to-peer is predicted to take 14 to 16 times as long as a pipeline, and took 18 times.",
            "How layers were cut into stages and which were recomputed, which is not told. The 2.7 GB/s that eight "
            "cards attain around a ring are chosen with two of these rows. RoundPipe's and Mobius' own runs.",
        ),
        "ccl_bench_training.csv": Card(
            "torchtitan on A100 with 40 GB: what fits",
            "All runs of Llama-3.1-8B that fitted are predicted to fit.",
            "Times, which are of a network far below its rating; volumes of collectives, which no command prints; "
            "DeepSeek under tensor parallelism, which no bundled model is sharded for.",
        ),
        "issue_thread_points.csv": Card(
            "Single points from threads",
            "Two steps of Llama-3.2-1B on eight RTX 3090 are predicted within 30 %.",
            "The other points, which do not tell model, batch or devices.",
        ),
    },
    "schedule_reference": {
        "makespans": Card(
            "Makespans by RoundPipe's simulator",
            "1F1B, interleaved 1F1B and breadth-first order take what another simulator says, to 0.02 %, for the same "
            "partition, times of layers and transfers.",
            "In which order RoundPipe's own dispatcher takes microbatches: two of its three makespans are 2 and 4 % "
            "shorter than parts dealt out in turn.",
        ),
        "layers": Card(
            "Layers of dense models on an RTX 4090",
            "Forward and backward of a layer of Llama-3-8B and Qwen3-32B, compiled, are predicted within 10 %.",
            "The size of a microbatch (6,144 tokens), which follows from the times of transfers. Layers of experts, "
            "which are 80 % slower in their backward than dense matmuls of the same FLOP.",
        ),
    },
}
"""Cards by script and set."""


def cards(script: str, printed: dict[str, Any], revision: str, day: str) -> Iterator[str]:
    """Yield the lines of the cards of what `script` printed with ``--json``."""
    for name, card in CARDS[script].items():
        if name not in printed:
            continue
        document = printed[name]
        only = f" --only {name}" if name.endswith(".csv") else ""
        values = "; ".join(_values(document)) or "nothing judged"
        yield f"\n### {card.title}\n\n| | |\n| --- | --- |"
        yield f"| claim | {card.claim} |"
        yield f"| command | `python validation/{script}.py{only}` |"
        yield f"| revision | {revision} |"
        yield f"| measured | {values} |"
        yield f"| date | {day} |"
        left_out = document.get("left_out", {})
        if left_out:
            reasons = [f"{count} for '{reason.replace('|', '/')}'" for reason, count in left_out.items()]
            yield f"| rows left out | {'; '.join(reasons)} |"
        yield f"| not checked | {card.unchecked} |"


def _values(document: dict[str, Any]) -> Iterator[str]:
    figures = {"": document} if "all" in document else document
    for figure, value in figures.items():
        name = f"{figure}: " if figure else ""
        if "all" in value:
            whole = value["all"]
            yield (
                f"{name}mean {whole['mean']:.1%}, bias {whole['bias']:+.1%}, worst {whole['worst_error']:+.0%} of "
                f"{whole['num_rows']} (bar {value['bar']:.0%})"
            )
        elif "wrong" in value:
            yield f"{name}{value['wrong']} of {value['rows']} against the prediction"

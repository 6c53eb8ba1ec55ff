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
            "Memory by stage of PaddlePaddle, the only framework that publishes it, is predicted within 6 % on average, "
            "and its order over the stages is right: each of its column-parallel matmuls keeps a copy of its input.",
            "PaddlePaddle's allocator and what `nvidia-smi` shows beside it, 1 to 2 GiB of every stage. That its backward "
            "sums the gradient of every copy by itself. How tokens were routed in the mixtures. "
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
        "ccl_search_trials.csv": Card(
            "A search over Megatron's parallelism on A100 with 40 GB: what fits",
            "All trials of Llama-3.1-8B that ended well are predicted to fit.",
            "Times, which are of a network far below its rating; why other trials failed, which is not told. That "
            "optimizers are sharded over replicas.",
        ),
        "automodel_goldens.csv": Card(
            "NeMo Automodel: fine-tuning Llama-3.2-1B on eight H100",
            "The allocated peak is predicted within 10 %. The step took three times as long as predicted.",
            "How many tokens of a batch were padding, beside the 177 a sample that are counted.",
        ),
        "issue_thread_points.csv": Card(
            "Single points from threads",
            "Two steps of Llama-3.2-1B on eight RTX 3090 are predicted within 30 %.",
            "The other points, which do not tell model, batch or devices.",
        ),
    },
    "pipelines": {
        "megatron_functional_tests.csv": Card(
            "Goldens of Megatron-LM's functional tests",
            "The allocated peak of the last rank is predicted within 2 % on average, the step of models "
            "with a hidden size of 2,048 and more within 12 %.",
            "Ranks other than the last; resident bytes; times of T5; Mamba, multi-token prediction and the "
            "other parts named above. Of the peaks above what a plan would leave free three are of images that ran "
            "without fused attention and do not say so, seven of experts and BERT, 5 to 8 % above. Of images with long-term "
            "support, those whose recordings kept every fifth step are taken to have had none. The rates of attention whose "
            "additions have a fixed order, which no option asks for, are given to the device; they were chosen with the "
            "three timed rows in view.",
        ),
        "mlperf_training.csv": Card(
            "Llama 3.1 405B in MLPerf Training",
            "A step in fp8 is predicted within 5 % on H100 and GB200, and so are its seconds per microbatch"
            " and those that do not depend on them.",
            "nvfp4, LoRA of Llama 2 70B, Llama 3.1 8B, GPT-3; memory, which is not published. The seconds "
            "of every step were fitted on the three rows on H100, the rate of fp8 matmuls on those on GB200"
            " among others.",
        ),
        "megatron_bridge_model_cards.csv": Card(
            "Megatron-Bridge's verified runs",
            "Two steps of Qwen3-8B on 16 H100 are predicted within 5 %.",
            "DeepSeek-V3, of which it is not told how layers were cut; runs that do not tell batch and degrees; long "
            "sequences, adapters.",
        ),
        "dgxc_benchmarking.csv": Card(
            "DGX Cloud recipes",
            "Steps of pipelines are predicted within 10 % in bf16 and 12 % in fp8.",
            "JAX, adapters, Llama 4, Nemotron-H and DeepSeek-V3; memory, which is not published. Nothing "
            "was fitted on these rows; that gathers are in eight bits was read from Transformer Engine's code with them in "
            "view. In bf16 runs without tensor parallelism are 10 % too slow, those with 2, 4 and 8 ranks of it 8, 2 and "
            "11 %, so that something other than collectives takes too long.",
        ),
    },
    "differences": {
        "all changes": Card(
            "What a change gains",
            "Of changes that were measured the sign is predicted right in 95 %, the size within 4 points on average: "
            "schedules, degrees, eight bits, recomputation. Compilation and asynchronous tensor parallelism are 4 points "
            "off, tensor parallelism of Llama 3 70B in eight bits 19. Of 653 changes between steps that vTrain's simulator "
            "composed from traced layers, which are no measurements (`pytest tests/validation/test_composed_steps.py`), "
            "94 % have the right sign, and sizes are 11.5 points off.",
            "Microbatch sizes alone, and tensor parallelism in place of a pipeline: no published pair of runs differs in "
            "nothing else. Recomputation of single modules, optimizers on the host and CUDA graphs, which no "
            "configuration describes or whose runs do not state their batch.",
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
"""Cards by script and set, of scripts whose sets have one each."""

UNCHECKED = (
    "Our own runtime on several GPUs: neither its times nor its memory. Ranks that shared one H100 "
    "trained as on CPUs, and their allocated peaks were as predicted; seconds of stages on a GPU were "
    "not measured.",
    "What PyTorch's allocator reserves with expandable segments, which our ranks on NVIDIA's GPUs use: "
    "its model follows the source and has not been compared with a GPU.",
    "Frozen weights in 4 and 8 bits on a GPU: dequantising is predicted as memory traffic.",
    "Weights streamed from the host to a GPU: copies take the link's rate, or the host memory's where all cards read "
    "at once; offloaded activations on the same link are left out.",
    "Clusters with unequal cards, hosts that keep optimizer state, offload over PCIe: only parts of them were measured.",
)
"""What no measurement has judged, most important first."""

WHOLE: dict[str, Card] = {
    "products": Card(
        "Matmuls by shape",
        "Seconds of matmuls in 16 bits on A100, H100 and B200 are predicted within 5 % on average, of "
        "large ones within 4 %.",
        "Clocks under a sustained load: the measurements are of seconds at boost clocks. Other types of numbers.",
    ),
    "square_matmuls": Card(
        "Large square matmuls on cards of many kinds",
        "The best matmul of a card is predicted within 8 % on average where no row of it was seen.",
        "Small and oblong matmuls on these cards. Users submitted the rows; repeats on one kind of card "
        "differ by a few per cent, on Jetson Thor and RTX PRO 6000 by a quarter. Six kinds were fitted, "
        "on every second of their rows; RTX 3080, 5080, 5070 Ti and 5060 Ti have the figures of the RTX "
        "3090 and 5090, and saw no row.",
    ),
    "attention": Card(
        "Fused attention by shape",
        "Seconds of fused attention are predicted within 8 % on average, with the rate of each kernel.",
        "Training kernels of consumer cards. Each kernel has a rate beside those that devices are "
        "described with, as a runtime's `attention_rate`; without these rates errors are those of the "
        "second set. Three passes over keys and values stand for the cache that serving systems write.",
    ),
    "experts": Card(
        "Matmuls of experts",
        "Grouped matmuls are predicted within 5 %, layers of experts within 13 % on average.",
        "Backward passes of serving systems' layers, which have three constants of the script for what "
        "surrounds their matmuls.",
    ),
    "operators": Card(
        "Operators of Megatron's GPT on four GPUs",
        "Operators are predicted within the errors below on V100, L4, A10G and A100.",
        "Anything after Ampere and Ada; attention that is not stored.",
    ),
    "collectives": Card(
        "Collectives",
        "Seconds of NCCL's collectives by size are predicted within the errors below, on the networks of the catalog.",
        "Networks other than those fitted. Messages around a ring are those of one communicator of many "
        "ranks, which no plan of ours asks for: stages that send to each other have one of two ranks.",
    ),
    "dispatch": Card(
        "Tokens to experts and back",
        "Seconds of exchanges by DeepEP are predicted within the errors below.",
        "Unbalanced routing. Constants were fitted on another draw of halves; a short fit on this one "
        "finds nearly the same.",
    ),
    "h100_eager": Card(
        "Eager training steps on one H100",
        "Steps of plain PyTorch are predicted within 8 %, allocated peaks within 1 % and reserved ones within 3 % on "
        "average.",
        "Scratch memory of convolution libraries, with which reserved peaks of vision models come out low.",
    ),
    "footprints": Card(
        "Memory of Megatron and of tuned stages",
        "Memory of stages is predicted within the errors below.",
        "Versions since 2024.",
    ),
    "runtimes": Card(
        "Training steps under other runtimes",
        "Steps under eight runtimes are predicted within 2 to 14 % on average, a set for each figure below.",
        "Rows whose configuration is not told whole, which are counted below with the reason. BLOOM's fp16 is given the "
        "catalog's rate in bf16, and its network one link of four, chosen with its rows in view; a user would write both in "
        "cluster.toml. Which matmuls torch's compiler overlaps was read from its code with torchtitan's rows in view.",
    ),
}
"""Cards of scripts that are one set, above the table of their figures."""


def table(card: Card, command: str, revision: str, day: str) -> Iterator[str]:
    """Yield the lines of a card without its figures."""
    yield "| | |\n| --- | --- |"
    yield f"| claim | {card.claim} |"
    yield f"| command | `{command}` |"
    yield f"| revision | {revision} |"
    yield f"| date | {day} |"
    yield f"| not checked | {card.unchecked} |"


def cards(script: str, printed: dict[str, Any], revision: str, day: str) -> Iterator[str]:
    """Yield the lines of the cards of what `script` printed with ``--json``."""
    for name, card in CARDS[script].items():
        if name not in printed:
            continue
        document = printed[name]
        only = f" --only {name}" if name.endswith(".csv") else ""
        is_sum = "pairs" in document  # over all that was printed
        values = "; ".join(_values(printed if is_sum else document)) or "nothing judged"
        yield f"\n### {card.title}\n"
        yield from table(card, f"python validation/{script}.py{only}", revision, day)
        yield f"| measured | {values} |"
        left_out = document.get("left_out", {})
        if left_out:
            reasons = [f"{count}: {reason.replace('|', '/')}" for reason, count in left_out.items()]
            yield f"| rows left out | {'; '.join(reasons)} |"


def _values(document: dict[str, Any]) -> Iterator[str]:
    figures = {"": document} if "all" in document or "pairs" in document else document
    for figure, value in figures.items():
        name = f"{figure}: " if figure else ""
        if "all" in value:
            whole = value["all"]
            yield (
                f"{name}mean {whole['mean']:.1%}, bias {whole['bias']:+.1%}, worst {whole['worst_error']:+.0%} of "
                f"{whole['num_rows']} (bar {value['bar']:.0%})"
            )
        elif "pairs" in value:
            yield (
                f"{name}sign right in {value['right']} of {value['clear']} changes, off by {value['mean_points']:.1f} "
                f"points on average over {value['pairs']} pairs"
            )
        elif "wrong" in value:
            yield f"{name}{value['wrong']} of {value['rows']} against the prediction"

"""What a runtime's fused kernels save: bytes moved, launches, and what the host spends on each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from stagewright.errors import named
from stagewright.estimation.megatron.stack import MEGATRON_STACKS, MegatronStack

Transfers = Literal["sends block", "both block", "overlapped"]
Gathers = Literal["none", "backward", "all"]
Dispatch = Literal["every copy", "once per node"]


@dataclass(frozen=True)
class Fusion:
    """Costs of one runtime's kernels that follow from how it fuses, not from the device.

    * `softmax_forward`: times attention's scores are moved by scale, mask and softmax.
    * `softmax_backward`: the same for their gradients, without dropout.
    * `rotary`: times queries, keys and values are moved to turn the first two.
    * `loss_forward`, `loss_backward`: bytes moved per logit.
    * `adding_bytes`: bytes moved per weight and microbatch to add its gradient up; 0 where the product does it.
    * `cast_bytes`: bytes moved per element of a product's input, and of its output's gradient, for copies in eight bits.
    * `optimizer_bytes`: bytes moved per parameter in a step: unscaling, norm, update, new half-precision copy.
    * `latent_copies`: times queries and keys are moved to join their rotary parts (MLA).
    * `routing`: times the router's logits are moved.
    * `routing_wait_s`: what a mixture keeps a device waiting in either direction: for hosts that read how many tokens go
      where, and launch the small kernels which sort them; 0 where a graph of kernels holds them, or experts have a fixed
      capacity that their inputs are padded to.
    * `hidden_gathers`: sequence-parallel collectives that run beside products: none, those of the backward that need no
      product in front of them, or all, in parts with the products they belong to.
    * `dispatch`: what travels to the experts: a copy of a token for each of them, or one to each node that has any, which
      hands it on inside.
    * `hides_dispatch`: whether tokens travel beside the passes of another microbatch. Such a runtime keeps one more
      microbatch alive, which `footprints` does not count.
    * `dispatch_share`: what hidden dispatches take of a device's multiprocessors meanwhile. DeepSeek-V3's kernels hold 20
      of the 132 of an H800 (arXiv 2412.19437, section 3.2.2).
    * `expert_streams`: products of experts that run beside each other (Transformer Engine's grouped layers).
    * `transfers`: whether a rank stands still while it sends, while it sends or receives, or not at all (overlapped).
    * `scatters_boundaries`: whether tensor-parallel devices send a part each between nodes and gather behind.
    * `scattered_wait_s`: what such a boundary waits between nodes beside its transfer.
    * `kernel_host_s`: what the host spends on a kernel, with the operators and autograd's work around it.
    * `peer_host_s`: what each further member of a collective adds while hosts are the bound: all wait for the slowest.
    * `collective_wait_s`: what a collective keeps a device waiting for the slowest of its members, whatever its size.
    * `product_gap_s`: idle time of the device around a product, beyond its ramp-up.
    * `pass_host_s`: what the pipeline's engine spends on a microbatch and pass.
    * `step_host_s`: once per step: data, learning rate, losses, the optimizer's bookkeeping.
    """

    name: str
    softmax_forward: float
    rotary: float
    loss_forward: float
    loss_backward: float
    adding_bytes: float
    optimizer_bytes: float
    latent_copies: float
    routing: float
    hidden_gathers: Gathers
    scatters_boundaries: bool
    kernel_host_s: float
    peer_host_s: float
    product_gap_s: float
    pass_host_s: float
    step_host_s: float
    scattered_wait_s: float = 0.0
    softmax_backward: float = 3
    collective_wait_s: float = 0.0
    cast_bytes: float = 0.0
    transfers: Transfers = "sends block"
    dispatch: Dispatch = "every copy"
    hides_dispatch: bool = False
    dispatch_share: float = 20 / 132
    expert_streams: int = 4
    routing_wait_s: float = 0.0


# Megatron-Core 0.14 and Transformer Engine 2.11: norms with their products, gated activations, rotary embedding and
# vocabulary-parallel cross entropy are single kernels; weight gradients add up in their products, which read and
# write fp32. Fitted on half of the rows of `validation/megatron_core.py`: `product_gap_s`, `step_host_s`; on the four
# rows of `validation/data/throughput/megatron_moe_zoo.csv`: `routing_wait_s`.
_CORE = Fusion(
    "megatron-core+te",
    softmax_forward=2,
    rotary=2,
    loss_forward=24,
    loss_backward=12,
    adding_bytes=6,
    optimizer_bytes=46,
    latent_copies=2,
    routing=8,
    hidden_gathers="none",
    scatters_boundaries=True,
    kernel_host_s=1e-5,
    peer_host_s=5e-6,
    product_gap_s=4.9e-5,
    pass_host_s=2e-4,
    step_host_s=1.5e-2,
    routing_wait_s=1.7e-3,
)

FUSIONS = {
    fusion.name: fusion
    for fusion in (
        # Source of the structure: Megatron-LM 2.x and 3.0: one kernel for scale, mask and softmax; fp16 gradients that
        # autograd adds up; logits cast to fp32, maximum, difference, exponential, sum and division one by one.
        # Fitted on a sixth of the single-node and half of the multi-node runs of `validation/megatron_time.py`:
        # `softmax_forward` and `loss_forward` (their kernels are not fused and compute in fp32), and the last six but
        # `step_host_s`.
        Fusion(
            "megatron-deepspeed",
            softmax_forward=6.3,
            rotary=4,
            loss_forward=62,
            loss_backward=35,
            adding_bytes=6,
            optimizer_bytes=52,
            latent_copies=2,
            routing=4,
            hidden_gathers="none",
            scatters_boundaries=False,
            kernel_host_s=7.1e-5,
            peer_host_s=2.1e-5,
            product_gap_s=5.4e-5,
            pass_host_s=6.8e-4,
            step_host_s=1e-3,
            collective_wait_s=7e-5,
        ),
        # The fork of the zero-bubble authors: its products add gradients up. Fitted on a third of the rows of
        # `validation/zero_bubble_runs.py` and the order of schedules in all: the losses, `peer_host_s`, `pass_host_s` and
        # `product_gap_s`; the rest as above.
        Fusion(
            "zero-bubble",
            softmax_forward=6.7,
            rotary=4,
            loss_forward=9,
            loss_backward=5.3,
            adding_bytes=0,
            optimizer_bytes=52,
            latent_copies=2,
            routing=4,
            hidden_gathers="none",
            scatters_boundaries=False,
            kernel_host_s=7e-5,
            peer_host_s=6e-5,
            product_gap_s=1.05e-4,
            pass_host_s=2e-4,
            step_host_s=1e-3,
        ),
        # Megatron-LM 3.0 on its authors' cluster: one kernel for the softmax. Fitted: `product_gap_s`.
        Fusion(
            "megatron-lm",
            softmax_forward=2,
            rotary=4,
            loss_forward=40,
            loss_backward=16,
            adding_bytes=6,
            optimizer_bytes=46,
            latent_copies=2,
            routing=4,
            hidden_gathers="none",
            scatters_boundaries=True,
            kernel_host_s=1e-5,
            peer_host_s=5e-6,
            product_gap_s=3e-5,
            pass_host_s=2e-4,
            step_host_s=1e-2,
        ),
        _CORE,
        # The same with DeepEP's or HybridEP's kernels between the experts' devices.
        replace(_CORE, name="megatron-core+te+deepep", dispatch="once per node"),
        # DeepSpeed's pipeline engine over Megatron-LM's layers in TF32: every send and receive stands for itself.
        # Fitted on the layer profile and the runs of `validation/sailor.py`: both softmaxes, the losses and what hosts take.
        Fusion(
            "deepspeed-tf32",
            softmax_forward=6,
            rotary=4,
            loss_forward=40,
            loss_backward=37,
            adding_bytes=12,
            optimizer_bytes=40,
            latent_copies=2,
            routing=4,
            hidden_gathers="none",
            scatters_boundaries=False,
            kernel_host_s=5.9e-5,
            peer_host_s=1e-5,
            product_gap_s=2e-5,
            pass_host_s=3e-4,
            step_host_s=1e-2,
            softmax_backward=21,
            transfers="both block",
        ),
    )
}


def find_fusion(name: str) -> Fusion:
    """The policy called `name`.

    Raises:
        InputError: there is none; names the nearest.
    """
    return named("kernels known of stack", name, FUSIONS)


def timed_stack(name: str) -> tuple[MegatronStack, Fusion]:
    """What the runtime called `name` keeps, and its kernels.

    Raises:
        InputError: one of them is not known; names the nearest of those whose both are.
    """
    timed = {one: (stack, FUSIONS[one]) for one, stack in MEGATRON_STACKS.items() if one in FUSIONS}
    return named("times are known of stack", name, timed)

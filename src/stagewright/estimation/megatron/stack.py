"""What Megatron's runtimes keep: one record per stack."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stagewright.errors import named


@dataclass(frozen=True)
class MegatronStack:
    """How one runtime executes a decoder with Adam.

    * `flash_attention`: attention's scores are never stored; False: softmax and dropout keep theirs.
    * `fp32_gradients`: gradients are added up in fp32 buffers, else in half precision.
    * `rotates_copies`: rotary embedding makes new queries and keys while values stay part of the joint projection.
    * `logit_bytes`: per element of the logits, what is alive at the height of the loss.
    * `saved_logit_bytes`: of these, what stays until the backward.
    * `workspace_bytes`: the matrix library's, in front of everything else.
    * `element_bytes`: of an element of parameters and activations.
    * `optimizer_bytes`: per parameter: an fp32 master copy where parameters are halves, and two moments.
    * `engine_bytes`: per parameter, what the training engine holds besides: flat copies, buckets, temporaries of its step.
    * `dispatch_tokens`: tokens that the buffers between devices with experts hold.
    * `computes_in`: the precision of products; None: the half precision of the device.
    """

    name: str
    flash_attention: bool
    fp32_gradients: bool
    rotates_copies: bool
    logit_bytes: int
    saved_logit_bytes: int
    workspace_bytes: int
    element_bytes: int = 2
    optimizer_bytes: int = 12
    engine_bytes: int = 0
    computes_in: str | None = None
    dispatch_tokens: int = 0

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Precisions of jobs that it trains."""
        return ("bf16", "fp16") if self.element_bytes == 2 else ("tf32", "fp32")

    def gradient_element_bytes(self, in_fp32: bool | None) -> int:
        """Bytes of an element of gradients as they are added up; None: as the stack does it."""
        return 4 if (self.fp32_gradients if in_fp32 is None else in_fp32) else self.element_bytes


# Fused norms with their products, fused gated activations, fused vocabulary-parallel cross entropy: logits in
# half precision, one fp32 copy that becomes the softmax, and gradients in half precision.
# Source: Megatron-Core 0.14 and Transformer Engine 2.11, modules named in each step of `layer.py`.
_CORE = MegatronStack(
    "megatron-core+te",
    flash_attention=True,
    fp32_gradients=True,
    rotates_copies=True,
    logit_bytes=8,
    saved_logit_bytes=6,
    workspace_bytes=2**25,
)

MEGATRON_STACKS = {
    stack.name: stack
    for stack in (
        _CORE,
        # Source: DeepEP's configuration for 16 to 32 devices: ten channels, each with 288 tokens from every one of eight
        # neighbours and twice 128 from every one of eight nodes.
        replace(_CORE, name="megatron-core+te+deepep", dispatch_tokens=10 * (8 * 288 + 2 * 8 * 128)),
        # Source: Korthikanti et al. 2022 (arXiv 2205.05198), sections 4 and 5; Megatron-LM's vocabulary-parallel cross
        # entropy: fp16 logits, their fp32 copy, and its exponentials, which are what is saved.
        MegatronStack(
            "megatron-deepspeed",
            flash_attention=False,
            fp32_gradients=False,
            rotates_copies=False,
            logit_bytes=10,
            saved_logit_bytes=4,
            workspace_bytes=0,
        ),
        # Source: Zhu et al. 2025, "Mist" (EuroSys), whose models use FlashAttention's kernels: the loss overwrites its
        # logits with their gradients, beside which the head's product has its own.
        MegatronStack(
            "mist",
            flash_attention=True,
            fp32_gradients=False,
            rotates_copies=False,
            logit_bytes=4,
            saved_logit_bytes=2,
            workspace_bytes=0,
        ),
        # DeepSpeed's pipeline over Megatron-LM's layers without half precision: fp32 values, products in TF32, logits whose
        # exponentials are saved. Source: the runs published with Sailor (SOSP'25): one forward layer of OPT-350M at width 1
        # does 78 TFLOP/s, above what GH200 reaches without TF32.
        MegatronStack(
            "deepspeed-tf32",
            flash_attention=False,
            fp32_gradients=True,
            rotates_copies=False,
            logit_bytes=12,
            saved_logit_bytes=4,
            workspace_bytes=0,
            element_bytes=4,
            optimizer_bytes=8,
            engine_bytes=29,  # fitted on the runs of `validation/sailor.py`
            computes_in="tf32",
        ),
    )
}


def find_megatron_stack(name: str) -> MegatronStack:
    """The stack called `name`.

    Raises:
        InputError: there is none; names the nearest.

    >>> find_megatron_stack("megatron-core+te").flash_attention
    True
    """
    return named("stack", name, MEGATRON_STACKS)

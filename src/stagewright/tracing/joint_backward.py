"""The backward half of the joint graph, built the way autograd would run it.

Forward operators come in reverse order, each contributing to the cotangents of its arguments; a cotangent that has arrived
before is the first addend. Because every backward operator is made for one forward operator, a cut between any two forward
operators also cuts the backward.
"""

from __future__ import annotations

from collections.abc import Mapping

from stagewright.errors import TraceError
from stagewright.graph import Node, Origin, Part, Ref, TensorMeta, renumbered
from stagewright.tracing.draft import Draft
from stagewright.tracing.model_errors import first_line
from stagewright.tracing.recipes import BackwardRecipe, Step
from stagewright.tracing.rules import Call, Rules

_ADD = "aten.add.Tensor"


class BackwardPass:
    """Adds the backward of what a draft has, whose nodes are those of `calls`.

    * `gradients`: of parameters and derived values, as values of their own;
    * `contributions`: to each of them, as (forward node, value);
    * `seed`: the cotangent of the loss.
    """

    def __init__(self, draft: Draft, calls: Mapping[int, Call], rules: Rules) -> None:
        self.draft = draft
        self.calls = calls
        self.rules = rules
        self.cotangent: dict[int, int] = {}
        self.gradients: dict[int, int] = {}
        self.contributions: dict[int, list[tuple[int, int]]] = {}
        self.seed = -1

    def run(self, loss: int) -> None:
        """From the value `loss`; raises `TraceError` as `build_joint` does."""
        value = self.draft.values[loss]
        if not value.needs_grad:
            raise TraceError(
                "the loss depends on no parameter that requires a gradient: there is nothing to train"
            )
        self.seed = self.cotangent[loss] = self.draft.add_value(value.meta, Origin.SEED, "seed")
        forward = tuple(self.draft.nodes)
        for part in (Part.FORWARD, Part.DERIVED):
            for node in reversed(forward):
                if node.part is part:
                    self._go_back(node)

    def _go_back(self, node: Node) -> None:
        """What `node` contributes to the cotangents of its arguments."""
        table = self.gradients if node.part is Part.DERIVED else self.cotangent
        seeds = {
            index: table[output]
            for index, output in enumerate(node.outputs)
            if output is not None and output in table
        }
        wanted = [index for index, ref in enumerate(node.inputs) if self._wants(node, ref)]
        if not seeds or not wanted:
            return
        weights = tuple(index for index in wanted if self.draft.values[node.inputs[index]].parameter >= 0)
        activations = tuple(index for index in wanted if index not in weights)
        recipe = self._recipe(node, activations, weights, seeds)
        given = (*node.inputs, *node.outputs, *seeds.values())
        local = {index: value for index, value in enumerate(given) if value is not None}
        for part, steps in ((Part.INPUT_GRAD, recipe.input_grad), (Part.WEIGHT_GRAD, recipe.weight_grad)):
            for step in steps:
                self._add_step(node, step, part, local)
        for index in wanted:
            gradient = recipe.gradients[index]
            if gradient is None:
                continue
            ref, value = node.inputs[index], local[gradient]
            if index in weights:
                self._contribute(ref, node, value)
            else:
                self._accumulate(ref, node, value)

    def _wants(self, node: Node, ref: int) -> bool:
        return self.draft.values[ref].needs_grad and node.op != "aten.detach.default"

    def _recipe(
        self, node: Node, activations: tuple[int, ...], weights: tuple[int, ...], seeds: Mapping[int, int]
    ) -> BackwardRecipe:
        """For the cotangents `seeds` of the outputs so numbered."""
        metas = tuple(_own_storage(self.draft.values[seed].meta) for seed in seeds.values())
        try:
            return self.rules.backward(self.calls[node.id], activations, weights, tuple(seeds), metas)
        except TraceError:
            raise
        except Exception as error:
            raise TraceError(
                f"operator {node.op} of module '{node.module}' at {node.where} cannot be differentiated: "
                f"{first_line(error)}"
            ) from error

    def _add_step(self, node: Node, step: Step, part: Part, local: dict[int, int]) -> None:
        arguments = renumbered((step.args, step.kwargs), local.__getitem__)
        call, refs = self.draft.call(step.op, *arguments)
        outcomes = self.rules.evaluate(call, (False,) * len(refs))
        parameters = {self.draft.values[ref].parameter for ref in refs}
        derived = len(refs) == 1 and -1 not in parameters and all(o is None or o.alias == 0 for o in outcomes)
        here, parameter = (Part.DERIVED, next(iter(parameters))) if derived else (part, -1)
        made = self.draft.add(call, refs, outcomes, here, parameter, node, None if derived else node.id)
        local.update(
            (number, value)
            for number, value in zip(step.outputs, made, strict=False)
            if number is not None and value is not None
        )

    def _accumulate(self, ref: int, node: Node, value: int) -> None:
        """Add `value` to the cotangent of `ref`."""
        earlier = self.cotangent.get(ref)
        if earlier is None:
            self.cotangent[ref] = value
            return
        call, refs = self.draft.call(_ADD, (Ref(earlier), Ref(value)))
        outcomes = self.rules.evaluate(call, (False, False))
        (total,) = self.draft.add(call, refs, outcomes, Part.INPUT_GRAD, -1, node, node.id)
        assert total is not None
        self.cotangent[ref] = total

    def _contribute(self, ref: int, node: Node, value: int) -> None:
        """Note that `value` is what `node` contributes to the gradient of `ref`."""
        gradient = self.gradients.get(ref)
        if gradient is None:
            meta = _own_storage(self.draft.values[value].meta)
            name = self.draft.values[ref].name
            gradient = self.gradients[ref] = self.draft.add_value(meta, Origin.GRADIENT, name)
        self.contributions.setdefault(gradient, []).append((node.id, value))


def _own_storage(meta: TensorMeta) -> TensorMeta:
    return TensorMeta(meta.shape, meta.stride, meta.dtype)

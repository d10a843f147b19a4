"""GRPO's completions must come from the policy that is trained, and making them must leave the base as it was."""

from __future__ import annotations

from typing import Any

import torch

from training import experts
from training.errors import LivenessError, Stage
from training.liveness.static import likely_cause, lora_layers, require_active


class Rollouts:
    """Watches the model's own `generate`: while it runs, the adapters are on, and every layer's experts run through our forward with them."""

    def __init__(self, model: Any) -> None:
        self._model, self._generate = model, model.generate
        self.seen = 0
        model.generate = self._watched

    def require_seen(self, step: int) -> dict[str, float]:
        """LivenessError if no completion came from the model so far: then somebody else makes them, from weights that nobody checks."""
        if not self.seen:
            raise LivenessError(
                f"step {step}: no completion was made by the model's own generate",
                stage="rollout",
                cause="another engine generates",
            )
        return {"rollouts": float(self.seen)}

    def _watched(self, *arguments: Any, **options: Any) -> Any:
        ran, adapted = experts.calls(self._model), experts.calls(self._model, "adapted")
        looks = [self._model.get_base_model().register_forward_pre_hook(lambda *_: self._look(looks))]
        try:
            output = self._generate(*arguments, **options)
        finally:
            for handle in looks:
                handle.remove()
        for name, count in experts.calls(self._model, "adapted").items():
            seen, wanted = count - adapted[name], experts.calls(self._model)[name] - ran[name]
            if not seen or seen != wanted:
                raise LivenessError(
                    f"rollout: {name} ran {wanted} times through our forward, {seen} of them with its adapter",
                    stage="rollout",
                    group="routed_experts.gate_up_proj",
                    tensor=name,
                    cause=likely_cause(self._model, "routed_experts"),
                )
        self.seen += 1
        return output

    def _look(self, looks: list[Any]) -> None:
        """At the first forward of a generation; the experts' counters speak for the others."""
        while looks:
            looks.pop().remove()
        require_active(self._model, "rollout")


def base_sums(model: Any) -> dict[str, int]:
    """Sums over the bits of every frozen weight under an adapter: what a merge in place would touch."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    weights = {name: base_weight(module) for name, module in lora_layers(model)}
    return {
        name: int(weight.view(bits[weight.element_size()]).sum(dtype=torch.int64)) for name, weight in weights.items()
    }


def require_base_unchanged(model: Any, before: dict[str, int], stage: Stage) -> None:
    """LivenessError if a frozen weight is not bit for bit what it was when the phase began."""
    sums = base_sums(model)
    if sums.keys() != before.keys():
        raise LivenessError(
            f"adapters stand under other layers than when the phase began, such as {min(sums.keys() ^ before.keys())}",
            stage=stage,
            cause="a wrapped layer was put in or taken out during the phase",
        )
    for name, now in sums.items():
        if now != before[name]:
            raise LivenessError(
                f"the frozen base weight under {name} is no longer what it was when the phase began",
                stage=stage,
                tensor=name,
                cause="the adapter was merged into the base and back, which rounds in bfloat16, or the base was trained",
            )


def base_weight(module: Any) -> torch.Tensor:
    """What the frozen layer under an adapter computes with; of one in 4 bits what stands for it: the scales of routed experts, the codes of a linear."""
    base = module.get_base_layer()
    packed = getattr(base, "livery_packed", None)
    if packed is not None:
        return packed[module.parameter_name] if hasattr(module, "get_param") else packed["weight"]
    weight = module.get_param() if hasattr(module, "get_param") else base.weight
    return weight.detach().contiguous()

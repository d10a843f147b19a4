"""Run by test_lean_kernels.py under Triton's interpreter: tiny models whose lean modules go through the kernels, against PEFT's and transformers' own."""

from __future__ import annotations

from typing import Any

import torch

from kernels import rows
from tests.kernels import checks
from tests.training.lean.conftest import adapted, gradients, inputs, logits, twin
from training import lean, packing, tiny
from training.contract.families import FAMILIES


def main() -> None:
    packing.install()
    checks.patch_once()
    # One layer of each kind: the interpreter takes a minute for four.
    sizes = (
        tiny._SIZES | {"num_hidden_layers": 2},
        tiny._GATED_DELTA_NET | {"layer_types": ["linear_attention", "full_attention"]},
    )
    tiny._SIZES, tiny._GATED_DELTA_NET = sizes
    launched: list[str] = []
    launch = rows.launch

    def counted(fn: Any, *args: Any, **options: Any) -> None:
        launched.append(fn.__name__)
        launch(fn, *args, **options)

    for module in ("norms", "conv", "gates", "rope", "router"):
        vars(__import__(f"kernels.{module}", fromlist=[""]))["launch"] = counted
    for name, family in FAMILIES.items():
        stock = adapted(family).float()
        ours = twin(stock)
        assert lean.install(ours).whole
        for kind in ("packed", "padded"):
            launched.clear()
            given = inputs(kind)
            with torch.no_grad():
                wanted, got = (logits(model, given) for model in (stock, ours))
            mask = given.get("attention_mask", torch.ones(wanted.shape[:2])).bool()
            difference = float((got - wanted)[mask].norm() / wanted[mask].norm())
            mine, theirs = gradients(ours, given), gradients(stock, given)
            worst = max(float((mine[each] - theirs[each]).norm() / theirs[each].norm()) for each in theirs)
            print(f"{name} {kind} logits {difference:.1e} gradients {worst:.1e} kernels {len(set(launched))}")


main()

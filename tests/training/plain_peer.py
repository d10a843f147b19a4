"""A peer for the tests: transformers and PEFT as they are, under the names by which the program calls a peer. LAZY leaves the experts out, as some do."""

from __future__ import annotations

import os
from typing import Any


class FastLanguageModel:
    @staticmethod
    def from_pretrained(model_name: str, dtype: Any, use_gradient_checkpointing: Any, **_: Any) -> tuple[Any, None]:
        from transformers import Qwen3_5MoeForConditionalGeneration

        model: Any = Qwen3_5MoeForConditionalGeneration.from_pretrained(model_name, dtype=dtype)
        if use_gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model, None

    @staticmethod
    def get_peft_model(model: Any, r: int, target_modules: list[str], lora_alpha: int, **_: Any) -> Any:
        from peft import LoraConfig, get_peft_model

        experts = [] if "LAZY" in os.environ else ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        leaves = [name for name in target_modules if name != "gate_up_proj"]
        config = LoraConfig(r=r, lora_alpha=lora_alpha, target_modules=leaves, target_parameters=experts or None)
        return get_peft_model(model, config)

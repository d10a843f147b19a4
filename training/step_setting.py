"""What the step benchmark measures, and the ways of making a step that it compares."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from training.contract.recipe import Adapters, Recipe, Recompute, parse_recipe

ROW_TOKENS = 2048
Layer = Literal["peft", "grouped", "ours", "portable"]


class SettingError(ValueError):
    """What was asked for is no measurement; says what was seen and what is wanted."""


@dataclass(frozen=True)
class Setting:
    """What is measured."""

    layers: int = 40
    tokens: int = 32_768
    """Of one optimizer step."""
    micro: tuple[int, ...] = (4096, 16_384)
    """Tokens of a micro-batch: the first for what others do, the last for the best that fits."""
    rank: int = 32
    steps: int = 3
    device: str = "cuda"
    dtype: str = "bfloat16"
    tiny: bool = False
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """Of our ways; the others keep torch's, with moments in fp32."""
    recompute: Literal["auto"] | Recompute = "auto"
    peak_gb: float = 125.0
    """What `auto` may take of the card, the driver's own part left out."""
    ways: tuple[str, ...] = ()
    """Names; none = all."""
    trainer: bool = False
    seconds: float = float("inf")
    """After these no other way is begun, and none begins another step."""
    check: bool = True
    profile: bool = True

    @property
    def row(self) -> int:
        return min(ROW_TOKENS, *self.micro)


@dataclass(frozen=True)
class Way:
    """One way of making the step."""

    name: str
    micro: int
    layer: Layer
    lean: bool = False
    packed: bool = False
    graph: bool = False

    @property
    def label(self) -> str:
        return f"{self.name} {self.micro}"


def ways(setting: Setting) -> list[Way]:
    """What matters most first, for a run that has not the time for all."""
    small, large = setting.micro[0], setting.micro[-1]
    every = [
        Way("ours+graph", small, "ours", lean=True, graph=True),
        Way("ours-packed+graph", small, "ours", lean=True, packed=True, graph=True),
        Way("seed", small, "grouped"),
        Way("ours+graph", large, "ours", lean=True, graph=True),
        Way("ours-packed+graph", large, "ours", lean=True, packed=True, graph=True),
        Way("trainer", large, "ours", lean=True, packed=True),
        Way("ours", large, "ours", lean=True),
        Way("ours-packed", large, "ours", lean=True, packed=True),
        Way("stock", small, "peft"),
        Way("ours", small, "ours", lean=True),
        Way("portable", large, "portable", lean=True),
        Way("seed", large, "grouped"),
        Way("experts", large, "ours"),
    ]
    if setting.device == "cpu":
        plain = [replace(way, layer="grouped") if way.layer in ("ours", "portable") else way for way in every]
        every = [way for way in plain if not way.graph]
    once = [way for way in dict.fromkeys(every) if way.name != "trainer" or setting.trainer]
    return [way for way in once if not setting.ways or way.name in (*setting.ways, "trainer")]


def require(setting: Setting) -> None:
    """SettingError if a step of so many tokens is not whole micro-batches of whole rows, whose rate would be told of tokens that were not there; if no way
    has one of the names; or if there is no optimizer of ours to measure."""
    row, known = setting.row, sorted({way.name for way in ways(replace(setting, ways=()))})
    if odd := [each for each in setting.micro if each % row or setting.tokens % each]:
        raise SettingError(
            f"--micro: seen {odd[0]}, with rows of {row} and --tokens {setting.tokens}; want a multiple of the one and a part of the other"
        )
    if strange := [name for name in setting.ways if name not in known]:
        raise SettingError(f"--only: seen {', '.join(strange)}; want some of {', '.join(known)}")
    if setting.device == "cpu" and setting.optimizer != "adamw":
        raise SettingError(f"--optimizer: seen {setting.optimizer}, which steps on a card; want adamw with --tiny")


def adapters_of(setting: Setting) -> Adapters:
    return Adapters(rank=setting.rank, alpha=2 * setting.rank)


def recipe_of(setting: Setting, micro: int) -> Recipe:
    """What the memory plan reads."""
    phase = {
        "kind": "sft",
        "data": "bucket:none",
        "steps": 1,
        "learning_rate": 1e-4,
        "max_length": max(16, setting.row),
    }
    cuda = setting.device == "cuda"
    return parse_recipe(
        {
            "name": "benchmark",
            "model": {"source": "bucket:none", "family": "qwen3_5_moe", "size_gb": 70, "dtype": setting.dtype},
            "adapters": adapters_of(setting).model_dump(mode="json"),
            "phases": [{**phase, "batch_size": max(1, micro // setting.row)}],
            "box": {"tier": "h200", "device": "cuda"} if cuda else {"tier": "rehearsal", "device": "cpu"},
            "budget": {"max_usd": 1},
            "optimizer": setting.optimizer,
            "recompute": setting.recompute,
        }
    )

"""`python -m training.sharded plan`: what a 4-bit base would take of a box. Exit codes: 0 it runs there, 1 it does not, 2 the inputs are wrong."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import yaml

from training.contract.quantised import GIB, Hardware, hardware_of, lines
from training.contract.recipe import Recipe, RecipeError, Tier, parse_recipe
from training.contract.recipe_yaml import read_yaml
from training.contract.shapes import ShapeError
from training.sharded.headers import CheckpointError
from training.sharded.inventory import read_inventory
from training.sharded.plan import plan


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        recipe = _recipe(arguments.recipe)
        inventory = read_inventory(arguments.model)
    except (CheckpointError, ShapeError, RecipeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    planned = plan(inventory, recipe, _hardware(arguments, recipe))
    print("\n".join(lines(planned)))
    return 0 if planned.chosen else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m training.sharded", description="A 4-bit base on one box.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("plan", help="memory, strategy, hours and dollars, from headers alone")
    command.add_argument("--model", type=Path, required=True, help="folder with config.json and .safetensors files")
    command.add_argument("--recipe", type=Path, required=True)
    command.add_argument("--tier", choices=get_args(Tier), help="by default the recipe's")
    command.add_argument("--gpus", type=_count, help="cards of the box, by default the recipe's")
    command.add_argument("--gpu-gb", type=_positive, help="of one card as it is sold: 2^30 bytes each; else the tier's")
    command.add_argument("--host-gb", type=_positive, help="host memory, 2^30 bytes each; else the recipe's floor")
    command.add_argument("--dph", type=_positive, help="dollars an hour, by default the recipe's cap")
    command.add_argument("--tflops", type=_positive, help="dense bf16 peak of a card; by default the tier's")
    command.add_argument("--host-gbs", type=_positive, help="GB/s from pinned host memory to each card at once")
    command.add_argument("--link-gbs", type=_positive, help="GB/s between cards: 24 without peer access")
    command.add_argument("--disk-gbs", type=_positive, help="GB/s from the disk that the model lies on: 1.5")
    return parser


def _hardware(arguments: argparse.Namespace, recipe: Recipe) -> Hardware:
    """The recipe's own box, with what was said of another."""
    box = recipe.box
    tier = arguments.tier or box.tier
    hardware = hardware_of(tier, arguments.gpus or box.gpus, box.min_host_memory_gb, dph_usd=box.max_dph_usd)
    other = arguments.tflops or (arguments.gpu_gb and abs(arguments.gpu_gb * GIB / hardware.gpu_gb - 1) > _SAME_CARD)
    said = {
        "tier": None if other else tier,
        "gpu_gb": arguments.gpu_gb and arguments.gpu_gb * GIB,
        "host_gb": arguments.host_gb and arguments.host_gb * GIB,
        "dph_usd": arguments.dph,
        "peak_tflops": arguments.tflops,
        "host_gbs": arguments.host_gbs,
        "link_gbs": arguments.link_gbs,
        "disk_gbs": arguments.disk_gbs,
    }
    return replace(hardware, **{name: value for name, value in said.items() if value or name == "tier"})


_SAME_CARD = 0.05
"""How far a card's memory may be from the tier's to be taken for one of them: measured rates are said of no other."""


def _recipe(path: Path) -> Recipe:
    try:
        return parse_recipe(read_yaml(path.read_text(encoding="utf-8"), yaml), path.name)
    except yaml.YAMLError as error:
        raise RecipeError(f"{path.name}: not YAML: {error}") from None


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("want a whole number above 0")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("want a number above 0")
    return value


if __name__ == "__main__":
    sys.exit(main())

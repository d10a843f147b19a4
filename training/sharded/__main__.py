"""`python -m training.sharded plan`: what a 4-bit base would take of a box. Exit codes: 0 it runs there, 1 it does not, 2 the inputs are wrong."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import yaml

from training.contract.flops import PEAK_TFLOPS
from training.contract.recipe import Recipe, RecipeError, parse_recipe
from training.contract.shapes import ShapeError
from training.sharded.headers import CheckpointError
from training.sharded.inventory import read_inventory
from training.sharded.plan import GIB, Box, lines, plan


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        recipe = _recipe(arguments.recipe)
        inventory = read_inventory(arguments.model)
    except (CheckpointError, ShapeError, RecipeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    planned = plan(inventory, recipe, _box(arguments, recipe), linears=arguments.attention)
    print("\n".join(lines(planned)))
    return 0 if planned.chosen else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m training.sharded", description="A 4-bit base on one box.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("plan", help="memory, strategy, hours and dollars, from headers alone")
    command.add_argument("--model", type=Path, required=True, help="folder with config.json and .safetensors files")
    command.add_argument("--recipe", type=Path, required=True)
    command.add_argument("--gpus", type=_count, required=True, help="cards of the box")
    command.add_argument("--gpu-gb", type=_positive, required=True, help="of one card as it is sold: 2^30 bytes each")
    command.add_argument("--host-gb", type=_positive, required=True, help="host memory as it is sold: 2^30 bytes each")
    command.add_argument("--dph", type=_positive, required=True, help="dollars an hour")
    command.add_argument(
        "--attention", choices=("nf4", "bf16"), default="nf4", help="the linear layers outside experts"
    )
    command.add_argument(
        "--tflops", type=_positive, help="dense bf16 peak of a card; by default that of the recipe's tier"
    )
    command.add_argument("--host-gbs", type=_positive, default=0.0, help="GB/s from pinned host memory to a card")
    command.add_argument("--link-gbs", type=_positive, default=313.0, help="GB/s between cards: 24 without peer access")
    command.add_argument("--disk-gbs", type=_positive, default=1.5, help="GB/s from the disk that the model lies on")
    return parser


def _box(arguments: argparse.Namespace, recipe: Recipe) -> Box:
    return Box(
        gpus=arguments.gpus,
        gpu_gb=arguments.gpu_gb * GIB,
        host_gb=arguments.host_gb * GIB,
        dph_usd=arguments.dph,
        peak_tflops=arguments.tflops or PEAK_TFLOPS.get(recipe.box.tier, PEAK_TFLOPS["h200"]),
        host_gbs=arguments.host_gbs,
        link_gbs=arguments.link_gbs,
        disk_gbs=arguments.disk_gbs,
    )


def _recipe(path: Path) -> Recipe:
    try:
        return parse_recipe(yaml.safe_load(path.read_text(encoding="utf-8")), path.name)
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

"""Recipes from YAML: the shipped ones by name, anybody's by path, with the few things that people override per run."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from tasks.errors import UserError
from training.contract.model import unknown_key
from training.contract.recipe import Recipe, RecipeError, parse_recipe
from training.contract.recipe_yaml import read_yaml

# Flat on purpose: Prefect replaces a nested parameter as a whole, which once turned a smoke run into a full one.
OVERRIDES = {
    "run_name": ("name",),
    "max_usd": ("budget", "max_usd"),
    "max_hours": ("budget", "max_hours"),
    "attempts": ("budget", "attempts"),
    "tier": ("box", "tier"),
    "max_dph_usd": ("box", "max_dph_usd"),
    "countries": ("box", "countries"),
    "interruptible": ("box", "interruptible"),
}


def shipped() -> dict[str, Path]:
    """The recipes that come with Livery, by name."""
    folder = Path(str(files("training").joinpath("recipes")))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_recipe(name_or_path: str, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """A shipped recipe by name or any recipe by path. UserError with one clear line per problem."""
    path = find_recipe(name_or_path)
    data = _read_yaml(path)
    try:
        return parse_recipe(_override(data, overrides or {}), subject=path.name)
    except RecipeError as error:
        raise UserError(str(error)) from None


def find_recipe(name_or_path: str) -> Path:
    """The file of a recipe. UserError lists the shipped names when there is none."""
    known = shipped()
    if name_or_path in known:
        return known[name_or_path]
    path = Path(name_or_path).expanduser()
    if path.suffix in {".yaml", ".yml"} and path.is_file():
        return path
    if path.suffix in {".yaml", ".yml"}:
        raise UserError(
            f"recipe: there is no file {path.absolute()}; want a path that is right where this runs, or one of {', '.join(known)}"
        )
    hint = unknown_key(name_or_path, known).partition("; ")[2]
    raise UserError(f"recipe: '{name_or_path}' is neither a shipped recipe nor a YAML file; {hint}")


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = read_yaml(path.read_text(encoding="utf-8"), yaml)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise UserError(f"{path.name} line {line}: not YAML: {error.problem}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise UserError(
            f"{path.name}: want a mapping of fields such as name, model, phases; seen {type(data).__name__}"
        )
    return data


def _override(data: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in overrides.items():
        if value is None:
            continue
        if key == "phases":
            data["phases"] = _chosen_phases(data.get("phases") or [], list(value))
        elif key == "max_steps":
            data["phases"] = [_capped(phase, int(value)) for phase in data.get("phases") or []]
        elif key in OVERRIDES:
            _set(data, OVERRIDES[key], value)
        else:
            raise UserError(unknown_key(key, [*OVERRIDES, "phases", "max_steps"]))
    return data


def _chosen_phases(phases: list[Any], names: list[str]) -> list[Any]:
    named = [(phase.get("name", phase.get("kind")), phase) for phase in phases if isinstance(phase, dict)]
    known = [name for name, _ in named]
    for name in names:
        if name not in known:
            raise UserError(f"phases: the recipe has no phase '{name}'; it has {', '.join(map(str, known))}")
    return [phase for name, phase in named if name in names]


def _capped(phase: Any, max_steps: int) -> Any:
    if not isinstance(phase, dict) or not isinstance(phase.get("steps"), int):
        return phase
    return {**phase, "steps": min(phase["steps"], max_steps)}


def _set(data: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for part in path[:-1]:
        inner = data.setdefault(part, {})
        if not isinstance(inner, dict):
            raise UserError(f"{part}: want a mapping, seen {type(inner).__name__}")
        data = inner
    data[path[-1]] = value

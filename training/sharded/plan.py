"""The plan of a 4-bit base from its checkpoint's own headers, before anything is rented: no torch, no card. The arithmetic is the contract's; the headers
add what config.json alone cannot say, that every tensor is there with the wanted shape, and what lies on the disk."""

from __future__ import annotations

from training.contract.quantised import Hardware, QuantisedPlan, plan_quantised
from training.contract.recipe import Recipe
from training.sharded.inventory import Inventory


def plan(inventory: Inventory, recipe: Recipe, hardware: Hardware) -> QuantisedPlan:
    """The fastest way that fits, or a refusal with its reasons."""
    return plan_quantised(recipe, inventory.shape, hardware, read_gb=inventory.bytes / 1e9)

"""`python -m flows`: the flows from a terminal. Help and recipe checks load neither Prefect nor torch."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from training.contract.recipe import Recipe


def main(argv: list[str] | None = None) -> int:
    from tasks.errors import LiveryError

    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except LiveryError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flows",
        description="Fine-tune a mixture-of-experts model on a rented GPU, and give the box back.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    check = commands.add_parser("check", help="read a recipe and say what is wrong with it; touches nothing")
    check.add_argument("recipe", help="a shipped recipe's name or a YAML file")
    check.add_argument(
        "--data", action="store_true", help="read every row of its datasets too; writes nothing anywhere"
    )
    check.set_defaults(run=_check)
    plan = commands.add_parser("plan", help="what a run would take and which offers fit; spends nothing")
    plan.add_argument("recipe")
    plan.add_argument("--tier", help="another tier than the recipe's")
    plan.add_argument("--max-dph", type=float, metavar="USD", help="another cap on $/h than the recipe's")
    plan.add_argument("--json", action="store_true", help="the whole plan as JSON on standard output")
    plan.set_defaults(run=_plan)
    finetune = commands.add_parser("finetune", help="one run, watched from this terminal (PREFECT_API_URL must answer)")
    finetune.add_argument("recipe")
    finetune.add_argument("--run-name", help="the run's name; the same name goes on from its manifests")
    finetune.add_argument("--max-usd", type=float)
    finetune.add_argument("--max-steps", type=int)
    finetune.set_defaults(run=_finetune)
    receipt = commands.add_parser("receipt", help="write and print the receipt of a flow run")
    receipt.add_argument("flow_run_id")
    receipt.set_defaults(run=_receipt)
    audit = commands.add_parser("audit", help="hold the last days' runs against the market's charges; finish receipts")
    audit.add_argument("--days", type=float, default=3, help="how far back to look (3)")
    audit.set_defaults(run=_audit)
    release = commands.add_parser("release", help="give back a box that is kept for debugging, now")
    release.add_argument("flow_run_id")
    release.set_defaults(run=_release)
    hosts = commands.add_parser("hosts", help="machines that failed, what they cost, and until when they are left out")
    hosts.set_defaults(run=_hosts)
    reaper = commands.add_parser("reaper", help="one sweep without Prefect: list, judge, destroy, confirm")
    reaper.add_argument("--dry-run", action="store_true")
    reaper.set_defaults(run=_reaper)
    return parser


def _check(arguments: argparse.Namespace) -> int:
    from tasks.recipes import load_recipe
    from tasks.rules.filters import require_consistent

    recipe = load_recipe(arguments.recipe)
    require_consistent(recipe)
    print(
        f"{recipe.name}: {recipe.model.source}, phases {', '.join(recipe.phase_names)}, tier {recipe.box.tier}, at most ${recipe.budget.max_usd:g}: the recipe is well formed"
    )
    if arguments.data:
        print(_data(arguments.recipe, recipe))
    return 0


def _data(name: str, recipe: Recipe) -> str:
    from tasks.data import check_data
    from tasks.recipes import find_recipe
    from tasks.settings import settings
    from tasks.stores import checked_store

    return check_data(recipe, find_recipe(name).parent, lambda: checked_store(settings()))


def _plan(arguments: argparse.Namespace) -> int:
    import logging

    from tasks.offers import plan_today, require_rentable
    from tasks.plan_table import plan_table
    from tasks.recipes import load_recipe
    from tasks.settings import settings

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    overrides = {"tier": arguments.tier, "max_dph_usd": arguments.max_dph}
    planned = plan_today(load_recipe(arguments.recipe, overrides), settings())
    print(planned.model_dump_json(indent=1) if arguments.json else plan_table(planned))
    require_rentable(planned)
    return 0


def _finetune(arguments: argparse.Namespace) -> int:
    import os

    from tasks.errors import UserError

    if not os.environ.get("PREFECT_API_URL"):
        raise UserError(
            "PREFECT_API_URL is not set: start a server with `python -m deployments up` and export the address it prints"
        )
    # Prefect reads these when it is imported: our own lines belong on the run's page.
    os.environ.setdefault("PREFECT_LOGGING_EXTRA_LOGGERS", "tasks,flows")
    os.environ.setdefault("PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW", "ignore")
    from flows.finetune import finetune

    finetune(arguments.recipe, run_name=arguments.run_name, max_usd=arguments.max_usd, max_steps=arguments.max_steps)
    return 0


def _receipt(arguments: argparse.Namespace) -> int:
    from tasks.receipt import settle, table

    receipt = settle(arguments.flow_run_id, "command")
    print(table(receipt) if receipt else f"flow run {arguments.flow_run_id} left no flight record: it rented nothing")
    return 0


def _audit(arguments: argparse.Namespace) -> int:
    from tasks.audit import audit_with
    from tasks.log import guard_secrets
    from tasks.settings import settings

    guard_secrets(settings())
    found = audit_with(settings(), days=arguments.days)
    print(found.text())
    found.raise_if_bad()
    return 0


def _release(arguments: argparse.Namespace) -> int:
    from tasks.destroy import release
    from tasks.errors import DestroyUnverified

    result = release(arguments.flow_run_id)
    if not result.clean:
        raise DestroyUnverified(f"box {list(result.unverified)} may still bill: {result.reason}")
    print(f"given back: {', '.join(map(str, result.gone)) or 'there was no box of this flow run'}")
    return 0


def _hosts(arguments: argparse.Namespace) -> int:
    import time

    from tasks.hosts import read_hosts, table
    from tasks.settings import settings
    from tasks.stores import checked_store

    print(table(read_hosts(checked_store(settings())), now=time.time()))
    return 0


def _reaper(arguments: argparse.Namespace) -> int:
    from tasks.reap import main as reaper

    return reaper(["--once", *(["--dry-run"] if arguments.dry_run else [])])


if __name__ == "__main__":
    sys.exit(main())

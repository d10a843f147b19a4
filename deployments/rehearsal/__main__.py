"""`python -m deployments.rehearsal`: a pretend market, its boxes and a bucket on loopback, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from deployments.rehearsal.faults import table

SECRET_WORDS = ("KEY", "SECRET")


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.faults:
        print(table())
        return 0
    from deployments.rehearsal import lifetime  # only now: --help and --faults need none of it

    print(lifetime.ssh_server_notice(), flush=True)
    settings = lifetime.Options(
        root=options.root,
        port=options.port,
        faults=options.fault,
        boot_s=options.boot_s,
        pace=options.pace,
        clock_ahead_s=options.clock_ahead_s,
        env_file=options.env_file,
        outlive_parent=options.outlive_parent,
        parent_pid=options.parent_pid,
        keep_bucket=options.keep_bucket,
    )
    try:
        asyncio.run(lifetime.serve(settings, lambda env: _announce(env, options.root)))
    except (RuntimeError, ValueError, OSError) as problem:
        print(f"rehearsal: {problem}", file=sys.stderr)
        return 1
    return 0


def _announce(env: dict[str, str], root: Path) -> None:
    """Prints the addresses; keys only by name, since this goes into terminals and logs."""
    for name, value in env.items():
        print(f"{name}={'…' if any(word in name for word in SECRET_WORDS) else value}")
    print(f"state: {env['LIVERY_MARKET_URL']}/_rehearsal/state")
    print(f"ready; the whole environment, keys included, is in {root.absolute() / 'env'}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deployments.rehearsal", description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(".livery/rehearsal"), help="where boxes and bucket lie")
    parser.add_argument("--port", type=int, default=0, help="the market's port; 0 takes a free one")
    parser.add_argument("--fault", action="append", default=[], metavar="SPEC", help="name[=value][@scope]; repeatable")
    parser.add_argument("--faults", action="store_true", help="list every fault and end")
    parser.add_argument("--boot-s", type=float, default=1.0, help="seconds from accepted to running")
    parser.add_argument("--pace", type=float, default=0.1, help="scales the market's rate limits; 0 turns them off")
    parser.add_argument("--clock-ahead-s", type=float, default=0.0, help="the market's clock ahead of the real one")
    parser.add_argument("--env-file", type=Path, help="also write the environment here (mode 0600)")
    parser.add_argument("--outlive-parent", action="store_true", help="go on when the process that started it ends")
    parser.add_argument("--parent-pid", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--keep-bucket", action="store_true", help="keep the data of the last start, and leave it")
    return parser


if __name__ == "__main__":
    sys.exit(main())

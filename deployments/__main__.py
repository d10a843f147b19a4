"""`python -m deployments up | demo | serve | yaml`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    return int(arguments.run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deployments", description="Start, rehearse and describe Livery's deployments."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    up = commands.add_parser(
        "up", help="a Prefect server if none answers, then serve every deployment; Ctrl-C stops it"
    )
    up.add_argument(
        "--rehearsal", action="store_true", help="use the embedded rehearsal even if an account is configured"
    )
    up.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="NAME[=VALUE][@SCOPE]",
        help="a fault of the rehearsal (list: python -m deployments.rehearsal --faults)",
    )
    up.set_defaults(run=_up)
    demo = commands.add_parser("demo", help="the whole run on the rehearsal, checked at its end")
    demo.add_argument("--fault", action="append", default=[], metavar="NAME[=VALUE][@SCOPE]")
    demo.add_argument("--recipe", help="another recipe for the rehearsal tier")
    demo.add_argument("--keep-up", action="store_true", help="leave everything running until Ctrl-C")
    demo.set_defaults(run=_demo)
    serve = commands.add_parser("serve", help="serve one process's deployments (what `up` starts)")
    serve.add_argument("process", choices=["runs", "reaper"])
    serve.add_argument("--rehearsal", action="store_true")
    serve.set_defaults(run=_serve)
    pools = commands.add_parser("yaml", help="write deployments/prefect.yaml from the catalogue")
    pools.set_defaults(run=_yaml)
    return parser


def _up(arguments: argparse.Namespace) -> int:
    from deployments.demo import say
    from deployments.up import Stopped, UpError, running, unwinding_on_signals

    say("starting a Prefect server if none answers, then the deployments …")
    try:
        with unwinding_on_signals(), running(force_rehearsal=arguments.rehearsal, faults=arguments.fault) as up:
            where = "the embedded rehearsal (no account configured)" if up.rehearsal else "your market account"
            say(f"serving on {up.ui_url} with {where}")
            say(
                f"alarms go to {up.alarms_go_to}"
                if up.alarms_go_to
                else "alarms are told to nobody: they stay in the bucket (alarms/), on the run's page and in its log; set LIVERY_NOTIFY_URL or LIVERY_NOTIFY_BLOCK"
            )
            say(
                f"run one: PREFECT_API_URL={up.api_url} prefect deployment run finetune/{'rehearsal' if up.rehearsal else 'full'} --watch"
            )
            try:
                while not up.dead():
                    time.sleep(0.5)
            finally:
                say("stopping: flows give their boxes back first …")
            raise UpError("\n".join(f"'{child.name}' has stopped:\n{child.tail()}" for child in up.dead()))
    except Stopped:
        return 0
    except UpError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _demo(arguments: argparse.Namespace) -> int:
    from deployments.demo import demo
    from deployments.up import Stopped, UpError

    try:
        return demo(arguments.fault, keep_up=arguments.keep_up, recipe=arguments.recipe)
    except Stopped as signal:
        print(f"stopped by {signal}; everything that was started is stopped again", file=sys.stderr)
        return 130
    except UpError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _serve(arguments: argparse.Namespace) -> int:
    from deployments.up import serve

    serve(arguments.process, rehearsal=arguments.rehearsal)
    return 0


def _yaml(arguments: argparse.Namespace) -> int:
    from deployments.pools import prefect_yaml

    path = Path(__file__).parent / "prefect.yaml"
    path.write_text(prefect_yaml())
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

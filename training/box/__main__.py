"""Entry of the zip that goes to the box first: `python3 box.zip supervisor|preflight|deadman …`. Standard library only."""

from __future__ import annotations

import sys


def main(argv: list[str]) -> int:
    # One import a verb: a fault in one of them must not take the others along.
    verb, rest = (argv[0], argv[1:]) if argv else ("", [])
    if verb == "supervisor":
        from training.box import supervisor

        return supervisor.main(rest)
    if verb == "preflight":
        from training.box import preflight

        return preflight.main(rest)
    if verb == "deadman":
        from training.box import deadman

        return deadman.main(rest)
    print(f"unknown verb '{verb}'; known: supervisor, preflight, deadman", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

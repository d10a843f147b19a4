"""Moves the model and the data to the box and checkpoints to the bucket. Runs in the small transfer environment.

    python -m training.box.transfer prefetch --assignment FILE
    python -m training.box.transfer upload   --assignment FILE --directory DIR [--claim N]
    python -m training.box.transfer mirror   --assignment FILE
    python -m training.box.transfer links    --assignment FILE --nonce N [--bytes N] [--seconds S]

The first three do their work in a child process, which training.box.child watches.

Exit codes: 0 done; 1 another failure; 2 the user's or the configuration's (denied, missing, a manifest that lies); 3 stalled or too
slow although other settings were tried; 4 this machine's (its disk, its clock); 5 fenced, since a newer runner has claimed the run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from training.box import child
from training.box.child import FAILED, FENCED, MACHINE, OK, STALLED, USER, WAYS, Fenced, Limits, Refused, Stalled, Voice
from training.box.light import light_bytes
from training.box.links import probe_links
from training.box.mirror import send_mirror
from training.box.prefetch import marker_holds, prefetch_here
from training.box.store import (
    EXPIRY_VARIABLE,
    KEY_VARIABLES,
    PRIVATE_ENV_VARIABLE,
    MachineFault,
    Store,
    StoreDenied,
    StoreError,
    StoreUnreachable,
    disk_fault,
)
from training.box.supervisor import read_env_file
from training.box.upload import durable, read_local_manifest, send
from training.contract import layout
from training.contract.claims import ClaimError
from training.contract.events import EventLog
from training.contract.manifest import ManifestError, parse_manifest
from training.contract.recipe import Assignment


def main(argv: list[str]) -> int:
    options = _parse(argv)
    load_private_env(options.assignment.parent / "private.env")
    is_child = options.verb.endswith("-child")
    try:
        return _dispatch(options)
    except (StoreDenied, Refused, ManifestError, ClaimError) as error:
        return child.end(error, USER, child=is_child)
    except Fenced as error:
        return child.end(error, FENCED, child=is_child)
    except MachineFault as error:
        return child.end(error, MACHINE, child=is_child)
    except (Stalled, StoreUnreachable) as error:
        return child.end(error, STALLED, child=is_child)
    except StoreError as error:
        return child.end(error, USER if "does not exist" in str(error) else FAILED, child=is_child)
    except OSError as error:
        if fault := disk_fault(error):
            return child.end(MachineFault(f"{error.filename or 'a file'}: {fault}"), MACHINE, child=is_child)
        raise


def load_private_env(path: Path, environ: MutableMapping[str, str] = os.environ) -> None:
    """The private file's variables, each only where the box's own environment does not have it: what the box says is nearer.

    A key that expires is the file's: it is renewed there, and whoever started this has the one from before.
    """
    if not path.exists():
        return
    private = read_env_file(str(path))
    environ[PRIVATE_ENV_VARIABLE] = str(path.absolute())
    if EXPIRY_VARIABLE in private:
        for name in KEY_VARIABLES:
            environ.pop(name, None)
    for name, value in private.items():
        environ.setdefault(name, value)


def prefetch(assignment_path: Path, *, home: Path | None = None, environ: Mapping[str, str] = os.environ) -> None:
    """Bring model and data to the box, verified, with progress as events; returns at once if the marker says that it was done.

    Stalled, Refused, MachineFault or StoreError.
    """
    assignment, home = _assignment(assignment_path), home or assignment_path.parent
    if marker_holds(home):
        return
    budget = assignment.recipe.budget
    limits = Limits(budget.stall_s, budget.prefetch_s)
    child.supervise(_child("prefetch", assignment_path), EventLog(home / "events.jsonl"), "down", limits, environ)
    if not marker_holds(home):
        raise StoreError("prefetch ended without its marker: a file on the disk is not what was downloaded")


def upload_checkpoint(
    assignment_path: Path,
    directory: Path,
    claim: int | None = None,
    *,
    home: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> int:
    """Make the checkpoint in `directory` durable. Bytes really sent; 0 if all was there. Says so, and in how many seconds, on stdout.

    Fenced if a higher claim than `claim` (by default the manifest's) has been made; otherwise as `prefetch`.
    """
    assignment, home = _assignment(assignment_path), home or assignment_path.parent
    manifest = read_local_manifest(directory)
    events, began = EventLog(home / "events.jsonl"), time.monotonic()
    budget = assignment.recipe.budget
    command = [*_child("upload", assignment_path), "--directory", str(directory)]
    command += ["--claim", str(claim)] if claim is not None else []
    limits = Limits(budget.stall_s, budget.upload_s)
    # In mid-phase a light checkpoint is nothing to go on from, and a light one has no lighter form.
    lighter = light_bytes(manifest.files) if manifest.complete and not manifest.light else None
    account = child.supervise(command, events, "up", limits, environ, light_bytes=lighter)
    events.emit(durable(assignment.run, manifest, account.sent, account.moved, began))
    print(json.dumps({"sent": account.sent, "seconds": round(time.monotonic() - began, 3)}), flush=True)
    return account.sent


def mirror_model(assignment_path: Path, *, environ: Mapping[str, str] = os.environ) -> int:
    """Upload the prefetched model to the bucket's mirror, unless it is there. Bytes really sent. It may take until the run's end: what has
    arrived by then is gone on from by the next box."""
    home = assignment_path.parent
    limits = Limits(_assignment(assignment_path).recipe.budget.stall_s, float("inf"))
    return child.supervise(
        _child("mirror", assignment_path), EventLog(home / "events.jsonl"), "up", limits, environ
    ).sent


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="training.box.transfer")
    verbs = ("prefetch", "upload", "mirror", "links", "prefetch-child", "upload-child", "mirror-child")
    parser.add_argument("verb", choices=verbs)
    parser.add_argument("--assignment", type=Path, default=Path.home() / layout.BOX_ASSIGNMENT)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--claim", type=int, help="the claim to write under; by default the manifest's own")
    parser.add_argument("--attempt", type=int, default=0)
    parser.add_argument("--nonce", default="")
    parser.add_argument("--bytes", type=int, default=32 << 20)
    parser.add_argument("--seconds", type=float, default=5.0)
    return parser.parse_args(argv)


def _dispatch(options: argparse.Namespace) -> int:
    if options.verb == "prefetch":
        prefetch(options.assignment)
    elif options.verb == "upload":
        upload_checkpoint(options.assignment, options.directory, options.claim)
    elif options.verb == "mirror":
        mirror_model(options.assignment)
    elif options.verb == "links":
        assignment = _assignment(options.assignment)
        store = Store.from_environment(assignment.bucket)
        report = probe_links(assignment, store, nonce=options.nonce, size=options.bytes, seconds=options.seconds)
        print(report.model_dump_json(), flush=True)
    else:
        _work(options)
    return OK


def _work(options: argparse.Namespace) -> None:
    """The child of a verb."""
    way, home, assignment = WAYS[options.attempt], options.assignment.parent, _assignment(options.assignment)
    store = _child_store(assignment)
    voice = Voice()  # its first word begins the watch, so after boto3's import, which takes seconds on a busy machine
    if options.verb == "prefetch-child":
        prefetch_here(assignment, store, home, voice, way, options.attempt)
    elif options.verb == "mirror-child":
        send_mirror(store, assignment.recipe.model.source, home, voice, way)
    else:
        claim = options.claim
        if claim is None:
            claim = parse_manifest((options.directory / "manifest.json").read_bytes(), str(options.directory)).claim
        send(store, assignment.run, options.directory, claim, voice, way)


def _child(verb: str, assignment_path: Path) -> list[str]:
    return [sys.executable, "-m", "training.box.transfer", f"{verb}-child", "--assignment", str(assignment_path)]


def _child_store(assignment: Assignment) -> Store:
    # Half of what the parent allows, so that a frozen connection is given up and made anew before the child is killed for it.
    stall_s = float(os.environ.get(child.STALL_VARIABLE, "30")) / 2
    return Store.from_environment(assignment.bucket, stall_s=max(0.5, min(15.0, stall_s)))


def _assignment(path: Path) -> Assignment:
    return Assignment.model_validate_json(path.read_bytes())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

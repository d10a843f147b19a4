"""Moves the model and the data to the box and checkpoints to the bucket. Runs in the small transfer environment.

    python -m training.box.transfer prefetch --assignment FILE
    python -m training.box.transfer upload   --assignment FILE --directory DIR [--claim N]
    python -m training.box.transfer mirror   --assignment FILE
    python -m training.box.transfer fetch    --assignment FILE --errand FILE
    python -m training.box.transfer send     --assignment FILE --errand FILE
    python -m training.box.transfer links    --assignment FILE --nonce N [--bytes N] [--seconds S]

All but the last do their work in a child process, which training.box.child watches.

Exit codes: 0 done; 1 another failure; 2 the user's or the configuration's (denied, missing, a manifest that lies); 3 stalled or too
slow although other settings were tried; 4 this machine's (its disk, its clock); 5 fenced, since a newer runner has claimed the run;
6 an object is missing, or is not what was promised of it.
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
from training.box.child import (
    DAMAGED,
    FAILED,
    FENCED,
    MACHINE,
    OK,
    STALLED,
    USER,
    WAYS,
    Damaged,
    Fenced,
    Limits,
    Refused,
    Stalled,
    Voice,
)
from training.box.client import EXPIRY_VARIABLE, KEY_VARIABLES, PRIVATE_ENV_VARIABLE
from training.box.files import Errand, download_all, upload_all
from training.box.light import light_bytes
from training.box.links import probe_links
from training.box.mirror import send_mirror
from training.box.prefetch import marker_holds, prefetch_here
from training.box.store import (
    MachineFault,
    Store,
    StoreDenied,
    StoreError,
    StoreMissing,
    StoreUnreachable,
    disk_fault,
)
from training.box.store_errors import NoBucket, NoUpload
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
    except (Damaged, StoreMissing) as error:
        return child.end(error, DAMAGED, child=is_child)
    except (StoreDenied, NoBucket, Refused, ManifestError, ClaimError) as error:
        return child.end(error, USER, child=is_child)
    except Fenced as error:
        return child.end(error, FENCED, child=is_child)
    except MachineFault as error:
        return child.end(error, MACHINE, child=is_child)
    except (Stalled, StoreUnreachable, NoUpload) as error:
        return child.end(error, STALLED, child=is_child)
    except StoreError as error:
        return child.end(error, FAILED, child=is_child)
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


def run_errand(verb: str, assignment_path: Path, errand_path: Path, *, environ: Mapping[str, str] = os.environ) -> None:
    """`fetch` or `send` the errand's files, within the budget of a prefetch or of an upload. Damaged if an object is missing or is not what the
    errand says; otherwise as `prefetch`."""
    budget = _assignment(assignment_path).recipe.budget
    down = verb == "fetch"
    limits = Limits(budget.stall_s, budget.prefetch_s if down else budget.upload_s)
    command = [*_child(verb, assignment_path), "--errand", str(errand_path)]
    what, events = _errand(errand_path).what, EventLog(assignment_path.parent / "events.jsonl")
    child.supervise(command, events, "down" if down else "up", limits, environ, what=what)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="training.box.transfer")
    watched = ("prefetch", "upload", "mirror", "fetch", "send")
    verbs = (*watched, "links", *(f"{verb}-child" for verb in watched))
    parser.add_argument("verb", choices=verbs)
    parser.add_argument("--assignment", type=Path, default=Path.home() / layout.BOX_ASSIGNMENT)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--errand", type=Path, help="what to fetch or send, a training.box.files.Errand as JSON")
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
    elif options.verb in ("fetch", "send"):
        run_errand(options.verb, options.assignment, options.errand)
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
    way, assignment = WAYS[options.attempt], _assignment(options.assignment)
    store = _child_store(assignment)
    voice = Voice()  # its first word begins the watch, so after boto3's import, which takes seconds on a busy machine
    try:
        _work_with(options, assignment, store, voice, way)
    finally:
        voice.last_word()


def _work_with(options: argparse.Namespace, assignment: Assignment, store: Store, voice: Voice, way: child.Way) -> None:
    home = options.assignment.parent
    if options.verb == "prefetch-child":
        prefetch_here(assignment, store, home, voice, way, options.attempt)
    elif options.verb == "mirror-child":
        send_mirror(store, assignment.recipe.model.source, home, voice, way)
    elif options.verb == "fetch-child":
        errand = _errand(options.errand)
        download_all(store, errand.folder, errand.items, errand.what, voice, way)
    elif options.verb == "send-child":
        errand = _errand(options.errand)
        upload_all(store, errand.folder, errand.items, errand.what, voice, way)
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


def _errand(path: Path) -> Errand:
    return Errand.model_validate_json(path.read_bytes())


def _assignment(path: Path) -> Assignment:
    return Assignment.model_validate_json(path.read_bytes())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

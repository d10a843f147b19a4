"""Moves the model and the data to the box and checkpoints to the bucket. Runs in the small transfer environment.

    python -m training.box.transfer prefetch --assignment FILE
    python -m training.box.transfer upload   --assignment FILE --directory DIR [--claim N]
    python -m training.box.transfer links    --assignment FILE --nonce N [--bytes N] [--seconds S]

The work is done by a child process that can be killed, because some ways of hanging cannot be interrupted from inside. The parent
counts what moves; when nothing does for `budget.stall_s` it ends the child and tries again with other settings, three times in all.

Exit codes: 0 done; 1 another failure; 2 the user's or the configuration's (denied, missing, a manifest that lies); 3 stalled or too
slow although other settings were tried; 5 fenced, since a newer runner has claimed the run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from training.box.store import PART_BYTES, Store, StoreDenied, StoreError, StoreUnreachable
from training.box.supervisor import read_env_file
from training.contract import layout
from training.contract.checks import Check, CheckReport
from training.contract.claims import ClaimError, newest_claim
from training.contract.events import CheckpointDurable, Event, EventLog, Notice, Transfer
from training.contract.manifest import Manifest, ManifestError, parse_manifest
from training.contract.recipe import Assignment, Recipe

OK, FAILED, USER, STALLED, FENCED = 0, 1, 2, 3, 5
EVENT_EVERY_S = 2.0
START_S = 60.0
MARKER = "prefetched.json"
MODEL, DATA = "prefetch model", "prefetch data"
# The part size stays the same over the tries: parts of another size that already lie in the bucket could not be used.
_WORKERS = (4, 2, 1)
_BLOCK = 1 << 20


class Stalled(Exception):
    """All tries were used up; the message names the rates."""


class Refused(Exception):
    """The user's or the configuration's fault; another try or another box would end alike."""


class Fenced(Exception):
    """A newer runner has claimed the run: this one must write no manifest any more."""


@dataclass(frozen=True)
class Wanted:
    """One file that must lie under the box's livery folder."""

    path: str
    """Relative to ~/livery, such as `data/sft.jsonl`."""
    key: str
    bytes: int
    sha256: str | None = None


@dataclass
class Sent:
    """What a child did: its progress by `what`, and its last word."""

    done: dict[str, int] = field(default_factory=dict)
    total: dict[str, int] = field(default_factory=dict)
    moved: int = 0
    sent: int = 0
    error: str = ""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="training.box.transfer")
    verbs = ("prefetch", "upload", "links", "prefetch-child", "upload-child")
    parser.add_argument("verb", choices=verbs)
    parser.add_argument("--assignment", type=Path, default=Path.home() / layout.BOX_ASSIGNMENT)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--claim", type=int, help="the claim to write under; by default the manifest's own")
    parser.add_argument("--attempt", type=int, default=0)
    parser.add_argument("--nonce", default="")
    parser.add_argument("--bytes", type=int, default=32 << 20)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args(argv)
    load_private_env(options.assignment.parent / "private.env")
    child = options.verb.endswith("-child")
    try:
        return _dispatch(options)
    except (StoreDenied, Refused, ManifestError, ClaimError) as error:
        return _end(error, USER, child=child)
    except Fenced as error:
        return _end(error, FENCED, child=child)
    except (Stalled, StoreUnreachable) as error:
        return _end(error, STALLED, child=child)
    except StoreError as error:
        return _end(error, USER if "does not exist" in str(error) else FAILED, child=child)


def load_private_env(path: Path, environ: Any = os.environ) -> None:
    """The private file's variables, each only where the box's own environment does not have it: what the box says is nearer."""
    if path.exists():
        for name, value in read_env_file(str(path)).items():
            environ.setdefault(name, value)


def prefetch(assignment_path: Path, *, home: Path | None = None, environ: Mapping[str, str] = os.environ) -> None:
    """Bring model and data to the box, verified, with progress as events; returns at once if the marker says that it was done.

    Writes `prefetched.json` ({"files": {path: {"sha256", "bytes"}}}) last. Stalled, Refused or StoreError.
    """
    assignment, home = _assignment(assignment_path), home or assignment_path.parent
    if marker_holds(home):
        return
    budget = assignment.recipe.budget
    command = [sys.executable, "-m", "training.box.transfer", "prefetch-child", "--assignment", str(assignment_path)]
    _supervise(command, EventLog(home / "events.jsonl"), "down", budget.stall_s, budget.prefetch_s, environ)
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
    """Make the checkpoint in `directory` durable: blobs first, its manifest last. Bytes really sent; 0 if all was there.

    Idempotent: a blob that is in the bucket is not sent again, and the manifest is the same bytes. Fenced if a higher claim than `claim`
    (by default the manifest's) has been made.
    """
    assignment, home = _assignment(assignment_path), home or assignment_path.parent
    manifest = read_local_manifest(directory)
    events, began = EventLog(home / "events.jsonl"), time.monotonic()
    budget = assignment.recipe.budget
    command = [sys.executable, "-m", "training.box.transfer", "upload-child", "--assignment", str(assignment_path)]
    command += ["--directory", str(directory)] + (["--claim", str(claim)] if claim is not None else [])
    child = _supervise(command, events, "up", budget.stall_s, budget.upload_s, environ)
    events.emit(_durable(assignment.run, manifest, child.sent, began))
    return child.sent


def store_checkpoint(store: Store, run: str, directory: Path, claim: int, events: EventLog) -> int:
    """As upload_checkpoint, in this process: for a bucket that cannot hang, which is a folder."""
    manifest, began = read_local_manifest(directory), time.monotonic()
    sent = _send(store, run, directory, claim, _Voice(mute=True), 1)
    events.emit(_durable(run, manifest, sent, began))
    return sent


def read_local_manifest(directory: Path) -> Manifest:
    """The manifest in a checkpoint directory, after each file was held against it. Refused if one is missing or differs."""
    path = directory / "manifest.json"
    if not path.exists():
        raise Refused(f"{directory} holds no manifest.json: nothing to upload")
    manifest = parse_manifest(path.read_bytes(), str(path))
    for name, entry in manifest.files.items():
        file = directory / name
        if not file.is_file():
            raise Refused(f"{path}: names {name}, which is not in {directory}")
        if file.stat().st_size != entry.bytes or _sha256(file) != entry.sha256:
            raise Refused(f"{path}: {name} is not the file that the manifest describes; the checkpoint is not whole")
    return manifest


def probe_links(assignment: Assignment, store: Store, *, nonce: str, size: int, seconds: float) -> CheckReport:
    """Up and down against the real bucket with the production code: incompressible bytes, bounded by `seconds` each way, deleted after. A
    model that comes from the hub is measured from there as well."""
    box, prefix = assignment.recipe.box, f"{layout.run(assignment.run)}/_probe/{nonce}/"
    try:
        up, keys = _measure_up(store, prefix, size, seconds)
        down = _measure_down(store, keys, seconds)
    finally:
        store.abort_uploads(prefix)
        for item in store.list(prefix):
            store.delete(item.key)
    skew = time.time() - store.server_time()
    clock_good = abs(skew) <= box.max_clock_skew_s + 1  # the header has whole seconds
    checks = (
        _rate_check("uplink_mbps", up, box.min_inet_up_mbps, "each checkpoint goes this way"),
        _rate_check("downlink_mbps", down, box.min_inet_down_mbps, "model and data come this way"),
        Check(
            id="bucket_clock",
            verdict="pass" if clock_good else "fail",
            actual=f"{skew:+.1f}",
            required=f"± {box.max_clock_skew_s:g}",
            unit="s",
            purpose="the bucket refuses requests signed with a wrong time",
            remedy="" if clock_good else "next offer",
        ),
        *_hub_checks(assignment.recipe, size, seconds),
    )
    return CheckReport(
        stage="a", nonce=nonce, checks=checks, facts={"uplink_mbps": f"{up:.1f}", "downlink_mbps": f"{down:.1f}"}
    )


def marker_holds(home: Path) -> bool:
    """Whether the marker is there and every file it names has the size it says."""
    path = home / MARKER
    if not path.exists():
        return False
    files = json.loads(path.read_text())["files"]
    return all(
        (home / name).is_file() and (home / name).stat().st_size == entry["bytes"] for name, entry in files.items()
    )


def wanted_data(recipe: Recipe) -> dict[str, str]:
    """Path on the box → key in the bucket, for the phases' data and the held-out set. Refused if one is not in the bucket."""
    places = {f"data/{phase.name}.jsonl": phase.data for phase in recipe.phases}
    if recipe.evaluation.data:
        places["data/evaluation.jsonl"] = recipe.evaluation.data
    for path, place in places.items():
        if not place.startswith("bucket:"):
            raise Refused(
                f"{path}: data '{place}' is not in the bucket; want bucket:KEY (the flow copies local files there)"
            )
    return {path: place.removeprefix("bucket:") for path, place in places.items()}


def _dispatch(options: argparse.Namespace) -> int:
    if options.verb == "prefetch":
        prefetch(options.assignment)
    elif options.verb == "upload":
        upload_checkpoint(options.assignment, options.directory, options.claim)
    elif options.verb == "links":
        assignment = _assignment(options.assignment)
        store = Store.from_environment(assignment.bucket)
        report = probe_links(assignment, store, nonce=options.nonce, size=options.bytes, seconds=options.seconds)
        print(report.model_dump_json(), flush=True)
    elif options.verb == "prefetch-child":
        _prefetch_here(_assignment(options.assignment), options.assignment.parent, options.attempt)
    else:
        _upload_here(_assignment(options.assignment), options.directory, options.claim, options.attempt)
    return OK


def _supervise(
    command: list[str], events: EventLog, direction: str, stall_s: float, budget_s: float, environ: Mapping[str, str]
) -> Sent:
    """Run the child until it is done, with three settings in turn; its last account, with what was sent over all tries."""
    deadline, sent, said = time.monotonic() + budget_s, 0, ""
    what = "prefetch" if direction == "down" else "upload"
    for attempt, workers in enumerate(_WORKERS):
        if attempt:
            events.emit(Notice(what=what, reason=f"{said}; trying again with {workers} at a time"))
        account, reporter = Sent(), _Reporter(events, direction)
        code, how = _persist([*command, "--attempt", str(attempt)], account, reporter, stall_s, deadline, environ)
        sent += account.sent
        if code == OK:
            account.sent = sent
            return account
        if code == USER:
            raise Refused(account.error or "the transfer was refused without a reason")
        if code == FENCED:
            raise Fenced(account.error or "a newer runner has claimed the run")
        said = f"{what}, try {attempt + 1}: {how} ({reporter.told(account)})"
        if time.monotonic() >= deadline:
            raise Stalled(f"{said}; the budget of {budget_s:.0f} s is used up")
    raise Stalled(f"{said}; {len(_WORKERS)} ways were tried")


def _persist(
    command: list[str],
    account: Sent,
    reporter: _Reporter,
    stall_s: float,
    deadline: float,
    environ: Mapping[str, str],
) -> tuple[int | None, str]:
    """One setting, until it is done, refused, or nothing has moved for `stall_s`. A child that ends sooner (a link that refuses for
    some seconds) is started again, since what it did is kept. Exit code and, in words, how it ended."""
    pulse = _Pulse()
    while True:
        sent_before = account.sent
        code = _watch(command, account, reporter, pulse, stall_s, deadline, environ)
        account.sent += sent_before
        if code in (OK, USER, FENCED):
            return code, ""
        if code is None or pulse.still_s() > stall_s or time.monotonic() >= deadline:
            return code, f"no byte moved for {pulse.still_s():.0f} s" if pulse.still_s() > stall_s else account.error
        time.sleep(min(1.0, stall_s / 10))


class _Pulse:
    """When something last moved."""

    def __init__(self) -> None:
        self._at = time.monotonic()

    def beat(self) -> None:
        self._at = time.monotonic()

    def forgive(self, seconds: float) -> None:
        """Time in which nothing could move."""
        self._at += seconds

    def still_s(self) -> float:
        return time.monotonic() - self._at


def _watch(
    command: list[str],
    account: Sent,
    reporter: _Reporter,
    pulse: _Pulse,
    stall_s: float,
    deadline: float,
    environ: Mapping[str, str],
) -> int | None:
    """Follow one child to its end; None if it had to be killed, for standing still or for being over its budget."""
    account.sent = account.moved = 0
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env={**environ, "LIVERY_TRANSFER_STALL_S": f"{stall_s:g}"},
        preexec_fn=_die_with_parent,
        start_new_session=True,
    )
    assert child.stdout is not None
    buffer, spawned, spoken = b"", time.monotonic(), False
    with selectors.DefaultSelector() as selector, child.stdout:
        selector.register(child.stdout, selectors.EVENT_READ)
        while True:
            if selector.select(timeout=min(1.0, stall_s / 4)):
                data = os.read(child.stdout.fileno(), 1 << 16)
                if not data:
                    break
                if not spoken:
                    spoken = True
                    pulse.forgive(time.monotonic() - spawned)
                *lines, buffer = (buffer + data).split(b"\n")
                moved = [_note(account, line) for line in lines]
                if any(moved):
                    pulse.beat()
                    reporter.tell(account)
            # A busy machine takes seconds to start an interpreter; that is no stall of the link.
            still = pulse.still_s() > stall_s if spoken else time.monotonic() - spawned > max(START_S, stall_s)
            if still or time.monotonic() >= deadline:
                account.error = account.error or "over its budget"
                _kill(child)
                return None
    code = child.wait()
    reporter.tell(account, finished=code == OK)
    return code


def _note(account: Sent, line: bytes) -> bool:
    """Take one line of the child; whether anything has moved since the last."""
    word = json.loads(line)
    before = (account.moved, sum(account.done.values()))
    if "what" in word:
        account.done[word["what"]], account.total[word["what"]] = word["done"], word["total"]
    account.moved = word.get("moved", account.moved)
    account.sent = word.get("sent", account.sent)
    account.error = word.get("error", account.error)
    return before != (account.moved, sum(account.done.values()))


class _Reporter:
    """Turns a child's progress into Transfer events, one every two seconds for each thing that is moving."""

    def __init__(self, events: EventLog, direction: str) -> None:
        self._events, self._direction = events, direction
        self._began: dict[str, tuple[float, int]] = {}
        self._last: dict[str, float] = {}
        self._finished: set[str] = set()
        self._rate = 0.0

    def tell(self, account: Sent, *, finished: bool = False) -> None:
        now = time.monotonic()
        for what, done in account.done.items():
            began_at, began_done = self._began.setdefault(what, (now, done))
            whole = done >= account.total[what]
            due = now - self._last.get(what, 0.0) >= EVENT_EVERY_S or whole or finished
            if what in self._finished or not due:
                continue
            self._last[what] = now
            elapsed = now - began_at
            self._rate = (done - began_done) * 8 / 1e6 / elapsed if elapsed > 0.05 else 0.0
            left = account.total[what] - done
            self._events.emit(self._event(what, done, account.total[what], left, whole))
            if whole:
                self._finished.add(what)

    def told(self, account: Sent) -> str:
        parts = [
            f"{what} {done / 1e6:.1f} of {account.total[what] / 1e6:.1f} MB" for what, done in account.done.items()
        ]
        return f"{', '.join(parts) or 'nothing begun'}, {self._rate:.2f} Mbps"

    def _event(self, what: str, done: int, total: int, left: int, whole: bool) -> Event:
        return Transfer(
            what=what,
            direction="down" if self._direction == "down" else "up",
            done_bytes=done,
            total_bytes=total,
            mbps=round(self._rate, 3),
            eta_s=round(left * 8 / 1e6 / self._rate, 1) if self._rate > 0 else None,
            finished=whole,
        )


class _Voice:
    """The child's side: says on stdout what moved, at most every half second, and at once when something is whole."""

    def __init__(self, *, mute: bool = False) -> None:
        self._mute = mute
        self._lock = threading.Lock()
        self._said_at = 0.0
        self._moved = 0
        self._sent = 0
        self._say({}, due=True)

    def moved(self, count: int) -> None:
        with self._lock:
            self._moved += count
            self._say({}, due=time.monotonic() - self._said_at > 0.5)

    def progress(self, what: str, done: int, total: int) -> None:
        with self._lock:
            whole = done >= total
            self._say({"what": what, "done": done, "total": total}, due=whole or time.monotonic() - self._said_at > 0.5)

    def sent(self, count: int) -> None:
        with self._lock:
            self._sent += count
            self._say({}, due=True)

    def _say(self, word: dict[str, Any], *, due: bool) -> None:
        if due and not self._mute:
            self._said_at = time.monotonic()
            print(json.dumps({**word, "moved": self._moved, "sent": self._sent}), flush=True)


def _prefetch_here(assignment: Assignment, home: Path, attempt: int) -> None:
    """The child of prefetch: data first, since it is small and a missing file should show before the model is paid for."""
    voice = _Voice()
    store = _child_store(assignment)
    keys = wanted_data(assignment.recipe)
    wanted = [Wanted(path, key, _size(store, key)) for path, key in keys.items()]
    known = _download_all(store, home, wanted, DATA, voice, _WORKERS[attempt])
    source = assignment.recipe.model.source
    if source.startswith("hub:"):
        from training.box.hub import download_model

        known |= download_model(source, home / "model", lambda done, total: voice.progress(MODEL, done, total), attempt)
    else:
        files = list_model(store, source.removeprefix("bucket:"))
        known |= _download_all(store, home, files, MODEL, voice, _WORKERS[attempt])
    fresh = home / f"{MARKER}.new"
    fresh.write_text(json.dumps({"files": known, "at": time.time()}, indent=1))
    os.replace(fresh, home / MARKER)


def list_model(store: Store, prefix: str) -> list[Wanted]:
    """All objects under the model's prefix. Refused if there is none, or if a name would leave the model's folder."""
    base = prefix.rstrip("/") + "/"
    found = []
    for item in store.list(base):
        name = item.key.removeprefix(base)
        if not name or name.endswith("/"):
            continue
        if ".." in name.split("/") or name.startswith("/"):
            raise Refused(f"{item.key}: a model file may not lie outside its folder")
        found.append(Wanted(f"model/{name}", item.key, item.size))
    if not found:
        raise Refused(f"{store.where}: no object under {base}; mirror the model there first")
    return found


def _download_all(
    store: Store, home: Path, wanted: list[Wanted], what: str, voice: _Voice, workers: int
) -> dict[str, dict[str, Any]]:
    """Fetch the files, several at a time; their digests by path. A file that has its name was verified before it got it."""
    total, done = sum(item.bytes for item in wanted), {item.path: 0 for item in wanted}
    lock = threading.Lock()

    def count(path: str, bytes_done: int) -> None:
        with lock:
            done[path] = bytes_done
            voice.progress(what, sum(done.values()), total)

    def fetch(item: Wanted) -> tuple[str, dict[str, Any]]:
        target = home / item.path
        if not (target.is_file() and target.stat().st_size == item.bytes):
            store.download_file(
                item.key,
                target,
                progress=lambda so_far, _: count(item.path, so_far),
                expect_bytes=item.bytes,
                expect_sha256=item.sha256,
            )
        count(item.path, item.bytes)
        return item.path, {"sha256": _sha256(target, voice), "bytes": item.bytes}

    with ThreadPoolExecutor(workers) as pool:
        try:
            return dict(job.result() for job in as_completed([pool.submit(fetch, item) for item in wanted]))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _upload_here(assignment: Assignment, directory: Path, claim: int | None, attempt: int) -> None:
    """The child of upload."""
    voice = _Voice()
    if claim is None:
        claim = parse_manifest((directory / "manifest.json").read_bytes(), str(directory)).claim
    _send(_child_store(assignment), assignment.run, directory, claim, voice, _WORKERS[attempt])


def _send(store: Store, run: str, directory: Path, claim: int, voice: _Voice, workers: int) -> int:
    """Small blobs first: if the link dies midway, what is there by then is most of the files. Bytes sent.

    The manifest is the very last request: a checkpoint exists only when its manifest does.
    """
    require_unclaimed(store, run, claim)
    manifest_bytes = (directory / "manifest.json").read_bytes()
    manifest = parse_manifest(manifest_bytes, str(directory / "manifest.json"))
    blobs = {entry.sha256: (name, entry.bytes) for name, entry in manifest.files.items()}
    total, before, sent = sum(size for _, size in blobs.values()), 0, 0
    what = f"upload {manifest.phase}/{manifest.step}"
    voice.progress(what, 0, total)
    for sha256, (name, size) in sorted(blobs.items(), key=lambda item: item[1][1]):

        def progress(done: int, _: int, before: int = before) -> None:
            voice.progress(what, before + done, total)

        key = layout.blob(run, sha256)
        count = store.upload_file(
            directory / name, key, sha256=sha256, progress=progress, moved=voice.moved, workers=workers
        )
        voice.sent(count)
        before, sent = before + size, sent + count
    require_unclaimed(store, run, claim)
    store.put_bytes(layout.manifest(run, manifest.phase, manifest.step), manifest_bytes)
    return sent


def require_unclaimed(store: Store, run: str, claim: int) -> None:
    """Fenced if a runner newer than the one of `claim` is at work on the run."""
    newest = newest_claim(store, run)
    if newest is not None and newest.number > claim:
        raise Fenced(
            f"run {run}: claim {newest.number} of flow run {newest.flow_run_id}, attempt {newest.attempt}, has superseded ours ({claim});"
            " this box writes nothing any more. Nothing is lost: the other goes on from the last checkpoint"
        )


def _measure_up(store: Store, prefix: str, size: int, seconds: float) -> tuple[float, list[str]]:
    """Mbps acknowledged by the bucket, and the keys written. A first small body tells how large the others may be, so that a slow link
    gives its number within the time and a fast one is not held up by its round trips."""
    count, keys, lock = [0], [], threading.Lock()

    def send(number: int, length: int) -> None:
        key = f"{prefix}{number}"
        store.put_bytes(key, secrets.token_bytes(length), content_type="application/octet-stream")
        with lock:
            keys.append(key)
            count[0] += length

    began = time.monotonic()
    send(0, _BLOCK // 4)
    took = time.monotonic() - began
    block = int(min(PART_BYTES, max(_BLOCK // 4, _BLOCK / 8 / took)))
    began, stop, count[0] = time.monotonic(), time.monotonic() + seconds, 0
    with ThreadPoolExecutor(_WORKERS[0]) as pool:
        jobs = range(1, max(1, size // block) + 1)
        list(pool.map(lambda number: send(number, block) if time.monotonic() < stop else None, jobs))
    return count[0] * 8 / 1e6 / (time.monotonic() - began), keys


def _measure_down(store: Store, keys: list[str], seconds: float) -> float:
    stop, count, lock = time.monotonic() + seconds, [0], threading.Lock()

    def fetch(key: str) -> None:
        if time.monotonic() < stop:
            data = store.get_bytes(key)
            with lock:
                count[0] += len(data or b"")

    began = time.monotonic()
    with ThreadPoolExecutor(_WORKERS[0]) as pool:
        list(pool.map(fetch, keys))
    return count[0] * 8 / 1e6 / (time.monotonic() - began)


def _hub_checks(recipe: Recipe, size: int, seconds: float) -> list[Check]:
    """The downlink from the hub, if the model comes from there. A hub that does not answer is unknown: it may be the hub's trouble."""
    if not recipe.model.source.startswith("hub:"):
        return []
    from training.box.hub import measure_down

    purpose, floor = "the model comes this way", recipe.box.min_inet_down_mbps
    try:
        return [_rate_check("hub_mbps", measure_down(recipe.model.source, size, seconds), floor, purpose)]
    except StoreDenied as error:
        seen, verdict, blame = str(error), "fail", "user"
    except StoreUnreachable as error:
        seen, verdict, blame = str(error), "unknown", "host"
    remedy = "mend model.source, or HF_TOKEN in the settings" if verdict == "fail" else ""
    found = {"verdict": verdict, "actual": seen, "required": f"≥ {floor:g} Mbps", "blame": blame, "remedy": remedy}
    return [Check.model_validate({"id": "hub_mbps", "purpose": purpose, **found})]


def _rate_check(name: str, seen: float, floor: float, purpose: str) -> Check:
    good = seen >= floor
    return Check(
        id=name,
        verdict="pass" if good else "fail",
        actual=f"{seen:.1f}",
        required=f"≥ {floor:g}",
        unit="Mbps",
        purpose=purpose,
        remedy="" if good else "next offer",
    )


def _durable(run: str, manifest: Manifest, sent: int, began: float) -> CheckpointDurable:
    return CheckpointDurable(
        phase=manifest.phase,
        step=manifest.step,
        manifest=layout.manifest(run, manifest.phase, manifest.step),
        bytes=sent,
        seconds=round(time.monotonic() - began, 3),
        complete=manifest.complete,
    )


def _child_store(assignment: Assignment) -> Store:
    # Half of what the parent allows, so that a frozen connection is given up and made anew before the child is killed for it.
    stall_s = float(os.environ.get("LIVERY_TRANSFER_STALL_S", "30")) / 2
    return Store.from_environment(assignment.bucket, stall_s=max(0.5, min(15.0, stall_s)))


def _assignment(path: Path) -> Assignment:
    return Assignment.model_validate_json(path.read_bytes())


def _size(store: Store, key: str) -> int:
    size = store.size(key)
    if size is None:
        raise Refused(f"{store.where}: {key} does not exist; upload it, or correct the recipe's data")
    return size


def _sha256(path: Path, voice: _Voice | None = None) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            if voice:
                voice.moved(len(block))  # hashing a shard of many GB is work, not a stall
    return digest.hexdigest()


def _die_with_parent() -> None:
    """Linux: a child whose parent is killed must not go on moving bytes beside its successor."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _kill(child: subprocess.Popen[bytes]) -> None:
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _end(error: Exception, code: int, *, child: bool) -> int:
    """A child tells its parent, the parent tells a person."""
    if child:
        print(json.dumps({"error": str(error)}), flush=True)
    else:
        print(f"{error}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

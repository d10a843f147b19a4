"""Two environments on the box: a small one that moves files and a large one that trains, both from one wheel and the pinned versions.

Installing is a detached job, so a dropped connection does not lose it, and its exit code is not what counts: the import probe is.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import logging
import os
import re
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from tasks.errors import BoxLost, InstallFailed, UserError
from tasks.remote.jobs import Jobs, JobState
from tasks.remote.ssh import Remote
from training.contract import layout
from training.contract.recipe import Recipe

log = logging.getLogger(__name__)

PACKAGES = ("kernels", "training")  # what a box may import; the control plane stays at home
CONSTRAINTS = f"{layout.BOX_HOME}/constraints.txt"
_PUT_S = 300
_POLL_S = 0.5
_UNREACHABLE_S = 300.0
_SCRIPT = """\
set -euo pipefail
home="$HOME/{home}"; venv="$HOME/{venv}"
export PIP_DISABLE_PIP_VERSION_CHECK=1 UV_NO_PROGRESS=1 PIP_PROGRESS_BAR=off
want='{requirement}'
uv=$(command -v uv || true)
if [ -n "$uv" ]; then
  "$uv" venv --quiet --clear --python '>=3.11,<3.14' "$venv"
  "$uv" pip install --python "$venv/bin/python" -c "$home/constraints.txt" "$want"
else
  for python in python3.13 python3.12 python3.11 python3 /opt/conda/bin/python3 /venv/main/bin/python3; do
    python=$(command -v "$python") && "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' && break
    python=
  done
  [ -n "$python" ] || {{ echo "no Python 3.11 to 3.13 and no uv on this box" >&2; exit 1; }}
  "$python" -m venv --clear "$venv"
  "$venv/bin/python" -m pip install -c "$home/constraints.txt" "$want"
fi
"""
# The resolver's own words for pins that cannot be met; a network that is down also ends there, so it is looked for first.
_NETWORK = re.compile(
    r"failed to fetch|connection|timed? ?out|temporary failure|dns|no space left|input/output error|read-only file system"
    r"|max retries|incompleteread|hash mismatch|cannot allocate memory",
    re.IGNORECASE,
)
_UNRESOLVABLE = re.compile(
    r"no solution found|could not find a version|no matching distribution|resolutionimpossible|requirements are unsatisfiable",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Ears:
    """Who hears of a job while it is followed: its log, and how long the box has not answered. Each may raise, which leaves the box."""

    on_log: Callable[[bytes], None] = lambda log: None
    on_silence: Callable[[float], None] = lambda silent_s: None
    meanwhile: Callable[[], object] = lambda: None
    """What goes on beside the job and is looked after at each poll."""


_NOBODY = Ears()


def install_transfer(remote: Remote, recipe: Recipe, state_dir: Path, ears: Ears = _NOBODY) -> None:
    """Send the wheel and make the small environment (boto3, huggingface_hub), so that the model can come while the rest installs."""
    send_wheel(remote, state_dir)
    _install(remote, recipe, layout.BOX_TRANSFER_VENV, ears, extra="", state_dir=state_dir)


def install_training(remote: Remote, recipe: Recipe, state_dir: Path, ears: Ears = _NOBODY) -> None:
    """Make the environment that trains. The counting trainer needs nothing beyond the small one, so it gets that."""
    if recipe.trainer == "counting":
        command = f"cd && ln -sfn {Path(layout.BOX_TRANSFER_VENV).name} {layout.BOX_TRAIN_VENV}"
        answer = remote.run(command, timeout_s=30)
        if answer.code is None:
            raise BoxLost("install training: the box does not answer")
        if answer.code != 0:
            raise InstallFailed(f"install training: {answer.err.decode(errors='replace').strip()[-300:]}")
        return
    extras = ["train", *(["cuda"] if recipe.box.device == "cuda" else []), *recipe.trackers]
    extra = f"[{','.join(extras)}]"
    _install(remote, recipe, layout.BOX_TRAIN_VENV, ears, extra=extra, state_dir=state_dir)


def send_wheel(remote: Remote, state_dir: Path) -> str:
    """Wheel and constraints to the box; the wheel's file name."""
    wheel = build_wheel(state_dir / "wheels")
    remote.put(find_constraints().encode(), CONSTRAINTS, timeout_s=_PUT_S)
    remote.put(wheel, f"{layout.BOX_HOME}/{wheel.name}", timeout_s=_PUT_S)
    return wheel.name


def build_wheel(cache_dir: Path) -> Path:
    """The wheel for the box, from the very files that are running here and the metadata they were installed with.

    Nothing is built and no index is asked, so it works offline and from an editable install as from a wheel, and the same sources
    give the same bytes. Cached under its content's digest. UserError if Livery is not installed but only lies on the path.
    """
    try:
        metadata = importlib.metadata.distribution("livery").read_text("METADATA")
    except importlib.metadata.PackageNotFoundError:
        metadata = None
    if metadata is None:
        raise UserError("livery is not installed in this environment: run 'make' or 'pip install -e .[control]' first")
    version = importlib.metadata.version("livery")
    members = dict(_members())
    info = f"livery-{version}.dist-info"
    members[f"{info}/METADATA"] = metadata.encode()
    members[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: livery\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = [f"{name},{_record_digest(data)},{len(data)}" for name, data in sorted(members.items())]
    members[f"{info}/RECORD"] = ("\n".join([*record, f"{info}/RECORD,,"]) + "\n").encode()
    digest = hashlib.sha256(
        b"".join(name.encode() + b"\0" + data for name, data in sorted(members.items()))
    ).hexdigest()
    path = cache_dir / digest[:16] / f"livery-{version}-py3-none-any.whl"
    if not path.exists():
        _write_zip(path, members)
    return path


def find_constraints() -> str:
    """The pinned versions: from the source tree, else as packed into the installed wheel. UserError if neither is there."""
    packed = files("training") / "constraints.txt"
    for place in (Path(__file__).parents[1] / "constraints.txt", packed):
        if place.is_file():
            return place.read_text()
    raise UserError("constraints.txt is neither beside the sources nor in the installed package: install Livery again")


def blame_for(output: str) -> tuple[str, bool]:
    """The line of an installer's output that says most, and whether the host is to blame rather than the pins."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for pattern, host in ((_NETWORK, True), (_UNRESOLVABLE, False)):
        for line in lines:
            if pattern.search(line):
                return _with_next(lines, line), host
    return (lines[-1] if lines else "no output"), True


def _install(remote: Remote, recipe: Recipe, venv: str, ears: Ears, *, extra: str, state_dir: Path) -> None:
    wheel = build_wheel(state_dir / "wheels")
    script = _SCRIPT.format(
        home=layout.BOX_HOME,
        venv=venv,
        requirement=f"livery{extra} @ file://'\"${{HOME// /%20}}\"'/{layout.BOX_HOME}/{wheel.name}",
    )
    name = f"install-{Path(venv).name}"
    token = hashlib.sha256(script.encode() + wheel.parent.name.encode()).hexdigest()[:16]
    jobs = Jobs(remote)
    remote.put(script.encode(), f"{layout.BOX_HOME}/{name}.sh", timeout_s=_PUT_S)
    jobs.start(name, token, ["bash", f"~/{layout.BOX_HOME}/{name}.sh"])
    state, output = follow(jobs, name, budget_s=recipe.budget.install_s, ears=ears)
    if state.exit_code != 0:
        line, host = blame_for(output)
        ended = f"exit code {state.exit_code}" if state.state == "exited" else state.state
        raise InstallFailed(f"{name}: {ended}: {line}", blame="host" if host else "other")
    log.info("%s: done", name)


def follow(
    jobs: Jobs,
    name: str,
    *,
    budget_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    ears: Ears = _NOBODY,
) -> tuple[JobState, str]:
    """Watch a job to its end; its last state and its log. InstallFailed over budget (the job is stopped), BoxLost if the box is silent."""
    began = heard = clock()
    offset, output = 0, bytearray()
    while True:
        state = jobs.poll(name, offset)
        now = clock()
        if state.state != "unknown":
            heard, offset = now, state.offset
            output += state.log
            if state.log:
                ears.on_log(state.log)
        else:
            ears.on_silence(now - heard)
        if state.state in ("exited", "lost", "absent") and not state.more:
            return state, output.decode(errors="replace")
        if now - heard > min(_UNREACHABLE_S, budget_s):
            raise BoxLost(f"{name}: the box has not answered for {now - heard:.0f} s")
        ears.meanwhile()
        if now - began > budget_s:
            jobs.stop(name, 2)
            last = output.decode(errors="replace").strip().splitlines()[-1:] or ["no output"]
            raise InstallFailed(
                f"{name}: not done after {now - began:.0f} s, budget {budget_s:.0f} s; its last line: {last[0]}"
            )
        sleep(_POLL_S)


def _members() -> Iterator[tuple[str, bytes]]:
    for package in PACKAGES:
        yield from _files(files(package), package)


def _files(folder: Traversable, prefix: str) -> Iterator[tuple[str, bytes]]:
    for item in folder.iterdir():
        if item.is_dir() and item.name != "__pycache__":
            yield from _files(item, f"{prefix}/{item.name}")
        elif item.is_file() and not item.name.endswith((".pyc", "~")):
            yield f"{prefix}/{item.name}", item.read_bytes()


def _write_zip(path: Path, members: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    with zipfile.ZipFile(fresh, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(members):
            info = zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0))
            info.external_attr = 0o644 << 16
            archive.writestr(info, members[name], zipfile.ZIP_DEFLATED)
    os.replace(fresh, path)


def _record_digest(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _with_next(lines: list[str], line: str) -> str:
    """The line and the one after it: resolvers put their reason there."""
    at = lines.index(line)
    return " ".join(lines[at : at + 2])[:400]

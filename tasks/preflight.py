"""Does this box do? Asked in three steps, each before the next costs anything: the bare box, its links to the bucket, its device."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Sequence

from pydantic import ValidationError

from tasks.domain import Offer
from tasks.errors import BoxError, BoxLost, InstallFailed, PreflightFailed
from tasks.install import follow
from tasks.remote.bundle import box_command
from tasks.remote.jobs import Jobs
from tasks.remote.ssh import Remote
from tasks.rules.tiers import TIERS
from training.contract import layout
from training.contract.checks import CheckReport
from training.contract.recipe import Box, Recipe

log = logging.getLogger(__name__)
_STAGE_A_S = 90.0
_LINKS_S = 120.0
_PROBE_S = 600.0
# The market counts GPU memory in its own way; a card of another kind differs by far more.
_MEMORY_SHARE = 0.95


def check_box(remote: Remote, recipe: Recipe, offer: Offer | None = None) -> CheckReport:
    """Stage A: hardware, limits and clock of the bare box. PreflightFailed with every failing check, BoxLost if there is no answer."""
    deadline = time.monotonic() + _STAGE_A_S
    while (left := deadline - time.monotonic()) > 0:
        asked = time.monotonic()
        if remote.run("true", timeout_s=min(left, 20)).code is None:
            time.sleep(0.5)
            continue
        wanted = wanted_of(recipe.box, offer, now=time.time(), round_trip_s=time.monotonic() - asked)
        nonce = secrets.token_hex(8)
        command = box_command("preflight", "--wanted", json.dumps(wanted), "--nonce", nonce)
        answer = remote.run(command, timeout_s=min(left, 60))
        if answer.code is None:
            continue
        reports = find_reports(answer.text, nonce)
        if not reports:
            said = answer.err.decode(errors="replace").strip()[-300:]
            raise PreflightFailed(f"preflight printed no report (exit code {answer.code}): {said or 'nothing else'}")
        return _judged(reports[0], PreflightFailed)
    raise BoxLost(f"preflight: no answer from the box in {_STAGE_A_S:.0f} s")


def check_links(remote: Remote, recipe: Recipe) -> CheckReport:
    """Uplink, downlink and clock against the recipe's own bucket, with the code that will move the checkpoints."""
    python = f"~/{layout.BOX_TRANSFER_VENV}/bin/python"
    argv = [python, "-m", "training.box.transfer", "links", "--bytes", str(probe_bytes(recipe.box))]
    reports, last = _probe(remote, "links", argv, _LINKS_S)
    if not reports:
        raise PreflightFailed(f"the links probe printed no report with our nonce; its last line: {last}")
    return _judged(reports[0], PreflightFailed)


def check_device(remote: Remote, recipe: Recipe) -> tuple[CheckReport, CheckReport]:
    """Import probe and stage B in the training environment. InstallFailed if an import or a version is wrong, PreflightFailed for the device."""
    python = f"~/{layout.BOX_TRAIN_VENV}/bin/python"
    reports, last = _probe(
        remote, "probe", [python, "-m", "training.box.probe"], min(_PROBE_S, recipe.budget.install_s)
    )
    by_stage = {report.stage: report for report in reports}
    if "probe" not in by_stage:
        raise InstallFailed(f"the import probe printed no report with our nonce; its last line: {last}")
    imports = _judged(by_stage["probe"], InstallFailed)
    if "b" not in by_stage:
        raise PreflightFailed(f"the device probe printed no report with our nonce; its last line: {last}")
    return imports, _judged(by_stage["b"], PreflightFailed)


def wanted_of(box: Box, offer: Offer | None, *, now: float, round_trip_s: float) -> dict[str, object]:
    """What stage A is to hold the box against: the recipe's floors, and what the offer promised."""
    tier = TIERS[box.tier]
    memory = tier.min_memory_mb if offer is None else offer.gpu_ram_mb * _MEMORY_SHARE
    return {
        "device": box.device,
        "num_gpus": offer.num_gpus if offer else tier.num_gpus,
        "gpu_memory_mb": memory,
        "min_driver": box.min_driver,
        "min_cuda": box.min_cuda,
        "disk_free_gb": box.min_disk_free_gb if box.min_disk_free_gb is not None else 0.8 * box.disk_gb,
        "min_pids": box.min_pids,
        "host_memory_gb": box.min_host_memory_gb,
        "max_clock_skew_s": box.max_clock_skew_s,
        "now": now,
        "round_trip_s": round_trip_s,
    }


def probe_bytes(box: Box) -> int:
    """What the links are measured with: a second or so at the floors, so that a low one is told by little, 8 to 32 MiB."""
    floor_mbps = max(box.min_inet_up_mbps, box.min_inet_down_mbps)
    return min(32 << 20, max(8 << 20, int(1.3 * floor_mbps * 1e6 / 8)))


def find_reports(text: str, nonce: str) -> list[CheckReport]:
    """The reports in a log that carry our nonce. Anything else, an echo of the command among it, is no result."""
    found = []
    for line in text.splitlines():
        if line.startswith("{") and nonce in line:
            try:
                report = CheckReport.model_validate_json(line)
            except ValidationError:
                continue
            if report.nonce == nonce:
                found.append(report)
    return found


def _probe(remote: Remote, name: str, argv: Sequence[str], budget_s: float) -> tuple[list[CheckReport], str]:
    """Run a probe as a detached job, so that a dropped connection costs a poll and not the answer. Its reports and its last line."""
    nonce = secrets.token_hex(8)
    jobs = Jobs(remote)
    words = [*argv, "--assignment", f"~/{layout.BOX_ASSIGNMENT}", "--nonce", nonce]
    jobs.start(name, nonce, words, f"~/{layout.BOX_PRIVATE_ENV}")
    _, output = follow(jobs, name, budget_s=budget_s)
    reports, lines = find_reports(output, nonce), output.strip().splitlines()
    if not reports:
        log.warning("%s: no report; its log ends:\n%s", name, "\n".join(lines[-20:]))
    return reports, lines[-1][:300] if lines else "nothing"


def _judged(report: CheckReport, error: type[BoxError]) -> CheckReport:
    for check in report.checks:
        if check.verdict == "unknown":
            log.warning("unknown: %s", check.sentence)
    if report.failed:
        blame = "host" if any(check.blame == "host" for check in report.failed) else "other"
        raise error("; ".join(check.sentence for check in report.failed), blame=blame)  # type: ignore[arg-type]
    facts = ", ".join(f"{name} {value}" for name, value in report.facts.items() if value)
    log.info("checks passed: %s (%s)", ", ".join(check.id for check in report.checks) or "none needed", facts)
    return report

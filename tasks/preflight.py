"""Does this box do? Asked in three steps, each before the next costs anything: the bare box, its links to bucket and hub, its device.

The three share `PREFLIGHT_S` seconds; each is told how many are left, and what does not fit is unknown.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Mapping, Sequence

from pydantic import ValidationError

from tasks.domain import Offer
from tasks.errors import BoxError, BoxLost, InstallFailed, PreflightFailed
from tasks.install import follow
from tasks.remote.bundle import box_command
from tasks.remote.jobs import Jobs
from tasks.remote.ssh import Remote
from tasks.rules.tiers import TIERS
from training.contract import layout
from training.contract.checks import Check, CheckReport
from training.contract.flops import step_tokens
from training.contract.recipe import Box, GrpoPhase, Recipe

log = logging.getLogger(__name__)
PREFLIGHT_S = 120.0
# At most so much of it for one of the first two, and so much kept for what comes after.
_STAGE_A_S = 60.0
_LINKS_S = 60.0
_KEPT_S = 20.0
_LEAST_LINKS_S = 20.0
# The import probe loads some GB of packages from a cold disk: it belongs to the install.
_IMPORTS_S = 500.0
# A job is started and its answer fetched by polls.
_POLLS_S = 10.0
# The market counts GPU memory in its own way; a card of another kind differs by far more.
_MEMORY_SHARE = 0.95
# (MB to write and read, least MB/s): at 300 MB/s a base of 67 GB is read in four minutes.
_DISK = {"cuda": (2000, 300.0), "cpu": (16, 1.0), "none": (16, 1.0)}
# The prediction is of the card alone: a box that is slower than this even so is throttled, shared, or another card.
_SLOWER_THAN_PLANNED = 2.0


def check_box(
    remote: Remote, recipe: Recipe, offer: Offer | None = None, *, within_s: float = PREFLIGHT_S
) -> CheckReport:
    """Stage A: hardware, limits, disk and clock of the bare box. PreflightFailed with every failing check, BoxLost if there is no answer."""
    budget_s = min(_STAGE_A_S, within_s)
    deadline = time.monotonic() + budget_s
    while (left := deadline - time.monotonic()) > 0:
        asked = time.monotonic()
        if remote.run("true", timeout_s=min(left, 20)).code is None:
            time.sleep(0.5)
            continue
        wanted = wanted_of(recipe.box, offer, now=time.time(), round_trip_s=time.monotonic() - asked)
        wanted["seconds"] = 0.8 * max(0.0, deadline - time.monotonic())
        nonce = secrets.token_hex(8)
        command = box_command("preflight", "--wanted", json.dumps(wanted), "--nonce", nonce)
        answer = remote.run(command, timeout_s=deadline - time.monotonic())
        if answer.code is None:
            continue
        reports = find_reports(answer.text, nonce)
        if not reports:
            said = answer.err.decode(errors="replace").strip()[-300:]
            raise PreflightFailed(f"preflight printed no report (exit code {answer.code}): {said or 'nothing else'}")
        return _judged(reports[0], PreflightFailed)
    raise BoxLost(f"preflight: no answer from the box in {budget_s:.0f} s")


def check_links(remote: Remote, recipe: Recipe, *, within_s: float = PREFLIGHT_S) -> CheckReport:
    """Uplink, downlink and clock against the recipe's own bucket and hub, with the code that will move the checkpoints. PreflightFailed too
    if the few MB of the measurement have not passed in the time: that is no link."""
    budget_s = min(_LINKS_S, within_s - _KEPT_S)
    if budget_s < _LEAST_LINKS_S:
        return _judged(_links_unknown(), PreflightFailed)
    python = f"~/{layout.BOX_TRANSFER_VENV}/bin/python"
    argv = [python, "-m", "training.box.transfer", "links", "--bytes", str(probe_bytes(recipe.box))]
    try:
        reports, last = _probe(remote, "links", argv, budget_s)
    except InstallFailed as error:
        raise PreflightFailed(str(error), fault="uplink_mbps") from None
    if not reports:
        raise PreflightFailed(f"the links probe printed no report with our nonce; its last line: {last}")
    return _judged(reports[0], PreflightFailed)


def check_device(
    remote: Remote,
    recipe: Recipe,
    *,
    within_s: float = PREFLIGHT_S,
    planned_step_s: Mapping[str, float] | None = None,
) -> tuple[CheckReport, CheckReport]:
    """Import probe and stage B in the training environment. InstallFailed if an import or a version is wrong, PreflightFailed for the device.

    `planned_step_s` holds the plan's seconds a step by phase, for the question whether this card keeps it.
    """
    seconds = max(0.0, within_s - _POLLS_S)
    python = f"~/{layout.BOX_TRAIN_VENV}/bin/python"
    argv = [python, "-m", "training.box.probe", "--seconds", f"{seconds:.0f}"]
    budget_s = min(_IMPORTS_S, recipe.budget.install_s) + seconds + _POLLS_S
    reports, last = _probe(remote, "probe", argv, budget_s)
    by_stage = {report.stage: report for report in reports}
    if "probe" not in by_stage:
        raise InstallFailed(f"the import probe printed no report with our nonce; its last line: {last}")
    imports = _judged(by_stage["probe"], InstallFailed)
    if "b" not in by_stage:
        raise PreflightFailed(f"the device probe printed no report with our nonce; its last line: {last}")
    device = by_stage["b"]
    if recipe.box.device == "cuda":
        speed = step_check(recipe, device.facts.get("predicted_tokens_s"), planned_step_s or {})
        log.info("speed of this card: %s", speed.sentence)
        device = device.model_copy(update={"checks": (*device.checks, speed)})
    return imports, _judged(device, PreflightFailed)


def step_check(recipe: Recipe, tokens_s: str | None, planned_step_s: Mapping[str, float]) -> Check:
    """The step as this card can do it, against the plan's, for the phase where the card does worst. GRPO is left out: it mostly generates."""
    purpose = "hours and dollars were planned with it"
    phases = [phase for phase in recipe.phases if phase.name in planned_step_s and not isinstance(phase, GrpoPhase)]
    if tokens_s is None or not phases:
        seen = "not measured" if tokens_s is None else "no plan"
        return Check(
            id="step_seconds", verdict="unknown", actual=seen, required="the plan's", unit="s", purpose=purpose
        )
    together_s = float(tokens_s) * recipe.box.gpus
    steps = [(step_tokens(phase) / together_s, planned_step_s[phase.name], phase.name) for phase in phases]
    seen_s, planned_s, name = max(steps, key=lambda step: step[0] / step[1])
    good = seen_s <= _SLOWER_THAN_PLANNED * planned_s
    return Check(
        id="step_seconds",
        verdict="pass" if good else "fail",
        actual=f"{seen_s:.2f} at best in phase {name}",
        required=f"≤ {_SLOWER_THAN_PLANNED * planned_s:.2f}, twice the plan's",
        unit="s",
        purpose=purpose,
        remedy="" if good else "next offer",
    )


def wanted_of(box: Box, offer: Offer | None, *, now: float, round_trip_s: float) -> dict[str, object]:
    """What stage A is to hold the box against: the recipe's floors, and what the offer promised."""
    tier = TIERS[box.tier]
    memory = tier.min_memory_mb if offer is None else offer.gpu_ram_mb * _MEMORY_SHARE
    return {
        "device": box.device,
        "num_gpus": offer.num_gpus if offer else box.gpus,
        "gpu_memory_mb": memory,
        "min_driver": box.min_driver,
        "min_cuda": box.min_cuda,
        "disk_free_gb": box.min_disk_free_gb if box.min_disk_free_gb is not None else 0.8 * box.disk_gb,
        "min_pids": box.min_pids,
        "host_memory_gb": box.min_host_memory_gb,
        "max_clock_skew_s": box.max_clock_skew_s,
        "now": now,
        "round_trip_s": round_trip_s,
        "disk_probe_mb": _DISK[box.device][0],
        "min_disk_mb_s": _DISK[box.device][1],
    }


def probe_bytes(box: Box) -> int:
    """What the links are measured with: a second or so at the floors, so that a low one is told by little, 8 to 32 MiB."""
    floor_mbps = max(box.min_inet_up_mbps, box.min_inet_down_mbps)
    return min(32 << 20, max(8 << 20, int(1.3 * floor_mbps * 1e6 / 8)))


def _links_unknown() -> CheckReport:
    seen = {"verdict": "unknown", "actual": "no time left to look", "required": "a measurement", "unit": "Mbps"}
    purposes = {"uplink_mbps": "each checkpoint goes this way", "downlink_mbps": "model and data come this way"}
    checks = tuple(Check.model_validate({"id": name, "purpose": why, **seen}) for name, why in purposes.items())
    return CheckReport(stage="a", nonce="", checks=checks)


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
        blamed = {check.blame: check.id for check in reversed(report.failed)}
        said = "; ".join(check.sentence for check in report.failed)
        if "host" in blamed:
            raise error(said, fault=blamed["host"])
        # What we or the user have to mend is told first: no other image would mend it.
        ours = next((blamed[who] for who in ("us", "user") if who in blamed), None)
        raise error(said, blame="image" if ours is None else "other", fault=ours or blamed["image"])
    facts = ", ".join(f"{name} {value}" for name, value in report.facts.items() if value)
    log.info("checks passed: %s (%s)", ", ".join(check.id for check in report.checks) or "none needed", facts)
    return report

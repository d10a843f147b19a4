"""A check on a box: what was measured, what was wanted, why it matters and what to do. Printed by preflight, read by the flow."""

from __future__ import annotations

from typing import Literal

from training.contract.model import Frozen

Verdict = Literal["pass", "fail", "unknown"]


class Check(Frozen):
    id: str
    """Stable name such as `driver`, `disk_free`, `import_probe`."""
    verdict: Verdict
    actual: str
    required: str
    unit: str = ""
    purpose: str
    remedy: str = ""
    blame: Literal["host", "image", "us", "user"] = "host"
    """host: remember the machine and try the next offer; image: believed when a second box says the same; us/user: another box would fail
    alike."""

    @property
    def sentence(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        return f"{self.id}: seen {self.actual}{unit}, want {self.required}{unit} ({self.purpose})" + (
            f"; {self.remedy}" if self.remedy else ""
        )


class CheckReport(Frozen):
    """All checks of one stage; `nonce` is what the caller gave, so that an echo of the command cannot pass for a result."""

    stage: Literal["a", "b", "probe"]
    nonce: str
    checks: tuple[Check, ...]
    facts: dict[str, str] = {}

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.verdict == "fail")

    @property
    def ok(self) -> bool:
        """True if nothing failed. An unknown does not fail a box, but it is shown."""
        return not self.failed

"""The named faults: what can go wrong in the rehearsal, how each is written, and which are armed right now.

A fault is written `name[=value][@scope]`. The scope says how often it strikes: `once` (default; the first call or box
that it fits), `N` (the first N), `always`, or `machine:<machine_id>` (every time, on that machine only).
"""

from __future__ import annotations

import difflib
import textwrap
from dataclasses import dataclass, field
from typing import Literal

NAME_COLUMNS, LINE_COLUMNS = 40, 120

FaultValue = float | int | str | bool


@dataclass(frozen=True)
class Fault:
    """One kind of trouble. `hits` tells when it is consumed: by a call to the market, or by a box when it is made."""

    says: str
    hits: Literal["call", "box"]
    kind: type[float] | type[int] | type[str] | None = None
    unit: str = ""
    default: FaultValue | None = None
    repeats: bool = False
    """The value counts how many calls in a row are hit."""
    live: bool = False
    """Armed while boxes are up, it strikes them too, not only the next one."""


def _call(says: str, kind: type | None = None, unit: str = "", default: FaultValue | None = None) -> Fault:
    return Fault(says, "call", kind, unit, default)


def _calls(says: str, default: int) -> Fault:
    return Fault(says, "call", int, "calls", default, repeats=True)


def _box(says: str, kind: type | None = None, unit: str = "", default: FaultValue | None = None) -> Fault:
    return Fault(says, "box", kind, unit, default)


def _live(says: str, kind: type | None = None, unit: str = "", default: FaultValue | None = None) -> Fault:
    return Fault(says, "box", kind, unit, default, live=True)


FAMILIES: dict[str, str] = {
    "search": "searching offers",
    "create": "accepting an offer",
    "show": "looking at one box",
    "list": "listing all boxes",
    "read": "any call that only reads",
    "auth": "the key",
    "credit": "the account's money",
    "charges": "the bill",
    "destroy": "giving a box back",
    "boot": "from accepted to running",
    "bid": "taken away by a higher bid",
    "host": "taken away by the host",
    "contract": "the rental's end",
    "price": "the rental's price",
    "ssh": "logging in",
    "net": "the box's links",
    "box": "the box itself",
}

FAULTS: dict[str, Fault] = {
    "search.quota": _call("The day's search quota is used up: 429 search_quota_exceeded, until UTC midnight."),
    "search.object_not_list": _call("The reply's offers are an object, as in the market's own documentation."),
    "create.drop_after_commit": _call("The box is created, then the connection drops before any reply."),
    "create.504_after_commit": _call("The box is created, and the reply is a 504 page."),
    "create.504_before_commit": _call("Nothing is created, and the reply is a 504 page."),
    "create.429": _call("Nothing is created, and the reply is the rate limiter's 429."),
    "create.200_without_id": _call("The box is created, and the reply is 200 without its id."),
    "create.success_false_with_contract": _call(
        "The reply is 200 with success:false, yet carries the id of a box that runs."
    ),
    "create.double_accept": _call("One create call makes two boxes with the same label; the reply names the first."),
    "create.offer_gone_404": _call("The offer was taken: 404 invalid_args with no_such_ask in msg."),
    "create.offer_gone_410": _call("The offer was taken: 410 no_such_ask."),
    "create.spend_limit": _call("The account may not spend faster: 200 with success:false, spend_rate_limit."),
    "create.returns_on_demand_for_bid": _call("A bid is silently made an on-demand box at the full price."),
    "create.label_lost": _call("The box is created without its label."),
    "create.disk_short": _call("The box gets only this share of the disk that was asked for.", float, "share", 0.5),
    "create.other_gpu": _call("The box has another, smaller GPU than the offer.", str, "gpu_name", "RTX 4090"),
    "create.dearer": _call("The GPU's price is this many times the offer's.", float, "times", 4.0),
    "show.null": _calls("Showing one instance answers {'instances': null} although it exists.", 1),
    "show.empty_list": _calls("Showing one instance answers {'instances': []} although it exists.", 1),
    "show.404_lag": _calls("Showing a new instance answers 404 no_such_instance for a while.", 2),
    "list.410": _call("The v1 listing itself answers 410 deprecated_endpoint."),
    "list.missing_row": _call(
        "The listing leaves one instance out (0: the newest) while total_instances counts it.", int, "id", 0
    ),
    "list.null_fields": _call("Every nullable field of every row is null."),
    "list.one_malformed_row": _call("One row of the listing has fields of the wrong type."),
    "list.page2_429": _calls("Every page after the first answers 429.", 1),
    "list.bad_total": _call("total_instances is one more than there are."),
    "list.empty_but_success": _call("The listing says success and holds nothing, total_instances 0."),
    "list.wrong_account": _call("users/current answers for another account."),
    "list.lag": _box(
        "The box stays out of every listing, and of its counts, this long after it was made.", float, "s", 60.0
    ),
    "list.stale_after_destroy": _box(
        "The box stays in every listing this long after it was destroyed, unbilled.", float, "s", 60.0
    ),
    "read.429": _calls("A call that only reads answers 429, as when another machine uses the same key.", 2),
    "read.502": _calls("A call that only reads answers a 502 page.", 2),
    "auth.revoked_midway": _call(
        "The account key (not the reaper's) is revoked this long after a box was first accepted: 404 auth_error.",
        float,
        "s",
        0.0,
    ),
    "auth.read_only": _call(
        "The account key (not the reaper's) may only read until this is taken back: every change answers 403."
    ),
    "auth.session_expired_404": _calls("A valid key is answered 404 auth_error, session expired.", 1),
    "credit.zero": _call(
        "The account has no credit until this is taken back: creates are refused, running boxes are stopped."
    ),
    "charges.lag": _call(
        "Until this is taken back, a box is on the bill only this long after its end.", float, "s", 3600.0
    ),
    "charges.behind": _call(
        "Until this is taken back, the bill is this long behind: of each box, what it cost until then.",
        float,
        "s",
        3600.0,
    ),
    "destroy.429": _calls("DELETE answers 429.", 3),
    "destroy.200_but_stays": _call(
        "DELETE answers 200, but the box stays, billed, for this many further looks at it.", int, "polls", 3
    ),
    "destroy.success_false": _calls("DELETE answers 200 with success:false, and the box stays.", 2),
    "destroy.404_but_alive": _calls("DELETE answers 404 no_such_instance, and the box stays.", 2),
    "destroy.500_but_done": _call("DELETE answers 500, but the box is gone."),
    "destroy.hang": _call("DELETE does nothing, and the connection hangs this long before it drops.", float, "s", 30.0),
    "boot.loading_forever": _box("The box stays in loading for ever."),
    "boot.status_msg": _box(
        "The box stays in loading with this status_msg.",
        str,
        "text",
        "Error response from daemon: manifest unknown",
    ),
    "boot.exited": _box("The container exits as soon as it has started."),
    "boot.no_address": _box("The box runs, and neither of its SSH addresses is ever told."),
    "boot.offline_after": _box("The host goes offline this long after running.", float, "s", 5.0),
    "boot.unknown_then_back": _box("One second after running the state is unknown for this long.", float, "s", 5.0),
    "bid.outbid_after": _box("A bid box is outbid, and stops, this long after running.", float, "s", 5.0),
    "host.reclaim_stop": _box(
        "The host reclaims the GPU, and the box stops, this long after running.", float, "s", 5.0
    ),
    "host.reboots_after": _box(
        "The host reboots this long after running: every process is gone, the ports are new, the disk stays.",
        float,
        "s",
        5.0,
    ),
    "contract.ends_after": _box(
        "The contract ends this long after running: the box stops for good, and is deleted 48 hours later.",
        float,
        "s",
        5.0,
    ),
    "price.increase_after": _box("The GPU's price rises by half this long after running.", float, "s", 5.0),
    "ssh.refused_for": _box("Both SSH endpoints refuse connections for this long after running.", float, "s", 3.0),
    "ssh.blackhole": _live("Both SSH endpoints accept a connection and never say a word."),
    "ssh.attach_refused": _call("Attaching a key answers 400 team_ssh_keys_not_supported."),
    "ssh.key_missing_for": _box("authorized_keys stays empty for this long after running.", float, "s", 3.0),
    "ssh.key_dropped_after": _box(
        "The host empties authorized_keys this long after running; attaching through the API restores it.",
        float,
        "s",
        5.0,
    ),
    "ssh.port_changes_after": _box("Both SSH endpoints move to new ports this long after running.", float, "s", 5.0),
    "ssh.direct_blocked": _live(
        "The direct SSH endpoint is dead (blackhole: connects, silent; or refuse); the proxy works.",
        str,
        "blackhole|refuse",
        "blackhole",
    ),
    "ssh.proxy_blocked": _live(
        "The proxy SSH endpoint is dead (blackhole or refuse); the direct one works.",
        str,
        "blackhole|refuse",
        "blackhole",
    ),
    "ssh.drop_mid_command": _live(
        "This many times, every SSH connection is reset 1.5 s after a command began.", int, "times", 1
    ),
    "ssh.tmux_banner_on_stdout": _box("Every command's stdout begins with the banner of a tmux login."),
    "ssh.path_minimal": _box("Commands run with PATH=/usr/bin:/bin, as non-interactive shells do on some hosts."),
    "net.uplink": _live("The box's uplink (to the bucket and over SSH) is this slow.", float, "MB/s", 0.38),
    "net.downlink": _live("The box's downlink (from the bucket and over SSH) is this slow.", float, "MB/s", 0.38),
    "net.stall_after": _live("The bucket link freezes after the box has sent this much.", int, "bytes", 1_000_000),
    "box.driver_old": _box(
        "The offer promises a good driver, the box has this one (CUDA 12.4).", str, "version", "550.127.05"
    ),
    "box.pids_max": _box("The box may hold only this many processes.", int, "pids", 1024),
    "box.disk_full": _box("The box has only this much disk left.", float, "GB", 0.5),
    "box.clock_skew": _box("The box's clock is this far ahead.", float, "s", 1200.0),
    "box.gpu_lost": _box("The GPU has fallen off the bus with this Xid; nvidia-smi fails.", int, "Xid", 79),
    "box.lost_at": _live(
        "The host vanishes when the box's events.jsonl shows this phase at this step or later.", str, "phase:step"
    ),
    "box.import_broken": _box("Importing this module fails in every Python on the box.", str, "module", "peft"),
}


@dataclass
class Armed:
    """A fault that waits for its victims. `left` is None when it never runs out."""

    name: str
    value: FaultValue
    scope: str
    left: int | None
    machine_id: int | None
    fired: int = 0

    def fits(self, machine_id: int | None) -> bool:
        return self.left != 0 and (self.machine_id is None or self.machine_id == machine_id)


@dataclass
class FaultBook:
    """The armed faults and how often each has struck."""

    armed: list[Armed] = field(default_factory=list)

    def arm(self, spec: str) -> Armed:
        """Arms `name[=value][@scope]`; ValueError says what is wrong with it and what would be right."""
        armed = parse(spec)
        self.disarm(armed.name)
        self.armed.append(armed)
        return armed

    def disarm(self, name: str) -> bool:
        found = [a for a in self.armed if a.name == name]
        self.armed = [a for a in self.armed if a.name != name]
        return bool(found)

    def peek(self, name: str, machine_id: int | None = None) -> FaultValue | None:
        """The value of an armed fault that fits, without using it up; None when there is none."""
        return next((a.value for a in self.armed if a.name == name and a.fits(machine_id)), None)

    def take(self, name: str, machine_id: int | None = None) -> FaultValue | None:
        """The value of an armed fault that fits, used once; None when there is none."""
        for armed in self.armed:
            if armed.name == name and armed.fits(machine_id):
                armed.fired += 1
                if armed.left is not None:
                    armed.left -= 1
                return armed.value
        return None

    def note(self, name: str) -> None:
        """Counts a strike of a fault that is a lasting state rather than a series of strikes."""
        for armed in self.armed:
            if armed.name == name:
                armed.fired += 1

    def rows(self) -> list[dict[str, object]]:
        return [
            {"name": a.name, "value": a.value, "scope": a.scope, "left": a.left, "fired": a.fired} for a in self.armed
        ]


def parse(spec: str) -> Armed:
    text, has_scope, scope = spec.strip().rpartition("@")
    if not has_scope:
        text, scope = scope, "once"
    name, has_value, raw = text.partition("=")
    if name not in FAULTS:
        near = difflib.get_close_matches(name, FAULTS, n=3, cutoff=0.3)
        near += [n for n in FAULTS if name and name in n and n not in near]
        raise ValueError(f"fault {name!r}: no such fault; nearest: {', '.join(near[:4]) or 'none'}; --faults lists all")
    value = _value(name, FAULTS[name], raw if has_value else None)
    left, machine_id = _scope(spec, scope)
    if FAULTS[name].repeats and left is not None:
        left *= int(value)
    return Armed(name, value, scope, left, machine_id)


def _value(name: str, fault: Fault, raw: str | None) -> FaultValue:
    if fault.kind is None:
        if raw is not None:
            raise ValueError(f"fault {name}: takes no value, got {raw!r}; write {name}")
        return True
    if raw is None:
        if fault.default is None:
            raise ValueError(f"fault {name}: needs a value ({fault.unit}); write {name}=<{fault.unit}>")
        return fault.default
    if name == "box.lost_at":
        phase, colon, step = raw.partition(":")
        if not (phase and colon and step.isdigit()):
            raise ValueError(f"fault {name}: got {raw!r}, wanted phase:step; write {name}=sft:5")
    if fault.unit == "blackhole|refuse" and raw not in ("blackhole", "refuse"):
        raise ValueError(f"fault {name}: got {raw!r}, wanted blackhole or refuse")
    try:
        number: FaultValue = fault.kind(raw)
    except ValueError:
        raise ValueError(
            f"fault {name}: got {raw!r}, wanted a number of {fault.unit}; write {name}={fault.default}"
        ) from None
    if isinstance(number, (int, float)) and number < 0:
        raise ValueError(f"fault {name}: got {raw!r}, wanted a number of {fault.unit} that is not negative")
    return number


def _scope(spec: str, scope: str) -> tuple[int | None, int | None]:
    if scope == "once":
        return 1, None
    if scope == "always":
        return None, None
    if scope.isdigit() and int(scope) > 0:
        return int(scope), None
    word, _, machine = scope.partition(":")
    if word == "machine" and machine.isdigit():
        return None, int(machine)
    raise ValueError(f"fault {spec!r}: scope {scope!r} unknown; wanted once, always, a count or machine:<machine_id>")


def table() -> str:
    """Every fault by what it troubles, with its value's default and unit, for `--faults`."""
    lines = [
        "A fault is written name[=value][@scope]. Scopes: once (the default: the first call or box that it fits), a count,",
        "always, machine:<machine_id>. A name with = takes a value; the one shown is used when none is given.",
    ]
    for family, title in FAMILIES.items():
        lines += ["", f"{family}: {title}"]
        for name, fault in FAULTS.items():
            if name.partition(".")[0] == family:
                lines += _entry(name, fault)
    return "\n".join(lines)


def _entry(name: str, fault: Fault) -> list[str]:
    value = "" if fault.kind is None else f"={fault.default}" if fault.default is not None else f"=<{fault.unit}>"
    unit = f" [{fault.unit}]" if fault.unit and fault.default is not None else ""
    first, margin = f"  {name}{value}", " " * NAME_COLUMNS
    said = textwrap.wrap(fault.says + unit, LINE_COLUMNS - NAME_COLUMNS)
    head = [f"{first:<{NAME_COLUMNS}}{said[0]}"] if len(first) < NAME_COLUMNS else [first, margin + said[0]]
    return head + [margin + line for line in said[1:]]

"""How fast the box's lines to the real bucket and to the hub are, with the code that will use them."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from training.box.store import Store, StoreDenied, StoreUnreachable
from training.contract import layout
from training.contract.checks import Check, CheckReport
from training.contract.recipe import Assignment, Recipe

_CONNECTIONS = 4
_BLOCK = 1 << 20
_MOST = 8 << 20  # in one request, so that the time is kept on a slow link


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
    block = int(min(_MOST, max(_BLOCK // 4, _BLOCK / 8 / took)))
    began, stop, count[0] = time.monotonic(), time.monotonic() + seconds, 0
    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        jobs = range(1, max(1, size // block) + 1)
        list(pool.map(lambda number: send(number, block) if time.monotonic() < stop else None, jobs))
    return count[0] * 8 / 1e6 / (time.monotonic() - began), keys


def _measure_down(store: Store, keys: list[str], seconds: float) -> float:
    """Mbps that arrive; what has not when the time is over is not waited for."""
    stop, count, lock = time.monotonic() + seconds, [0], threading.Lock()

    def fetch(key: str) -> None:
        with contextlib.closing(store.stream(key)) as blocks:
            for block in blocks if time.monotonic() < stop else ():
                with lock:
                    count[0] += len(block)
                if time.monotonic() > stop:
                    return

    began = time.monotonic()
    with ThreadPoolExecutor(_CONNECTIONS) as pool:
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

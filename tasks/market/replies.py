"""What the market's replies mean: error bodies to the exception tree, rows to our types. Pure, so that each odd reply is one line of a test.

Bodies were gathered in November 2026 from the official client's source, the documentation and public reports. A field may be
missing, null, or a number written as text; anything else of an unknown form is a ShapeError, never "empty" and never "gone".
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Literal

from tasks.domain import Charge, Endpoint, Instance, Offer, UnparsedInstance
from tasks.errors import (
    Ambiguous,
    AuthError,
    EndpointGone,
    InvalidRequest,
    MarketError,
    NotFound,
    OfferGone,
    QuotaExhausted,
    RateLimited,
    Rejected,
    ShapeError,
)

_NAMED = re.compile(r'("(?:instance_api_key|jupyter_token|image_login|api_key|onstart)"\s*:\s*)"(?:[^"\\]|\\.)*"')
_KEY_FORM = re.compile(r"\b[0-9a-f]{64}\b")
# Looking for the form of a key at each place of a page of a listing takes longer than all else that is done with it.
_HEX = bytes(ord("h") if chr(code) in "0123456789abcdef" else ord(" ") for code in range(256))
_UNSURE_STATUS = {408, 409, 425}


def redact(text: str, key: str) -> str:
    """The text without our key and without the secrets that the market's replies carry; JSON stays JSON."""
    shown = text.replace(key, "[secret]") if key else text
    shown = _NAMED.sub(r'\1"[secret]"', shown)
    may_hold_one = b"h" * 64 in shown.encode(errors="replace").translate(_HEX)
    return _KEY_FORM.sub("[secret]", shown) if may_hold_one else shown


def error_of(call: str, status: int, headers: Mapping[str, str], text: str) -> MarketError | None:
    """The error a reply stands for, None if it is a success. `call` names the request, `text` is the redacted body.

    The body decides, for this market answers a bad key with 404 and a failure with 200.
    """
    body = _object(text)
    name, message = _words(body, text)
    instance_id = created_id(body)
    kind = _kind(status, name, message, body)
    if kind is None:
        return None
    said = f"{call}: HTTP {status}{f' {name}' if name else ''}: {message or '(empty body)'}"
    if kind is RateLimited:
        return RateLimited(said, retry_after_s=_seconds(headers.get("retry-after")), instance_id=instance_id)
    if kind is QuotaExhausted and headers.get("x-ratelimit-reset"):
        said += f"; until {headers['x-ratelimit-reset']}"
    if kind is AuthError:
        said += "; check LIVERY_MARKET_API_KEY (the reaper's own: LIVERY_REAPER_API_KEY) and its permissions"
    return kind(said, instance_id=instance_id)


def _kind(status: int, name: str, message: str, body: dict[str, Any] | None) -> type[MarketError] | None:
    words = f"{name} {message}".lower()
    if status == 401 or status == 403 or "auth_error" in words:
        return AuthError
    if status == 429:
        return QuotaExhausted if "quota" in words else RateLimited
    if "no_such_ask" in words and status in {404, 410}:
        return OfferGone
    if status == 410:
        return EndpointGone
    if status == 404:
        # An unknown 404 may come from a proxy or a moved path: taking it for "gone" would leave a box billing.
        return NotFound if "no_such_instance" in words or name == "not_found" else ShapeError
    if status in _UNSURE_STATUS or status >= 500:
        return Ambiguous
    if 400 <= status < 500:
        return InvalidRequest
    if status != 200:
        return ShapeError
    return Rejected if body is not None and body.get("success") is False else None


def json_of(call: str, text: str) -> Any:
    """The JSON of a 200; Ambiguous if it is none, for then nobody knows what happened."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise Ambiguous(f"{call}: HTTP 200, but not JSON: {text[:200]!r}") from None


def _object(text: str) -> dict[str, Any] | None:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def _words(body: dict[str, Any] | None, text: str) -> tuple[str, str]:
    if body is None:
        return "", " ".join(text.split())[:300]
    said = next((body[key] for key in ("msg", "message", "detail") if body.get(key)), "")
    return str(body.get("error") or ""), str(said)[:300]


def created_id(body: Any) -> int | None:
    """The id of the box that a create call made, from a success or an error; None if the reply names none."""
    return whole_number(body.get("new_contract")) if isinstance(body, dict) else None


def whole_number(seen: Any) -> int | None:
    """This market writes a number now and then as text."""
    if isinstance(seen, str) and re.fullmatch(r"[0-9]{1,18}", seen):
        return int(seen)
    return seen if isinstance(seen, int) and not isinstance(seen, bool) else None


def _seconds(text: str | None) -> float | None:
    try:
        return max(0.0, min(60.0, float(text))) if text else None
    except ValueError:
        return None


def one_instance(call: str, body: Any) -> Instance | None:
    """Show-one: an object, null, or a list of none or one have all been seen."""
    if not isinstance(body, dict) or "instances" not in body:
        raise ShapeError(f"{call}: want an object with 'instances', seen {_shown(body)}")
    seen = body["instances"]
    if isinstance(seen, list) and len(seen) <= 1:
        seen = seen[0] if seen else None
    if seen is None:
        return None
    if not isinstance(seen, dict):
        raise ShapeError(f"{call}: want one instance, seen {_shown(seen)}")
    parsed = instance_of(seen)
    if isinstance(parsed, UnparsedInstance):
        raise ShapeError(f"{call}: {parsed.problem}")
    return parsed


def instance_of(row: Any) -> Instance | UnparsedInstance:
    """One row of a listing. A row that cannot be read still bills, so it is handed on with what can be read of it."""
    if not isinstance(row, dict):
        return UnparsedInstance(id=None, label=None, problem=f"want an object, seen {_shown(row)}")
    try:
        return _instance(row)
    except ValueError as error:
        label = row.get("label")
        return UnparsedInstance(
            id=_id_or_none(row), label=label if isinstance(label, str) else None, problem=str(error)
        )


def _instance(row: dict[str, Any]) -> Instance:
    disk_gb, storage = _number(row, "disk_space"), _number(row, "storage_total_cost")
    monthly = _number(row, "storage_cost")
    if storage is None and disk_gb is not None and monthly is not None:
        storage = monthly * disk_gb / 720
    return Instance(
        id=_integer(row, "id"),
        label=_text(row, "label"),
        machine_id=_integer_or_none(row, "machine_id"),
        actual_status=_text(row, "actual_status"),
        intended_status=_text(row, "intended_status"),
        cur_state=_text(row, "cur_state"),
        next_state=_text(row, "next_state"),
        status_msg=_text(row, "status_msg"),
        is_bid=_flag(row, "is_bid"),
        dph_total_usd=_number(row, "dph_total"),
        storage_usd_hour=storage,
        gpu_name=_text(row, "gpu_name"),
        num_gpus=_integer_or_none(row, "num_gpus"),
        gpu_ram_mb=_number(row, "gpu_ram"),
        gpu_util=_number(row, "gpu_util"),
        disk_space_gb=disk_gb,
        start_date=_number(row, "start_date"),
        end_date=_number(row, "end_date"),
        endpoints=_endpoints(row),
    )


def _endpoints(row: dict[str, Any]) -> tuple[Endpoint, ...]:
    """Direct, then proxy. `ports` has been seen as an object, null and a list of numbers; only the object helps."""
    found: list[Endpoint] = []
    host, ports = (_text(row, "public_ipaddr") or "").strip(), row.get("ports")
    mapped = ports.get("22/tcp") if isinstance(ports, dict) else None
    if host and isinstance(mapped, list) and mapped and isinstance(mapped[0], dict):
        port = _integer_or_none(mapped[0], "HostPort")
        if port:
            found.append(Endpoint(host=host, port=port, kind="direct"))
    proxy, proxy_port = (_text(row, "ssh_host") or "").strip(), _integer_or_none(row, "ssh_port")
    if proxy and proxy_port:
        found.append(Endpoint(host=proxy, port=proxy_port, kind="proxy"))
    return tuple(found)


def offer_of(row: Any) -> Offer:
    """One row of a search; ValueError says which field cannot be read."""
    if not isinstance(row, dict):
        raise ValueError(f"want an object, seen {_shown(row)}")
    reliability = _number(row, "reliability")
    return Offer(
        id=_integer(row, "id"),
        machine_id=_integer(row, "machine_id"),
        host_id=_integer_or_none(row, "host_id"),
        gpu_name=_text(row, "gpu_name") or "unnamed",
        num_gpus=_integer(row, "num_gpus"),
        gpu_ram_mb=_needed(row, "gpu_ram"),
        compute_cap=_integer_or_none(row, "compute_cap"),
        cpu_arch=_text(row, "cpu_arch"),
        cuda_max_good=_number(row, "cuda_max_good"),
        driver_version=_text(row, "driver_version"),
        disk_space_gb=_needed(row, "disk_space"),
        dph_total_usd=_needed(row, "dph_total"),
        dph_base_usd=_number(row, "dph_base"),
        storage_usd_gb_month=_number(row, "storage_cost"),
        min_bid_usd=_number(row, "min_bid"),
        inet_down_mbps=_number(row, "inet_down"),
        inet_up_mbps=_number(row, "inet_up"),
        inet_down_usd_gb=_traffic_usd_gb(row, "down"),
        inet_up_usd_gb=_traffic_usd_gb(row, "up"),
        reliability=reliability if reliability is not None else _number(row, "reliability2"),
        verified=row.get("verification") == "verified",
        rentable=row.get("rentable") is True,
        country=country_of(_text(row, "geolocation")),
        geolocation=_text(row, "geolocation"),
        duration_s=_number(row, "duration"),
        host_memory_gb=_memory_share_gb(row),
        pcie_gbs=_number(row, "pcie_bw"),
        direct_port_count=_integer_or_none(row, "direct_port_count") or 0,
    )


def _traffic_usd_gb(row: Mapping[str, Any], way: Literal["down", "up"]) -> float:
    per_gb, per_tb = _number(row, f"inet_{way}_cost"), _number(row, f"internet_{way}_cost_per_tb")
    return per_gb if per_gb is not None else (per_tb or 0.0) / 1000


# The last part of the free text is a two-letter code or, on some hosts, a name.
_COUNTRIES = {
    "united states": "US", "usa": "US", "canada": "CA", "germany": "DE", "netherlands": "NL", "the netherlands": "NL",
    "finland": "FI", "sweden": "SE", "norway": "NO", "denmark": "DK", "iceland": "IS", "france": "FR", "spain": "ES",
    "portugal": "PT", "italy": "IT", "poland": "PL", "czechia": "CZ", "czech republic": "CZ", "austria": "AT",
    "switzerland": "CH", "belgium": "BE", "ireland": "IE", "united kingdom": "GB", "great britain": "GB",
    "hungary": "HU", "romania": "RO", "bulgaria": "BG", "greece": "GR", "estonia": "EE", "latvia": "LV",
    "lithuania": "LT", "slovakia": "SK", "slovenia": "SI", "croatia": "HR", "luxembourg": "LU", "japan": "JP",
    "south korea": "KR", "taiwan": "TW", "singapore": "SG", "india": "IN", "australia": "AU", "brazil": "BR",
}  # fmt: skip


def country_of(geolocation: str | None) -> str | None:
    """`"Bavaria, DE"`, `", US"` and `"California, United States"` to a code; None if it cannot be told."""
    last = (geolocation or "").rpartition(",")[2].strip()
    if re.fullmatch(r"[A-Z]{2}", last):
        return last
    return _COUNTRIES.get(last.lower())


def _memory_share_gb(row: dict[str, Any]) -> float | None:
    """`cpu_ram` is the whole machine's; ours goes by cores, or by the share of its GPUs where the cores are null."""
    whole_mb = _number(row, "cpu_ram")
    ours, cores = _number(row, "cpu_cores_effective"), _number(row, "cpu_cores")
    share = ours / cores if ours and cores else _number(row, "gpu_frac")
    return None if whole_mb is None or share is None else round(whole_mb / 1000 * min(share, 1.0), 3)


_CHARGE_KINDS: dict[str, Literal["gpu", "disk", "down", "up"]] = {
    "gpu": "gpu",
    "disk": "disk",
    "bwd": "down",
    "bwu": "up",
}


def charges_of(call: str, row: Any) -> tuple[int | None, list[Charge]]:
    """One row of the charges: the box it is for (None: not a box) and its items."""
    if not isinstance(row, dict) or not isinstance(row.get("items"), list):
        raise ShapeError(f"{call}: want an object with a list of items, seen {_shown(row)}")
    source = re.fullmatch(r"instance-(\d+)", str(row.get("source")))
    if not source:
        return None, []
    instance_id = int(source[1])
    try:
        return instance_id, [
            Charge(
                instance_id=instance_id,
                kind=_CHARGE_KINDS.get(str(item.get("type")), "other"),
                usd=_needed(item, "amount"),
                since=_moment(row, "start"),
                until=_moment(row, "end"),
                label=_label_in(row.get("metadata")),
            )
            for item in row["items"]
        ]
    except (ValueError, AttributeError) as error:
        raise ShapeError(f"{call}: charges of instance {instance_id}: {error}") from None


def _moment(row: Mapping[str, Any], name: str) -> float | None:
    """Epoch seconds; None for a form nobody knows, since when it was is not worth losing what it was."""
    try:
        return _number(row, name)
    except ValueError:
        return None


def _label_in(metadata: Any) -> str | None:
    label = metadata.get("label") if isinstance(metadata, dict) else None
    return label if isinstance(label, str) else None


def _number(row: Mapping[str, Any], name: str) -> float | None:
    seen = row.get(name)
    if seen is None:
        return None
    try:
        number = float(seen) if isinstance(seen, (int, float, str)) and not isinstance(seen, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name}: want a number, seen {_shown(seen)}")
    return number


def _needed(row: Mapping[str, Any], name: str) -> float:
    number = _number(row, name)
    if number is None:
        raise ValueError(f"{name}: want a number, seen none")
    return number


def _integer(row: Mapping[str, Any], name: str) -> int:
    number = _needed(row, name)
    if number != int(number):
        raise ValueError(f"{name}: want a whole number, seen {number}")
    return int(number)


def _integer_or_none(row: Mapping[str, Any], name: str) -> int | None:
    return None if row.get(name) is None else _integer(row, name)


def _id_or_none(row: Mapping[str, Any]) -> int | None:
    try:
        return _integer(row, "id")
    except ValueError:
        return None


def _text(row: Mapping[str, Any], name: str) -> str | None:
    seen = row.get(name)
    if isinstance(seen, (dict, list)):
        raise ValueError(f"{name}: want a text, seen {_shown(seen)}")
    return None if seen is None else str(seen)


def _flag(row: Mapping[str, Any], name: str) -> bool | None:
    seen = row.get(name)
    if seen in (0, 1) and isinstance(seen, int):
        return bool(seen)
    if seen is not None and not isinstance(seen, bool):
        raise ValueError(f"{name}: want true or false, seen {_shown(seen)}")
    return seen


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:80]!r}"

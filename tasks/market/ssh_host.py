"""A box that its user owns: nothing is bought and nothing is ended, but one run at a time has it, from create to destroy.

Renting takes the host's lock, an object in the bucket that carries the label, and clears away what an earlier run of ours left in
Livery's working folder. Destroying stops our jobs, takes our secrets and our key away and gives the lock back. The host itself is not ours
to destroy, so a host that does not answer is given back all the same: it costs nothing, and the next run clears it first.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import secrets
import shlex
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tasks.domain import Charge, Endpoint, Instance, Listing, Offer, UnparsedInstance
from tasks.errors import Ambiguous, AuthError, LoginFailed, MarketError, OfferGone, Rejected, ShapeError
from tasks.market.protocol import CreateRequest, Market
from tasks.remote.bundle import FIND_PYTHON, box_zip
from tasks.remote.ssh import Answer, Remote
from tasks.rules.tiers import TIERS
from tasks.settings import Settings
from tasks.stores import open_store
from training.box.store import Store, StoreConflict, StoreError
from training.contract import layout
from training.contract.model import Frozen
from training.contract.recipe import Box as BoxWanted

log = logging.getLogger(__name__)

COMMAND_S = 60.0
NOT_OURS = "your own host: $0, not ours to destroy"
_YEAR_S = 365 * 86_400.0
# An owner knows where the host stands; the links are measured before anything big is downloaded, the plan counts on this.
_PLANNED_MBPS = 1_000.0
_OURS = f"{layout.BOX_HOME}/.livery-host"
_SECRETS = (layout.BOX_PRIVATE_ENV, layout.BOX_INSTANCE_ENV)
# All that a run leaves behind but its environments, which the next install makes anew by itself.
LEFTOVERS = (
    *_SECRETS,
    layout.BOX_ZIP,
    layout.BOX_ASSIGNMENT,
    layout.BOX_ALIVE,
    layout.BOX_EVENTS,
    layout.BOX_ABORTED,
    layout.BOX_DEVICE_FACTS,
    layout.BOX_JOBS,
    layout.BOX_MODEL,
    layout.BOX_DATA,
    layout.BOX_WORK,
    f"{layout.BOX_HOME}/prefetched.json",
)

# Our own program comes on standard input each time: what lies on the host may be half there, or in use by another run.
_WITH_ZIP = f'cd && Z=$(mktemp) && trap \'rm -f "$Z"\' EXIT && cat > "$Z" || exit 1; {{ {FIND_PYTHON}; }}\n'
_MEASURE = """
import json, platform, subprocess, sys
sys.path.insert(0, sys.argv[1])
from training.box import preflight
facts = {**preflight.read_host_facts(), **preflight.read_driver_facts(sys.argv[2]), "machine": platform.machine()}
try:
    asked = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    facts["compute_caps"] = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=20).stdout.split()
except (OSError, subprocess.SubprocessError):
    pass
print(json.dumps(facts))
"""
_STOP_JOBS = f"""
failed=
for job in {layout.BOX_JOBS}/*/; do
  [ ! -d "$job" ] || "$P" -S "$Z" supervisor stop "$HOME/$job" 5 | grep -qv '"running"' || failed="$failed $job"
done
[ -z "$failed" ] || {{ echo "could not be stopped:$failed" >&2; exit 4; }}
"""
_CLEAR = f"""
if [ ! -e {_OURS} ] && [ -n "$(ls -A {layout.BOX_HOME} 2>/dev/null)" ]; then
  echo "the folder ~/{layout.BOX_HOME} holds something that is not Livery's; move it away" >&2; exit 3
fi
mkdir -p {layout.BOX_HOME} && touch {_OURS} || exit 1
{_STOP_JOBS}
rm -rf {" ".join(LEFTOVERS)} && touch {layout.BOX_ALIVE}
"""
_ATTACH = r"""
read -r line && umask 077 && mkdir -p ~/.ssh && cd ~/.ssh && touch authorized_keys || exit 1
grep -qxF "$line" authorized_keys && exit 0
[ -z "$(tail -c 1 authorized_keys)" ] || echo >> authorized_keys
printf '%s\n' "$line" >> authorized_keys
"""


class Held(Frozen):
    """`owned/<machine id>.json`, there while a run has the host. Deleting the object frees it."""

    instance_id: int
    label: str
    taken_at: float
    gpu_name: str
    num_gpus: int
    gpu_ram_mb: float
    disk_gb: float


def open_host(settings: Settings, budget_s: float | None = None) -> Market:
    assert settings.ssh_host is not None and settings.ssh_key_path is not None, "settings see to that"
    return SshHost(
        settings.ssh_host,
        settings.ssh_port,
        settings.ssh_user,
        settings.ssh_key_path.expanduser(),
        open_store(settings),
        settings.state_dir.expanduser(),
        command_s=COMMAND_S if budget_s is None else max(1.0, budget_s / 3),
    )


class SshHost:
    """The market protocol over one host and the bucket that says who has it."""

    name = "ssh_host"
    owned = True

    def __init__(
        self,
        host: str,
        port: int,
        user: str,
        key_path: Path,
        store: Store,
        state_dir: Path,
        *,
        command_s: float = COMMAND_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._host, self._port, self._user, self._key_path = host, port, user, key_path
        self._store, self._command_s, self._clock = store, command_s, clock
        self.address = f"{user}@{host}:{port}"
        self.machine_id = int(hashlib.sha256(f"{host}:{port}".encode()).hexdigest()[:12], 16)
        self._known_hosts = state_dir / "keys" / f"own-{self.machine_id}.known"
        self._key = f"owned/{self.machine_id}.json"

    def account_id(self) -> str:
        return f"ssh_host:{self.address}"

    def credit_usd(self) -> float | None:
        return math.inf

    def search(self, want: BoxWanted) -> list[Offer]:
        """The one host, as measured at a login just now. Ambiguous if it does not answer, AuthError if it refuses the key."""
        facts = self._measured(want)
        gpus = facts.get("gpus") or []
        memory_gb = facts.get("memory_max_gb")
        return [
            Offer(
                id=self.machine_id,
                machine_id=self.machine_id,
                gpu_name=str(gpus[0]["name"]) if gpus else "no GPU",
                num_gpus=len(gpus),
                gpu_ram_mb=float(gpus[0]["memory_mb"] or 0) if gpus else 0.0,
                compute_cap=_compute_cap(facts, want),
                cpu_arch={"x86_64": "amd64", "aarch64": "arm64"}.get(facts["machine"], facts["machine"]),
                cuda_max_good=facts["cuda_driver"] / 1000 if facts.get("cuda_driver") else None,
                driver_version=facts.get("driver_version"),
                disk_space_gb=facts["disk_free_gb"],
                dph_total_usd=0.0,
                inet_down_mbps=max(want.min_inet_down_mbps, _PLANNED_MBPS),
                inet_up_mbps=max(want.min_inet_up_mbps, _PLANNED_MBPS),
                reliability=1.0,
                verified=True,
                rentable=self._holder() is None,
                country=want.countries[0] if want.countries else None,
                geolocation="your own host",
                duration_s=_YEAR_S,
                host_memory_gb=memory_gb if memory_gb is not None and math.isfinite(memory_gb) else None,
                direct_port_count=1,
            )
        ]

    def create(self, request: CreateRequest) -> int:
        """Take the lock and clear the host. OfferGone if another run has it; Rejected with the id if it cannot be cleared."""
        offer = request.offer
        held = Held(
            instance_id=10**11 + secrets.randbelow(9 * 10**11),
            label=request.label,
            taken_at=self._clock(),
            gpu_name=offer.gpu_name,
            num_gpus=offer.num_gpus,
            gpu_ram_mb=offer.gpu_ram_mb,
            disk_gb=offer.disk_space_gb,
        )
        try:
            self._store.put_bytes(self._key, held.model_dump_json().encode(), create_only=True)
        except StoreConflict:
            raise OfferGone(self._in_use()) from None
        except StoreError as error:
            raise Ambiguous(f"lock of {self.address}: {error}") from None
        try:
            self._run(_WITH_ZIP + _CLEAR, "clear", stdin=box_zip())
        except MarketError as error:
            raise Rejected(str(error), instance_id=held.instance_id) from None
        log.info("%s is taken for this run; nothing is bought (%s)", self.address, NOT_OURS)
        return held.instance_id

    def show(self, instance_id: int) -> Instance | None:
        held = self._holder()
        return self._row(held) if held is not None and held.instance_id == instance_id else None

    def list_all(self) -> Listing:
        try:
            held = self._holder()
        except ShapeError as error:
            unparsed = (UnparsedInstance(id=None, label=None, problem=str(error)),)
            return Listing(instances=(), unparsed=unparsed, account_id=self.account_id(), complete=True)
        rows = () if held is None else (self._row(held),)
        return Listing(instances=rows, account_id=self.account_id(), complete=True)

    def destroy(self, instance_id: int) -> None:
        """Leave the host as clean as it can be reached, and give the lock back."""
        if (held := self._holder()) is None or held.instance_id != instance_id:
            log.info("box %d: %s is not held under this id any more", instance_id, self.address)
            return
        try:
            self._run(_WITH_ZIP + _leave(instance_id), "leave", stdin=box_zip())
        except MarketError as error:
            log.warning(
                "box %d: our jobs and keys may still be on the host, the next run clears them: %s", instance_id, error
            )
        try:
            self._store.delete(self._key)
        except StoreError as error:
            raise Ambiguous(f"lock of {self.address}: {error}") from None
        log.info("box %d: %s is free again (%s)", instance_id, self.address, NOT_OURS)

    def attach_key(self, instance_id: int, public_key: str) -> None:
        self._run(_ATTACH, "attach key", stdin=f"{public_key.strip()} {_key_mark(instance_id)}\n".encode())

    def charges(self, instance_ids: tuple[int, ...] | None, since: float, until: float) -> list[Charge]:
        return [Charge(instance_id=instance_id, kind="other", usd=0.0) for instance_id in instance_ids or ()]

    def _holder(self) -> Held | None:
        try:
            data = self._store.get_bytes(self._key)
        except StoreError as error:
            raise Ambiguous(f"lock of {self.address}: {error}") from None
        try:
            return None if data is None else Held.model_validate_json(data)
        except ValidationError:
            raise ShapeError(f"{self._key} in the bucket is not a lock of ours; look at it, then delete it") from None

    def _in_use(self) -> str:
        held = self._holder()
        by = "another run" if held is None else f"{held.label} for {(self._clock() - held.taken_at) / 60:.0f} min"
        return f"{self.address} is in use by {by}; one run at a time: wait, or let the reaper free it when that run's lease is over"

    def _row(self, held: Held) -> Instance:
        return Instance(
            id=held.instance_id,
            label=held.label,
            machine_id=self.machine_id,
            actual_status="running",
            intended_status="running",
            cur_state="running",
            next_state="running",
            status_msg=NOT_OURS,
            is_bid=False,
            dph_total_usd=0.0,
            storage_usd_hour=0.0,
            gpu_name=held.gpu_name,
            num_gpus=held.num_gpus,
            gpu_ram_mb=held.gpu_ram_mb,
            disk_space_gb=held.disk_gb,
            start_date=held.taken_at,
            endpoints=(Endpoint(host=self._host, port=self._port, kind="direct"),),
        )

    def _measured(self, want: BoxWanted) -> Mapping[str, Any]:
        command = f'"$P" -S -c {shlex.quote(_MEASURE)} "$Z" {want.device}'
        answer = self._run(_WITH_ZIP + command, "measure", stdin=box_zip())
        try:
            facts: Mapping[str, Any] = json.loads(answer.text.strip().splitlines()[-1])
        except (ValueError, IndexError):
            raise ShapeError(f"{self.address}: its facts cannot be read: {answer.text[-200:]!r}") from None
        return facts

    def _run(self, command: str, what: str, stdin: bytes | None = None) -> Answer:
        """A command with the owner's own key, over a connection of its own."""
        endpoint = Endpoint(host=self._host, port=self._port, kind="direct")
        remote = Remote(self._user, self._key_path, self._known_hosts, lambda: (endpoint,))
        try:
            answer = remote.run(command, timeout_s=self._command_s, stdin=stdin)
        except LoginFailed as error:
            raise AuthError(
                f"{self.address}: {error}; if the host was set up anew, delete {self._known_hosts}"
            ) from None
        finally:
            remote.close()
        said = answer.err.decode(errors="replace").strip()[-300:]
        if answer.code is None and said == "key not accepted":
            raise AuthError(f"{self.address}: the key of LIVERY_SSH_KEY_PATH is not accepted for LIVERY_SSH_USER")
        if answer.code is None:
            raise Ambiguous(f"{self.address}: {what}: {said or 'no answer'}; see LIVERY_SSH_HOST and LIVERY_SSH_PORT")
        if answer.code != 0:
            raise Rejected(f"{self.address}: {what} ended with {answer.code}: {said or 'nothing said'}")
        return answer


def _compute_cap(facts: Mapping[str, Any], want: BoxWanted) -> int | None:
    """`12.0` as 1200. A rehearsal's facts file names none, and nothing is computed there."""
    if "facts_file" in facts and want.device != "cuda":
        return TIERS["rehearsal"].compute_cap
    caps = facts.get("compute_caps") or []
    return round(float(caps[0]) * 100) if caps else None


def _key_mark(instance_id: int) -> str:
    return f"livery-box-{instance_id}"


def _leave(instance_id: int) -> str:
    """Secrets and the run's key first: they must go even if a job will not."""
    return f"""
rm -f {" ".join(_SECRETS)}
keys=.ssh/authorized_keys
if grep -q ' {_key_mark(instance_id)}$' $keys 2>/dev/null; then
  grep -v ' {_key_mark(instance_id)}$' $keys > "$Z.keys"; cat "$Z.keys" > $keys; rm -f "$Z.keys"
fi
{_STOP_JOBS}
"""

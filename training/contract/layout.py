"""Where things lie: keys in the bucket and paths on the box. Each is written in one place only."""

from __future__ import annotations

# On the box, relative to the login's home directory.
BOX_HOME = "livery"
BOX_ZIP = f"{BOX_HOME}/box.zip"  # training/box without torch: sent at the first login
BOX_ASSIGNMENT = f"{BOX_HOME}/recipe.json"
BOX_PRIVATE_ENV = f"{BOX_HOME}/private.env"  # 0600: bucket credentials, hub token
BOX_INSTANCE_ENV = f"{BOX_HOME}/instance.env"  # 0600: the per-instance key, written by onstart
BOX_ALIVE = f"{BOX_HOME}/alive"  # touched by the flow's lease thread; the dead-man switch reads its age
BOX_EVENTS = f"{BOX_HOME}/events.jsonl"
BOX_UPLINK = f"{BOX_HOME}/uplink.json"  # written from outside: {"send": "all" | "light", "reason"}
BOX_ABORTED = f"{BOX_HOME}/aborted.json"  # why the last runner gave up for good; gone when one starts
BOX_DEVICE_FACTS = f"{BOX_HOME}/device.json"  # what the device probe measured, for whoever trains there
BOX_JOBS = f"{BOX_HOME}/jobs"
BOX_TRANSFER_VENV = f"{BOX_HOME}/venv-transfer"
BOX_TRAIN_VENV = f"{BOX_HOME}/venv-train"
BOX_MODEL = f"{BOX_HOME}/model"
BOX_DATA = f"{BOX_HOME}/data"
BOX_WORK = f"{BOX_HOME}/work"

PROBE = "probe.json"
"""Beside the last adapter and in its export: a prompt and the answers of base and adapter, to hold any server against."""


def lease(flow_run_id: str) -> str:
    return f"leases/{flow_run_id}.json"


def intent(flow_run_id: str, attempt: int) -> str:
    return f"intents/{flow_run_id}/{attempt:03d}.json"


FLIGHTS = "flights/"


def flight(flow_run_id: str) -> str:
    """The flight record: what the flow did and when, kept so that a stranger can write the receipt."""
    return f"{FLIGHTS}{flow_run_id}.json"


ALARMS = "alarms/"
REAPER_LAST_SUCCESS = "reaper/last_success.json"
"""When a sweep of the reaper last saw everything."""


REAPER_MEMORY = "reaper/memory.json"
"""What earlier sweeps saw of boxes that were not up, and which intents they found closed."""


def reaper_claim(instance_id: int) -> str:
    """A sweep is destroying this box; another one that runs at the same time leaves it alone for a while."""
    return f"reaper/claims/{instance_id}.json"


def alarm(subject: str) -> str:
    """What a person must know of a flow run, a box of nobody's (`box-<id>`), the `account` or the `reaper`; gone when it is over."""
    return f"{ALARMS}{subject}.json"


def host(machine_id: int) -> str:
    return f"hosts/{machine_id}.json"


def run(name: str) -> str:
    return f"runs/{name}"


def blob(name: str, sha256: str) -> str:
    return f"runs/{name}/blobs/{sha256}"


def pace(tier: str, digest: str) -> str:
    """Seconds a step as the newest run measured them on this tier, under the digest of all that decides them."""
    return f"paces/{tier}/{digest}.json"


def phase_manifests(name: str, phase: str) -> str:
    return f"runs/{name}/manifests/{phase}/"


def manifest(name: str, phase: str, step: int) -> str:
    return f"{phase_manifests(name, phase)}{step:08d}.json"


def light_manifests(name: str, phase: str) -> str:
    return f"runs/{name}/light/{phase}/"


def light_manifest(name: str, phase: str, step: int) -> str:
    """A checkpoint that was too large for its uplink: the adapter in bfloat16, without the trainer's state."""
    return f"{light_manifests(name, phase)}{step:08d}.json"


def first(name: str, phase: str, step: int) -> str:
    """Prefix of what goes before a light checkpoint's routed experts: an adapter for people, in case the line dies. No checkpoint: nothing resumes from
    it, and it goes when the checkpoint is there."""
    return f"runs/{name}/first/{phase}/{step:08d}/"


def mirror(source: str) -> str:
    """Prefix of the bucket's own copy of `hub:OWNER/NAME@COMMIT`."""
    return f"models/{source.removeprefix('hub:')}/"


def mirror_list(source: str) -> str:
    """Written after the mirror's files, with their digests: the mirror exists only when this does."""
    return f"{mirror(source)}mirror.json"


def claims(name: str) -> str:
    return f"runs/{name}/claims/"


def claim(name: str, number: int) -> str:
    """Who writes the run's manifests; see training.contract.claims."""
    return f"{claims(name)}{number:08d}.json"


def references(name: str, digest: str) -> str:
    """Log-probabilities of a phase's reference policy, under the digest of all that decides them."""
    return f"runs/{name}/references/{digest}.json"


def adapter(name: str) -> str:
    """Prefix of the exported adapter, the files that stock PEFT loads."""
    return f"runs/{name}/adapter/"


def exported(name: str) -> str:
    """Written after the adapter's files, with their digests: the run is over when it is there."""
    return f"{adapter(name)}exported.json"


def events(name: str, flow_run_id: str, attempt: int) -> str:
    return f"runs/{name}/events/{flow_run_id}/{attempt:03d}.jsonl"


def receipt(name: str, flow_run_id: str) -> str:
    return f"runs/{name}/receipts/{flow_run_id}.json"


def dataset(sha256: str) -> str:
    """A local dataset, copied to the bucket under its own digest."""
    return f"datasets/by-digest/{sha256}.jsonl"

"""The manifest: what a checkpoint holds. A checkpoint exists only when its manifest does, so the manifest is written last."""

from __future__ import annotations

from pydantic import Field, ValidationError

from training.contract import layout
from training.contract.events import GroupState
from training.contract.model import Frozen, explain

VERSION = 1
RESUME = "resume.safetensors"
"""In place of optimizer.pt on a base in 4 bits: weights and moments in one file, whatever the number of processes that wrote it."""
# Without any one of these transformers resumes silently wrong (fresh optimizer, fresh schedule, phase-start weights): all or nothing.
REQUIRED_FILES = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state.pth",
    "trainer_state.json",
    "training_args.bin",
)
REQUIRED_QUANTISED = tuple(RESUME if name == "optimizer.pt" else name for name in REQUIRED_FILES)
# A checkpoint made with other versions of these may load and mean something else; the others are recorded only.
FROZEN_VERSIONS = ("peft", "transformers", "trl")


class ManifestError(ValueError):
    """The manifest does not fit this run; the message says which field, what it holds and what the run has."""


class FileEntry(Frozen):
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    bytes: int = Field(ge=0)


class Parent(Frozen):
    """The last manifest of the phase before: its key, and the sha256 of its bytes, so that an overwritten one is noticed."""

    key: str
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")

    def __str__(self) -> str:
        return f"{self.key} (sha256 {self.sha256[:12]})"


class Manifest(Frozen):
    """One durable checkpoint of one phase. Its blobs lie under their sha256, shared by all checkpoints of the run."""

    version: int = VERSION
    run: str
    phase: str
    step: int
    max_steps: int
    created_at: float
    phase_digest: str
    """`Recipe.phase_digest`: what decided these weights."""
    data_sha256: str
    """sha256 of the phase's dataset file."""
    parent: Parent | None
    """The manifest that the phase began from; None for the first phase."""
    claim: int = 0
    """Number of the claim under which it was written; see training.contract.claims."""
    versions: dict[str, str]
    files: dict[str, FileEntry]
    """Relative path in the checkpoint directory to its content."""
    groups: dict[str, GroupState] = {}
    loss_first: float | None = None
    loss_last: float | None = None
    metrics: dict[str, float] = {}
    flow_run_id: str = ""
    attempt: int = 0
    stands_for: Parent | None = None
    """Set in a light checkpoint: the full one whose adapter it holds, in bfloat16 and without the trainer's state. Training cannot go on from it in
    mid-phase; the next phase can begin from it."""

    @property
    def light(self) -> bool:
        return self.stands_for is not None

    @property
    def complete(self) -> bool:
        """The phase is done: this is its last checkpoint."""
        return self.step >= self.max_steps

    @property
    def total_bytes(self) -> int:
        return sum(entry.bytes for entry in self.files.values())


def key_of(run: str, manifest: Manifest) -> str:
    """Where it lies in the bucket. A light one has a place of its own, where nobody takes it for a full one."""
    place = layout.light_manifest if manifest.light else layout.manifest
    return place(run, manifest.phase, manifest.step)


def parse_manifest(text: str | bytes, key: str) -> Manifest:
    """A manifest from the bucket; ManifestError names the key and the field."""
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        raise ManifestError(explain(error, key)) from None


def check_fits(manifest: Manifest, key: str, *, phase_digest: str, data_sha256: str, versions: dict[str, str]) -> None:
    """Refuse a checkpoint of another recipe, other data or other library versions; ManifestError says what differs and what to do."""
    if manifest.phase_digest != phase_digest:
        raise ManifestError(
            f"{key}: was trained by another recipe (digest {manifest.phase_digest[:12]}, this run {phase_digest[:12]}); give the run another name, or the recipe its old values"
        )
    if manifest.data_sha256 != data_sha256:
        raise ManifestError(
            f"{key}: was trained on other data (sha256 {manifest.data_sha256[:12]}, this run {data_sha256[:12]}); give the run another name, or the old file"
        )
    for name in FROZEN_VERSIONS:
        seen, here = manifest.versions.get(name), versions.get(name)
        if seen != here:
            raise ManifestError(
                f"{key}: was written with {name} {seen}, this environment has {here}; install {name}=={seen} or give the run another name"
            )

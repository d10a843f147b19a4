"""Who may write a run's manifests: each runner claims the run when it starts, under a number that only grows.

Two boxes may believe that they work on one run: one that was taken for lost comes back, or a flow is started twice. The newest claim wins.
Before each manifest the writer looks for a higher claim and stops if there is one. Between that look and the write another runner may
claim; so a claim also names, by key and digest, every manifest that its runner found, and a manifest of an older claim that is not named
there does not count. No clock decides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Protocol

from pydantic import Field, ValidationError

from training.contract import layout
from training.contract.manifest import Manifest, ManifestError, Parent, parse_manifest
from training.contract.model import Frozen, explain


class ClaimError(ValueError):
    """A claim in the bucket cannot be read."""


class Claim(Frozen):
    """`runs/<name>/claims/<number>.json`, written once (create-only) and never changed."""

    number: int = Field(ge=1)
    runner: str
    """Random, so that two runners' claims of one number are never the same bytes."""
    flow_run_id: str = ""
    attempt: int = 0
    at: float
    """Epoch seconds by the claimant's clock; for people only."""
    found: dict[str, str] = {}
    """Manifests that counted when it was made: key → sha256 of the manifest's bytes."""


def parse_claim(text: str | bytes, key: str) -> Claim:
    """ClaimError names the key and the field."""
    try:
        return Claim.model_validate_json(text)
    except ValidationError as error:
        raise ClaimError(explain(error, key)) from None


class _Key(Protocol):
    @property
    def key(self) -> str: ...


class Bucket(Protocol):
    """As much of a store as is needed here."""

    def list(self, prefix: str) -> Sequence[_Key]: ...

    def get_bytes(self, key: str) -> bytes | None: ...


def newest_claim(bucket: Bucket, run: str) -> Claim | None:
    """The claim of the highest number; None if the run was never claimed. ClaimError if it cannot be read: then nobody knows who may write."""
    keys = [info.key for info in bucket.list(layout.claims(run))]
    if not keys:
        return None
    text = bucket.get_bytes(max(keys))
    if text is None:
        raise ClaimError(f"{max(keys)}: was listed and is gone; is another process deleting in runs/{run}/?")
    return parse_claim(text, max(keys))


def newest_manifests(bucket: Bucket, run: str, phases: Sequence[str]) -> Iterator[tuple[str, Manifest]]:
    """(key, manifest) of the newest one that counts of each phase, as far as each begins from the one before it: a run's progress. ClaimError and
    ManifestError name what cannot be read."""
    parent: Parent | None = None
    for phase in phases:
        newest = newest_manifest(bucket, run, phase)
        if newest is None:
            return
        key, text = newest
        manifest = parse_manifest(text, key)
        if manifest.parent != parent:
            return  # the phase before was trained again, so this one will be, too
        yield key, manifest
        parent = Parent(key=key, sha256=hashlib.sha256(text).hexdigest())


def newest_manifest(bucket: Bucket, run: str, phase: str) -> tuple[str, bytes] | None:
    """Key and text of the phase's newest manifest that counts; None if there is none. One that cannot be parsed is returned, for the caller to
    refuse by name; ClaimError if a listed one is gone."""
    claim = newest_claim(bucket, run)
    for key in sorted((info.key for info in bucket.list(layout.phase_manifests(run, phase))), reverse=True):
        text = bucket.get_bytes(key)
        if text is None:
            raise ClaimError(f"{key}: was listed and is gone; is another process deleting in runs/{run}/?")
        try:
            number = parse_manifest(text, key).claim
        except ManifestError:
            return key, text
        if counts(key, hashlib.sha256(text).hexdigest(), number, claim):
            return key, text
    return None


def counts(key: str, sha256: str, number: int, newest_claim: Claim | None) -> bool:
    """Whether a manifest (its key, digest and the claim it was written under) counts, given the run's newest claim."""
    return newest_claim is None or number >= newest_claim.number or newest_claim.found.get(key) == sha256

from __future__ import annotations

import pytest

from training.contract.manifest import Manifest, ManifestError, check_fits, parse_manifest

MANIFEST = Manifest(
    run="r",
    phase="sft",
    step=10,
    max_steps=10,
    created_at=0.0,
    phase_digest="a" * 64,
    data_sha256="b" * 64,
    parent=None,
    versions={"peft": "0.21.2", "trl": "1.16.0", "transformers": "5.23.0", "torch": "2.13.0"},
    files={},
)


def fits(**changes: object) -> None:
    wanted = {"phase_digest": "a" * 64, "data_sha256": "b" * 64, "versions": dict(MANIFEST.versions), **changes}
    check_fits(MANIFEST, "key", **wanted)  # type: ignore[arg-type]


def test_a_checkpoint_of_this_run_fits() -> None:
    fits()


def test_another_torch_is_no_reason_to_refuse() -> None:
    fits(versions={**MANIFEST.versions, "torch": "2.11.0"})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"phase_digest": "c" * 64}, "another recipe"),
        ({"data_sha256": "c" * 64}, "other data"),
        ({"versions": {**MANIFEST.versions, "peft": "0.22.0"}}, "peft 0.21.2, this environment has 0.22.0"),
        ({"versions": {"peft": "0.21.2", "trl": "1.16.0"}}, "transformers 5.23.0"),
    ],
)
def test_a_foreign_checkpoint_is_refused_with_the_reason_and_the_way_out(
    changes: dict[str, object], words: str
) -> None:
    with pytest.raises(ManifestError, match=words) as caught:
        fits(**changes)
    assert "give the run another name" in str(caught.value)


def test_a_phase_is_complete_at_its_last_step_only() -> None:
    assert MANIFEST.complete
    assert not MANIFEST.model_copy(update={"step": 9}).complete


def test_a_manifest_that_cannot_be_read_names_its_key() -> None:
    with pytest.raises(ManifestError, match="runs/r/manifests"):
        parse_manifest(b'{"version": 1}', "runs/r/manifests/sft/00000001.json")

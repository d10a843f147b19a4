"""The house has one-way stairs: imports go down the list of folders and never up. Read from the source, not from what happens to load."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("deployments", "flows", "tasks", "training", "kernels")
# What each folder may import of the house, besides itself. training.box.store is the one S3 module, and tasks may use it.
ALLOWED: dict[str, tuple[str, ...]] = {
    "deployments": ("flows", "tasks", "training.contract", "training.box.store"),
    "flows": ("tasks", "training.contract", "training.box.store"),
    "tasks": ("training.contract", "training.box.store"),
    "training": ("kernels",),
    "kernels": (),
}
BANNED: dict[str, tuple[str, ...]] = {
    "deployments": ("torch", "transformers", "peft", "trl", "triton"),
    "flows": ("torch", "transformers", "peft", "trl", "triton"),
    "tasks": ("torch", "transformers", "peft", "trl", "triton"),
    "training": ("prefect", "prefect_aws", "fabric", "paramiko"),
    "kernels": ("transformers", "peft", "trl", "prefect"),
}
NOWHERE = ("unsloth", "unsloth_zoo", "axolotl", "liger_kernel")


def imports(source: str) -> Iterator[str]:
    """Every module named by an import statement, however deep in the code it stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def under(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def wrong_imports(folder: str, source: str) -> list[str]:
    wrong = []
    for name in imports(source):
        top = name.partition(".")[0]
        if (
            under(name, NOWHERE)
            or under(name, BANNED[folder])
            or top == "tests"
            or (
                top in FOLDERS
                and top != folder
                and not under(name, ALLOWED[folder])
                and not any(full.startswith(name + ".") for full in ALLOWED[folder])
            )
        ):
            wrong.append(name)
    return wrong


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_go_down_the_house_and_never_up(folder: str) -> None:
    wrong = {
        str(path.relative_to(ROOT)): bad for path in sources(folder) if (bad := wrong_imports(folder, path.read_text()))
    }
    assert not wrong


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("tasks", "from flows.finetune import finetune"),
        ("tasks", "def f():\n    import torch"),
        ("tasks", "from training.runner import main"),
        ("training", "import prefect"),
        ("kernels", "from training.experts import install"),
        ("flows", "import unsloth"),
        ("training", "from unsloth.kernels.moe.grouped_gemm.interface import grouped_gemm"),
    ],
)
def test_a_wrong_import_is_seen(folder: str, source: str) -> None:
    assert wrong_imports(folder, source)


def test_the_contract_imports_pydantic_and_the_standard_library_only() -> None:
    import sys

    allowed = {*sys.stdlib_module_names, "pydantic", "pydantic_core"}
    for path in sorted((ROOT / "training" / "contract").rglob("*.py")):
        foreign = {
            name
            for name in imports(path.read_text())
            if name.partition(".")[0] not in allowed and not name.startswith("training.contract")
        }
        assert not foreign, path.name


def test_kernels_is_ours_and_hugging_faces_distribution_is_absent() -> None:
    import kernels

    assert Path(kernels.__file__ or "").is_relative_to(ROOT)
    with pytest.raises(PackageNotFoundError):
        distribution("kernels")


@pytest.mark.parametrize("name", ["unsloth", "unsloth_zoo", "axolotl", "liger_kernel"])
def test_no_forbidden_distribution_is_installed(name: str) -> None:
    with pytest.raises(PackageNotFoundError):
        distribution(name.replace("_", "-"))


def test_transformers_does_not_take_our_kernels_folder_for_hugging_faces() -> None:
    transformers_utils = pytest.importorskip("transformers.utils.import_utils", exc_type=ImportError)
    assert transformers_utils.is_kernels_available() is False


def test_our_version_is_outside_the_range_that_transformers_reads_as_its_kernels() -> None:
    version = tuple(int(part) for part in distribution("livery").version.split(".")[:3])
    assert not (0, 18, 2) <= version < (0, 20)


def test_nothing_names_a_registry_host_or_a_machine_path() -> None:
    words = ("pypi.org", "pythonhosted", "/opt/wheels", "/work/", "/root/")
    for path in [
        *(
            p
            for folder in (*FOLDERS, "tests")
            for p in (ROOT / folder).rglob("*")
            if p.suffix in {".py", ".yaml", ".txt", ".md"}
        ),
        *ROOT.glob("*.*"),
    ]:
        if path.is_file() and path != Path(__file__):
            text = path.read_text(errors="ignore")
            assert not [word for word in words if word in text], path


def test_secrets_have_no_way_into_the_create_call() -> None:
    """The market shows `env` and `onstart` to anyone with the key, so the request has no field for either kind of secret."""
    from tasks.market.protocol import CreateRequest

    assert "env" not in CreateRequest.model_fields

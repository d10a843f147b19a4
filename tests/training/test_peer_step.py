from __future__ import annotations

import ast
import json
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from training import peer_program
from training.peer_step import MODEL_LAYERS, PROGRAM, NoPeer, PeerSetting, lines, main, measure, ratios

HERE = Path(__file__).parent


def interpreter(folder: Path, says: str) -> Path:
    """A peer's interpreter that runs `says` instead of the program; `ask` is what it was asked."""
    script = folder / "script.py"
    script.write_text(
        "import json, os, sys, time\n"
        "ask = json.loads(sys.argv[3])\n"
        "def say(**facts): print('livery-peer ' + json.dumps(facts), flush=True)\n" + says
    )
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S {script} "$@"\n')
    python.chmod(0o755)
    return python


def run_of(layers: int, tokens: int, micro_ms: float, recompute: str = "full", dead: int = 0) -> dict[str, Any]:
    return {
        "layers": layers,
        "tokens": tokens,
        "recompute": recompute,
        "micro_ms": micro_ms,
        "peak_gb": 30.0,
        "without_gradient": dead,
    }


def test_what_layers_cost_is_the_difference_of_two_depths_and_the_rest_counts_once(tmp_path: Path) -> None:
    runs = [run_of(8, 4096, 100.0) | {"peak_gb": 34.0}, run_of(4, 4096, 60.0)]
    python = interpreter(
        tmp_path,
        f"if ask['do'] == 'make': say(made_s=1.0)\nelse:\n    print('a banner'); say(layer_gb=1.75)\n    for run in {runs!r}: say(run=run)\n",
    )
    document = measure(PeerSetting(python, recompute=("full",)))
    assert document["made_s"] == 1.0 and document["runs"] == runs and "failed" not in document
    whole_ms = 20 + MODEL_LAYERS * 10
    assert document["whole"] == [
        {
            "tokens": 4096,
            "recompute": "full",
            "layer_ms": 10.0,
            "rest_ms": 20.0,
            "micro_ms": whole_ms,
            "tokens_per_s": round(4096 / whole_ms * 1e3, 1),
            # The weights of 32 layers more, and their activations: 1 GB a layer.
            "peak_gb": 34 + 32 * (1.75 + 1),
        }
    ]
    assert "40 layers reckoned, 4096 tokens, recompute full: 420 ms" in "\n".join(lines(document))


def test_the_ratio_is_of_the_best_micro_batches_of_as_many_tokens_and_only_of_a_whole_model_that_agrees() -> None:
    reckoned = [("full", 4096, 900.0), ("none", 4096, 800.0), ("full", 16_384, 2000.0)]
    peer = {
        "package": "peer",
        "whole": [{"recompute": how, "tokens": tokens, "micro_ms": ms} for how, tokens, ms in reckoned],
    }
    ways = {
        "ours 4096": {"micro": 4096, "micro_ms": 400.0},
        "ours+graph 4096": {"micro": 4096, "micro_ms": 200.0},
        "ours-packed 16384": {"micro": 16_384, "micro_ms": 1.0},
        "ours 16384": {"failed": "does not fit this card"},
        "seed 4096": {"micro": 4096, "micro_ms": 1.0},
    }
    ours: dict[str, Any] = {"setting": {"layers": MODEL_LAYERS}, "ways": ways, "ratio": {}}
    assert ratios(peer, ours) == {"ours against peer, micro-batch of 4096": 4.0}
    assert ratios(peer, ours | {"setting": {"layers": 4}}) == {}
    del ours["ratio"]
    assert ratios(peer, ours) == {}


@pytest.mark.parametrize(
    "runs",
    [
        [run_of(8, 4096, 100.0, dead=2), run_of(4, 4096, 60.0, dead=1)],
        [run_of(8, 4096, 100.0)],
        [{"layers": 8, "tokens": 4096, "recompute": "full", "failed": "out of memory"}, run_of(4, 4096, 60.0)],
        [run_of(8, 4096, 100.0), run_of(4, 4096, 60.0, recompute="none")],
        [run_of(8, 4096, 59.0), run_of(4, 4096, 60.0)],
    ],
    ids=["adapters without gradient", "one depth", "out of memory", "another recompute", "layers that cost nothing"],
)
def test_no_figure_is_reckoned_from_what_is_not_the_same_step(tmp_path: Path, runs: list[dict[str, Any]]) -> None:
    says = f"if ask['do'] == 'measure':\n    for run in {runs!r}: say(run=run)\n"
    document = measure(PeerSetting(interpreter(tmp_path, says), recompute=("full",)))
    assert document["runs"] == runs and document["whole"] == []
    assert len(list(lines(document))) == 1 + len(runs)


def test_the_peer_sees_neither_our_folders_nor_our_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"LD_LIBRARY_PATH": "/lib", "CUDA_VISIBLE_DEVICES": "1", "UNSLOTH_MOE_BACKEND": "grouped_mm"}
    kept |= {"FLA_CACHE_MODE": "full", "FLA_CONFIG_DIR": "/tuned"}
    secret = {"VAST_API_KEY": "k", "AWS_SECRET_ACCESS_KEY": "k", "HF_TOKEN": "k", "PYTHONPATH": str(PROGRAM.parent)}
    for key, value in (kept | secret).items():
        monkeypatch.setenv(key, value)
    says = "say(env=dict(os.environ), argv=sys.argv[1:3], cwd=os.getcwd())\n"
    document = measure(PeerSetting(interpreter(tmp_path, says), recompute=()))
    assert kept.items() <= document["env"].items() and not secret.keys() & document["env"].keys()
    assert document["argv"] == ["-P", str(PROGRAM)] and not Path(document["cwd"]).is_relative_to(PROGRAM.parents[1])


def test_a_peer_that_fails_is_told_with_its_reason_and_what_it_measured_is_kept(tmp_path: Path) -> None:
    says = (
        "if ask['do'] == 'measure':\n"
        f"    say(run={run_of(8, 4096, 100.0)!r})\n"
        "    if ask['recompute'] == 'full': say(failed='RuntimeError: no kernel'); sys.exit(1)\n"
        "    sys.exit('died\\nof thirst')\n"
    )
    document = measure(PeerSetting(interpreter(tmp_path, says)))
    assert document["failed"] == [
        "recompute full: RuntimeError: no kernel",
        "recompute none: exit code 1: died of thirst",
    ]
    assert len(document["runs"]) == 2 and "FAILED: recompute full: RuntimeError" in "\n".join(lines(document))


def test_without_a_checkpoint_the_peer_is_not_asked_to_measure(tmp_path: Path) -> None:
    says = "say(did=ask['do'])\nif ask['do'] == 'make': say(failed='OSError: disk full'); sys.exit(1)\n"
    document = measure(PeerSetting(interpreter(tmp_path, says)))
    assert document["did"] == "make" and document["failed"] == ["making the checkpoint: OSError: disk full"]


SLOW = (
    "import subprocess\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "say(child=child.pid)\ntime.sleep(600)\n"
)


def test_a_late_peer_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    document = measure(PeerSetting(interpreter(tmp_path, SLOW), seconds=1.5, recompute=("full",)))
    assert document["failed"] == ["making the checkpoint: ended at its limit of 2 s"]
    assert _ends(document["child"])


def test_who_is_told_to_end_ends_the_peer_too(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "training.peer_step", "--python", str(interpreter(tmp_path, SLOW))]
    with subprocess.Popen(command, cwd=PROGRAM.parents[1], stderr=subprocess.PIPE, text=True) as ours:
        assert ours.stderr is not None
        child = ast.literal_eval(ours.stderr.readline().partition(": ")[2])["child"]
        assert _runs(child)
        ours.terminate()
        assert ours.wait(30) == 128 + signal.SIGTERM
    assert _ends(child)


def _ends(pid: int) -> bool:
    for _ in range(100):
        if not _runs(pid):
            return True
        time.sleep(0.05)
    return False


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_missing_interpreter_is_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NoPeer, match="want the interpreter"):
        measure(PeerSetting(tmp_path / "none"))
    assert main(["--python", str(tmp_path / "none")]) == 2
    assert "peer: seen" in capsys.readouterr().err


def test_the_program_imports_nothing_of_ours() -> None:
    tops = set()
    for node in ast.walk(ast.parse(PROGRAM.read_text())):
        if isinstance(node, ast.Import):
            tops |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            tops.add((node.module or "").partition(".")[0])
    assert "torch" in tops and not tops & {"deployments", "flows", "tasks", "training", "kernels", "tests"}


def test_a_library_that_the_peer_brings_within_itself_is_told_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_distribution(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    brought = ModuleType("fla")
    brought.__dict__["__version__"] = "0.5.1"
    monkeypatch.setitem(sys.modules, "fla", brought)
    monkeypatch.setattr(metadata, "version", no_distribution)
    assert peer_program._version("flash-linear-attention") == "0.5.1 of the peer's own"
    assert peer_program._version("xformers") is None
    monkeypatch.delitem(sys.modules, "fla")
    assert peer_program._version("flash-linear-attention") is None


def with_plain_peer(folder: Path, **env: str) -> Path:
    python = folder / "python"
    given = " ".join(
        f"{key}={value}" for key, value in {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1", **env}.items()
    )
    python.write_text(f'#!/bin/sh\n{given} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


def tiny(python: Path, **changes: Any) -> PeerSetting:
    return PeerSetting(
        python,
        "plain_peer",
        tokens=(64,),
        recompute=("full",),
        rank=4,
        row=32,
        rounds=1,
        turns=1,
        device="cpu",
        dtype="float32",
        tiny=True,
        **changes,
    )


@pytest.mark.train
def test_the_program_loads_adapts_and_times_two_depths_by_a_peers_public_names(tmp_path: Path) -> None:
    document = measure(tiny(with_plain_peer(tmp_path)))
    assert "failed" not in document, document["failed"]
    assert [(run["layers"], run["tokens"], run["without_gradient"]) for run in document["runs"]] == [
        (8, 64, 0),
        (4, 64, 0),
    ]
    # Eight layers hold a fifth of the default recipe's 330 pairs.
    assert document["adapter_tensors"] == 2 * 330 // 5 and document["versions"]["peft"]
    assert all(run["micro_ms"] > 0 and run["loss"] > 0 for run in document["runs"])


@pytest.mark.train
def test_a_peer_that_leaves_the_routed_experts_out_gets_no_figure(tmp_path: Path) -> None:
    document = measure(tiny(with_plain_peer(tmp_path, LAZY="1")))
    assert document["whole"] == [] and "none on the routed experts" in document["failed"][0]


def test_the_figures_are_written_and_a_failure_is_the_exit_code(tmp_path: Path) -> None:
    says = f"if ask['do'] == 'measure': say(run={run_of(8, 4096, 100.0)!r}); say(run={run_of(4, 4096, 60.0)!r})\n"
    out = tmp_path / "out.json"
    command = ["--python", str(interpreter(tmp_path, says)), "--recompute", "full", "--json", str(out)]
    assert main(command) == 0 and json.loads(out.read_text())["whole"][0]["layer_ms"] == 10.0
    assert main([*command[:1], str(interpreter(tmp_path, "sys.exit(3)\n")), *command[2:]]) == 1


@pytest.mark.train
def test_the_step_benchmark_takes_a_peer_into_its_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from training import benchmark

    out = tmp_path / "out.json"
    says = "if ask['do'] == 'measure': say(run=" + repr(run_of(8, 24, 100.0)) + " | {'recompute': ask['rank']})\n"
    step = ["step", "--tiny", "--steps", "1", "--rank", "4", "--only", "stock", "--no-check", "--json", str(out)]
    benchmark.main([*step, "--peer", str(interpreter(tmp_path, says))])
    assert json.loads(out.read_text())["peer"]["runs"][0]["recompute"] == 4
    assert "8 layers, 24 tokens, recompute 4: 100.0 ms" in capsys.readouterr().out
    assert benchmark.main([*step, "--peer", str(tmp_path / "none")]) == 2
    assert "want the interpreter of the peer's environment" in capsys.readouterr().err

"""A peer's step beside ours: a few full-width layers on the peer's own package, in the peer's own environment, by subprocess.

    python -m training.peer_step --python ENV/bin/python --package unsloth --layers 4 8 --tokens 4096 16384 --json OUT

The peer needs a checkpoint to load, and the whole model is larger than many a disk. So it gets one of eight layers and is timed at two depths: their
difference is what layers cost, the remainder is embeddings, head and loss, and the whole model's micro-batch is reckoned from both. Neither the optimizer
nor its memory is in it. `training.peer_program` runs over there. Nothing of Livery is imported by the peer, nor the peer by Livery. A peer
with flash-linear-attention reads the configurations that ours has tuned where the environment says FLA_CACHE_MODE=full and FLA_CONFIG_DIR=
training/lean/tuned/CARD; without them its first micro-batch tunes for minutes.

Exit codes: 0 measured, 1 the peer failed, 2 there is no such interpreter.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MODEL_LAYERS = 40
ROW_TOKENS = 2048
PROGRAM = Path(__file__).with_name("peer_program.py")
_MARK = "livery-peer "
# What a library needs of the surroundings. Everything else stays here: keys and tokens, and PYTHONPATH, by which the peer would see our folders.
_HANDED_ON = ("PATH", "HOME", "LANG", "TMPDIR", "CC", "CXX")
_HANDED_ON_BEGINNINGS = ("LD_", "CUDA_", "NVIDIA_", "TRITON_", "TORCHINDUCTOR_", "OMP_", "FLA_", "UNSLOTH_")
# Nothing is fetched, and the peer does not count its users on a box of ours.
_SILENT = {"HF_HUB_OFFLINE": "1", "UNSLOTH_DISABLE_STATISTICS": "1", "TOKENIZERS_PARALLELISM": "false"}
_TAIL = 300


class NoPeer(RuntimeError):
    """There is no interpreter to ask."""


@dataclass(frozen=True)
class PeerSetting:
    """What the peer is asked for."""

    python: Path
    """Of the peer's environment."""
    package: str = "unsloth"
    layers: tuple[int, ...] = (8, 4)
    """Depths in the order of their timing; multiples of four, as every fourth layer has full attention."""
    tokens: tuple[int, ...] = (4096, 16_384)
    """Of a micro-batch, in rows of `row`."""
    recompute: tuple[str, ...] = ("full", "none")
    """`full` and `none`, or a word of the peer's own."""
    rank: int = 32
    row: int = ROW_TOKENS
    rounds: int = 3
    turns: int = 3
    """Micro-batches of a round, with no wait between them."""
    device: str = "cuda"
    dtype: str = "bfloat16"
    tiny: bool = False
    seconds: float = 600.0
    """After these the peer is ended; what it has said until then is kept."""
    folder: Path | None = None
    """Where the checkpoint lies meanwhile: 3.2 GB, and 1.65 GB a layer. None = the system's place for temporary files."""


def measure(setting: PeerSetting, tell: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """The peer's figures: `runs` as timed, `whole` as reckoned for the whole model; `failed` says what came between. NoPeer if there is no interpreter."""
    if not os.access(setting.python, os.X_OK):
        raise NoPeer(f"peer: seen '{setting.python}', want the interpreter of the peer's environment, executable")
    until = time.monotonic() + setting.seconds
    document: dict[str, Any] = {"package": setting.package, "runs": [], "model_layers": MODEL_LAYERS}
    with tempfile.TemporaryDirectory(dir=setting.folder, prefix="peer-") as name:
        asks = [{"do": "make"}, *({"do": "measure", "recompute": each} for each in setting.recompute)]
        for ask in asks:
            for facts in _answers(setting, Path(name), ask, until):
                tell(f"{setting.package}: {facts}")
                _add(document, facts)
            if ask["do"] == "make" and "failed" in document:
                break
    document["whole"] = list(_whole(document["runs"], document.get("layer_gb", 0.0)))
    return document


def ratios(peer: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, float]:
    """How many times faster our best micro-batch is than the peer's best of as many tokens. None unless ours (the step benchmark's document) is the whole
    model's and agrees with stock."""
    if "ratio" not in ours or ours["setting"]["layers"] != MODEL_LAYERS:
        return {}
    found = {}
    for tokens in dict.fromkeys(each["tokens"] for each in peer["whole"]):
        theirs = min(each["micro_ms"] for each in peer["whole"] if each["tokens"] == tokens)
        mine = [
            facts["micro_ms"]
            for name, facts in ours["ways"].items()
            if name.startswith(("ours ", "ours+graph ")) and facts.get("micro") == tokens
        ]
        if mine:
            found[f"ours against {peer['package']}, micro-batch of {tokens}"] = round(theirs / min(mine), 3)
    return found


def lines(document: Mapping[str, Any]) -> Iterator[str]:
    """The document for a person."""
    versions = document.get("versions", {})
    yield f"{document['package']}: " + ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    for run in document["runs"]:
        what = f"  {run['layers']} layers, {run['tokens']} tokens, recompute {run['recompute']}: "
        if "failed" in run:
            yield what + run["failed"]
            continue
        peak = "" if run["peak_gb"] is None else f", peak {run['peak_gb']:.1f} GB"
        dead = f", {run['without_gradient']} ADAPTERS WITHOUT GRADIENT" if run["without_gradient"] else ""
        yield f"{what}{run['micro_ms']:.1f} ms{peak}{dead}"
    for each in document["whole"]:
        peak = "" if each["peak_gb"] is None else f", {each['peak_gb']:.0f} GB"
        yield (
            f"  {MODEL_LAYERS} layers reckoned, {each['tokens']} tokens, recompute {each['recompute']}: {each['micro_ms']:.0f} ms "
            f"({each['layer_ms']:.2f} a layer, {each['rest_ms']:.1f} the rest), {each['tokens_per_s']:,.0f} tok/s{peak}, all without the optimizer"
        )
    for what, ratio in document.get("ratio", {}).items():
        yield f"  {what}: {ratio:.2f}x"
    for failed in document.get("failed", []):
        yield f"  FAILED: {failed}"


def _answers(setting: PeerSetting, folder: Path, ask: Mapping[str, Any], until: float) -> Iterator[dict[str, Any]]:
    """What one run of the program says, line by line, and at last `failed` if it did not end well."""
    wanted = {key: value for key, value in asdict(setting).items() if key not in ("python", "seconds", "folder")}
    wanted |= {**ask, "folder": str(folder / "model")}
    command = [str(setting.python), "-P", str(PROGRAM), json.dumps(wanted)]
    failed, seconds = None, until - time.monotonic()
    if seconds <= 0:
        yield {"failed": f"{_name(ask)}: no time was left for it"}
        return
    with open(folder / "stderr", "w+", errors="replace") as stderr, _session(command, folder, stderr) as process:
        late = threading.Timer(seconds, _end, [process])
        late.daemon = True
        late.start()
        try:
            for line in process.stdout or ():
                if line.startswith(_MARK):
                    facts = json.loads(line.removeprefix(_MARK))
                    failed = facts.pop("failed", failed)
                    if facts:
                        yield facts
            code = process.wait()
        finally:
            late.cancel()
        if time.monotonic() >= until:
            failed = f"ended at its limit of {setting.seconds:.0f} s"
        elif code and not failed:
            stderr.seek(0)
            failed = f"exit code {code}: {' '.join(stderr.read()[-_TAIL:].split())}"
    if failed:
        yield {"failed": f"{_name(ask)}: {failed}"}


@contextlib.contextmanager
def _session(command: Sequence[str], folder: Path, stderr: Any) -> Iterator[subprocess.Popen[str]]:
    """The program in a session of its own: a compiler's workers end with it."""
    (folder / "model").mkdir(exist_ok=True)
    handed_on = {
        key: value for key, value in os.environ.items() if key in _HANDED_ON or key.startswith(_HANDED_ON_BEGINNINGS)
    }
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=handed_on | _SILENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        yield process
    finally:
        _end(process)
        process.wait()
        if process.stdout:
            process.stdout.close()


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _name(ask: Mapping[str, Any]) -> str:
    return "making the checkpoint" if ask["do"] == "make" else f"recompute {ask['recompute']}"


def _add(document: dict[str, Any], facts: dict[str, Any]) -> None:
    if "run" in facts:
        document["runs"].append(facts["run"])
    elif "failed" in facts:
        document.setdefault("failed", []).append(facts["failed"])
    else:
        document.update(facts)


def _whole(runs: Sequence[Mapping[str, Any]], layer_gb: float) -> Iterator[dict[str, Any]]:
    """A micro-batch of the whole model, for each kind of run that was timed at two depths. Adapters without gradient would make it another step."""
    for (tokens, recompute), same in itertools.groupby(runs, key=lambda run: (run["tokens"], run["recompute"])):
        timed = {run["layers"]: run for run in same if "failed" not in run and not run["without_gradient"]}
        if len(timed) < 2:
            continue
        few, many = timed[min(timed)], timed[max(timed)]
        apart, more = many["layers"] - few["layers"], MODEL_LAYERS - many["layers"]
        layer_ms = (many["micro_ms"] - few["micro_ms"]) / apart
        if layer_ms <= 0:
            continue
        whole_ms = many["micro_ms"] + more * layer_ms
        # The weights of all layers lay in memory at both depths.
        peak_gb = many["peak_gb"] and many["peak_gb"] + more * (layer_gb + (many["peak_gb"] - few["peak_gb"]) / apart)
        yield {
            "tokens": tokens,
            "recompute": recompute,
            "layer_ms": round(layer_ms, 3),
            "rest_ms": round(whole_ms - MODEL_LAYERS * layer_ms, 2),
            "micro_ms": round(whole_ms, 1),
            "tokens_per_s": round(tokens / whole_ms * 1e3, 1),
            "peak_gb": peak_gb and round(peak_gb, 1),
        }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m training.peer_step", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--python", type=Path, required=True, help="of the peer's environment")
    parser.add_argument("--package", default="unsloth")
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 4], help="depths, multiples of 4; 8 4")
    parser.add_argument("--tokens", type=int, nargs="+", help="of a micro-batch; 4096 16384")
    parser.add_argument("--recompute", nargs="+", default=["full", "none"], help="full, none or the peer's own word")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=600.0, help="after which the peer is ended")
    parser.add_argument("--folder", type=Path, help="for a checkpoint of 16 GB")
    parser.add_argument("--tiny", action="store_true", help="small shapes in float32 on the CPU")
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args(argv)
    tiny: dict[str, Any] = {"device": "cpu", "dtype": "float32", "tiny": True, "row": 32} if options.tiny else {}
    setting = PeerSetting(
        python=options.python,
        package=options.package,
        layers=tuple(options.layers),
        tokens=tuple(options.tokens or ((32, 64) if options.tiny else (4096, 16_384))),
        recompute=tuple(options.recompute),
        rank=options.rank,
        seconds=options.seconds,
        folder=options.folder,
        **tiny,
    )
    # Who ends this ends the peer: an exit runs what stands in `finally`.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        document = measure(setting, tell=lambda line: print(line, file=sys.stderr, flush=True))
    except NoPeer as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print("\n".join(lines(document)))
    return 1 if "failed" in document or not document["whole"] else 0


if __name__ == "__main__":
    sys.exit(main())

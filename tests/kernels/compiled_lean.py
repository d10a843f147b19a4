"""Cross-compile the lean ops' launches at a model's own sizes for one card after the other and print what each takes; run by test_lean.py."""

from __future__ import annotations

import json
import sys

import torch

from kernels import rows
from tests.kernels.lean_cases import Sizes, all_cases
from tests.kernels.offline import Launch, Recorder, compile_for

MODELS = {
    "35B": Sizes(4096, 2048, 16, 256, 64, key=2048, value=4096, experts=256, k=8, vocabulary=248_320, rows=2048),
    "235B": Sizes(4096, 4096, 64, 128, 128, key=2048, value=4096, experts=128, k=8, vocabulary=151_936, rows=2048),
}


def main(model: str, *capabilities: str) -> None:
    """All launches for the first card, one of each kernel for the others: these hold nothing that depends on the card."""
    launches = record(MODELS[model])
    for i, capability in enumerate(capabilities):
        for launch in {launch.fn.__name__: launch for launch in launches}.values() if i else launches:
            kernel = compile_for(launch, int(capability))
            found = {"kernel": launch.fn.__name__, "capability": int(capability), "shared": kernel.shared}
            found |= {"registers": kernel.registers, "stack": kernel.stack}
            found |= {"wide loads": kernel.count(r"ld\.global\S*\.v4\.b32"), "barriers": kernel.count(r"bar\.sync")}
            print(json.dumps(found), flush=True)


def record(sizes: Sizes) -> list[Launch]:
    """Every launch of every op, forward and backward, in bfloat16 on tensors that have no memory."""
    recorder = Recorder()
    rows._LAUNCH, rows._INTERPRETED = recorder, True
    with torch.device("meta"):
        for case in all_cases(sizes):
            case.results(torch.bfloat16, "meta")
    return list(recorder.launches.values())


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Cross-compile AdamW's launches for one card after the other and print what each takes; run by test_adamw.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import torch

from kernels import adamw, adamw_8bit
from tests.kernels.offline import Launch, Recorder, compile_for


def main(*capabilities: str) -> None:
    for capability in map(int, capabilities):
        for launch in record():
            kernel = compile_for(launch, capability)
            found = {"kernel": launch.fn.__name__, "capability": capability, "shared": kernel.shared}
            found["transposed"] = launch.fn.__name__ == "adamw_8bit" and bool(launch.args[-5])
            found |= {"registers": kernel.registers, "stack": kernel.stack}
            found |= {
                "wide loads": kernel.count(r"ld\.global\S*\.v4"),
                "wide stores": kernel.count(r"st\.global\S*\.v4"),
            }
            print(json.dumps(found), flush=True)


def record() -> list[Launch]:
    """Every launch of a step: clipped and zeroed, and of one that is none of that."""
    recorder = Recorder()
    gradients, all_five = table(("gradient",), recorder), table(adamw._COLUMNS, recorder)
    clip = adamw._norm(gradients, 1.0)
    rates = torch.zeros(5, dtype=torch.float64)
    adamw._adamw(all_five, rates, clip, True)
    adamw._adamw(all_five, rates, None, False)
    packed, maps, numbers = adamw_8bit.AdamW8bitPass(), (torch.zeros(256),) * 4, torch.zeros(3, adamw.COEFFICIENTS)
    for chosen, transposed in ((packed._flat, False), (packed._tall, True)):
        chosen._cut([torch.Size([1024, 8192])], torch.device("cpu"))
        chosen.launch, chosen.aligned = recorder, True
        for which, how in (
            (clip, (True, transposed, True, True)),
            (None, (True, transposed, False, False)),
        ):
            adamw_8bit._launch(chosen, numbers, maps, which, how, transposed)
    return list(recorder.launches.values())


def table(columns: Sequence[str], recorder: Recorder) -> adamw.Table:
    made = adamw.Table(columns, adamw._chunks, adamw._require)
    made._cut([torch.Size([size]) for size in (70_000, 81_920, 3)], torch.device("cpu"))
    made.launch, made.aligned = recorder, True
    return made


if __name__ == "__main__":
    main(*sys.argv[1:])

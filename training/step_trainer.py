"""Our step as training takes it: TRL's SFTTrainer on the benchmark's model."""

from __future__ import annotations

import itertools
import tempfile
import time
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer

from training import optimizer
from training.contract.micro_batches import ENOUGH_TOKENS
from training.phases.common import OPTIMIZERS
from training.phases.lean_trainer import Graphs, adapt
from training.phases.reporter import TokenCount
from training.step_setting import Way
from training.tiny import datasets, make_tokenizer

if TYPE_CHECKING:
    from training.step_benchmark import Bench


def under_trl(bench: Bench, way: Way) -> dict[str, Any]:
    """Ours as training takes it: TRL's SFTTrainer with packing, its optimizer and its logging, seconds from step end to step end."""
    setting = bench.setting
    micro = way.micro
    cuda = setting.device == "cuda"
    policy = bench.choose(way)
    bench.base.__dict__.pop("forward", None)  # the trainer puts its own head on
    count = max(1, setting.tokens // micro)
    steps = setting.steps + 2
    rows = (steps + 1) * count * (micro // setting.row)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, bench.config.vocab_size, (rows, setting.row), generator=generator).tolist()
    ends: list[float] = []
    told: list[str] = []

    class Clock(TrainerCallback):
        def on_log(self, *_: Any, **__: Any) -> None:
            # The loss has just been read: the card is through with the step.
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=count,
            max_steps=steps,
            max_length=micro,
            packing=True,
            packing_strategy="bfd",
            learning_rate=0.0,
            weight_decay=0.0,
            optim=OPTIMIZERS[setting.optimizer] if cuda else "adamw_torch",
            router_aux_loss_coef=0.0,
            bf16=cuda,
            use_cpu=not cuda,
            gradient_checkpointing=False,
            dataloader_pin_memory=cuda,
            logging_steps=1,
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = SFTTrainer(
            bench.model,
            args=arguments,
            train_dataset=Dataset.from_dict({"input_ids": ids}),
            processing_class=make_tokenizer(datasets()),
            callbacks=[Clock()],
        )
        trainer.remove_callback(PrinterCallback)
        # On a card, as a phase has it.
        graphs = Graphs(told.append, TokenCount(), ENOUGH_TOKENS) if cuda else None
        adapt(trainer, graphs)
        if cuda:
            optimizer.adapt(trainer)
        bench.reset_peak()
        trainer.train()
    # The first step compiles, and the last log is the trainer's summary.
    seconds = [after - before for before, after in itertools.pairwise(ends[1:-1])]
    bench.clear()
    return {
        **bench.facts(seconds),
        "micro": micro,
        "recompute": policy,
        "busy_share": None,
        "step_busy_share": None,
        "parts_ms": {},
        "graph": told,
        **bench.peaks(cuda),
    }

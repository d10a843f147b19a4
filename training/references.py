"""What the phase-start policy thinks of every answer: the reference of DPO and KTO, as ready columns of the data.

TRL can compute these itself, but it first hashes the whole model (67 GB of weights, upcast), copies the adapter under the name `ref`, and
keeps the result in a file of this machine. Here the model just built, which is the phase-start policy, scores each row once with TRL's own
arithmetic in TRL's own batches, so the numbers are TRL's to the bit; no copy is ever made, and a box that comes later fetches them from
the bucket.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader

from training import parts
from training.contract import layout
from training.crew import Crew, Single
from training.errors import LivenessError
from training.experts import ADAPTER
from training.model import lora_tensors
from training.phases.desk import Desk

# The columns TRL's collators know, in the order in which its `compute_ref_log_probs` returns them.
COLUMNS = {"dpo": ("ref_chosen_logps", "ref_rejected_logps"), "kto": ("ref_logps", "ref_KL_logps")}
_READ = ("prompt_ids", "chosen_ids", "rejected_ids", "completion_ids", "KL_completion_ids", "label")

Columns = dict[str, np.ndarray[Any, np.dtype[np.float32]]]


@contextlib.contextmanager
def no_copy(model: Any) -> Iterator[None]:
    """While it lasts, a TRL trainer built from `model` adds no `ref` adapter: to add one does nothing, and what TRL would copy from `default`
    to `ref` it copies onto itself. LivenessError if a second adapter is there all the same."""
    get = model.get_parameter
    model.add_adapter = lambda name, config, **_: None
    model.get_parameter = lambda name: get(name.replace(".ref.", f".{ADAPTER}."))
    try:
        yield
    finally:
        del model.add_adapter, model.get_parameter
    others = sorted(set(model.peft_config) - {ADAPTER})
    if others:
        raise LivenessError(
            f"adapter {others[0]} stands beside {ADAPTER}: a second copy in memory and in every checkpoint",
            stage="reference",
            cause="this TRL makes its reference adapter in another way",
        )


def require_copy(model: Any, *, wanted: bool) -> None:
    """GRPO: with a KL term one frozen copy of the phase-start adapter, under the name `ref`; without one none. LivenessError otherwise."""
    adapters = set(model.peft_config)
    if adapters != ({ADAPTER, "ref"} if wanted else {ADAPTER}):
        raise LivenessError(
            f"adapters {', '.join(sorted(adapters))}, want {ADAPTER}{' and ref' if wanted else ' alone'}",
            stage="reference",
        )
    for which in ("lora_A", "lora_B") if wanted else ():
        copies = zip(lora_tensors(model, which), lora_tensors(model, which, "ref"), strict=True)
        for (group, name, tensor), (_, _, copy) in copies:
            if copy.requires_grad or not torch.equal(tensor, copy):
                state = "trains" if copy.requires_grad else "differs from the phase-start adapter"
                raise LivenessError(f"the reference's {name} {state}", stage="reference", group=group, tensor=name)


def attach(trainer: Any, desk: Desk) -> Any:
    """The trainer with its reference columns: fetched from the bucket if they lie there whole, else computed and put there.

    Call it when the trainer is built, before training and before a checkpoint is loaded: the model must be the phase-start policy.
    """
    names = COLUMNS[desk.phase.kind]
    rows, leads, adapter = len(trainer.train_dataset), desk.crew.rank == 0, adapter_digest(trainer.model)
    key = layout.references(desk.assignment.run, digest(trainer, desk, adapter)) if leads else ""
    columns = desk.crew.share(_fetch(desk, key, names, rows) if leads else None)
    if columns is None:
        columns = compute(trainer, names, desk.crew)
        if leads:
            _keep(desk, key, columns)
        desk.notice(
            "reference computed",
            f"log-probabilities of {rows} rows by the policy the phase begins with; {key}",
            routine=True,
        )
    for name, values in columns.items():
        trainer.train_dataset = trainer.train_dataset.add_column(name, values)
    trainer.precompute_ref_logps = True  # the loss reads the columns
    return trainer


def compute(trainer: Any, names: tuple[str, str], crew: Crew | None = None) -> Columns:
    """One float32 a row and column. The batches are those in which TRL would precompute them: padding decides the last bits. Several processes take
    turns at them (collective)."""
    crew = crew or Single()
    loader = DataLoader(
        trainer.train_dataset,
        batch_size=trainer.args.per_device_train_batch_size,
        collate_fn=trainer.data_collator,
        pin_memory=trainer.args.dataloader_pin_memory,
        shuffle=False,
    )
    mine: list[tuple[np.ndarray[Any, Any], ...]] = []
    # With a reference model in hand TRL leaves the adapters as they are; without one it would turn them off.
    trainer.ref_model = trainer.model
    try:
        # A loader draws from the global generator, and so would give the phase another shuffle than where the columns are fetched.
        with torch.random.fork_rng(devices=[]):
            for batch in _turns(loader, crew):
                batch = send_to_device(batch, trainer.accelerator.device)
                scored = trainer.compute_ref_log_probs(trainer.model, batch)
                mine.append(tuple(values.float().cpu().numpy() for values in scored))
    finally:
        trainer.ref_model = None
    # Batch after batch, as they lie in the data; where the last turn was not full, some did one that another had done.
    rounds = zip(*crew.collect(mine), strict=True)
    batches = [batch for each in rounds for batch in each][: len(loader)]
    columns = {name: np.concatenate([batch[place] for batch in batches]) for place, name in enumerate(names)}
    for name, values in columns.items():
        if not np.isfinite(values).all():
            row = int(np.flatnonzero(~np.isfinite(values))[0])
            raise LivenessError(f"{name} of row {row} is {values[row]}: base or adapter is damaged", stage="reference")
    return columns


def _turns(loader: DataLoader[Any], crew: Crew) -> Iterator[Any]:
    """This process's batches: every so many. All get as many, since they may only go through the model together."""
    last = None
    for number, batch in enumerate(loader):
        if number % crew.size == crew.rank:
            last = batch
            yield batch
        elif number < crew.rank:
            last = batch
    if len(loader) % crew.size and crew.rank >= len(loader) % crew.size:
        yield last


def digest(trainer: Any, desk: Desk, adapter: str = "") -> str:
    """sha256 of all that decides the columns: base and adapter, the tokens and their order, the batches, the libraries."""
    recipe, phase = desk.assignment.recipe, desk.phase
    decides = {
        "model": recipe.model.model_dump(mode="json"),
        "adapter": adapter or adapter_digest(trainer.model),
        "rows": _rows_digest(trainer.train_dataset),
        "kind": phase.kind,
        "batch_size": trainer.args.per_device_train_batch_size,
        "max_length": phase.max_length,
        "versions": {name: desk.identity.versions.get(name) for name in ("peft", "transformers", "trl", "torch")},
    }
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


def adapter_digest(model: Any) -> str:
    """sha256 of every adapter's numbers. Collective."""
    seen = hashlib.sha256()
    for which in ("lora_A", "lora_B"):
        for _, name, tensor in lora_tensors(model, which):
            seen.update(name.encode())
            seen.update(parts.whole(tensor).float().cpu().contiguous().numpy().data)
    return seen.hexdigest()


def _rows_digest(dataset: Any) -> str:
    seen = hashlib.sha256()
    columns = [name for name in _READ if name in dataset.column_names]
    for row in dataset.select_columns(columns):
        for name in columns:
            tokens = np.atleast_1d(np.asarray(row[name], dtype=np.int64))
            seen.update(f"{name}:{len(tokens)}:".encode())
            seen.update(tokens.data)
    return seen.hexdigest()


def _fetch(desk: Desk, key: str, names: tuple[str, str], rows: int) -> Columns | None:
    """What the bucket holds, if it is whole; None if it is not there, or with a notice if it is torn."""
    data = desk.store.get_bytes(key)
    if data is None:
        return None
    try:
        columns = _parse(data, names, rows)
    except (ValueError, KeyError, TypeError) as error:
        desk.notice("reference torn", f"{key}: {type(error).__name__}: {error}; computed again")
        return None
    desk.notice("reference fetched", f"log-probabilities of {rows} rows, computed before; {key}", routine=True)
    return columns


def _parse(data: bytes, names: tuple[str, str], rows: int) -> Columns:
    stored = json.loads(data)
    if stored["sha256"] != _sha256(stored["columns"]):
        raise ValueError("the columns are not those that were written")
    columns = {name: np.asarray(stored["columns"][name], dtype=np.float32) for name in names}
    for name, values in columns.items():
        if values.shape != (rows,) or not np.isfinite(values).all():
            raise ValueError(f"{name} holds {values.shape} values, want {rows} finite ones")
    return columns


def _keep(desk: Desk, key: str, columns: Columns) -> None:
    # A float32 written as the shortest decimal of its double comes back as the same float32.
    lists = {name: [float(value) for value in values] for name, values in columns.items()}
    desk.store.put_bytes(key, json.dumps({"sha256": _sha256(lists), "columns": lists}).encode())


def _sha256(columns: Mapping[str, list[float]]) -> str:
    return hashlib.sha256(json.dumps(columns, sort_keys=True).encode()).hexdigest()

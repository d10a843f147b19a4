"""A bench on which real phases are run and sabotaged: the smallest world they run in, the moments at which a fault may be put in, and one
switch that takes the guard away.

The faults themselves, and what must be said of each, stand in test_bypasses.py.
"""

from __future__ import annotations

import ast
import inspect
import json
import shutil
import sys
import threading
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import TrainerCallback
from transformers.models.qwen3_5_moe import Qwen3_5MoeForCausalLM
from trl.trainer.base_trainer import _BaseTrainer

from tests.training.conftest import recipe_of
from training import evaluate, liveness, tiny
from training.box.folder import FolderStore
from training.box.store import sha256_of
from training.checkpoint import Checkpoints, Found, Identity
from training.contract.events import EventLog, Guard, read_events
from training.contract.manifest import REQUIRED_FILES
from training.contract.recipe import Assignment, Recipe
from training.errors import LivenessError
from training.model import attach, load_base
from training.phases import common, grpo
from training.phases.desk import Desk, Home, Pulse
from training.uploader import Uploader

_SIZES = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "num_experts": 4,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_PHASES: dict[str, dict[str, Any]] = {
    "cpt": {"batch_size": 1, "max_length": 64},
    "sft": {"batch_size": 1, "max_length": 64},
    "dpo": {"batch_size": 2, "max_length": 64},
    "kto": {"batch_size": 2, "max_length": 64},
    "grpo": {"batch_size": 4, "max_length": 64, "generations": 4, "max_completion_length": 8, "silent_steps": 2},
}


def make_world(root: Path) -> Path:
    """model/ of two layers and datasets/ of short rows for every phase, from the machinery of training.tiny."""
    datasets = {name: rows[:12] for name, rows in tiny.datasets().items()}
    tokenizer = tiny.make_tokenizer(datasets)
    tokenizer.save_pretrained(root / "model")
    _small_model(tokenizer).save_pretrained(root / "model")
    (root / "data").mkdir()
    for name, rows in datasets.items():
        lines = (json.dumps(_short(row)) + "\n" for row in rows)
        (root / "data" / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return root


def _small_model(tokenizer: Any) -> Any:
    config = tiny.make_model(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id).config
    config.update(_SIZES)
    torch.manual_seed(0)
    model = Qwen3_5MoeForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0, 1.0)
        model.lm_head.weight.normal_(0, 0.3)
        # So that some completions end by themselves: GRPO learns from no others.
        model.lm_head.weight[tokenizer.eos_token_id] *= 6
        for name, parameter in model.named_parameters():
            if "proj" in name:
                parameter.mul_(4)
    return model


def _short(row: dict[str, Any]) -> dict[str, Any]:
    """Without the tools' schemas, which make a row ten times as long; a text is cut to a few sentences."""
    kept = {name: value for name, value in row.items() if name != "tools"}
    return kept | {"text": row["text"][:240]} if "text" in row else kept


def recipe(phase: str, groups: Sequence[str] | None, settings: Mapping[str, Any]) -> Recipe:
    """One phase of a few steps."""
    fields = _PHASES[phase] | {
        "kind": phase,
        "data": f"bucket:{phase}.jsonl",
        "learning_rate": 5e-3,
        "accumulation": 1,
        "schedule": "constant",
        **settings,
    }
    adapters = {"rank": 8, "alpha": 16} | ({"groups": list(groups)} if groups else {})
    return recipe_of("tiny-moe", phases=[fields], adapters=adapters)


Hook = Callable[..., Any]
MOMENTS = ("loaded", "attached", "arguments", "built", "began", "step", "stepped", "saved")


@dataclass
class Bench:
    """One run of one phase, with the moments at which a fault can be put in.

    loaded(base)  attached(model)  arguments(setting, dict)  built(trainer)  began(trainer, optimizer)  step(trainer, number)
    stepped(trainer, number)  saved(trainer, directory)
    """

    world: Path
    root: Path
    patch: pytest.MonkeyPatch
    phase: str = "sft"
    """A phase's kind; or `evaluation`, which scores the adapter `start` as the runner does after the last phase; or `merge`, which tries a merge."""
    groups: Sequence[str] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 3
    start: Path | None = None
    """The adapter that the phase begins from; None = fresh adapters."""
    resume: Found | None = None
    resume_dir: Path | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    """Set it, and the phase saves and ends with Interrupted."""
    hooks: dict[str, list[Hook]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self.root.mkdir(exist_ok=True)
        # Of their own, so that they may be damaged.
        for name in ("start", "resume_dir"):
            if getattr(self, name) is not None:
                setattr(self, name, Path(shutil.copytree(getattr(self, name), self.root / name)))
        for name in ("model", "data"):
            (self.root / name).symlink_to(self.world / name)
        kind = self.phase if self.phase in _PHASES else "sft"
        steps: dict[str, Any] = {"steps": self.steps, "save_every_steps": self.steps}
        self.recipe = recipe(kind, self.groups, steps | self.settings)
        # Cards of the saved adapter take as long as a training step.
        self.patch.setattr(PeftModel, "create_or_update_model_card", lambda *given: None)
        self.patch.setattr(_BaseTrainer, "create_model_card", lambda *given, **named: None)
        # A model that has learnt nothing is never right: here chance is rewarded, too.
        self.patch.setattr(grpo, "call_reward", reward)
        store = FolderStore(self.root / "bucket")
        self.checkpoints = Checkpoints(store, "bypass", self.root / "work" / "staging", _tell)

    def at(self, moment: str, hook: Hook) -> None:
        assert moment in MOMENTS, moment
        self.hooks[moment].append(hook)

    def fire(self, moment: str, *what: Any) -> None:
        for hook in self.hooks[moment]:
            hook(*what)

    @property
    def passed(self) -> list[str]:
        """The stages that the events say were passed, in order."""
        return [event.stage for event in read_events(self.root / "events.jsonl") if isinstance(event, Guard)]

    def run(self) -> Any:
        """Train the phase through its own entry point, or evaluate or merge; what that returns."""
        if self.phase == "evaluation":
            self._hook_model(evaluate)
            rows = self.recipe.evaluation.model_copy(update={"rows": 2, "max_new_tokens": 2})
            self.recipe = self.recipe.model_copy(update={"evaluation": rows})
            return evaluate.evaluate(
                self.root / "model", self.root / "data" / "evaluation.jsonl", self.recipe, self.start
            )
        if self.phase == "merge":
            model = attach(load_base(self.root / "model", self.recipe), self.recipe, self.start)
            self.fire("attached", model)
            return liveness.require_merged(model, torch.arange(20, 60)[None])
        self._hook_model(common)
        return self._train()

    def identity(self) -> Identity:
        return Identity(
            phase_digest=self.recipe.phase_digest(self.phase),
            data_sha256=sha256_of(self.root / "data" / f"{self.phase}.jsonl"),
            versions={},
            parent=None,
            required=REQUIRED_FILES,
        )

    def _train(self) -> Path:
        module = import_module(f"training.phases.{self.phase}")
        self._hook_trainer(module)
        events = EventLog(self.root / "events.jsonl")
        assignment = Assignment(
            recipe=self.recipe, run="bypass", flow_run_id="a" * 36, attempt=1, bucket="none", hard_end=4_000_000_000
        )
        (self.root / "recipe.json").write_text(assignment.model_dump_json())
        uploader = Uploader(self.root / "recipe.json", self.root / "work" / "staging", self.checkpoints, _tell)
        desk = Desk(
            assignment=assignment,
            phase=self.recipe.phases[0],
            home=Home(self.root),
            events=events,
            pulse=Pulse(),
            stop=self.stop,
            uploader=uploader,
            store=self.checkpoints.store,
            identity=self.identity(),
            start=self.start,
            resume=self.resume,
            resume_dir=self.resume_dir,
        )
        try:
            result: Path = module.train(desk)
            return result
        finally:
            durable = uploader.wait(timeout_s=60)
            uploader.close()
            assert durable

    def _hook_model(self, module: Any) -> None:
        def loading(*given: Any, **named: Any) -> Any:
            base = load_base(*given, **named)
            self.fire("loaded", base)
            return base

        def attaching(*given: Any, **named: Any) -> Any:
            model = attach(*given, **named)
            self.fire("attached", model)
            return model

        self.patch.setattr(module, "load_base", loading)
        self.patch.setattr(module, "attach", attaching)

    def _hook_trainer(self, module: Any) -> None:
        build, arguments = module.build, common.Setting.arguments

        def arguing(setting: common.Setting) -> dict[str, Any]:
            wanted = arguments(setting)
            self.fire("arguments", setting, wanted)
            return wanted

        def building(*given: Any) -> Any:
            trainer = build(*given)
            trainer.add_callback(_Moments(self, trainer))
            self.fire("built", trainer)
            return trainer

        self.patch.setattr(common.Setting, "arguments", arguing)
        self.patch.setattr(module, "build", building)


class _Moments(TrainerCallback):
    """Stands before the guard among the trainer's callbacks, as a fault in the code above it would."""

    def __init__(self, bench: Bench, trainer: Any) -> None:
        self._bench, self._trainer = bench, trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        self._bench.fire("began", self._trainer, optimizer)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._bench.fire("step", self._trainer, state.global_step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._bench.fire("stepped", self._trainer, state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._bench.fire("saved", self._trainer, Path(args.output_dir) / f"checkpoint-{state.global_step}")


def _tell(what: str, reason: str) -> None:
    print(f"{what}: {reason}", file=sys.stderr)


def reward(completions: Sequence[str], **_: Any) -> list[float]:
    return [sum(map(ord, text)) % 7 / 7 for text in completions]


def without_guard(patch: pytest.MonkeyPatch) -> list[LivenessError]:
    """Take the guard away: every `raise` of a LivenessError in training/ becomes a note in the returned list.

    Functions keep their identity and get new code, so that it also holds for those that others have imported by name.
    """
    noted: list[LivenessError] = []

    def note(error: BaseException, cause: BaseException | None = None) -> dict[str, float]:
        if not isinstance(error, LivenessError):
            raise error from cause
        noted.append(error)
        return {}

    for name, module in list(sys.modules.items()):
        if name.startswith("training.") and (codes := _without_raises(name)):
            patch.setattr(module, "_noted", note, raising=False)
            for function in _functions(module):
                if function.__qualname__ in codes:
                    patch.setattr(function, "__code__", codes[function.__qualname__])
    return noted


@cache
def _without_raises(name: str) -> dict[str, types.CodeType]:
    """Of a module's functions those that raise LivenessErrors, without that."""
    source = inspect.getsource(sys.modules[name])
    if "LivenessError" not in source:
        return {}
    tree = ast.fix_missing_locations(_NotesInstead().visit(ast.parse(source)))
    module = compile(tree, str(sys.modules[name].__file__), "exec", dont_inherit=True)
    return {code.co_qualname: code for code in _codes(module) if "_noted" in _names(code)}


class _NotesInstead(ast.NodeTransformer):
    """A function called require_… returns an empty result where it would have raised, as if nothing had been wrong; any other goes on."""

    _requires = False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        outer, self._requires = self._requires, node.name.startswith("require")
        self.generic_visit(node)
        self._requires = outer
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        if node.exc is None:
            return node
        call = ast.Call(ast.Name("_noted", ast.Load()), [node.exc, *([node.cause] if node.cause else [])], [])
        return ast.copy_location(ast.Return(call) if self._requires else ast.Expr(call), node)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _codes(constant)


def _names(code: types.CodeType) -> set[str]:
    return set(code.co_names).union(*(_names(inner) for inner in code.co_consts if isinstance(inner, types.CodeType)))


def _functions(module: types.ModuleType) -> Iterator[types.FunctionType]:
    """Those written in this module: at its top and in its classes, under decorators, too."""
    holders: list[Any] = [
        module,
        *(each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__),
    ]
    for holder in holders:
        for value in vars(holder).values():
            function = inspect.unwrap(getattr(value, "__func__", getattr(value, "fget", None) or value))
            if isinstance(function, types.FunctionType) and function.__module__ == module.__name__:
                yield function

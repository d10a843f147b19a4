"""The recipe: what the user wants, as typed and documented fields. Unknown keys are refused, defaults are stated here and nowhere else.

Tiers, floors and budgets come from what failed without them: see each field. Memory bands are MB as the market reports them.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from training.contract.families import FAMILIES, Group
from training.contract.model import Frozen, explain

PhaseKind = Literal["cpt", "sft", "dpo", "kto", "grpo"]
Tier = Literal["rtxpro6000", "h200", "b200", "h100", "a100", "l40s", "rtx5090", "rtx4090", "rehearsal"]
Quantisation = Literal["none", "nf4"]
Linears = Literal["nf4", "bf16"]
Execution = Literal["auto", "host", "all_gather"]
Recompute = Literal["none", "mixer", "experts_kept", "full"]
"""What of each layer is computed again in the backward pass: nothing; the token mixer; all but the routed experts; the whole layer."""
STREAMED_PHASES = ("cpt", "sft", "dpo", "kto")
"""What a 4-bit base can be trained by: GRPO generates, which asks every layer for a few tokens at a time, and over a streamed base that takes days."""
Allowance = Literal["slow_experts", "unpacked", "fewer_groups", "light_checkpoints"]
RUN_NAME = re.compile(r"^[a-z0-9][a-z0-9-]{0,39}$")
PHASE_NAME = re.compile(r"^[a-z][a-z0-9-]{0,23}$")


class RecipeError(ValueError):
    """The recipe cannot be used; each line of the message names a field, what was seen and what is wanted."""


class Model(Frozen):
    """The frozen base model."""

    source: str
    """`hub:OWNER/NAME@REVISION` (a 40-digit commit) or `bucket:PREFIX` (a mirror in the run's own bucket)."""
    family: str
    """The architecture, one of training.contract.families, which says where its routed experts are. `qwen3_5_moe` covers Qwen3.5 and Qwen3.6."""
    size_gb: float = Field(gt=0)
    """Bytes to prefetch in GB (10^9); sets the prefetch budget and the disk."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    mirror: bool = False
    """Take a hub's model from the bucket's own copy; the first box that has it from the hub uploads that, while nothing else waits for the uplink."""
    quantisation: Quantisation = "none"
    """`nf4`: the routed experts lie in 4-bit NormalFloat (4.5 bits a weight with their scales), quantised while the files are read. One layer at a
    time is unpacked, so a base that no card holds can be trained, and several cards work on one run."""
    linears: Linears = "nf4"
    """With nf4: what the linear layers outside the routed experts become. `bf16` keeps them in `dtype`: 9.6 GB a card more for Qwen3-235B-A22B."""
    execution: Execution = "auto"
    """With nf4: where the experts lie. `host`: once in host memory, copied ahead to each card, layer by layer; `all_gather`: spread over the cards,
    the next layer gathered ahead; `auto`: the faster of those that fit, by the box's measured links."""
    nf4_cache: bool = False
    """With nf4: keep the quantised base on the box's disk, so that a restart there reads a quarter of the bytes. Takes `disk_gb` for it."""

    @field_validator("family")
    @classmethod
    def _family(cls, value: str) -> str:
        if value not in FAMILIES:
            raise ValueError(f"want one of {', '.join(FAMILIES)}")
        return value

    @field_validator("source")
    @classmethod
    def _source(cls, value: str) -> str:
        if re.fullmatch(r"hub:[\w.-]+/[\w.-]+@[0-9a-f]{40}", value) or re.fullmatch(r"bucket:[\w./-]+", value):
            return value
        raise ValueError(
            "want 'hub:OWNER/NAME@<40-digit commit>' or 'bucket:PREFIX'; a branch name may move under a run"
        )

    @model_validator(mode="after")
    def _only_with_nf4(self) -> Model:
        for name in ("linears", "execution", "nf4_cache") if self.quantisation == "none" else ():
            value, default = getattr(self, name), type(self).model_fields[name].default
            if value != default:
                raise ValueError(
                    f"{name}: {value} is of a 4-bit base, and quantisation is none; want quantisation: nf4, or leave {name} out"
                )
        return self


class Adapters(Frozen):
    """The LoRA adapters: which groups, and how large."""

    rank: int = Field(32, ge=1, le=256)
    alpha: float = Field(64, gt=0)
    groups: tuple[Group, ...] = ("attention", "linear_attention", "shared_expert", "routed_experts")
    """Groups that must train. Each is checked by name at the first step of each phase; none may be silently missing."""
    gate_projections: bool = False
    """Also adapt in_proj_a and in_proj_b of the gated delta net (390 targets instead of 330 on Qwen3.6-35B); no serving engine has a slot for them."""

    @field_validator("groups")
    @classmethod
    def _groups(cls, value: tuple[Group, ...]) -> tuple[Group, ...]:
        if not value or len(set(value)) != len(value):
            raise ValueError("want at least one group, each named once")
        return value


class _Phase(Frozen):
    name: str
    """What the phase is called in events, manifests and tables; its kind unless said otherwise. Two phases of one kind need names of their own."""
    data: str
    """`bucket:KEY` or a local path (relative to the recipe's file): a .jsonl or .parquet file, or a folder that `datasets` saved. Local data and
    everything that is not JSON lines is put into the bucket as JSON lines before renting."""
    steps: int = Field(ge=1)
    """Optimizer steps."""
    learning_rate: float = Field(gt=0, lt=1)
    batch_size: int = Field(2, ge=1)
    """Rows per micro-batch."""
    accumulation: int = Field(8, ge=1)
    """Micro-batches per optimizer step, those of all cards together: with `box.gpus` of 4 and 16 here each card takes 4."""
    max_length: int = Field(2048, ge=16)
    """Tokens per row; longer rows are dropped and counted (CPT splits them instead)."""
    warmup_steps: int = Field(0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    save_every_steps: int = Field(50, ge=1)
    """Local checkpoint interval; the upload takes the newest one that is finished."""
    router_aux_loss: float = Field(0.0, ge=0)
    """TRL turns the router's auxiliary loss on by default; with a frozen router it only leaks into the other adapters."""

    @model_validator(mode="before")
    @classmethod
    def _named_after_kind(cls, data: Any) -> Any:
        return {"name": data.get("kind", cls.model_fields["kind"].default), **data} if isinstance(data, dict) else data

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        if not PHASE_NAME.fullmatch(value) or value == "evaluation":
            raise ValueError("want lower case letters, digits and dashes, at most 24, such as 'sft-code'")
        return value


class CptPhase(_Phase):
    """Continued pretraining on `{"text"}` rows, packed by bfd_split so that no token of a long document is lost."""

    kind: Literal["cpt"] = "cpt"


class SftPhase(_Phase):
    """Supervised fine-tuning on `{"messages", "tools"}` rows; the loss is on the assistant's tokens only."""

    kind: Literal["sft"] = "sft"


class DpoPhase(_Phase):
    """Direct preference optimisation on `{"prompt", "chosen", "rejected", "tools"}` rows."""

    kind: Literal["dpo"] = "dpo"
    beta: float = Field(0.1, gt=0)


class KtoPhase(_Phase):
    """Kahneman-Tversky optimisation on `{"prompt", "completion", "label", "tools"}` rows."""

    kind: Literal["kto"] = "kto"
    beta: float = Field(0.1, gt=0)

    @model_validator(mode="after")
    def _pairs(self) -> KtoPhase:
        if self.batch_size < 2:
            raise ValueError("batch_size: KTO estimates its KL from pairs inside a batch, so it needs at least 2 rows")
        return self


class GrpoPhase(_Phase):
    """Group-relative policy optimisation on `{"messages", "tools", "answer"}` rows, rewarded for valid and right tool calls."""

    kind: Literal["grpo"] = "grpo"
    generations: int = Field(8, ge=2)
    """Completions per prompt; the group whose mean is the baseline."""
    max_completion_length: int = Field(256, ge=8)
    temperature: float = Field(1.0, gt=0)
    beta: float = Field(0.0, ge=0)
    """KL weight against the phase-start policy; above zero costs a second copy of the adapter."""
    silent_steps: int = Field(20, ge=1)
    """Abort after this many steps in a row whose rewards had no variance: nothing would be learnt."""

    @model_validator(mode="after")
    def _whole_groups(self) -> GrpoPhase:
        if (self.batch_size * self.accumulation) % self.generations:
            raise ValueError(
                f"batch_size x accumulation = {self.batch_size * self.accumulation} must be a multiple of generations = {self.generations}"
            )
        return self


Phase = Annotated[CptPhase | SftPhase | DpoPhase | KtoPhase | GrpoPhase, Field(discriminator="kind")]


class Box(Frozen):
    """The box to rent. Names of cards vary in listings, so a tier is a memory band plus a compute capability."""

    tier: Tier
    gpus: int = Field(1, ge=1, le=8)
    """Cards of one box. More than one only with `model.quantisation: nf4`."""
    device: Literal["cuda", "cpu", "none"] = "cuda"
    """`none` is for the counting trainer, which trains nothing and only rehearses the machinery."""
    image: str = "pytorch/pytorch:2.11.0-cuda13.0-cudnn9-devel"
    disk_gb: int = Field(250, ge=8)
    """Not resizable later; base model + merged copy + FP8 copy of a 35B need 250."""
    max_dph_usd: float = Field(1.30, gt=0)
    """Cap on $/h for the whole box with this disk. Never relaxed by the program."""
    interruptible: bool = False
    """Bid instances may be reclaimed at any moment: for short runs only."""
    min_inet_down_mbps: float = Field(250, ge=0)
    min_inet_up_mbps: float = Field(200, ge=0)
    min_reliability: float = Field(0.95, ge=0, le=1)
    """0.99 excludes nearly the whole cheap tier."""
    min_cuda: float = Field(13.0, ge=0)
    min_driver: str = "580.65.06"
    countries: tuple[str, ...] | None = None
    """Two-letter codes. Left out = near the bucket's region, since advertised bandwidth is local; [] = anywhere."""
    min_pids: int = Field(4096, ge=0)
    """Containers with pids.max of 1024 break the downloader and OpenMP."""
    min_host_memory_gb: float = Field(96, ge=0)
    """The box's share of its machine's memory, in GB as the market has it. A 4-bit base in host memory may need more than this: the plan says so."""
    min_disk_free_gb: float | None = None
    """Measured on the box at the first login; by default 80 % of disk_gb, since the image takes its part."""
    max_clock_skew_s: float = Field(60, gt=0)
    boot_s: int = Field(900, ge=1)
    """From create to a successful login."""

    @field_validator("countries")
    @classmethod
    def _countries(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for code in value or ():
            if not re.fullmatch(r"[A-Z]{2}", code):
                raise ValueError(f"'{code}' is not a two-letter country code such as DE")
        return value


class Budget(Frozen):
    """What may be spent, in dollars and seconds. Reaching a limit ends the run and its box; it goes on from its last manifest when it is run again."""

    max_usd: float = Field(gt=0)
    """For the whole run, failed boxes included."""
    max_hours: float = Field(12, gt=0)
    """From the first rent to the destroy; becomes the hard end in the box's label."""
    attempts: int = Field(5, ge=1)
    """Boxes that may be tried."""
    install_s: int = Field(900, ge=1)
    prefetch_s: int = Field(1500, ge=1)
    """67 GB in 1500 s is about 360 Mbps."""
    upload_s: int = Field(1500, ge=1)
    """For one checkpoint to become durable."""
    stall_s: int = Field(90, ge=1)
    """No byte moved for this long: the transfer is killed and tried another way."""
    silent_s: int = Field(900, ge=1)
    """No event from the runner, or no end of a step, for this long: the box is lost."""

    @property
    def last_upload_s(self) -> float:
        """When a runner is told to stop, for its last checkpoint to become durable; what is not by then stays staged on the box. A checkpoint of
        the 35B has 11.4 GB, so a minute would save nothing."""
        return min(600.0, self.upload_s)


class Evaluation(Frozen):
    """A held-out set that is scored before and after training."""

    data: str | None = None
    rows: int = Field(50, ge=1)
    max_new_tokens: int = Field(64, ge=1)


class Recipe(Frozen):
    """A whole fine-tuning run, from the base model to the adapter."""

    name: str
    """The run: a second run of the same name goes on from its manifests. Lower case, digits and dashes, at most 40."""
    model: Model
    adapters: Adapters = Adapters()
    phases: tuple[Phase, ...]
    box: Box
    budget: Budget
    evaluation: Evaluation = Evaluation()
    trainer: Literal["trl", "counting"] = "trl"
    """`counting` keeps the runner's whole contract and trains nothing; it rehearses faults in seconds."""
    step_seconds: float | None = Field(None, gt=0)
    """Seconds a step measured before for this recipe and tier; empty = predicted, and the plan says so."""
    checkpoint_mb: float | None = Field(None, gt=0, le=1000)
    """With the counting trainer: what each of its checkpoints has, 0.26 unless said; a real one's size follows from its adapters."""
    optimizer: Literal["adamw_8bit", "adamw"] = "adamw_8bit"
    """State of 2.03 bytes a parameter, or of 8 in fp32. With fp32 state a rank-32 adapter of all experts does not fit 96 GB beside the 35B."""
    recompute: Literal["auto", "none", "mixer", "experts_kept", "full"] = "auto"
    """What of each layer is computed again in the backward pass rather than kept: `none`, the token `mixer`, all with the routed `experts_kept`, or the
    `full` layer. Each is slower than the one before and takes less memory; `auto` is the fastest that fits the card, which the plan prints, and on a card
    always `full` in float32 or without adapters on the routed experts."""
    micro_batches: Literal["auto", "recipe"] = "auto"
    """How many rows of a step go through the model at once, in CPT and SFT on a card. `auto`: as many as take the least time of those that fit; the step
    is the same. `recipe`: each phase's own batch_size and accumulation. Always those in other phases, with a router_aux_loss, over a 4-bit base, in float32
    and without adapters on the routed experts."""
    cuda_graphs: Literal["auto", "off"] = "auto"
    """Run each packed micro-batch of CPT and SFT as one CUDA graph, on a card that holds the base unquantised; a notice says that it does, or what keeps
    it from it."""
    trackers: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = ()
    """Where the steps are shown besides the events file, which stays the truth. Each needs its package on the box; wandb its key in the settings."""
    seed: int = 0
    allow: tuple[Allowance, ...] = ()
    """Slower or smaller ways that this recipe accepts. Without the word, each of them stops the run."""

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        if not RUN_NAME.fullmatch(value):
            raise ValueError("want lower case letters, digits and dashes, at most 40, such as 'tools-35b'")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        names = self.phase_names
        if not names:
            raise ValueError("phases: want at least one of cpt, sft, dpo, kto, grpo")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"phases: {names.count(twice[0])} are called '{twice[0]}'; give each a name of its own, such as name: {twice[0]}-2"
            )
        if (self.trainer == "counting") != (self.box.device == "none"):
            raise ValueError("trainer: 'counting' goes with box.device: none, and only with it")
        if self.checkpoint_mb is not None and self.trainer != "counting":
            raise ValueError("checkpoint_mb: only the counting trainer's checkpoints are of any size; leave it out")
        if (self.box.tier == "rehearsal") == (self.box.device == "cuda"):
            raise ValueError("box.device: the rehearsal tier has no GPU (cpu or none); every other tier wants cuda")
        known = FAMILIES[self.model.family].groups
        if strange := [group for group in self.adapters.groups if group not in known]:
            raise ValueError(
                f"adapters.groups: {self.model.family} has no {' and no '.join(strange)}; name some of {', '.join(known)}"
            )
        if self.recompute != "auto" and self.model.quantisation != "none":
            raise ValueError(
                f"recompute: {self.recompute}, but layers of a 4-bit base are always recomputed whole; want auto, or model.quantisation: none"
            )
        self._require_trainable_cards()
        return self

    def _require_trainable_cards(self) -> None:
        gpus, quantised = self.box.gpus, self.model.quantisation == "nf4"
        if gpus > 1 and not quantised:
            raise ValueError(
                f"box.gpus: {gpus} cards for a base that is not quantised; several cards train a 4-bit base only: want 1, or model.quantisation: nf4"
            )
        for phase in self.phases if quantised else ():
            if phase.kind not in STREAMED_PHASES:
                raise ValueError(
                    f"phases.{phase.name}: {phase.kind} cannot run on a 4-bit base, which is streamed layer by layer; "
                    f"want {', '.join(STREAMED_PHASES)}, or model.quantisation: none"
                )
            if phase.accumulation % gpus:
                raise ValueError(
                    f"phases.{phase.name}.accumulation: {phase.accumulation} micro-batches a step over {gpus} cards (box.gpus); want a multiple of {gpus}"
                )

    def phase(self, name: str) -> CptPhase | SftPhase | DpoPhase | KtoPhase | GrpoPhase:
        """The phase of that name; KeyError if the recipe has none."""
        for phase in self.phases:
            if phase.name == name:
                return phase
        raise KeyError(f"the recipe has no phase '{name}'; it has {', '.join(self.phase_names)}")

    @property
    def phase_names(self) -> tuple[str, ...]:
        return tuple(phase.name for phase in self.phases)

    def phase_digest(self, name: str) -> str:
        """sha256 of all that decides this phase's weights: model, adapters, optimizer, seed, and every phase up to and with this one.

        Budgets, boxes and prices are left out, so that a run may go on elsewhere; a changed learning rate may not.
        The data's place is left out too: the manifest holds the sha256 of its content.
        """
        upto = self.phase_names.index(self.phase(name).name) + 1
        model = {"source": True, "family": True, "size_gb": True, "dtype": True}
        deciding: Any = {"model": model, "adapters": True, "optimizer": True, "seed": True, "trainer": True}
        decides = self.model_dump(mode="json", include=deciding)
        if self.model.quantisation != "none":
            # Where the experts lie and how many cards there are change no weight; rounding them does.
            decides["quantised"] = {"quantisation": self.model.quantisation, "linears": self.model.linears}
        # Without packing the same rows make other steps.
        decides["unpacked"] = "unpacked" in self.allow
        decides["phases"] = [
            phase.model_dump(mode="json", exclude={"save_every_steps", "data"}) for phase in self.phases[:upto]
        ]
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


class Assignment(Frozen):
    """`recipe.json` on the box: the recipe, and which run and attempt this box works for. Holds no secret."""

    recipe: Recipe
    run: str
    flow_run_id: str
    attempt: int = Field(ge=1)
    bucket: str
    hard_end: int
    """Epoch seconds after which the box destroys itself."""
    dph_usd: float = 0.0
    """For the cost shown in events; the bill itself comes from the market."""
    inet_up_usd_gb: float = Field(0.0, ge=0)
    """Of the box's uplink: how often a checkpoint is sent depends on it."""


def parse_recipe(data: Any, subject: str = "recipe") -> Recipe:
    """Make a Recipe of parsed YAML or JSON; RecipeError with one clear line per problem."""
    if not isinstance(data, dict):
        raise RecipeError(
            f"{subject}: want a mapping of fields such as name, model, phases; seen {type(data).__name__}"
        )
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise RecipeError(explain(error, subject)) from None

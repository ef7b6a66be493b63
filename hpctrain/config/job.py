"""The job: what to train, on which data, how long. One TOML file, read into one frozen object.

A job file has the sections `[model] [data] [train] [precision] [plan] [search] [overlap] [kernels]
[checkpoint] [comm] [observe] [watch]`; it may start from another file (`extends = "base.toml"`, relative to itself),
from a ready-made job (`extends = "tiny"`) and from a model preset; the command line has the last word
(`--set train.steps=10`). Whatever is wrong with it becomes one `JobError` with the file, the key, the value and what
to set.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from hpctrain.architectures.description import Description, Experts, head_size_of
from hpctrain.architectures.registry import describe_unread, families, presets, unread_keys
from hpctrain.config.bounds import (
    MOST_NUMBER,
    MOST_RATE,
    Count,
    LayerCount,
    Timeout,
    TokenCount,
    WholeNumber,
    Width,
)
from hpctrain.config.errors import JobError, did_you_mean
from hpctrain.config.kernels import KernelChoice
from hpctrain.config.other_names import OTHER_NAMES
from hpctrain.config.parallelism import Overlap, PlanRequest, SearchBudget
from hpctrain.config.paths import is_file
from hpctrain.config.precision import Precision
from hpctrain.config.recovery import Recovery
from hpctrain.config.saved import KEY, SCHEMA, saved_job, say_on_stderr
from hpctrain.config.tables import (
    AUTO,
    FilePath,
    Several,
    Table,
    explain,
    flatten,
    parse_override,
    parse_toml,
    read_text,
    shorten,
    toml_comment,
    toml_value,
)
from hpctrain.config.training.train import Train
from hpctrain.config.watch import Watch

MOST_NAME_BYTES = 200
"""Names of files have 255 at most, and a run folder's has a date behind."""
MOST_EXTENDED = 20
"""Job files that extend each other."""
MOST_SECTIONS = 8
"""Of a key on the command line."""
WRITTEN = "# What this run does, with every choice made."
"""How a job file begins that hpctrain wrote."""
READY_MADE = Path(__file__).parents[1] / "jobs"
PRESET_TOKENS, PRESET_LENGTH = "tokens/stdlib.h5", 4096
"""Data of a job that is a preset by its name: the token file of the ready-made job `tiny`, and the most positions."""


class RopeScaling(Table):
    """A change of rotary frequencies for sequences longer than those of pre-training."""

    kind: Literal["linear", "llama3", "yarn"]
    """`linear`: all are divided by `factor`. `llama3`, `yarn`: those of long wavelengths are."""
    factor: Annotated[float, Field(ge=1, le=MOST_NUMBER)]
    """What frequencies are divided by."""
    low_factor: Annotated[float, Field(gt=0, le=MOST_NUMBER)] = 1.0
    """llama3: wavelengths above original_positions / low_factor are divided."""
    high_factor: Annotated[float, Field(gt=0, le=MOST_NUMBER)] = 4.0
    """llama3: wavelengths below original_positions / high_factor stay."""
    original_positions: TokenCount = 8192
    """llama3, yarn: the longest sequence of pre-training."""
    beta_fast: Annotated[float, Field(gt=0, le=MOST_NUMBER)] = 32.0
    """yarn: pairs that turn more often than this in original_positions stay."""
    beta_slow: Annotated[float, Field(gt=0, le=MOST_NUMBER)] = 1.0
    """yarn: pairs that turn less often than this in original_positions are divided."""
    attention_factor: Annotated[float | None, Field(gt=0, le=MOST_NUMBER)] = None
    """yarn: what cos and sin are multiplied by; None: 0.1 * ln(factor) + 1."""
    truncate: bool = True
    """yarn: whether the first and the last pair between both are rounded to whole pairs."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.beta_fast < self.beta_slow:
            raise ValueError(f"beta_fast = {self.beta_fast} is below beta_slow = {self.beta_slow}; exchange them")
        fields = type(self).model_fields
        for key in ("beta_fast", "beta_slow", "attention_factor", "truncate"):
            if self.kind != "yarn" and getattr(self, key) != fields[key].default:
                raise ValueError(f'{key} = {getattr(self, key)} has no effect on kind = "{self.kind}"; remove it')
        return self


class Model(Table):
    """The shape of a decoder-only transformer; names and sizes of its parameters follow from it alone."""

    preset: str | None = None
    """A published shape, see below. Other keys override its values."""
    architecture: str
    """The family: `gpt2`, `llama` (2 and 3), `qwen2` (and 2.5), `qwen3`, `mistral`, `gemma2`, `gemma3`,
    `starcoder2`; with experts `mixtral`, `qwen3_moe`, `dots1`, `gpt_oss`."""
    num_layers: LayerCount
    """Transformer blocks."""
    hidden_size: Width
    """Features of the residual stream."""
    num_heads: Width
    """Query heads of attention."""
    num_kv_heads: Width | None = None
    """Key/value heads (grouped-query attention); None: as many as heads."""
    head_size: Width | None = None
    """Features of a head; None: hidden_size / num_heads."""
    ffn_size: Width | None = None
    """Inner width of the feed-forward part; None: 4 * hidden_size."""
    vocab_size: Annotated[Width | None, AUTO] = None
    """Number of token ids; auto: that of the token file's tokenizer."""
    max_positions: TokenCount = 1024
    """Longest sequence; the length of the table of learned positions for gpt2."""
    tie_head: bool = False
    """Whether the head shares the embedding's weight."""
    rope_base: Annotated[float, Field(gt=1, le=MOST_NUMBER)] = 10000.0
    """Base of the rotary positions (RoPE)."""
    rope_scaling: RopeScaling | None = None
    """For sequences longer than those of pre-training."""
    rope_local_base: Annotated[float | None, Field(gt=1, le=MOST_NUMBER)] = None
    """gemma3: the base in layers with a window."""
    window: Count | None = None
    """mistral, gemma2, gemma3: positions that a token attends to in layers with a window; None: all before it."""
    global_every: Count | None = None
    """gemma2, gemma3: every so many layers one sees all positions."""
    score_divisor: Annotated[float | None, Field(gt=0, le=MOST_NUMBER)] = None
    """gemma2, gemma3: attention scores are divided by its square root; None: by that of the head size."""
    score_cap: Annotated[float | None, Field(gt=0, le=MOST_NUMBER)] = None
    """gemma2: attention scores s become cap * tanh(s / cap)."""
    logit_cap: Annotated[float | None, Field(gt=0, le=MOST_NUMBER)] = None
    """gemma2: logits become cap * tanh(logit / cap)."""
    num_experts: Width | None = None
    """mixtral, qwen3_moe, dots1, gpt_oss: experts of a layer."""
    experts_per_token: Width | None = None
    """mixtral, qwen3_moe, dots1, gpt_oss: experts that compute a token."""
    expert_size: Width | None = None
    """qwen3_moe, dots1: inner width of an expert; None: ffn_size, as in mixtral."""
    shared_experts: Annotated[int, Field(ge=0, le=64)] = 0
    """dots1: experts that compute every token, in addition."""
    dense_layers: Annotated[int, Field(ge=0, le=MOST_NUMBER)] = 0
    """qwen3_moe, dots1: first layers without experts."""
    expert_groups: Width = 1
    """dots1: groups of experts; a token takes experts of the best `groups_per_token`."""
    groups_per_token: Width = 1
    """dots1: groups that a token takes experts of."""
    normalise_scores: bool = True
    """qwen3_moe, dots1: whether the scores of a token's experts are divided by their sum."""
    score_scale: Annotated[float, Field(gt=0, le=MOST_NUMBER)] = 1.0
    """dots1: factor of the scores."""
    norm_epsilon: Annotated[float, Field(gt=0, le=1)] = 1e-5
    """Added to the variance in norms."""
    init_std: Annotated[float, Field(gt=0, le=MOST_RATE)] = 0.02
    """Standard deviation of initial weights."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.architecture not in families():
            raise ValueError(
                f"architecture '{self.architecture}' is not known{did_you_mean(self.architecture, families())}"
            )
        if unread := unread_keys(vars(self)):
            key = unread[0]
            raise ValueError(f"{key} = {getattr(self, key)} {describe_unread(self.architecture, key)}")
        if self.head_size is None and self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not divisible by num_heads {self.num_heads};"
                f" set hidden_size to a multiple of {self.num_heads}, or head_size"
            )
        if self.num_heads % (self.num_kv_heads or 1):
            raise ValueError(
                f"num_heads {self.num_heads} is not divisible by num_kv_heads {self.num_kv_heads};"
                f" set num_kv_heads to a divisor of {self.num_heads}"
            )
        if self.description.blocks[0].attention.rotary and head_size_of(self) % 2:
            raise ValueError(f"rotary positions need an even head size, and it is {head_size_of(self)}")
        return self

    @property
    def num_ids(self) -> int:
        """The vocabulary size of a resolved job."""
        assert self.vocab_size is not None, "a job is resolved before its model is used"
        return self.vocab_size

    @property
    def description(self) -> Description:
        """The description of the model by its family."""
        return _describe(self)  # pyright: ignore[reportArgumentType] - frozen, so it has a hash

    @property
    def num_items(self) -> int:
        """Items of a plan: the embedding, of each block attention and feed-forward part, the head."""
        return 2 * self.num_layers + 2


@lru_cache(maxsize=64)
def _describe(model: Model) -> Description:
    return families()[model.architecture].describe(model)


class Source(Table):
    """One more token file."""

    tokens: FilePath
    """Made with the same tokenizer as the first."""
    weight: Annotated[float, Field(gt=0, le=MOST_NUMBER)]
    """Its share of the sequences, over the sum of all weights."""


class Data(Table):
    """The files that tokens come from."""

    tokens: FilePath
    """A token file made by `hpctrain prepare`, Megatron's `.bin` with its `.idx`, or nanoGPT's `.bin`. Relative to the
    current directory."""
    validation: FilePath | None = None
    """Tokens for validation; None: the last `validation_fraction` of each token file."""
    weight: Annotated[float, Field(gt=0, le=MOST_NUMBER)] = 1.0
    """The share of `tokens`, where there are `more`."""
    more: Several[Source] = ()
    """Further token files, each as `[[data.more]]` with `tokens` and `weight`."""
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of `tokens` that is kept for validation."""
    sequence_length: TokenCount = 256
    """Tokens of a sequence."""
    mask_documents: bool = False
    """Whether attention and loss stay inside a document, where a sequence holds several; positions restart."""


class Checkpoint(Table):
    every: WholeNumber = 0
    """Steps between checkpoints; 0: at the end only."""
    keep: Count = 2
    """How many of the last ones to keep; the oldest are deleted once a newer one is complete."""
    keep_every: WholeNumber = 0
    """Keep those of steps that are a multiple of it too; 0: none."""
    keep_best: bool = False
    """Keep the one with the lowest validation loss too, of those that were saved in a step with a validation."""
    resume: Annotated[str, Field(pattern=r"^(auto|latest|step-\d{8,})$")] = "auto"
    """auto: continue from the latest checkpoint, or from the newest intact one where that is damaged; latest: from the
    latest or not at all; step-00000100: from that one."""
    parts: Literal["auto", "rank", "node"] = "auto"
    """Who writes a file: each rank, or the ranks of a node together; auto: a node from 513 ranks on."""
    on_error: Literal["stop", "continue"] = "stop"
    """What happens where a checkpoint cannot be written: the run stops, or trains on and says so."""


class Observe(Table):
    log_every: Count = 1
    """Steps between lines of metrics.jsonl."""
    start_timeout_seconds: Timeout = 1800.0
    """How long an operation may take before training begins, and while a checkpoint is saved: files are waited for."""
    first_step_timeout_seconds: Timeout = 1800.0
    """How long in the first step, which allocates memory and starts libraries, and in validation."""
    step_timeout_seconds: Timeout = 600.0
    """How long in every other step."""
    trace: bool = False
    """Whether to keep what every rank did and when, in trace.json of the run folder."""
    trace_steps: Count = 10
    """How many steps are traced, from the start or from where the run continues."""
    torch_profile_steps: Annotated[tuple[Count, Count], Field(strict=False)] | None = None
    """The first and the last step in which torch.profiler runs, such as [11, 12]; None: it does not. Those steps are
    slower. The files are in `torch-profile/` of the run folder."""
    torch_profile_ranks: Several[WholeNumber] = (0,)
    """The ranks that torch.profiler runs on, each with a file of its own."""
    tensorboard: bool = False
    """Whether to write event files for TensorBoard, in `tensorboard/` of the run folder."""
    wandb: str | None = None
    """The project of Weights & Biases to log to; None: nothing is logged."""
    prometheus_file: FilePath | None = None
    """A text file of the latest metrics, for Prometheus' node_exporter. Relative to the current directory."""

    @field_validator("torch_profile_steps")
    @classmethod
    def _steps(cls, steps: tuple[int, int] | None) -> tuple[int, int] | None:
        if steps and steps[1] < steps[0]:
            raise ValueError(f"ends before it begins; write the first step and the last, [{steps[1]}, {steps[0]}]")
        return steps


class Comm(Table):
    gather_messages: bool = True
    """Whether the y ranks of a stage each receive a part over a slow link and gather it. The numbers are equal."""


class Job(Table):
    """One training job. Immutable; what was `auto` is replaced by `model_copy` once it is known."""

    name: str
    model: Model
    data: Data
    train: Train = Train()
    precision: Precision = Precision()
    plan: Annotated[PlanRequest | None, AUTO] = None
    """auto: searched for on the machine that there is; see `[search]`."""
    search: SearchBudget = SearchBudget()
    overlap: Overlap = Overlap()
    kernels: KernelChoice = KernelChoice()
    checkpoint: Checkpoint = Checkpoint()
    comm: Comm = Comm()
    observe: Observe = Observe()
    watch: Watch = Watch()
    recovery: Recovery = Recovery()

    other_names: ClassVar = OTHER_NAMES

    def dtype_of(self, family: str) -> str:
        """Return the dtype that ranks of a family compute in. The job is resolved.

        The families of a tile over several, "a+b", have one dtype (`hpctrain.plan.uniform.check_families`).
        """
        return self.precision.by_family.get(family.split("+")[0], self.train.resolved_dtype)

    def wire_dtype(self, family: str, other: str) -> str:
        """Return the dtype of what two families' tiles send each other: theirs, or where these differ, that of the job,
        which is fp32 where it says nothing."""
        one, two = self.dtype_of(family), self.dtype_of(other)
        return one if one == two else self.precision.wire or "fp32"

    @field_validator("name")
    @classmethod
    def _name(cls, name: str) -> str:
        if not name or "/" in name or "\0" in name:
            raise ValueError("must be a file name, as the run folder is named after it")
        if len(name.encode(errors="replace")) > MOST_NAME_BYTES:
            raise ValueError(
                f"is longer than {MOST_NAME_BYTES} bytes, and the run folder is named after it; shorten it"
            )
        return name

    @model_validator(mode="after")
    def _sequence_fits(self) -> Self:
        if self.data.sequence_length > self.model.max_positions:
            raise ValueError(
                f"data.sequence_length {self.data.sequence_length} is more than model.max_positions"
                f" {self.model.max_positions}; lower the one or raise the other"
            )
        return self

    @model_validator(mode="after")
    def _has_balance(self) -> Self:
        mlps = [block.mlp for block in self.model.description.blocks]
        is_set = self.train.balance_rate != Train.model_fields["balance_rate"].default
        if is_set and not any(isinstance(mlp, Experts) and mlp.balances for mlp in mlps):
            raise ValueError(
                f"train.balance_rate = {self.train.balance_rate} has no effect on a {self.model.architecture}, which"
                " balances no experts; remove it, or take a family that does: dots1"
            )
        if self.train.balance_loss and not any(isinstance(mlp, Experts) for mlp in mlps):
            raise ValueError(
                f"train.balance_loss = {self.train.balance_loss} has no effect on a {self.model.architecture}, which"
                " has no experts; remove it"
            )
        return self


def load_job(reference: str, overrides: Iterable[str] = (), say: Callable[[str], None] = say_on_stderr) -> Job:
    """Read a job file, or a ready-made job or a preset by its name, with `section.key=value` overrides applied last.

    What is gone since hpctrain wrote a file is left out of it, and `say` hears of it. Raises JobError for anything
    that is wrong with it, naming file and key.
    """
    path = Path(reference)
    if not is_file(path) and reference in presets() and reference not in ready_jobs():
        data = {"tokens": PRESET_TOKENS, "sequence_length": min(PRESET_LENGTH, presets()[reference]["max_positions"])}
        tree, origins = {"name": reference, "model": {"preset": reference}, "data": data}, {}
    else:
        path = locate_job(reference)
        tree, origins = _read(path, (), say)
    tree.setdefault("name", path.stem)
    for override in overrides:
        _apply_override(tree, origins, override)
    model = tree.get("model")
    if isinstance(model, dict) and "preset" in model:
        name = model["preset"]
        if not isinstance(name, str) or name not in presets():
            where = origins.get("model.preset", str(path))
            raise JobError(f"{where}: model.preset = {name!r}: no such preset{did_you_mean(str(name), presets())}")
        tree["model"] = presets()[name] | model
    try:
        return Job.model_validate(tree)
    except ValidationError as error:
        lines = []
        for key, text in explain(error, Job):
            if key == "plan":
                text = text.replace("a section of keys", "a section of keys, or 'auto'")
            where = origins.get(key) or origins.get(key.rpartition(".")[0]) or path
            lines.append(f"{where}: {text}")
        raise JobError("\n".join(lines)) from None


def locate_job(reference: str) -> Path:
    """Return the path of a job file, or of the ready-made job of that name."""
    path = Path(reference)
    if is_file(path):
        return path
    if ready := ready_jobs().get(reference):
        return ready
    hint = did_you_mean(reference, [*ready_jobs(), *presets()])
    raise JobError(f"{shorten(reference)}: no such job file, nor a ready-made job or preset of that name{hint}")


def ready_jobs() -> dict[str, Path]:
    """Return the ready-made jobs by name."""
    return {path.stem: path for path in sorted(READY_MADE.glob("*.toml"))}


def _read(path: Path, seen: tuple[Path, ...], say: Callable[[str], None]) -> tuple[dict, dict[str, str]]:
    """Read a TOML file over what it extends; also return which file each dotted key came from."""
    text = read_text(path, JobError)
    tree = parse_toml(text, str(path), JobError)
    if text.startswith(WRITTEN):
        tree = saved_job(tree, Job, str(path), JobError, say)
    where = path.resolve()  # it could be read, so it is not a link to itself
    if where in seen:
        raise JobError(f"{path}: extends itself, through {' -> '.join(p.name for p in seen)}")
    if len(seen) == MOST_EXTENDED:
        raise JobError(f"{path}: is the end of {MOST_EXTENDED} files that extend each other; put some of them into one")
    plan = tree.get("plan")
    if isinstance(plan, dict) and isinstance(plan.get("file"), str):  # a run folder can be moved with its plan
        plan["file"] = str(path.parent / plan["file"])
    train = tree.get("train")
    if isinstance(train, dict) and isinstance(train.get("start_from"), str):
        train["start_from"] = str((path.parent / train["start_from"]).absolute())
    base = tree.pop("extends", None)
    if base is None:
        return tree, {key: str(path) for key, _ in flatten(tree)}
    if not isinstance(base, str):
        raise JobError(f"{path}: extends = {base!r}: must be a job file or a ready-made job, in quotes")
    own = path.parent / base
    parent, origins = _read(own if is_file(own) else ready_jobs().get(base, own), (*seen, where), say)
    return _merge(parent, tree), origins | {key: str(path) for key, _ in flatten(tree)}


def _merge(under: dict, over: dict) -> dict:
    merged = dict(under)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _apply_override(tree: dict, origins: dict[str, str], override: str) -> None:
    try:
        (*sections, last), value = parse_override(override)
        if len(sections) > MOST_SECTIONS:
            raise ValueError("write it as section.key=value")
    except ValueError as error:
        raise JobError(f"--set {shorten(repr(override))}: {error}") from None
    at = tree
    for section in sections:
        if not isinstance(at.get(section), dict):
            at[section] = {}  # also turns plan = "auto" into a section
        at = at[section]
    at[last] = value
    origins[".".join([*sections, last])] = "--set"


def save_job(job: Job) -> str:
    """Return a job as a checkpoint has it: JSON."""
    return json.dumps({KEY: SCHEMA} | job.model_dump(mode="json"), indent=1)


def dump_job(job: Job, reasons: Mapping[str, str], plan_file: str | None) -> str:
    """Return a job as TOML, with reasons as comments. `plan_file` is relative to it; None: the plan is searched for."""
    tree = job.model_dump(mode="json", exclude_none=True, exclude={"plan"})
    lines = [f"{WRITTEN} Reasons:"]
    lines += toml_comment(
        "\n".join(f"{key}: {reason}" for key, reason in reasons.items()) or "nothing was left to choose"
    )
    lines += ["", f"{KEY} = {SCHEMA}", f"name = {toml_value(tree.pop('name'))}"]
    if plan_file:
        tree["plan"] = {"file": plan_file}
    for section, values in tree.items():
        lines += ["", f"[{section}]", *(f"{key} = {toml_value(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"

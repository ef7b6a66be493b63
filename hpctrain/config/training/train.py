"""The section `[train]` of a job: the optimisation, in terms that do not depend on how many ranks there are."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from hpctrain.config.bounds import MOST_NUMBER, MOST_RATE, Count, SequenceCount, WholeNumber
from hpctrain.config.tables import AUTO, FilePath, Table
from hpctrain.config.training.decays import DECAYS, FLOOR_SHARE, DecayName
from hpctrain.config.training.optimizers import RULES, OptimizerName, OptimizerRule

NonNegative = Annotated[float, Field(ge=0, le=MOST_NUMBER)]


class Train(Table):
    """The optimisation, in terms that do not depend on how many ranks there are."""

    steps: Count = 100
    """Updates of the weights."""
    start_from: FilePath | None = None
    """A checkpoint, or a run folder, whose weights to start from, such as `hpctrain import` makes. Relative to the job
    file."""
    global_batch: SequenceCount = 16
    """Sequences in a step, over all ranks."""
    optimizer: OptimizerName = "adamw"
    """What updates the weights."""
    learning_rate: Annotated[float, Field(gt=0, le=MOST_RATE)] = 3e-4
    """The highest, after warm-up."""
    min_learning_rate: NonNegative | None = None
    """Where the decay ends; None: a tenth of learning_rate."""
    warmup_steps: WholeNumber = 0
    """Steps in which the learning rate rises from 0."""
    decay: DecayName = "cosine"
    """How the learning rate falls."""
    decay_steps: Count | None = None
    """The last steps, in which it falls; it stays at its highest before them, and the checkpoint with which they begin
    is kept (warm-up, stay, decay). None: it falls from the end of the warm-up on."""
    weight_decay: Annotated[float, Field(ge=0, le=MOST_RATE)] = 0.1
    """On weights of two dims; biases and norms are not decayed."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    epsilon: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """adamw: added to the root of the second moment."""
    balance_rate: Annotated[float, Field(ge=0, le=MOST_RATE)] = 0.001
    """dots1: by how much a step moves the bias of an expert that had more, or fewer, tokens than its share."""
    balance_loss: NonNegative = 0.0
    """With experts: coefficient of an auxiliary loss of each sequence against uneven load, which each layer adds; 0
    turns it off."""
    clip_norm: NonNegative = 1.0
    """Largest global norm of the gradient; 0 turns clipping off."""
    seed: int = 1
    dtype: Annotated[Literal["fp32", "bf16", "fp16"] | None, AUTO] = None
    """Of weights in use and activations; auto: fp32 on processors; else by family, bf16 or fp16 where it is
    clearly faster.

    Master weights, moments and sums of gradients are always fp32.
    """
    validate_every: WholeNumber = 0
    """Steps between validations; 0: at the end only."""
    validation_sequences: SequenceCount = 64

    @property
    def resolved_dtype(self) -> str:
        """The dtype of a resolved job."""
        assert self.dtype is not None, "a job is resolved before it is trained"
        return self.dtype

    @property
    def rule(self) -> OptimizerRule:
        """The rule of the optimizer."""
        return RULES[self.optimizer]

    @property
    def decay_start(self) -> int:
        """The steps after which the learning rate begins to fall."""
        if self.decay == "constant":
            return self.steps
        return self.warmup_steps if self.decay_steps is None else self.steps - self.decay_steps

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, of which the first is 0: it rises in the warm-up, stays, and falls. It
        depends on nothing else, so that resuming needs no state."""
        start = self.decay_start
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if step < start:
            return self.learning_rate
        floor = self.learning_rate / FLOOR_SHARE if self.min_learning_rate is None else self.min_learning_rate
        progress = (step - start) / max(1, self.steps - start)
        return floor + (self.learning_rate - floor) * DECAYS[self.decay].left(min(1.0, progress))

    @property
    def kept_step(self) -> int | None:
        """The step whose checkpoint is kept, since a longer run goes on from it; None without one."""
        return self.decay_start if self.decay_steps is not None and self.decay_start > 0 else None

    @model_validator(mode="after")
    def _rates_in_order(self) -> Self:
        if (self.min_learning_rate or 0) > self.learning_rate:
            raise ValueError(
                f"min_learning_rate {self.min_learning_rate} is more than learning_rate {self.learning_rate};"
                " lower the one or raise the other"
            )
        return self

    @model_validator(mode="after")
    def _decay_is_possible(self) -> Self:
        for key in ("decay_steps", "min_learning_rate"):
            if self.decay == "constant" and getattr(self, key) is not None:
                raise ValueError(f"{key} has no effect with decay = 'constant'; remove one of them")
        if self.decay_steps is None:
            return self
        if self.decay_steps > self.steps - self.warmup_steps:
            raise ValueError(
                f"decay_steps {self.decay_steps} and warmup_steps {self.warmup_steps} are more than steps"
                f" {self.steps}; lower them or raise steps"
            )
        return self

    @model_validator(mode="after")
    def _optimizer_reads_what_is_set(self) -> Self:
        fields, own = type(self).model_fields, self.rule.keys
        for key in sorted({key for rule in RULES.values() for key in rule.keys} - set(own)):
            if getattr(self, key) != fields[key].default:
                raise ValueError(
                    f"{key} has no effect with optimizer = '{self.optimizer}', which reads {', '.join(own)}; remove it"
                )
        for key in self.rule.positive:
            if not getattr(self, key):
                raise ValueError(
                    f"{key} is 0, and optimizer = '{self.optimizer}' needs more; {fields[key].default} is the default"
                )
        return self

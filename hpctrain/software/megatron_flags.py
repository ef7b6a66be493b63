"""Reads a launch line of Megatron-LM: each flag is read, known to change neither speed nor memory, or refused."""

import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from hpctrain.config.bounds import MOST_NUMBER
from hpctrain.config.clusters.cluster import Cluster
from hpctrain.config.errors import JobError, did_you_mean
from hpctrain.config.job import Model
from hpctrain.config.tables import explain
from hpctrain.software.deepspeed import DEEPSPEED
from hpctrain.software.launched import LaunchedRun
from hpctrain.software.megatron import MEGATRON, MEGATRON_CORE
from hpctrain.software.run import DescribedRun, cut_layers, stages_of

FLAGS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
"""What each flag means for a prediction; the file says how it is read."""
FORKS = FLAGS["deepspeed"]
CHOICES = FLAGS["choices"] | {
    name: [*FLAGS["choices"].get(name, ()), *words] for name, words in FORKS["choices"].items()
}
READ = (*FLAGS["numbers"], *CHOICES, *FLAGS["switches"], "deepspeed")
NO_EFFECT = re.compile("|".join((*FLAGS["no_effect"], *FORKS["no_effect"])))
NOT_PRICED = re.compile("|".join((*FLAGS["not_priced"], *FORKS["not_priced"])))
REFUSED = {why: re.compile("|".join(names)) for why, names in FLAGS["refused"].items()}
LAUNCHER = re.compile(r"(nproc|nnodes|node.rank|master|rdzv|max.restarts|standalone|role|tee|redirects|local.ranks).*")
"""Flags of torchrun, for a program whose name does not end with .py."""
ASSIGNMENT, VARIABLE = re.compile(r"([A-Za-z_]\w*)(\+?)="), re.compile(r"\$\{?(\w+)(?:\[[@*]\])?(?::?-([^}]*))?\}?")
PRODUCT = re.compile(r"\$\(\(([^()]*)\)\)")
"""A product or quotient of whole numbers, as a shell computes it."""
END_OF_COMMAND = frozenset(("|", "||", "&", "&&", ">", ">>", "2>&1", "&>"))
PADDED_BY = 128
"""Default of --make-vocab-size-divisible-by, for each rank of a tensor group."""
ASSUMED_VOCABULARY = 51200
SCHEDULE = "step-batch-size-schedule"


@dataclass(frozen=True)
class MegatronFlags:
    """The flags of a launch line by their names, without dashes; a switch has an empty value."""

    values: dict[str, str]
    where: str

    def has(self, name: str) -> bool:
        return name in self.values

    def number(self, name: str, default: int | None = None) -> int:
        """Return the number of a flag. Raises JobError where it is none, or is missing without a default."""
        text = self.values.get(name)
        if text is None and default is not None:
            return default
        if text is None or not re.fullmatch(r"\d{1,18}", text) or not 0 < int(text) <= MOST_NUMBER:
            given = "is not given" if text is None else f"{text or '(nothing)'}"
            raise JobError(f"{self.where}: --{name} {given}; set it to a whole number above 0")
        return int(text)


def read_flags(text: str) -> MegatronFlags:
    """Return the flags of a launch line: the flags themselves, or the path of a script or of a model_config.yaml.

    Raises JobError for a flag that is refused, with the reason, for an unknown one, and for a wrong value.
    """
    where, path = "the flags", None if "\n" in text or text.startswith("-") else Path(text)
    if path is not None:
        where = str(path)
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise JobError(f"{where}: cannot be read ({why}); give flags, a script or a model_config.yaml") from None
    pairs = _yaml_flags(text, where) if re.search(r"^MODEL_ARGS:", text, re.M) else _shell_flags(text, where)
    values = {}
    for name, value in pairs:
        name = name.replace("_", "-")
        values |= {new: fixed or value for new, fixed in FLAGS["renamed"].get(name, {name: ""}).items()}
    if not values:
        raise JobError(f"{where}: no flags of Megatron-LM, such as --num-layers 32")
    for name, value in values.items():
        _check(name, value, where)
    return MegatronFlags(values, where)


def _yaml_flags(text: str, where: str) -> Iterator[tuple[str, str]]:
    """Yield the flags of a functional test of Megatron-LM: lines `  --name: value` below `MODEL_ARGS:`."""
    mode = re.search(r"^MODE: *(\w+)", text, re.M)
    if mode and mode[1] != "pretraining":
        raise JobError(f"{where}: MODE: {mode[1]} is no pre-training, and nothing else is predicted")
    below = re.split(r"^MODEL_ARGS:.*\n", text, maxsplit=1, flags=re.M)[1]
    own = re.split(r"^\w", below, maxsplit=1, flags=re.M)[0]
    for name, value in re.findall(r"^ +--([\w-]+): *(.*?) *$", own, re.M):
        value = re.sub(r"\s+#.*$", "", value).strip("\"'")
        if value.lower() != "false":
            yield name, "" if value.lower() == "true" else value


def _shell_flags(text: str, where: str) -> Iterator[tuple[str, str]]:
    """Yield the flags of a command line, or of the command of a script that has the most flags of Megatron-LM.

    A script's variables and arrays are known. Of several branches the last counts. A file that only sets variables has
    the flags of all of them.
    """
    text = PRODUCT.sub(lambda match: match[0].replace(" ", ""), text.replace("\\\n", " "))
    try:
        words = [word.rstrip(";") for word in shlex.split(text, comments="\n" in text)]
    except ValueError as error:
        raise JobError(f"{where}: cannot be read as a shell does: {error}") from None
    known: dict[str, str] = {}
    commands: list[list[str]] = [[]]
    array = None
    for word in words:
        if array:
            known[array] += " " + _expanded(word, known).rstrip(")")
        elif match := ASSIGNMENT.match(word):
            name, value = match[1], word[match.end() :]
            old = known.get(name, "")  # which stays where another branch sets nothing
            known[name] = (old if match[2] or value in ("", "()") else "") + _expanded(value, known).strip("()")
            array = name if value.startswith("(") else None
        else:
            for each in re.sub("[()]", " ", _expanded(word, known)).split():
                commands += [[]] if each in END_OF_COMMAND or each.endswith(".py") else []
                commands[-1].append(each)
        array = None if PRODUCT.sub("", word).endswith(")") else array
    commands.append([] if any(map(_num_read, commands)) else " ".join(known.values()).split())
    name, values = None, []
    for word in (*max(reversed(commands), key=_num_read), "--"):  # the last of equals: others are printed
        if not word.startswith("--"):
            values.append(word)
            continue
        if name and not LAUNCHER.fullmatch(name):
            yield name, " ".join(values[:1] if name in READ else values).strip("\"'")
        name, _, first = word.removeprefix("--").partition("=")
        values = [first] if first else []


def _num_read(command: list[str]) -> int:
    return sum(
        word.removeprefix("--").partition("=")[0].replace("_", "-") in READ for word in command if word[:2] == "--"
    )


def _expanded(word: str, known: Mapping[str, str]) -> str:
    """Return a word of a script with the values of its variables; those that it does not set are empty."""
    word = PRODUCT.sub(
        lambda match: str(_product(re.sub(r"[A-Za-z_]\w*", r"$\g<0>", match[1].replace("$", "")), known)), word
    )
    return VARIABLE.sub(lambda match: known.get(match[1], match[2] or ""), word)


def _product(text: str, known: Mapping[str, str]) -> int | str:
    """Return a product or quotient from left to right; nothing for another term."""
    numbers = re.split(r"([*/])", VARIABLE.sub(lambda match: known.get(match[1], ""), text))
    if not all(each in ("*", "/") or re.fullmatch(r"\d{1,18}", each) for each in numbers):
        return ""
    result = int(numbers[0])
    for sign, number in zip(numbers[1::2], numbers[2::2], strict=True):
        result = result * int(number) if sign == "*" else result // max(1, int(number))
    return result


def _check(name: str, value: str, where: str) -> None:
    """Raise JobError for a flag that is refused, is unknown, or has a value that cannot be predicted."""
    for why, pattern in REFUSED.items():
        if pattern.fullmatch(name) and FLAGS["harmless"].get(name) != value:
            raise JobError(f"{where}: --{name} {value}".rstrip() + f": {why} cannot be predicted")
    if name in CHOICES:
        known = CHOICES[name]
        if known and value.strip("[]") not in known:
            raise JobError(f"{where}: --{name} {value} cannot be predicted; of its values {', '.join(known)} can")
    elif (
        name not in READ
        and name not in FLAGS["harmless"]
        and not (NO_EFFECT.fullmatch(name) or NOT_PRICED.fullmatch(name))
    ):
        near = get_close_matches(name, READ, 1)
        why = did_you_mean(name, near) if near else ""
        raise JobError(f"{where}: --{name} is no flag of Megatron-LM at d98e8a64 (2026-08-22){why}")


@dataclass(frozen=True)
class MegatronRun(LaunchedRun):
    """A launch line of Megatron-LM on a cluster."""

    num_ids: int
    """Ids of the vocabulary, which are padded to a multiple of `padded_by` for each rank of a tensor group."""
    padded_by: int
    other_words: tuple[str, ...] = ()
    """Given flags that say its layout in other words than `words`, and flags of `words` with which they are given."""

    def with_layout(self, run: DescribedRun) -> Self:
        run = replace(
            run,
            vocabulary=self.num_ids + -self.num_ids % (self.padded_by * run.tensor),
            sequence_parallel=run.tensor > 1,
            zero=1,
            overlapped=True,
            overlaps_tensor=run.overlaps_tensor and run.tensor > 1,
        )
        software = replace(self.software, sequence_parallel=run.sequence_parallel)
        return replace(self, run=run, software=software, other_words=())

    def words(self) -> dict[str, str]:
        run, is_deepspeed = self.run, self.software.name == DEEPSPEED.name
        has_own_tensor = run.num_experts and run.expert_tensor != run.tensor  # by default that of the layout
        flags = {
            "tensor-model-parallel-size": str(run.tensor),
            "pipeline-model-parallel-size": str(run.pipeline),
            "context-parallel-size": str(run.context),
            "expert-tensor-parallel-size": str(run.expert_tensor) if has_own_tensor else None,
            "micro-batch-size": str(run.microbatch),
            "global-batch-size": str(run.global_batch),
            "num-virtual-stages-per-pipeline-rank": str(run.interleave) if run.interleave > 1 else None,
            "recompute-granularity": run.recompute if run.recompute != "none" else None,
            "recompute-method": "uniform" if run.recompute == "full" else None,
            "recompute-num-layers": "1" if run.recompute == "full" else None,
            "sequence-parallel": "" if run.sequence_parallel else None,
            "use-distributed-optimizer": "" if run.zero == 1 and not is_deepspeed else None,
            "use-torch-fsdp2": "" if run.zero == 3 and not is_deepspeed else None,
            "zero-stage": str(run.zero) if is_deepspeed else None,
            "overlap-grad-reduce": "" if run.overlapped else None,
            "tp-comm-overlap": "" if run.overlaps_tensor else None,
        }
        said_otherwise = {FLAGS["other_words"].get(name) for name in self.other_words}
        own = {name: value for name, value in flags.items() if value is not None and name not in said_otherwise}
        return own | dict.fromkeys(self.other_words, "")


def run_of(flags: MegatronFlags, cluster: Cluster) -> MegatronRun:
    """Return the run of a launch line on all devices of a cluster.

    Raises JobError where flags are missing or contradict each other, and PlanError where the layout does not go with
    the model.
    """
    number, has, word, where = flags.number, flags.has, flags.values.get, flags.where
    hidden, heads, layers = (number(each) for each in ("hidden-size", "num-attention-heads", "num-layers"))
    degrees = ("tensor-model", "pipeline-model", "context")
    tensor, pipeline, context = (number(f"{each}-parallel-size", 1) for each in degrees)
    devices, of_replica = cluster.num_devices, tensor * pipeline * context
    if devices % of_replica:
        raise JobError(
            f"{where}: tensor {tensor} x pipeline {pipeline} x context {context} are {of_replica} devices a replica,"
            f" which do not divide the {devices} of the cluster; set --tensor-model-parallel-size, or another of these"
        )
    data, microbatch = devices // of_replica, number("micro-batch-size")
    last = MegatronFlags({SCHEDULE: flags.values.get(SCHEDULE, "").rpartition(":")[2]}, where)  # the full batch
    batch = number("global-batch-size", last.number(SCHEDULE) if has(SCHEDULE) else microbatch * data)
    for name, parts in (("num-attention-heads", tensor), ("seq-length", 2 * context if context > 1 else 1)):
        if number(name) % parts:
            raise JobError(f"{where}: --{name} {number(name)} is not divisible by {parts}, as this layout needs")
    vocabulary, assumed = number("padded-vocab-size", number("vocab-size", ASSUMED_VOCABULARY)), []
    if not has("vocab-size") and not has("padded-vocab-size"):
        assumed.append(f"--vocab-size: {vocabulary:,} ids of the tokenizer")
    padded_by = 1 if has("padded-vocab-size") else number("make-vocab-size-divisible-by", PADDED_BY)
    interleave, gated = number("num-virtual-stages-per-pipeline-rank", 1), has("swiglu")
    if has("num-layers-per-virtual-pipeline-stage"):
        interleave = max(1, layers // pipeline // number("num-layers-per-virtual-pipeline-stage"))
    if number("recompute-num-layers", 1) > 1:
        assumed.append("--recompute-num-layers: 1")
    assumed += [f"--{name} changes nothing" for name in flags.values if NOT_PRICED.fullmatch(name)]
    shards_all = has("use-torch-fsdp2") or word("data-parallel-sharding-strategy") == "optim_grads_params"
    zero = 3 if shards_all else int(has("use-distributed-optimizer"))
    is_flash = has("use-flash-attn") or word("transformer-impl") != "local"
    is_core = is_flash and word("attention-backend") not in ("unfused", "local")
    software = MEGATRON_CORE if is_core else MEGATRON
    if has("deepspeed"):
        software, zero = DEEPSPEED, int(word("zero-stage", "0"))
        assumed += [] if has("zero-stage") else ["--zero-stage: 0"]
        if has("num-experts"):
            raise JobError(f"{where}: --deepspeed with --num-experts: DeepSpeed's own experts cannot be predicted")
        if has("use-flash-attn") or (zero == 3 and pipeline > 1):
            raise JobError(f"{where}: --deepspeed with --use-flash-attn, or stages with ZeRO 3, cannot be predicted")
    stages = _stages(flags, layers, pipeline, interleave) if pipeline > 1 else ()
    if has("num-experts") and not has("moe-router-force-load-balancing"):
        assumed.append("the load of experts: even")
    run = DescribedRun(
        hidden,
        layers,
        heads,
        number("seq-length"),
        tensor,
        pipeline,
        data,
        microbatch,
        batch,
        next(iter(cluster.families)),
        vocabulary=vocabulary + -vocabulary % (padded_by * tensor),
        ffn=number("ffn-hidden-size", hidden * 8 // 3 // 64 * 64 if gated else 4 * hidden),
        dtype=next((dtype for dtype in ("fp16", "bf16") if has(dtype)), "fp32"),
        linear_dtype="fp8" if has("fp8-format") else None,
        recompute=word("recompute-granularity", "selective" if has("recompute-activations") else "none"),
        sequence_parallel=has("sequence-parallel") and tensor > 1,
        context=context,
        zero=zero,
        interleave=interleave,
        stack=software.name,
        stages=stages,
        architecture="llama" if gated else "gpt2",
        kv_heads=number("num-query-groups", 1) if has("group-query-attention") else None,
        tie_head=not has("untie-embeddings-and-output-weights"),
        overlapped=has("overlap-grad-reduce") and zero < 3,
        gradient_dtype=None if has("grad-reduce-in-bf16") else "fp32",
        overlaps_tensor=has("tp-comm-overlap") and tensor > 1,
        cuda_graphs=has("enable-cuda-graph") or word("cuda-graph-impl", "none") != "none",
        head_size=number("kv-channels") if has("kv-channels") else None,
        machine=cluster,
    )
    if has("num-experts"):
        run = _with_experts(run, flags)
    try:
        _ = run.model
    except ValidationError as error:
        raise JobError(f"{where}: {explain(error, Model)[0][1]}") from None
    software = replace(software, sequence_parallel=run.sequence_parallel)
    other_words = (name for pair in FLAGS["other_words"].items() if has(pair[0]) for name in pair if has(name))
    return MegatronRun(run, software, tuple(assumed), vocabulary, padded_by, tuple(other_words))


def _with_experts(run: DescribedRun, flags: MegatronFlags) -> DescribedRun:
    """Return a run whose layers have experts. Raises JobError where the record does not say what these cost."""
    has, parallel = flags.has, flags.number("expert-model-parallel-size", 1)
    dispatcher, count = flags.values.get("moe-token-dispatcher-type", "allgather"), flags.number("num-experts")
    for name, why, is_unknown in (
        ("swiglu", "experts without gates", not has("swiglu")),
        ("moe-grouped-gemm", "one product after the other", not has("moe-grouped-gemm") and count > parallel),
        ("moe-token-dispatcher-type alltoall", "gathering all tokens", dispatcher == "allgather" and parallel > 1),
    ):
        if is_unknown:
            raise JobError(f"{flags.where}: --num-experts without --{name}: {why} cannot be predicted")
    if run.tensor > 1 and not has("sequence-parallel"):
        raise JobError(
            f"{flags.where}: --num-experts with --tensor-model-parallel-size {run.tensor} and without"
            " --sequence-parallel: Megatron-LM refuses to train it; add --sequence-parallel"
        )
    if count % parallel:
        raise JobError(f"{flags.where}: --num-experts {count} is not divisible by {parallel} ranks with experts")
    return replace(
        run,
        architecture="mixtral",
        num_experts=count,
        experts_per_token=flags.number("moe-router-topk", 2),
        ffn=flags.number("moe-ffn-hidden-size", run.ffn),
        expert_parallel=parallel,
        expert_tensor=flags.number("expert-tensor-parallel-size", run.tensor),
        dispatches_once=dispatcher == "flex",
        overlaps_experts=has("overlap-moe-expert-parallel-comm"),
    )


def _stages(flags: MegatronFlags, num_layers: int, pipeline: int, interleave: int) -> tuple[int, ...]:
    """Return how many layers each rank of a pipeline has, with embedding and head; nothing where blocks are cut evenly.

    Raises JobError where they cannot be cut so.
    """
    ends = [f"decoder-{end}-pipeline-num-layers" for end in ("first", "last")]
    given = [flags.number(name) if flags.has(name) else None for name in ends]
    of_ends = [int(flags.has(f"account-for-{end}-in-pipeline-split")) for end in ("embedding", "loss")]
    if "embedding" in flags.values.get("pp-partition-method", ""):
        of_ends = [1, 1]
    if any(of_ends):
        return stages_of(cut_layers(num_layers, pipeline * interleave, *of_ends), pipeline)
    if not any(given):
        return ()
    between = pipeline - len([each for each in given if each])
    each, rest = divmod(num_layers - sum(each or 0 for each in given), max(1, between))
    if rest or each < 1 or interleave > 1:
        raise JobError(
            f"{flags.where}: --{ends[0]} and --{ends[1]} leave {num_layers} blocks uneven in {between} stages;"
            " they must be equal, and of one virtual stage each"
        )
    stages = [given[0] or each, *[each] * (pipeline - 2), given[1] or each]
    return (stages[0] + 1, *stages[1:-1], stages[-1] + 1)

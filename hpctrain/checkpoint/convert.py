"""Models of Hugging Face: a folder of safetensors becomes a checkpoint to start from, and a checkpoint such a folder.

Both go tensor by tensor, on one rank without a GPU, and hold no more than a part in memory. What is wrong with a folder
is refused before anything is written; what is written has its final name only when it is complete. No pickle is read.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hpctrain.architectures.description import head_size_of
from hpctrain.architectures.huggingface import HuggingFace, UnknownConfigError
from hpctrain.architectures.registry import OPTIONAL, families
from hpctrain.checkpoint.contents import Contents, WrittenStream, make_tables, write_tables
from hpctrain.checkpoint.folder import commit, partial_folder
from hpctrain.checkpoint.format import KEPT, PARTIAL, RECTANGLE, part_name
from hpctrain.checkpoint.index import Index
from hpctrain.checkpoint.parts import lay_out, write_stream
from hpctrain.checkpoint.state import make_empty, read_job, writing
from hpctrain.config.errors import CheckpointError, JobError, describe_os_error
from hpctrain.config.job import MOST_NAME_BYTES, Checkpoint, Job, Model, save_job
from hpctrain.config.paths import is_file, read_bytes, refused_as
from hpctrain.config.tables import explain, one_line, read_text, toml_value
from hpctrain.data.tokenizer import Tokenizer
from hpctrain.plan.file import dump_plan
from hpctrain.plan.tiling import even_plan
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval, cut_evenly
from hpctrain.sharding.parameters import Parameter, all_parameters

CONFIG, TOKENIZER, SINGLE, SHARDS = "config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json"
PART_BYTES = 512 << 20
"""Bytes of fp32 weights in one part of the checkpoint, which is also the most in memory at once."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""Name suffixes of the tensors in older files that are not weights."""


READ_DTYPES = ("F32", "BF16", "F16")
"""Dtypes of weights that an import reads, named as in safetensors: fp32 holds their values exactly."""
GENERATION, TOKENIZER_CONFIG = "generation_config.json", "tokenizer_config.json"
KEPT_FILES = (GENERATION, TOKENIZER_CONFIG, "special_tokens_map.json", "chat_template.jinja")
KEPT_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of a config that text generation needs and training does not."""


class TensorPlace(NamedTuple):
    """The place of a parameter, or of some rows of it, in files of Hugging Face."""

    name: str
    first: int
    """The row at which they begin, in a tensor that holds several parameters."""
    rows: Interval
    """The rows of the parameter: its output features."""
    is_transposed: bool
    expert: int | None = None
    """The expert whose values they are, in a tensor of all of them."""
    alternates: bool = False
    """Whether rows of gate and up alternate there; ours are all of gate, then all of up."""

    def in_our_order(self, values: torch.Tensor) -> torch.Tensor:
        """Return the rows of the parameter of an expert's values there."""
        rows = values.t() if values.dim() > 1 else values
        return torch.cat([rows[::2], rows[1::2]]) if self.alternates else rows

    def in_their_order(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the values there of an expert's rows."""
        rows = torch.stack(rows.chunk(2), 1).flatten(0, 1) if self.alternates else rows
        return rows.t() if rows.dim() > 1 else rows


@dataclass(frozen=True)
class Imported:
    """The checkpoint and the job file that a folder became."""

    checkpoint: Path
    job_file: Path
    model: Model
    num_parameters: int
    has_tokenizer: bool
    auxiliary_loss: float
    """The coefficient of the config for an auxiliary loss of experts, which is not taken over; 0 without one."""


def names_of(model: Model) -> HuggingFace:
    """Return the table of Hugging Face names for a model. Raises CheckpointError for a family that has none."""
    table = known_names().get(model.architecture)
    if table is None:
        raise CheckpointError(
            f"the family {model.architecture!r} has no HUGGING_FACE table in hpctrain/architectures/"
            f"{model.architecture}.py, so nobody knows how its weights are called there; add one, see docs/extending.md"
        )
    return table


def check_form(model: Model) -> None:
    """Refuse a model that an export could not write so that it is read as the same. Raises JobError."""
    table = known_names().get(model.architecture)
    if table is None:
        return
    model = model.model_copy(update={"vocab_size": model.vocab_size or 1})  # any has a form
    try:
        keys = table.model_keys(table.config(model))
        again = Model.model_validate({"architecture": model.architecture, **keys})
        if model.score_divisor is None and again.score_divisor == head_size_of(model):  # which None means
            again = again.model_copy(update={"score_divisor": None})
        what = "" if again.description == model.description else f"it would be read as {again.description}"
    except (UnknownConfigError, ValidationError) as error:
        what = explain(error, Model)[0][1] if isinstance(error, ValidationError) else str(error)
    if what:
        differing = [key for key in OPTIONAL if getattr(model, key) != OPTIONAL[key]]
        given = ", ".join(f"{key} = {getattr(model, key)}" for key in differing) or "its sizes"
        raise JobError(
            f"[model]: the family {model.architecture} has no form for {given} at Hugging Face ({what:.300}), so what"
            " is trained could not be exported; change the key, or take another family"
        )


def known_names() -> dict[str, HuggingFace]:
    """Return the tables of all families that have one."""
    return {name: module.HUGGING_FACE for name, module in families().items() if hasattr(module, "HUGGING_FACE")}


def locate(model: Model, table: HuggingFace) -> dict[str, list[TensorPlace]]:
    """Return the places of each parameter in Hugging Face files, in the order of its rows."""
    parameters, result = all_parameters(model), {}
    for name, parameter in parameters.items():
        stem, kind = name.rsplit(".", 1)
        part = stem.split(".", 2)[2] if stem.startswith("blocks.") else stem
        if part in table.experts:
            layer = f"{table.blocks}.{stem.split('.')[1]}"
            named = [each.format(n) for n in range(model.num_experts or 0) for each in table.experts[part]]
            rows = cut_evenly(parameter.shape[0], len(named))
            result[name] = [TensorPlace(f"{layer}.{n}.{kind}", 0, r, False) for n, r in zip(named, rows, strict=True)]
            continue
        if named := table.packed.get(f"{part}.{kind}"):
            theirs, alternates = f"{table.blocks}.{stem.split('.')[1]}.{named}", part == "experts.up"
            rows = enumerate(cut_evenly(parameter.shape[0], model.num_experts or 1))
            result[name] = [TensorPlace(theirs, 0, of_expert, False, n, alternates) for n, of_expert in rows]
            continue
        others = next((ours for ours in table.fused.values() if part in ours), (part,))
        before = [stem.removesuffix(part) + other for other in others[: others.index(part)]]
        first = sum(parameters[f"{other}.{kind}"].shape[0] for other in before)
        is_transposed = table.transposes and part != stem and len(parameter.shape) == 2
        result[name] = [TensorPlace(table.their_name(name), first, Interval(0, parameter.shape[0]), is_transposed)]
    return result


# ---- in ------------------------------------------------------------------------------------------------------------


def import_model(folder: Path, out: Path) -> Imported:
    """Make a run folder whose checkpoint has the weights of a Hugging Face folder, and a job file to start from it.

    Raises CheckpointError where the folder is damaged, or its model is none that we know; nothing is written then.
    """
    config = _read_json(folder / CONFIG)
    model = _model_of(config, folder / CONFIG)
    refuse_unless_empty(out, "--out")
    tokenizer = folder / TOKENIZER
    text = Tokenizer.load(tokenizer).to_json() if is_file(tokenizer) else ""
    kept = json.dumps(_read_kept(folder, config))
    with ExitStack() as files:
        weights = _Weights(folder, model, files)
        checkpoint = _write_checkpoint(weights, model, out, _about(model, folder) | {"tokenizer": text, KEPT: kept})
    job_file = out / "model.toml"
    with writing(out):
        job_file.write_text(_job_text(model, folder))
    count = sum(int(np.prod(p.shape)) for p in all_parameters(model).values())
    return Imported(checkpoint, job_file, model, count, bool(text), config.get("router_aux_loss_coef") or 0.0)


def refuse_unless_empty(folder: Path, option: str) -> None:
    """Refuse a folder to make that has something in it, or is a file. Raises CheckpointError."""
    with refused_as(CheckpointError, f"{folder}: a folder is to be made there", f"choose another {option}"):
        if folder.is_symlink() and not folder.exists():
            raise CheckpointError(f"{folder}: is a link that leads nowhere; remove it, or choose another {option}")
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if any(there.iterdir()) and there is folder:
            raise CheckpointError(f"{folder}: is there already and not empty; choose another {option}")


def _read_kept(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an export of the model writes again: files, and token ids of the config."""
    kept: dict[str, Any] = {CONFIG: {key: config[key] for key in KEPT_IDS if key in config}}
    for name in KEPT_FILES:
        if is_file(folder / name):
            if name.endswith(".json"):
                _read_json(folder / name)
            kept[name] = read_text(folder / name, CheckpointError)
    return kept


def _read_json(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(read_bytes(path))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; name a folder of a Hugging Face model") from None
    except (OSError, ValueError, RecursionError) as error:
        what = describe_os_error(error) if isinstance(error, OSError) else f"not valid JSON: {error}"
        raise CheckpointError(f"{path}: cannot be read: {what}") from None
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path}: is not a table of keys")
    return tree


def _model_of(config: dict[str, Any], path: Path) -> Model:
    kind = config.get("model_type")
    by_type = {table.model_type: name for name, table in known_names().items()}
    if not isinstance(kind, str) or kind not in by_type:
        raise CheckpointError(f"{path}: model_type = {kind!r} is not known; known are: {', '.join(sorted(by_type))}")
    family = by_type[kind]
    try:
        keys = known_names()[family].model_keys(config)
        return Model.model_validate({"architecture": family, **keys})
    except UnknownConfigError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except ValidationError as error:
        raise CheckpointError(f"{path}: {'; '.join(text for _, text in explain(error, Model))}") from None
    except (TypeError, KeyError, AttributeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(f"{path}: is not a config of {kind}: {error!r}") from None


class _Weights:
    """The tensors of a folder. None is missing, and all have the right shape."""

    def __init__(self, folder: Path, model: Model, files: ExitStack):
        """`files` closes what is opened here."""
        self._folder = folder
        self._open: dict[str, Any] = {}
        self._theirs = locate(model, names_of(model))
        self._file_of = self._open_files(files)
        self._check(all_parameters(model), model)

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return rows of a parameter of ours, fp32."""
        asked = Interval(start, stop)
        shared = [(place, common) for place in self._theirs[name] if (common := place.rows.intersect(asked)).size]
        parts = [self._read(place, common.shift(place.first - place.rows.start)) for place, common in shared]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _read(self, place: TensorPlace, rows: Interval) -> np.ndarray:
        """Return rows of a tensor of theirs, fp32."""
        part, at = self._slice(place.name), slice(*rows)
        try:
            if place.expert is not None:
                values = place.in_our_order(part[place.expert])[at]
            else:
                values = part[:, at].t() if place.is_transposed else part[at]
        except SafetensorError as error:
            raise CheckpointError(f"{self._describe(place.name)}: {error}") from None
        result = values.float().contiguous().numpy()
        if wrong := result.size - int(np.isfinite(result).sum()):
            raise CheckpointError(
                f"{self._describe(place.name)}: {wrong:,} of {result.size:,} elements"
                " that were read are infinite or not a number; download the model again, or take another"
            )
        return result

    def _describe(self, name: str) -> str:
        return f"{self._folder / self._file_of[name]}: {name}"

    def _slice(self, name: str):
        return self._open[self._file_of[name]].get_slice(name)

    def _open_files(self, opened: ExitStack) -> dict[str, str]:
        """Open all files; return by tensor, under our names of their prefixes, the file that has it."""
        index = self._folder / SHARDS
        if index.is_file():
            named = _read_json(index).get("weight_map")
            if not isinstance(named, dict) or not all(isinstance(each, str) for each in named.values()):
                raise CheckpointError(f"{index}: has no weight_map of tensors to files")
            files = sorted(set(named.values()))
            outside = [file for file in files if Path(file).name != file or file.startswith(".")]
            if outside:
                raise CheckpointError(f"{index}: names {outside[0]!r}, which is no file of this folder")
        elif (self._folder / SINGLE).is_file():
            files, named = [SINGLE], None
        else:
            raise CheckpointError(f"{self._folder}: has neither {SINGLE} nor {SHARDS}; pickled weights are not read")
        result: dict[str, str] = {}
        for file in files:
            path = self._folder / file
            if not path.is_file():
                raise CheckpointError(f"{path}: is missing; {SHARDS} names it")
            try:
                self._open[file] = opened.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: is damaged or no safetensors file: {error}") from None
            result |= dict.fromkeys(self._open[file].keys(), file)
        if named is not None and (lacking := sorted(name for name in named if result.get(name) != named[name])):
            raise CheckpointError(f"{self._folder / named[lacking[0]]}: has no {lacking[0]}, which {SHARDS} says")
        return result

    def _check(self, parameters: dict[str, Parameter], model: Model) -> None:
        """Refuse tensors that are missing, have another shape, or are unknown."""
        wanted = {place.name for places in self._theirs.values() for place in places}
        prefix = names_of(model).ends["embedding"].split(".")[0] + "."
        if not wanted & set(self._file_of):  # files of the bare model have no prefix
            for places in self._theirs.values():
                places[:] = [place._replace(name=place.name.removeprefix(prefix)) for place in places]
            wanted = {name.removeprefix(prefix) for name in wanted}
        if lacking := sorted(wanted - set(self._file_of)):
            more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
            raise CheckpointError(f"{self._folder}: has no tensor {lacking[0]}{more}, which {CONFIG} asks for")
        tied = {names_of(model).ends["head"] + ".weight"} if model.description.tied_head else set()
        extra = sorted(n for n in set(self._file_of) - wanted - tied if not n.endswith(BUFFERS))
        if extra:
            raise CheckpointError(
                f"{self._folder}: has a tensor {extra[0]}, which a {model.architecture} model of this {CONFIG} has not;"
                " it would be dropped"
            )
        self._check_tied(tied)
        every = [(name, place) for name, places in self._theirs.items() for place in places]
        sizes: dict[str, int] = {}
        for _, place in every:
            sizes[place.name] = max(sizes.get(place.name, 0), place.first + place.rows.size)
        for name, place in every:
            expected, there = [sizes[place.name], *parameters[name].shape[1:]], self._slice(place.name)
            expected = expected[::-1] if place.is_transposed or place.expert is not None else expected
            expected = expected if place.expert is None else [model.num_experts, *expected]
            shape, dtype = list(there.get_shape()), there.get_dtype()
            if dtype not in READ_DTYPES:
                raise CheckpointError(
                    f"{self._describe(place.name)} has elements of {dtype}, and only"
                    f" {', '.join(READ_DTYPES)} are read; convert the model to one of them"
                )
            if shape != expected:
                raise CheckpointError(
                    f"{self._describe(place.name)} has shape {shape}, and {CONFIG} asks for {expected}"
                )

    def _check_tied(self, heads: set[str]) -> None:
        """Refuse a separate head weight in a model whose config ties the head to the embedding."""
        embedding = self._theirs["embedding.weight"][0].name
        for head in heads & set(self._file_of):
            ours, theirs = self._slice(head), self._slice(embedding)
            rows, columns = (*theirs.get_shape(), 1)[:2]
            at_once = max(1, PART_BYTES // (4 * columns))
            blocks = [slice(first, first + at_once) for first in range(0, rows, at_once)]
            is_same = ours.get_shape() == theirs.get_shape()
            if not is_same or not all(torch.equal(ours[block], theirs[block]) for block in blocks):
                raise CheckpointError(
                    f"{self._describe(head)} differs from {embedding}, and {CONFIG} says tie_word_embeddings, which"
                    " means that they are one; set tie_word_embeddings to false there, or remove the tensor"
                )


def _write_checkpoint(weights: _Weights, model: Model, out: Path, about: dict[str, str]) -> Path:
    partial, is_new = partial_folder(out, 0), not out.exists()
    try:
        with writing(partial):
            make_empty(partial)
            contents, written = _write_parts(weights, all_parameters(model), partial, about)
            write_tables(partial, make_tables(contents, written, 0))
            return commit(partial, Checkpoint(keep=1))
    except BaseException:
        shutil.rmtree(out if is_new else partial, ignore_errors=True)
        raise


def _write_parts(
    weights: _Weights, parameters: dict[str, Parameter], folder: Path, about: dict[str, str]
) -> tuple[Contents, list[WrittenStream]]:
    """Write each part as if a rank with the part's number had trained its contents. Raises OSError."""
    written, rectangles, elements, names = [], [], [], list(parameters)
    for number, blocks in enumerate(_cut_into_parts(parameters)):
        arrays = [weights.rows(block.name, block.start, block.stop).reshape(-1) for block in blocks]
        starts = np.cumsum([0, *(array.size for array in arrays)]).tolist()
        layout, name = lay_out({number: starts[-1]}), part_name(number)
        checksums = write_stream(folder / name, layout, number, np.concatenate(arrays).view(np.uint8))
        written.append(WrittenStream(number, layout.streams[number].offset, checksums, layout.describe(name)))
        rows = [
            (names.index(block.name), 0, (block.start, block.stop), (0, block.columns), start)
            for block, start in zip(blocks, starts[:-1], strict=True)
        ]
        rectangles.append(np.array(rows, RECTANGLE))
        elements.append(starts[-1])
    shapes = {f"model/{name}": parameter.shape for name, parameter in parameters.items()}
    return Contents(shapes, rectangles, elements, about), written


class RowBlock(NamedTuple):
    """Whole rows of a parameter that go into one part."""

    name: str
    start: int
    stop: int
    columns: int


def _cut_into_parts(parameters: dict[str, Parameter]) -> Iterator[list[RowBlock]]:
    """Yield the rows of parameters that go into one part each."""
    blocks, num_bytes = [], 0
    for name, parameter in parameters.items():
        rows, columns = (*parameter.shape, 1)[:2]
        at_once = max(1, PART_BYTES // (4 * columns))
        for start in range(0, rows, at_once):
            block = RowBlock(name, start, min(start + at_once, rows), columns)
            size = (block.stop - start) * columns * 4
            if num_bytes and num_bytes + size > PART_BYTES:
                yield blocks
                blocks, num_bytes = [], 0
            blocks.append(block)
            num_bytes += size
    yield blocks


def _about(model: Model, folder: Path) -> dict[str, str]:
    shown = one_line(folder)
    data = {"tokens": shown, "sequence_length": model.max_positions}
    name = one_line(folder.resolve().name)[: MOST_NAME_BYTES // 4] or "model"
    job = Job.model_validate({"name": name, "model": model, "data": data})
    plan = even_plan(model.num_items, TensorGrid(), 1, 1, 1, 1)
    return {"job": save_job(job), "plan": dump_plan(plan), "data": f"weights of {shown}"}


def _job_text(model: Model, folder: Path) -> str:
    """Return a job file to extend: the model's keys, and where training starts."""
    keys = model.model_dump(exclude_defaults=True, mode="json")
    lines = [
        f"# The model of {one_line(folder)}. A job starts from it with",
        '#     extends = "model.toml"',
        "",
        "[model]",
    ]
    lines += [f"{key} = {toml_value(value)}" for key, value in keys.items()]
    return "\n".join([*lines, "", "[train]", 'start_from = "."', ""])


# ---- out -----------------------------------------------------------------------------------------------------------


def export_model(
    checkpoint: Path, folder: Path, dtype: str = "bf16", shard_bytes: int = 5_000_000_000
) -> tuple[int, int, bool]:
    """Write a checkpoint's weights as a Hugging Face folder: safetensors of at most `shard_bytes`, config, tokenizer.

    Return how many files of weights there are, the bytes of all files, and whether there is a tokenizer. The config is
    one that an import reads as the same model. A tensor larger than `shard_bytes` has a file of its own.
    Raises CheckpointError, and JobError for a model that has no form there; nothing is left then.
    """
    refuse_unless_empty(folder, "--hf")
    partial = folder.with_name(folder.name + PARTIAL)
    with Index(checkpoint) as index:
        model = read_job(index).model
        names_of(model)
        check_form(model)
        try:
            with writing(partial):
                make_empty(partial)
                num_files = _write_weights(index, model, partial, DTYPES[dtype], shard_bytes)
                has_tokenizer = _write_others(model, partial, dtype, index.about)
                num_bytes = sum(path.stat().st_size for path in partial.iterdir())
                if folder.exists():
                    folder.rmdir()
                partial.rename(folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return num_files, num_bytes, has_tokenizer


def _write_weights(index: Index, model: Model, folder: Path, dtype: torch.dtype, shard_bytes: int) -> int:
    parameters = all_parameters(model)
    by_name: dict[str, list[tuple[str, TensorPlace]]] = {}
    for name, places in locate(model, names_of(model)).items():
        for place in places:
            by_name.setdefault(place.name, []).append((name, place))
    dtypes = {  # the library keeps the bias that balances experts in fp32
        theirs: torch.float32 if any(parameters[name].balances for name, _ in ours) else dtype
        for theirs, ours in by_name.items()
    }
    sizes = {
        theirs: dtypes[theirs].itemsize
        * sum(p.rows.size * int(np.prod(parameters[name].shape[1:])) for name, p in ours)
        for theirs, ours in by_name.items()
    }
    shards: list[list[str]] = [[]]
    for name, size in sizes.items():
        if shards[-1] and sum(sizes[each] for each in shards[-1]) + size > shard_bytes:
            shards.append([])
        shards[-1].append(name)
    count = len(shards)
    files = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)] if count > 1 else [SINGLE]
    for file, names in zip(files, shards, strict=True):
        tensors = {name: _stored_tensor(index, by_name[name], dtypes[name]) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if count > 1:
        where = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        table = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
        (folder / SHARDS).write_text(json.dumps(table, indent=2))
    return count


def _stored_tensor(index: Index, ours: list[tuple[str, TensorPlace]], dtype: torch.dtype) -> torch.Tensor:
    parts = []
    for name, place in sorted(ours, key=lambda each: each[1].first):
        columns = index.shape(name)[1:]
        values = index.read("model", name, place.rows, (0, columns[0] if columns else 1))
        part = torch.from_numpy(values.reshape(-1, *columns))
        parts.append(part if place.expert is None else place.in_their_order(part).unsqueeze(0))
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    result = (whole.t() if ours[0][1].is_transposed else whole).to(dtype).contiguous()
    if not torch.isfinite(result).all() and torch.isfinite(whole).all():
        raise CheckpointError(
            f"{index.path}: {ours[0][0]} has elements beyond the range of {dtype}, such as"
            f" {whole.abs().max().item():.3g}; export with --dtype bf16 or fp32"
        )
    return result


def _write_others(model: Model, folder: Path, dtype: str, about: Mapping[str, str]) -> bool:
    """Write the files other than weights; return whether there is a tokenizer among them."""
    name, text = str(DTYPES[dtype]).removeprefix("torch."), about["tokenizer"]
    separator = Tokenizer.from_json(text).separator if text else None
    files: dict[str, Any] = json.loads(about[KEPT] or "{}")
    ids = files.pop(CONFIG, {"bos_token_id": separator, "eos_token_id": separator} if text else {})
    config = names_of(model).config(model) | {"torch_dtype": name, "dtype": name} | ids
    tokenizer = json.loads(text or "{}")
    has_tokenizer = "model" in tokenizer  # not where tokens are bytes
    if has_tokenizer:
        described = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.max_positions}
        added = {each["id"]: each["content"] for each in tokenizer.get("added_tokens", [])}
        if separator in added:
            described["eos_token"] = added[separator]
        files = {TOKENIZER: text, TOKENIZER_CONFIG: json.dumps(described, indent=2) + "\n"} | files
    else:
        files = {file: files[file] for file in files if file == GENERATION}
    for file, content in {CONFIG: json.dumps(config, indent=2) + "\n", **files}.items():
        (folder / file).write_text(content, encoding="utf-8")
    return has_tokenizer

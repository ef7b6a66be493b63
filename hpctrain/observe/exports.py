"""Passes metrics on to other software where the job asks for it: TensorBoard, Weights & Biases, Prometheus."""

import importlib
from collections.abc import Mapping
from pathlib import Path

from hpctrain.config.errors import JobError
from hpctrain.config.job import Job
from hpctrain.config.paths import refused_as, replace_text
from hpctrain.config.tables import flatten

PREFIX = "hpctrain_"


class MetricsWriter:
    """Takes the metrics of logged steps, on rank 0."""

    path: Path
    """The place that they go to."""

    def write(self, metrics: Mapping) -> None:
        """Pass one step's metrics on. Raises OSError where a disk refuses."""

    def close(self) -> None:
        """Pass on what was kept back."""


def flat(metrics: Mapping) -> dict[str, float]:
    """Return every figure by its name; those of a table are named after both, such as `compute_seconds_max`."""
    return {name: value for name, value in flatten(metrics, "_") if isinstance(value, (int, float))}


class TensorBoardWriter(MetricsWriter):
    """Writes event files that TensorBoard shows, in the run folder."""

    def __init__(self, folder: Path):
        package = _import("torch.utils.tensorboard", "tensorboard", "tensorboard = true")
        self.path = folder / "tensorboard"
        self._writer = package.SummaryWriter(str(self.path))

    def write(self, metrics: Mapping) -> None:
        for name, value in flat(metrics).items():
            if name != "step":
                self._writer.add_scalar(name, value, metrics["step"])

    def close(self) -> None:
        self._writer.close()


class WandbWriter(MetricsWriter):
    """Logs to a project of Weights & Biases; what it does without a network is up to its own variables (WANDB_MODE)."""

    def __init__(self, project: str, job: Job, folder: Path):
        package = _import("wandb", "wandb", f'wandb = "{project}"')
        self.path = folder / "wandb"
        config = job.model_dump(mode="json", exclude_none=True)
        # The name is the run folder's: a start that continues continues the same run.
        self._run = package.init(
            dir=str(folder), config=config, project=project, name=folder.name, id=folder.name, resume="allow"
        )

    def write(self, metrics: Mapping) -> None:
        self._run.log(flat(metrics), step=metrics["step"])

    def close(self) -> None:
        self._run.finish()


class PrometheusWriter(MetricsWriter):
    """Keeps a text file of the latest figures, as node_exporter's textfile collector reads it."""

    def __init__(self, path: Path, job: str):
        self.path = path
        escaped = job.replace("\\", "\\\\").replace('"', '\\"')
        self._labels = f'{{job="{escaped}"}}'
        with refused_as(JobError, f"observe.prometheus_file = {path}", "name another file"):
            path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, metrics: Mapping) -> None:
        lines = []
        for name, value in flat(metrics).items():
            lines += [f"# TYPE {PREFIX}{name} gauge", f"{PREFIX}{name}{self._labels} {value!r}"]
        replace_text(self.path, "\n".join(lines) + "\n")


def make_writers(job: Job, folder: Path) -> list[MetricsWriter]:
    """Return what the job asks for. Raises JobError where the software for it is not installed."""
    observe, writers = job.observe, []
    if observe.tensorboard:
        writers.append(TensorBoardWriter(folder))
    if observe.wandb:
        writers.append(WandbWriter(observe.wandb, job, folder))
    if observe.prometheus_file:
        writers.append(PrometheusWriter(observe.prometheus_file, job.name))
    return writers


def _import(module: str, package: str, setting: str):
    try:
        return importlib.import_module(module)
    except ImportError:
        raise JobError(
            f"observe.{setting}: the package {package} is not installed; pip install {package}, or remove the key"
        ) from None

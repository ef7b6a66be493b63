"""From a job to all that a run needs: data, machine, dtype, plan, and a value for everything that is `auto`.

The order is that of what depends on what. Mistakes in files are found before torch is imported; what takes time comes
last. Every choice comes back as a value and a reason.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.comm.network import ClusterNetwork
from hpctrain.comm.topology import Preferences
from hpctrain.config.cluster_file import parse_cluster
from hpctrain.config.errors import HpctrainError, JobError, LaunchError, TopologyError
from hpctrain.config.job import Job
from hpctrain.engine.resolve_overlap import continued, crossings, resolve_forward, resolve_overlap
from hpctrain.plan.schedule_run import check_schedules
from hpctrain.plan.tiling import Plan
from hpctrain.sharding.intervals import cut_evenly
from hpctrain.sharding.parameters import padded_vocabulary

if TYPE_CHECKING:
    from hpctrain.comm.accelerators.base import Accelerator
    from hpctrain.comm.world import World
    from hpctrain.config.cluster import Cluster
    from hpctrain.config.truth import Truth
    from hpctrain.data.order import Sequences
    from hpctrain.data.tokens import TokenSource
    from hpctrain.planner.predictor import Prediction

BLOCKS_VERIFIED_AT_START = 256  # a rank, of 1 MiB: well under a second
SHORT_PROFILE_SECONDS = 0.5


@dataclass(frozen=True)
class Described:
    """A description of what the ranks run on: the real machine, or the one that they impersonate."""

    cluster: "Cluster"
    name: str
    is_rehearsed: bool = False
    path: Path | None = None
    """Of a description that hpctrain keeps itself, and adds to."""
    truth: "Truth | None" = None
    """How the devices behave that are impersonated."""


@dataclass
class Prepared:
    """All that a run needs to know before its weights are made."""

    job: Job
    plan: Plan
    reasons: dict[str, str]
    source: "TokenSource"
    training: "Sequences"
    validation: "Sequences | None"
    data_identity: str
    """Tells token files and their training parts apart; a run that is continued must have the same."""
    described: Described
    prediction: "Prediction | None" = None
    """Of a step; on rank 0."""


def prepare_run(
    world: "World",
    job: Job,
    resume_from: Path | None = None,
    described: Described | None = None,
    fresh_probe: bool = False,
) -> Prepared:
    """Open the data, replace what is `auto` by values, make the plan. All ranks must call.

    With `resume_from` (a checkpoint) values that can change a bit of the result are taken from it, as long as the ranks
    are those of its plan. `described` is what the ranks run on, where that is given; with `fresh_probe` what is known
    of the machine is measured anew. Groups made afterwards choose their algorithms by the links of what is described.

    Raises JobError, DataError, CheckpointError, TopologyError, LaunchError; PlanError also where the plan is predicted
    not to fit into memory.
    """
    return _Resolver(world, job, resume_from, described, fresh_probe).run()


class _Resolver:
    """The steps of `prepare_run`, each of which replaces values of the job and notes the reasons."""

    def __init__(self, world: "World", job: Job, resume_from: Path | None, described: Described | None, fresh: bool):
        self.world, self.job, self.resume_from, self._described = world, job, resume_from, described
        self.is_fresh = fresh
        self.reasons: dict[str, str] = {}
        self.families = [place.family for place in world.topology.places]
        self._plan: Plan | None = None
        self._choosing: Cluster | None = None
        """Whose links chose the algorithms of the run that is continued."""

    @property
    def plan(self) -> Plan:
        assert self._plan is not None, "asked for after the plan is there"
        return self._plan

    @property
    def described(self) -> Described:
        assert self._described is not None, "asked for after the machine is known"
        return self._described

    def run(self) -> Prepared:
        source, training, validation = self._open_data()
        data_identity = f"{source.identity} {tuple(training.interval)}"
        if self.resume_from is not None:
            self._continue(data_identity)
        self._take_given_plan()
        self._know_machine()
        self._choose_dtype()
        if self._plan is None:
            self._switch_overlaps()
            self._profile()
            self._search_plan()
        self._switch_overlaps(self.plan)
        with self.world.all_or_none():
            if self.world.rank == 0:
                check_schedules(self.plan, reduce_early=bool(self.job.overlap.data))
        padded = max(padded_vocabulary(self.job.model, tile.tensor) for tile in self.plan.tiles)
        if padded != self.job.model.vocab_size:
            vocabulary = f"{self.job.model.vocab_size} ids are padded to {padded}, a multiple of tensor y"
            self.reasons["vocabulary"] = vocabulary
        prediction = self._predict()
        self._tune_products()
        self._choose_algorithms()
        return Prepared(
            self.job,
            self.plan,
            self.reasons,
            source,
            training,
            validation,
            data_identity,
            self.described,
            prediction,
        )

    def _set(self, section: str, **values) -> None:
        """Replace some values of a section of the job."""
        self.job = with_values(self.job, section, **values)

    def _open_data(self):
        from hpctrain.data.order import open_datasets

        job, world = self.job, self.world
        source, training, validation = open_datasets(job.data, job.train.seed)
        with world.all_or_none():  # small files whole, by all ranks together; the rest when it is first read
            known = min(source.num_blocks, world.size * BLOCKS_VERIFIED_AT_START)
            source.verify(cut_evenly(known, world.size)[world.rank])
        if job.model.vocab_size is None:
            self._set("model", vocab_size=source.vocab_size)
            self.reasons["model.vocab_size"] = f"{source.vocab_size}: that of {job.data.tokens}"
        elif job.model.vocab_size < source.vocab_size:
            raise JobError(
                f"model.vocab_size {job.model.vocab_size} is less than the {source.vocab_size} token ids of"
                f' {job.data.tokens}; set it to {source.vocab_size} or more, or "auto"'
            )
        return source, training, validation

    def _continue(self, data_identity: str) -> None:
        """Take from the checkpoint what keeps the numbers the same; its plan and all, where the ranks are its own."""
        from hpctrain.checkpoint.state import check_same_run

        job, where = self.job, self.resume_from
        assert where is not None
        theirs, plan, cluster = check_same_run(where, job, data_identity)
        if job.train.dtype is None:
            self._set("train", dtype=theirs.train.dtype)
            self.reasons["train.dtype"] = f"{theirs.train.dtype}: that of {where}"
        if job.plan is None and not is_for(plan, self.families):
            self.reasons["planned again"] = (
                f"{where} was written by {describe_ranks(plan)}; these are"
                f" {_counted(self.families)}, which get a plan of their own"
            )
            return
        if job.plan is None:
            self._plan, self.reasons["plan"] = plan, f"{plan.describe()}: that of {where}"
        if cluster and [device.family for device in cluster.devices] == self.families:
            self._choosing = cluster
        overlap, taken = continued(job.overlap, theirs.overlap)
        self.job = self.job.model_copy(update={"overlap": overlap})
        self.reasons |= {key: f"{value}: that of {where}" for key, value in taken.items()}
        if job.products.tune is not False or theirs.products.layouts:
            tune = job.products.tune or bool(theirs.products.tune)
            self._set("products", tune=tune, layouts=theirs.products.layouts | job.products.layouts)

    def _take_given_plan(self) -> None:
        """Make the plan that the job describes, on one rank for all of them, whatever their hosts are like."""
        from hpctrain.plan.uniform import resolve_plan

        if self.job.plan is None:
            return
        resolved, world = None, self.world
        with world.all_or_none():
            if world.rank == 0:
                resolved = resolve_plan(self.job, world.size, self.families)
        resolved = world.broadcast_object(resolved)
        self._plan = resolved.plan
        self.reasons |= resolved.reasons

    def _know_machine(self) -> None:
        """Find the description of these devices, where none is given, or make one."""
        world = self.world
        if self._described is None:
            from hpctrain.comm.probe.machine import describe_machine

            machine = describe_machine(world, self._accelerator(), self.is_fresh)
            self._described = Described(machine.cluster, str(machine.path), path=machine.path)
            self.reasons["machine"] = f"{machine.cluster.describe()}: {machine.source}"
        with world.all_or_none():
            check_ranks_are_devices(self.described, self.families)

    def _accelerator(self) -> "Accelerator":
        from hpctrain.comm.accelerators.bind import bind_accelerator

        return bind_accelerator(self.world)

    def _choose_dtype(self) -> None:
        if self.job.train.dtype is not None:
            return
        from hpctrain.planner.choose import dtype_on

        with self.world.all_or_none():
            used = self._plan and [self.families[rank] for rank in self._plan.ranks]
            families = list(dict.fromkeys(used or self.families))
            dtype, reason = dtype_on(self.job, self.described.cluster, families, self.described.name)
        self.reasons["train.dtype"] = reason
        self._set("train", dtype=dtype)

    def _switch_overlaps(self, plan: Plan | None = None) -> None:
        """Give switches that are `auto` a value: all but `forward` without a plan, which may become others with it."""
        world, job = self.world, self.job
        if plan is None:
            self._open_overlap = job.overlap
            overlap, _ = resolve_overlap(job.overlap, world.topology)
            self.job = job.model_copy(update={"overlap": overlap})
            return
        job = job.model_copy(update={"overlap": getattr(self, "_open_overlap", job.overlap)})
        overlap, why = resolve_overlap(job.overlap, world.topology, crossings(world, job, plan))
        job, self.reasons = job.model_copy(update={"overlap": overlap}), self.reasons | why
        what = job, plan, world.topology, self.described.cluster
        overlap, why = world.broadcast_object(resolve_forward(*what) if world.rank == 0 else None)
        self.job, self.reasons = job.model_copy(update={"overlap": overlap}), self.reasons | why

    def _profile(self) -> None:
        """Measure passes of this job's items, where the description is hpctrain's own and has none of them."""
        from hpctrain.planner.curves import has_times

        described, job = self.described, self.job
        if described.path is None or has_times(described.cluster, job, job.train.resolved_dtype):
            return
        from hpctrain.engine.profiler import short_profile

        measured = short_profile(self.world, self._accelerator(), job, SHORT_PROFILE_SECONDS)
        text = None
        if measured:
            from hpctrain.comm.probe.machine import add_profiles

            text = add_profiles(described.path, described.cluster, *measured)
        text = self.world.broadcast_object(text)
        self._described = replace(described, cluster=parse_cluster(text, described.name))

    def _search_plan(self) -> None:
        from hpctrain.planner.choose import choose_plan

        choice, world = None, self.world
        with world.all_or_none():
            if world.rank == 0:
                choice = choose_plan(self.job, self.described.cluster, self.described.name)
        choice = world.broadcast_object(choice)
        self._plan = choice.plan
        self.reasons |= choice.reasons

    def _predict(self) -> "Prediction | None":
        """Predict a step, and refuse a plan that is predicted not to fit."""
        prediction, world = None, self.world
        with world.all_or_none():
            if world.rank == 0:
                from hpctrain.planner.choose import check_fits
                from hpctrain.planner.cost import Setup
                from hpctrain.planner.predictor import predict

                try:
                    prediction = predict(Setup.of_job(self.job), self.plan, self.described.cluster)
                except HpctrainError as error:
                    self.reasons["prediction"] = f"none, by {self.described.name}: {error}"
                if prediction and self.job.search.must_fit:
                    check_fits(prediction, self.plan, self.described.name)
        return prediction

    def _tune_products(self) -> None:
        if self.job.products.tune is False:
            return
        from hpctrain.engine.tuning import tune_products

        products, why = tune_products(self.world, self.job, self.plan)
        self.job, self.reasons = self.job.model_copy(update={"products": products}), self.reasons | why

    def _choose_algorithms(self) -> None:
        """Let groups choose their algorithms by the links that the plan was found with, or those of the checkpoint."""
        comm, world = self.job.comm, self.world
        cluster = self._choosing or self.described.cluster.model_copy(update={"profiles": ()})
        network = ClusterNetwork(cluster)
        world.configure(preferences=Preferences(comm.route, comm.algorithm, network))
        if comm.algorithm == "auto":
            everybody = range(world.size)
            is_shared = world.topology.route(everybody, comm.route).kind in ("alone", "shared")
            summary = "none: ranks share one host's memory" if is_shared else network.describe_choice(everybody)
            self.reasons["comm.algorithm"] = (
                f"{summary}, by the links of {self.resume_from if self._choosing else self.described.name}"
            )


def with_values(job: Job, section: str, **values) -> Job:
    """Return the job with some values of a section replaced."""
    return job.model_copy(update={section: getattr(job, section).model_copy(update=values)})


def is_for(plan: Plan, families: list[str]) -> bool:
    """Say whether a plan is for ranks of these families."""
    from hpctrain.plan.uniform import families_of

    tiles = [tile.family for tile in plan.tiles]
    return len(plan.ranks) == len(families) and families_of(plan, families) == tiles


def describe_ranks(plan: Plan) -> str:
    """Say which ranks a plan is for, such as `4 a100 and 4 v100`."""
    return _counted([tile.family for tile in plan.first_tiles for _ in tile.ranks] + ["unused"] * len(plan.unused))


def _counted(families: list[str]) -> str:
    return " and ".join(f"{families.count(name)} {name}" for name in dict.fromkeys(families))


def check_ranks_are_devices(described: Described, families: list[str]) -> None:
    """Refuse ranks that are not the devices of a cluster, in its order. Raises LaunchError or TopologyError."""
    devices = [device.family for device in described.cluster.devices]
    if len(devices) != len(families):
        raise LaunchError(
            f"{described.name} describes {len(devices)} devices ({_counted(devices)}), but {len(families)} ranks were"
            f" started; start it with mpirun -n {len(devices)}"
        )
    wrong = next((rank for rank, pair in enumerate(zip(devices, families, strict=True)) if pair[0] != pair[1]), None)
    if wrong is not None:
        raise TopologyError(
            f"{described.name}: rank {wrong} is a device of family '{devices[wrong]}' there, but '{families[wrong]}'"
            " here; start the ranks in the order of the file's nodes, name the families as the ranks do"
            " (HPCTRAIN_FAMILY), or describe this machine (hpctrain probe)"
        )

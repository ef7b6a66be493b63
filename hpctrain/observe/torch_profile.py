"""torch.profiler for some steps of some ranks, as `[observe]` asks.

torch-profile/rank-00000.json.gz     what a rank's operators and kernels took, for ui.perfetto.dev
                                     (-from-step-12 after the rank: where another plan has come within the steps)
"""

from torch.profiler import profile, supported_activities

from hpctrain.config.errors import JobError, describe_os_error
from hpctrain.config.job import Job
from hpctrain.observe.folder.spans import Observed, Observer

FOLDER = "torch-profile"


class TorchProfile(Observer):
    """The profiler of one rank. It runs from the first of the steps that the job names to the last."""

    def __init__(self, observed: Observed, job: Job, is_rehearsed: bool):
        """Raises JobError, on all ranks, where such a profile cannot be."""
        steps, ranks, world = job.observe.torch_profile_steps, job.observe.torch_profile_ranks, observed.world
        assert steps is not None, "only made where the job asks for it"
        if is_rehearsed:
            raise JobError(
                "observe.torch_profile_steps: a rehearsal pretends its devices, and the profiler would show this host's"
                " processors; remove it, or set observe.trace"
            )
        if steps[0] > job.train.steps:
            raise JobError(f"observe.torch_profile_steps = {list(steps)}: the run ends with step {job.train.steps}")
        if beyond := [rank for rank in ranks if rank >= world.size]:
            raise JobError(f"observe.torch_profile_ranks = {beyond[0]}: there are {world.size} ranks, from 0 on")
        self._first, self._last = steps
        self._ranks, self._world, self._folder = ranks, world, observed.files.path / FOLDER
        self._is_continued = observed.is_continued
        self._profiler = profile(activities=supported_activities()) if world.rank in ranks else None
        self._next, self._begun = 0, 0

    def start(self, steps_done: int) -> str | None:
        self._next = steps_done + 1
        self._begin_if_due()
        is_late = steps_done >= self._last and not self._is_continued
        return "torch profile: none, its steps are done already" if is_late else None

    def step_is_done(self, seconds: float) -> str | None:
        self._next += 1
        if self._next > self._last:
            return self.finish()
        return self._begin_if_due()

    def _begin_if_due(self) -> None:
        if not self._begun and self._first <= self._next <= self._last:
            self._begun = self._next
            if self._profiler:
                self._profiler.start()

    def finish(self) -> str | None:
        if not self._begun:
            return None
        begun, self._begun = self._begun, 0
        failures = [text for text in self._world.gather_objects(self._write(begun)) or () if text]
        if self._world.rank:
            return None
        ranks = ", ".join(map(str, self._ranks))
        done = f"torch profile of steps {begun} to {self._next - 1}, ranks {ranks}: {self._folder}"
        return f"torch profile: {'; '.join(failures)}" if failures else done

    def _write(self, begun: int) -> str:
        """Write this rank's file of the steps from `begun` on, if it has one; return what went wrong."""
        if not self._profiler:
            return ""
        self._profiler.stop()
        part = f"-from-step-{begun}" if self._is_continued else ""  # the leg before has written the other steps
        path = self._folder / f"rank-{self._world.rank:05d}{part}.json.gz"
        try:
            self._folder.mkdir(exist_ok=True)
            self._profiler.export_chrome_trace(str(path))
        except OSError as error:
            return f"{path}: cannot be written: {describe_os_error(error)}"
        return ""

"""GPT-2 of 124 M parameters on real text: the loss of each step beside plain PyTorch on the same batches.

    hpctrain prepare --stdlib --tokenizer bpe --vocab-size 50257 --out tokens/gpt2.h5
    python -m benchmarks.real_text tokens/gpt2.h5

The plain model is GPT2LMHeadModel of transformers with torch.optim.AdamW, started from the weights that hpctrain drew
and exported. A step of both takes some 20 seconds of one core.
"""

import tempfile
from pathlib import Path

import click
import torch
import torch.nn.functional as F

from hpctrain.checkpoint.convert import export_model
from hpctrain.comm.bind import bind_accelerator
from hpctrain.config.job import Job, Train
from hpctrain.data.order import Batch
from hpctrain.engine.start.resolve import prepare_run
from hpctrain.engine.step.phases import phases_of
from hpctrain.engine.trainer import Trainer
from hpctrain.jobs.common import load_job_on, started_world
from hpctrain.sharding.intervals import Interval

ROWS = 4
JOB = """
plan = "auto"
[model]
preset = "gpt2-124m"
[data]
tokens = "{tokens}"
sequence_length = 256
[train]
steps = {steps}
global_batch = 4
learning_rate = 6e-4
warmup_steps = 20
dtype = "fp32"
"""


class Plain:
    """GPT-2 as a user of PyTorch trains it, from exported weights."""

    def __init__(self, folder: Path, train: Train):
        from transformers import GPT2LMHeadModel

        self.train = train
        self.model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()  # eval: without dropout
        parameters = list(self.model.parameters())
        decayed, others = [[p for p in parameters if (p.dim() == 2) == matrix] for matrix in (True, False)]
        groups = [{"params": decayed, "weight_decay": train.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, betas=(train.beta1, train.beta2), eps=train.epsilon)

    def step(self, tokens: torch.Tensor, step: int) -> float:
        """Train on int64 [rows, positions + 1], and return the loss before the update."""
        loss = F.cross_entropy(self.model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.train.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.train.rate(step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def exported_start(trainer: Trainer, job: Job) -> Plain:
    """Return the plain model with the weights that a trainer begins with."""
    with tempfile.TemporaryDirectory() as folder:
        saved, exported = trainer.save(Path(folder) / "run", {}), Path(folder) / "hf"
        assert saved is not None
        export_model(saved, exported, "fp32")
        return Plain(exported, job.train)


@click.command("benchmarks.real_text")
@click.argument("tokens", type=click.Path(exists=True, path_type=Path))
@click.option("--steps", default=200, show_default=True)
@click.option("--every", default=10, show_default=True, help="Steps between two printed lines.")
def command(tokens, steps, every):
    """Train hpctrain and plain PyTorch in turn on TOKENS; print both losses."""
    path = Path(tempfile.mkdtemp()) / "job.toml"
    path.write_text(JOB.format(tokens=tokens.resolve(), steps=steps))
    with started_world() as world:
        prepared = prepare_run(world, load_job_on(world, str(path), ()))
        trainer = Trainer(world, bind_accelerator(world), prepared.job, prepared.plan)
        trainer.initialise()
        plain, phases = exported_start(trainer, prepared.job), phases_of(prepared.job.observe)
        largest = 0.0
        for step in range(steps):
            world.enter(phases.step if step else phases.first_step)
            tokens_of_step = Batch.of_step(prepared.training, step, ROWS).rows(Interval(0, ROWS))
            ours = trainer.step(prepared.training)[0]["loss"]
            theirs = plain.step(torch.from_numpy(tokens_of_step), step)
            largest = max(largest, abs(ours - theirs) / theirs)
            if step == 0 or (step + 1) % every == 0:
                print(f"step {step + 1:4}  hpctrain {ours:.6f}  plain {theirs:.6f}", flush=True)
        print(f"largest relative difference of {steps} steps: {largest:.1e}")


if __name__ == "__main__":
    command()

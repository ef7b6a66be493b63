"""The `hpctrain` command: loads the module of a subcommand, runs it, and prints what went wrong once."""

import importlib
import os
import sys

import click

from hpctrain import __version__
from hpctrain.comm.start.process import StopSignals, keep_output
from hpctrain.config.errors import HostError, HpctrainError
from hpctrain.config.terminal import use_plain_streams

COMMANDS = {
    "prepare": "turn text or source files into a token file",
    "train": "train a job; start it with mpirun or srun",
    "generate": "write text with a trained model",
    "evaluate": "print the loss of a trained model on a token file",
    "import": "make a checkpoint to start from of a Hugging Face model",
    "export": "write a checkpoint as a Hugging Face model",
    "plan": "search for a plan, write the even one, draw, check or export one",
    "predict": "predict a step and its memory on a cluster, by a plan or a launch line of Megatron-LM",
    "what-if": "say what other devices, networks or memory would bring to a job, in speed, money and energy",
    "probe": "measure this machine, or a job on it, and write a cluster file; start it with mpirun or srun",
    "slurm": "write a batch script, for one kind of nodes or several",
    "mpirun": "write a start with mpirun, each family with its own software",
    "inspect": "show what is in a run, a checkpoint, a plan, a job, a cluster or a token file",
    "report": "write what runs did as one HTML file",
    "compare": "compare the losses, and on request the weights, of two runs",
    "align": "compare every operator of a job with float64, on every family; start it with mpirun or srun",
    "doctor": "check this machine: versions, ranks, devices, and by which routes they communicate",
    "catalogue": "list the ready clusters, and the accelerators and networks that a cluster file may name",
}
REMOVED = {"bench": "python -m benchmarks.training, in a clone of the repository"}
"""Commands that are gone, and what does the same. A command that a version drops is added here."""
ENDS_IN_ORDER = ("train",)
"""Commands that listen to signals before they import what takes seconds, and do not end where output is lost."""
MODULES = {"import": "import_model", "what-if": "what_if"}
"""Modules of commands whose names are no names of Python."""


class Commands(click.Group):
    """Imports a command's module only when it is run, since ten thousand ranks read it from one file system."""

    def list_commands(self, context):
        return list(COMMANDS)

    def get_command(self, context, name):
        if name in REMOVED:
            raise click.UsageError(f"'{name}' is no command any more; use {REMOVED[name]}")
        if name not in COMMANDS:
            return None
        return importlib.import_module(f"hpctrain.jobs.{MODULES.get(name, name)}").command

    def format_commands(self, context, formatter):
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="hpctrain")
def root():
    """Train one large language model on all the accelerators a site owns, as if they were one machine.

    \b
    hpctrain prepare --stdlib --out tokens/stdlib.h5     make a token file
    mpirun -n 4 hpctrain train tiny                      train the ready-made job `tiny` on 4 ranks
    hpctrain generate runs/tiny-... --prompt "def "      write text with the result
    """


def main(command: click.Command = root) -> None:
    """Run a command line. Exit codes: 0, 2 for wrong usage, 80 to 88 by kind of error (hpctrain.config.errors)."""
    from hpctrain.comm.start.launcher import promised_rank, record_exit

    use_plain_streams()
    signals, speaks = None, True
    try:
        speaks = promised_rank() == 0  # of several ranks with the same complaint, one is enough
        if sys.argv[1:2] and sys.argv[1] in ENDS_IN_ORDER:
            signals = StopSignals().listen()
            keep_output(speaks)
        if not speaks and {"-h", "--help", "--version"} & set(sys.argv):
            sys.exit(0)
        command(standalone_mode=False, obj=signals)
    except click.exceptions.Exit as exit_request:
        sys.exit(exit_request.exit_code)
    except click.ClickException as error:
        if speaks:
            error.show()
        sys.exit(error.exit_code)
    except HpctrainError as error:
        from hpctrain.comm.accelerators.kinds import local_rank

        record_exit(error.exit_code)
        if speaks or (isinstance(error, HostError) and not local_rank(os.environ)):
            print(f"hpctrain: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output had enough
        sys.stderr.close()
        sys.exit(0)

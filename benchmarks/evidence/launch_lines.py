r"""Reads launch lines of Megatron-LM for 8 H100: how many are predicted, and why the others are refused.

    python -m benchmarks.evidence.launch_lines \
        Megatron-LM/tests/functional_tests/test_cases/{gpt,moe,mixtral}/*/model_config.yaml

Each file is a script, or a functional test of Megatron-LM. The same refusals are counted together.
"""

from collections import Counter

import click

from hpctrain.config.errors import JobError, PlanError
from hpctrain.software.megatron_flags import read_flags, run_of
from hpctrain.software.run import DescribedRun


@click.command(help=__doc__)
@click.argument("files", nargs=-1, required=True)
def main(files):
    machine = DescribedRun(1024, 4, 16, 1024, 8, 1, 1, 1, 1, "H100").own_cluster
    outcomes = Counter()
    for file in files:
        try:
            own = run_of(read_flags(file), machine)
            own.run.predict(own.software)
            outcomes["predicted, with experts" if own.run.num_experts else "predicted"] += 1
        except (JobError, PlanError) as error:
            outcomes[str(error).removeprefix(f"{file}: ")] += 1
    for outcome, count in outcomes.most_common():
        print(f"{count:5}  {outcome}")


if __name__ == "__main__":
    main()

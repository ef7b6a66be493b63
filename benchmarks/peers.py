"""hpctrain against stock PyTorch: the same model, batch and layouts, in one run on one machine.

    python -m benchmarks.peers --rounds 5
    python -m benchmarks.peers --layouts ddp,pipeline2_data2 --json

Each round runs every layout on both sides, one after the other, and alternates which goes first, so that a machine
whose speed drifts treats both alike. Quoted are medians over rounds: tokens/s, hpctrain/stock (the two speeds of one
round are divided, then the median taken), and each side as a fraction of the ceiling: NUM_CORES times the faster side's
speed on one rank. `one` is therefore always measured. Stock PyTorch is `stock.py` beside this file.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.commands import ONE_THREAD, TIMED_OUT, command_line, run

HERE = Path(__file__).resolve().parent
NUM_CORES = 2
"""Cores that the four ranks of a layout share."""
NUM_TOKENS, VOCABULARY, SEED = 200_000, 512, 1
SIDES = ("stock", "hpctrain")


@dataclass(frozen=True)
class Layout:
    num_ranks: int
    settings: tuple[str, ...]
    """What `--set` tells hpctrain beside COMMON."""


COMMON = ("train.global_batch=16", "train.clip_norm=0")
LAYOUTS = {
    "one": Layout(1, ("plan.microbatch=2",)),
    "ddp": Layout(4, ("plan.microbatch=2", "plan.data=4")),
    "fsdp": Layout(4, ("plan.microbatch=8", "plan.tensor.z=4")),  # z splits the rows: 2 sequences a rank
    "tensor4": Layout(4, ("plan.microbatch=2", "plan.tensor.y=4")),
    "tensor2_data2": Layout(4, ("plan.microbatch=2", "plan.tensor.y=2", "plan.data=2")),
    "pipeline2_data2": Layout(4, ("plan.microbatch=2", "plan.pipeline=2", "plan.data=2")),
    "interleaved2_data2": Layout(4, ("plan.microbatch=2", "plan.pipeline=2", "plan.data=2", "plan.virtual_stages=2")),
}


class RunError(Exception):
    """A benchmark command failed, ran out of time, or did not end with its JSON line."""


def write_tokens(path: Path) -> None:
    """Write random tokens in nanoGPT's format: little-endian uint16, no header."""
    np.random.default_rng(SEED).integers(VOCABULARY, size=NUM_TOKENS).astype("<u2").tofile(path)


def stock_command(layout: str, steps: int) -> list[str]:
    return [sys.executable, str(HERE / "stock.py"), layout, "--steps", str(steps), "--warmup", "1"]


def hpctrain_command(layout: str, steps: int, tokens: Path) -> list[str]:
    settings = (f"data.tokens={tokens}", *COMMON, *LAYOUTS[layout].settings)
    words = [HERE / "peers.toml", *(word for setting in settings for word in ("--set", setting))]
    words += ["--steps", steps, "--warmup", 1, "--json"]
    return command_line(*words, ranks=LAYOUTS[layout].num_ranks, module="benchmarks.training")


def measure(command: list[str], timeout_seconds: float) -> dict:
    """Run a command and return the JSON object on its last line of stdout. Raises RunError, with its stderr."""
    done = run(command, timeout_seconds=timeout_seconds, **ONE_THREAD)
    problem = f"exit code {done.returncode}" if done.returncode else None
    if done.returncode == TIMED_OUT:
        problem = f"not done after {timeout_seconds:g} s; give it more with --timeout"
    if problem is None:
        try:
            result = json.loads(done.stdout.strip().splitlines()[-1])
            if result["tokens_per_second"] > 0 and "loss" in result:
                return result
        except (IndexError, KeyError, TypeError, ValueError):
            pass
        problem = 'the last line of stdout is not a JSON object with "tokens_per_second" and "loss"'
    raise RunError(
        f"{problem}: {' '.join(command)}\n-- stdout\n{done.stdout[-2000:]}\n-- stderr\n{done.stderr[-8000:]}"
    )


def run_rounds(options: argparse.Namespace, tokens: Path) -> dict[str, dict[str, list[dict]]]:
    """Return, by layout and side, the results of each round."""
    results: dict[str, dict[str, list[dict]]] = defaultdict(lambda: defaultdict(list))
    for number in range(options.rounds):
        for position, layout in enumerate(options.layouts):
            commands = {
                "stock": stock_command(layout, options.steps),
                "hpctrain": hpctrain_command(layout, options.steps, tokens),
            }
            for side in SIDES if (number + position) % 2 == 0 else reversed(SIDES):
                result = measure(commands[side], options.timeout)
                results[layout][side].append(result)
                speed = f"{result['tokens_per_second']:,.0f} tokens/s, loss {result['loss']:.4f}"
                print(f"round {number + 1}/{options.rounds} {layout} {side}: {speed}", file=sys.stderr)
    return results


def summarise(results: dict[str, dict[str, list[dict]]]) -> dict:
    """Reduce the rounds to medians, ratios and fractions of the ceiling."""
    speeds = {
        layout: {side: [run["tokens_per_second"] for run in runs] for side, runs in sides.items()}
        for layout, sides in results.items()
    }
    ceiling = NUM_CORES * max(statistics.median(speeds["one"][side]) for side in SIDES)
    rows = {}
    for layout, sides in speeds.items():
        medians = {side: statistics.median(sides[side]) for side in SIDES}
        ratios = [ours / theirs for ours, theirs in zip(sides["hpctrain"], sides["stock"], strict=True)]
        rows[layout] = {
            "ranks": LAYOUTS[layout].num_ranks,
            **{f"{side}_tokens_per_second": medians[side] for side in SIDES},
            "ratio": statistics.median(ratios),
            "ratio_range": [min(ratios), max(ratios)],
            **{f"{side}_of_ceiling": medians[side] / ceiling for side in SIDES},
            **{f"{side}_loss": statistics.median(run["loss"] for run in results[layout][side]) for side in SIDES},
        }
    return {"rounds": len(speeds["one"]["stock"]), "ceiling_tokens_per_second": ceiling, "layouts": rows}


def table(summary: dict) -> str:
    lines = [
        "| layout | ranks | stock tokens/s | hpctrain tokens/s | hpctrain/stock (range) | stock of ceiling |"
        " hpctrain of ceiling |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for layout, row in summary["layouts"].items():
        low, high = row["ratio_range"]
        lines.append(
            f"| {layout} | {row['ranks']} | {row['stock_tokens_per_second']:,.0f}"
            f" | {row['hpctrain_tokens_per_second']:,.0f} | {row['ratio']:.2f} ({low:.2f} to {high:.2f})"
            f" | {row['stock_of_ceiling']:.0%} | {row['hpctrain_of_ceiling']:.0%} |"
        )
    ceiling = (
        f"Ceiling ({NUM_CORES} x the faster side on one rank): {summary['ceiling_tokens_per_second']:,.0f} tokens/s."
    )
    return "\n".join([*lines, "", f"{ceiling} Medians of {summary['rounds']} rounds."])


def layout_names(text: str) -> list[str]:
    """Parse `--layouts`; `one` comes first, asked for or not, as the ceiling is made from it."""
    names = text.split(",")
    if unknown := [name for name in names if name not in LAYOUTS]:
        raise argparse.ArgumentTypeError(f"no layout {', '.join(unknown)}; there are {', '.join(LAYOUTS)}")
    return list(dict.fromkeys(["one", *names]))


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", type=layout_names, default=list(LAYOUTS), help=f"of {','.join(LAYOUTS)} (all)")
    parser.add_argument("--rounds", type=positive, default=5, help="default 5")
    parser.add_argument("--steps", type=positive, default=3, help="measured steps of each run (default 3)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one run (default 300)")
    parser.add_argument("--json", action="store_true", help="one JSON line on stdout, the table on stderr")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "random.bin"
        write_tokens(tokens)
        try:
            summary = summarise(run_rounds(options, tokens))
        except (RunError, OSError) as error:
            print(f"peers.py: {error}", file=sys.stderr)
            return 1
    if options.json:
        print(table(summary), file=sys.stderr)
        print(json.dumps(summary))
    else:
        print(table(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())

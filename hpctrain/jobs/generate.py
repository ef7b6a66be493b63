"""`hpctrain generate`: write text with a trained model."""

import click

from hpctrain.jobs.arguments import COUNT, LARGE_COUNT, PATH, SEED, FiniteRange, json_option, print_result

MOST_TEMPERATURE = 1e6


@click.command("generate")
@click.argument("path", type=PATH)
@click.option("--prompt", default="", help="Text to continue.")
@click.option("--tokens", "num_tokens", default=200, show_default=True, type=COUNT)
@click.option(
    "--temperature",
    default=0.8,
    show_default=True,
    type=FiniteRange(0, MOST_TEMPERATURE),
    help="0: the likeliest token.",
)
@click.option("--top-k", default=50, show_default=True, type=LARGE_COUNT, help="Sample among so many tokens.")
@click.option(
    "--top-p",
    default=1.0,
    show_default=True,
    type=FiniteRange(0, 1, min_open=True),
    help="Sample among the likeliest ones of so much probability.",
)
@click.option("--stop", metavar="TEXT", multiple=True, help="End before this text; may be repeated.")
@click.option("--ignore-end", is_flag=True, help="Continue after the end of a document.")
@click.option("--seed", default=0, show_default=True, type=SEED)
@json_option
def command(path, prompt, num_tokens, temperature, top_k, top_p, stop, ignore_end, seed, as_json):
    """Write text with the model in PATH, a run folder (its latest checkpoint) or a checkpoint.

    Runs on one rank, whatever layout trained the model.
    """
    from hpctrain.checkpoint.folder import locate_checkpoint
    from hpctrain.engine.decode import Generator, Sampling

    checkpoint = locate_checkpoint(path)
    sampling = Sampling(temperature, top_k, top_p, seed, stop, ignore_end)
    text = Generator(checkpoint).text(prompt, num_tokens, sampling)
    print_result({"checkpoint": str(checkpoint), "prompt": prompt, "text": text}, prompt + text, as_json)

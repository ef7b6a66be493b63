"""`hpctrain evaluate`: the loss of a model on a token file."""

import click

from hpctrain.jobs.arguments import LARGE_COUNT, PATH, json_option, print_result


@click.command("evaluate")
@click.argument("path", metavar="RUN", type=PATH)
@click.option("--data", metavar="FILE", required=True, type=PATH, help="Token file.")
@click.option("--sequences", type=LARGE_COUNT, help="How many sequences, from the start.  [default: all]")
@click.option("--sequence-length", type=LARGE_COUNT, help="Tokens of a sequence.  [default: that of the run]")
@json_option
def command(path, data, sequences, sequence_length, as_json):
    """Print loss and perplexity of the model in RUN, a run folder (its latest checkpoint) or a checkpoint, on FILE.

    FILE is made with the model's own tokenizer: hpctrain prepare ... --tokenizer FILE. Runs on one rank.
    """
    from hpctrain.checkpoint.folder import locate_checkpoint
    from hpctrain.engine.decode import evaluate

    result = evaluate(locate_checkpoint(path), data, sequences, sequence_length)
    text = f"loss {result.loss:.4f} nats a token, perplexity {result.perplexity:.3f};"
    text += f" {result.sequences:,} sequences, {result.tokens:,} tokens"
    print_result(result._asdict(), text, as_json)

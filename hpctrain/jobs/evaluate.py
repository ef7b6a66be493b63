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

    The loss is that of training's own validation: the mean over answers, where FILE has prompts, and over what follows
    in its own document, where the model was trained with data.mask_documents.

    FILE is made with the model's own tokenizer: hpctrain prepare ... --tokenizer FILE. Runs on one rank.
    """
    from hpctrain.checkpoint.folder import locate_checkpoint
    from hpctrain.engine.decode import evaluate

    result = evaluate(locate_checkpoint(path), data, sequences, sequence_length)
    text = f"loss {result.loss:.4f} nats a token, perplexity {result.perplexity:.3f};"
    text += f" {result.sequences:,} sequences, {result.tokens:,} tokens"
    text += f" (without {result.left_out:,}: {' and '.join(result.masks)} left out)" if result.masks else " (all)"
    print_result(result._asdict(), text, as_json)

"""`hpctrain prepare`: make a token file from text."""

import os
import sys

import click

from hpctrain.config.terminal import drawing
from hpctrain.jobs.arguments import COUNT, PATH, VOCABULARY, json_option, print_result


@click.command("prepare", short_help="Make a token file from text.")
@click.argument("paths", metavar="PATH…", nargs=-1, type=PATH)
@click.option("--out", metavar="FILE.h5", required=True, type=PATH, help="Token file to write.")
@click.option(
    "--tokenizer",
    metavar="byte|bpe|FILE",
    default="byte",
    show_default=True,
    help="byte: a token is a byte. bpe: byte-level BPE, trained on the text itself. FILE: a Hugging Face"
    " tokenizer.json, a folder with it (and a chat template), or a token file whose tokenizer to use again (as for"
    " data.validation).",
)
@click.option("--vocab-size", type=VOCABULARY, help="Number of tokens that bpe trains, at least 257.  [default: 1024]")
@click.option("--glob", "globs", metavar="PATTERN", multiple=True, help="Which files of folders; may be repeated.")
@click.option("--stdlib", is_flag=True, help="Add the sources of Python's own standard library: about 30 MB.")
@click.option(
    "--field", default="text", show_default=True, help="Of JSON Lines and Parquet files: where a record has its text."
)
@click.option("--prompt-field", metavar="NAME", help="Where a record has a prompt, which is given and not learnt.")
@click.option("--special-tokens", is_flag=True, help="The text of a special token, such as <|im_end|>, is that token.")
@click.option("--workers", type=COUNT, help="Threads that encode.  [default: one for each core]")
@json_option
def command(paths, out, tokenizer, vocab_size, globs, stdlib, field, prompt_field, special_tokens, workers, as_json):
    """Make a token file, which training reads, from text files and folders of them.

    Every file is one document; of .jsonl, .json and .parquet files every record is one, of Megatron's .bin and .idx
    every document. Files ending in .gz and .zst are unpacked. A record with a list of messages is a chat: the template
    of the tokenizer's folder writes it, and the assistant's tokens alone are learnt. In folders, files that are not
    UTF-8 text are skipped and counted, hidden ones ignored; a file that is named is refused then. Documents are
    shuffled by a hash of their relative path, so the same folder gives the same token file on any machine. Its end,
    which training keeps for validation, is a fair sample. The file appears only when it is complete.

    \b
    Examples:
      hpctrain prepare --stdlib --out tokens/stdlib.h5 --tokenizer bpe
      hpctrain prepare books/ notes.txt --glob '*.txt' --glob '*.md' --out tokens/books.h5
      hpctrain prepare more/ --tokenizer tokens/books.h5 --out tokens/validation.h5

    The summary ends with the unigram entropy: the loss, in nats, of a model that knows only how frequent each token
    is. A training loss above it has learnt nothing from context yet.
    """
    if workers:
        os.environ["RAYON_NUM_THREADS"] = str(workers)  # read when the tokenizers library encodes for the first time

    from hpctrain.data.corpus import prepare
    from hpctrain.data.records import Fields

    with click.progressbar(length=1, file=drawing(sys.stderr), label="encoding", hidden=not sys.stderr.isatty()) as bar:

        def show(done: int, total: int) -> None:
            bar.length = total
            bar.update(done - bar.pos)

        summary = prepare(
            paths,
            out,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            globs=globs,
            stdlib=stdlib,
            fields=Fields(field, prompt_field),
            keeps_special=special_tokens,
            on_progress=show,
        )
    fields = vars(summary) | {"path": str(summary.path), "bytes_per_token": round(summary.bytes_per_token, 4)}
    skipped = ", ".join(f"{count:,} {reason}" for reason, count in sorted(summary.skipped.items()))
    wanted = f"  (of {summary.wanted_vocab_size:,} asked for: the text has no more pairs to merge)"
    short = summary.vocab_size < summary.wanted_vocab_size
    text = (
        f"{summary.path}\n"
        f"  documents        {summary.documents:,}{f'  (skipped: {skipped})' if skipped else ''}\n"
        f"  tokens           {summary.tokens:,}\n"
        f"  vocabulary       {summary.vocab_size:,}{wanted if short else ''}\n"
        f"  bytes per token  {summary.bytes_per_token:.2f}\n"
        f"  unigram entropy  {summary.unigram_entropy_nats:.4f} nats\n"
        f"  file size        {summary.file_bytes / 1e6:,.1f} MB"
    )
    if summary.special_tokens:
        what = "became the tokens" if special_tokens else "are plain text; with --special-tokens they are tokens"
        text += f"\n  special tokens   {summary.special_tokens:,} are written in texts, and {what}"
    print_result(fields, text, as_json)

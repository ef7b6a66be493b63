"""`hpctrain export`: write a checkpoint as a Hugging Face model."""

import click

from hpctrain.jobs.arguments import PATH, FiniteRange, json_option, print_result

GB = 1_000_000_000
MOST_SHARD_GB = 1e6


@click.command("export")
@click.argument("path", metavar="RUN", type=PATH)
@click.option("--hf", "folder", metavar="DIR", required=True, type=PATH, help="Folder to make.")
@click.option("--dtype", default="bf16", show_default=True, type=click.Choice(["bf16", "fp16", "fp32"]))
@click.option(
    "--shard-gb",
    default=5.0,
    show_default=True,
    type=FiniteRange(0, MOST_SHARD_GB, min_open=True),
    help="Largest file, in GB.",
)
@json_option
def command(path, folder, dtype, shard_gb, as_json):
    """Write the model in RUN, a run folder (its latest checkpoint) or a checkpoint, as a Hugging Face folder.

    DIR gets config.json, safetensors of at most --shard-gb and, where the run has one, tokenizer.json. A model that was
    imported gets back its ids of tokens, its chat template and generation_config.json. Needs one rank and no GPU,
    whatever layout trained the model. Weights are exact with --dtype fp32.
    """
    from hpctrain.checkpoint.convert import export_model
    from hpctrain.checkpoint.folder import locate_checkpoint

    num_files, num_bytes, has_tokenizer = export_model(locate_checkpoint(path), folder, dtype, int(shard_gb * GB))
    files = "1 file" if num_files == 1 else f"{num_files} files"
    tokenizer = "with its tokenizer" if has_tokenizer else "without a tokenizer: the run has none of that kind"
    summary = {"folder": str(folder), "files": num_files, "bytes": num_bytes}
    summary |= {"dtype": dtype, "tokenizer": has_tokenizer}
    rounded = "exact in fp32" if dtype == "fp32" else f"rounded from fp32 to {dtype} (--dtype fp32 for exact ones)"
    text = f"{folder}: {num_bytes:,} bytes in {files} of weights, {rounded}, {tokenizer}"
    print_result(summary, text, as_json)

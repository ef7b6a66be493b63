"""`hpctrain import`: make a checkpoint to start from of a Hugging Face model."""

import click

from hpctrain.jobs.arguments import PATH, json_option, print_result


@click.command("import")
@click.argument("folder", metavar="DIR", type=PATH)
@click.option("--out", metavar="RUN", required=True, type=PATH, help="Run folder to make.")
@json_option
def command(folder, out, as_json):
    """Make the run folder RUN from the Hugging Face model in DIR: config.json, safetensors, tokenizer.json.

    The checkpoint has the weights in fp32, exactly. RUN/model.toml is a job file to start from:

    \b
    extends = "RUN/model.toml"
    [data]
    tokens = "tokens.h5"       # imported with: hpctrain prepare ... --tokenizer DIR/tokenizer.json
    """
    from hpctrain.checkpoint.convert import import_model

    imported = import_model(folder, out)
    summary = {
        "checkpoint": str(imported.checkpoint),
        "job": str(imported.job_file),
        "parameters": imported.num_parameters,
    }
    summary |= {"architecture": imported.model.architecture, "tokenizer": imported.has_tokenizer}
    text = (
        f"{imported.checkpoint}: {imported.model.architecture}, {imported.num_parameters:,} parameters,"
        f" {'with' if imported.has_tokenizer else 'without'} a tokenizer\n"
        f'{imported.job_file}: the job file to start from: extends = "{imported.job_file}"'
    )
    if coefficient := imported.auxiliary_loss:
        summary["router_aux_loss_coef"] = coefficient
        text += (
            f"\nrouter_aux_loss_coef = {coefficient} is not taken over: the library's loss is over a whole batch. Set"
            " train.balance_loss for one over each sequence, which no plan changes"
        )
    print_result(summary, text, as_json)

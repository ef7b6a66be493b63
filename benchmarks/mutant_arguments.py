"""Command lines that ask for too much, or for nothing, and some that are right. Words in braces are long."""

from benchmarks.mutants import DEEP, LONG, MANY_DIGITS

SHORT = {"PREDICT": "predict job.toml --cluster cluster.toml --plan plan.toml"}
SPOKEN = {"{long}": LONG, "{digits}": MANY_DIGITS, "{line}": "\n", "{deep}": DEEP, "{dots}": ".".join(["a"] * 20_000)}
REFUSED = r"""
generate run --temperature nan
generate run --temperature inf
generate run --top-p nan
generate run --top-k 0
generate run --seed {digits}
generate run --tokens 1000000000000
generate {long}
generate loop
generate tokens.h5
evaluate run --data {long}
evaluate run --data loop
evaluate run --data tokens.h5 --sequence-length 1000000000
evaluate {long} --data tokens.h5
inspect {long}
inspect loop
inspect {long}.toml
inspect loop/x
inspect /dev/zero
inspect /dev/null
compare {long} run
compare loop run
compare run other --tolerance nan
compare run other --tolerance -1
export run --hf {long}
export run --hf made --shard-gb nan
export run --hf loop
import {long} --out made
import run --out made
plan check {long} job.toml
plan check plan.toml {long}
plan check loop job.toml
plan draw {long}
plan draw loop
plan draw /dev/zero
plan uniform job.toml --ranks 1000000000
plan uniform job.toml --ranks 1000000000 --set plan.data=1000000000 --set train.global_batch=1000000000000
plan uniform job.toml --ranks 1000000000 --set plan.pipeline=1000000000 --set model.num_layers=1000000000
plan uniform job.toml --ranks 1000000000 --set plan.tensor=1000000000
plan uniform job.toml --ranks {digits}
plan uniform job.toml --ranks nan
plan uniform job.toml --ranks 1 --set train.global_batch=1000000000000
plan uniform job.toml --ranks 1 --out {long}
plan uniform job.toml --ranks 1 --out loop
plan search job.toml --cluster {long}
plan search job.toml --cluster loop
plan search job.toml --cluster cluster.toml --seconds nan
plan search job.toml --cluster cluster.toml --budget 0
predict {long} --cluster cluster.toml --plan plan.toml
predict job.toml --cluster {long} --plan plan.toml
predict job.toml --cluster cluster.toml --plan {long}
predict loop --cluster cluster.toml --plan plan.toml
PREDICT --set train.learning_rate=true
PREDICT --set train.learning_rate=1e300
PREDICT --set model.init_std=1e30
PREDICT --set train.steps={digits}
PREDICT --set {dots}=1
PREDICT --set train.steps=1{line}x=2
PREDICT --set train.steps=1{line}[x]
PREDICT --set train.steps={deep}
PREDICT --set =
PREDICT --set train
PREDICT --set .=1
PREDICT --set train.=1
PREDICT --set {long}=1
PREDICT --set data.tokens="a\u0000b"
PREDICT --set data.tokens={long} --set model.vocab_size="auto"
slurm job.toml --nodes 1000000000 --ranks-per-node 1000000000 --run made
slurm job.toml --nodes 1 --ranks-per-node 1 --run {long}
slurm job.toml --nodes 1 --ranks-per-node 1 --run loop
slurm job.toml --nodes 1 --ranks-per-node 1 --run made --chain 1000000000
slurm job.toml --nodes 1 --ranks-per-node 1 --run made --retries 1000000000000
slurm job.toml --nodes 1 --ranks-per-node 1 --run made --time {long}
mpirun job.toml --nodes 1000000000 --ranks-per-node 1000000000 --run made
mpirun job.toml --nodes 1 --ranks-per-node 1 --run made --hosts {long}
mpirun job.toml --nodes 1 --ranks-per-node 1 --run made --hosts loop
prepare {long} --out made.h5
prepare loop --out made.h5
prepare text --out {long}
prepare text --out loop/x
prepare text --out made.h5 --tokenizer {long}
prepare text --out made.h5 --tokenizer loop
prepare text --out made.h5 --tokenizer bpe --vocab-size 1000000000000
prepare text --out made.h5 --tokenizer bpe --vocab-size -5
prepare /dev/zero --out made.h5
prepare records.jsonl --field {long} --out made.h5
prepare text --glob {long} --out made.h5
train {long} --cluster cluster.toml --run made
train job.toml --cluster {long} --run made
train loop --cluster cluster.toml --run made
train job.toml --cluster cluster.toml --run {long}
train job.toml --cluster cluster.toml --run loop
train job.toml --cluster cluster.toml --run job.toml
train job.toml --cluster cluster.toml --run made --stop-after 0
train job.toml --cluster cluster.toml --run made --sample -1
train job.toml --rehearse cluster.toml --time-scale nan --run made
train job.toml --rehearse {long} --run made
train job.toml --rehearse cluster.toml --time-scale inf --run made
probe --out made --seconds nan
probe --out {long}
probe --out loop/x
probe --job {long}
"""
ACCEPTED = r"""
inspect job.toml
inspect run
PREDICT
PREDICT --set train.steps=5
PREDICT --set train.weight_decay=1
PREDICT --set data.tokens=tokens.h5
plan draw plan.toml
PREDICT --set train.seed=-3
compare run other
generate run --tokens 2 --temperature 0
generate run --tokens 2 --top-k 1000000
plan uniform job.toml --ranks 1
inspect v100-t4
inspect mixed
"""

NO_NUMBERS = ("x", "-1", "1.5", "nan", "²", "9" * 5000, "1 2", "0x1")
OF_ALL = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
OF_RANKS = (
    "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "OMP_NUM_THREADS", "PMI_FD",
    "HPCTRAIN_DEVICE",
)  # fmt: skip
"""Variables that only commands look at that start ranks."""
WRONG_VARIABLES = [(name, text) for name in (*OF_ALL, *OF_RANKS[:-1]) for text in NO_NUMBERS] + [
    ("OMP_NUM_THREADS", "0"), ("PMI_FD", "987654"), ("HPCTRAIN_DEVICE", "nosuch"), ("HPCTRAIN_DEVICE", LONG),
]  # fmt: skip
VARIABLES = [(name, text) for name in (*OF_ALL, *OF_RANKS[:-1]) for text in ("", " ")] + [
    ("OMP_NUM_THREADS", "4,2"), ("OMP_NUM_THREADS", "1"), ("SLURM_JOB_END_TIME", "nan"), ("SLURM_JOB_END_TIME", "x"),
    ("HPCTRAIN_END_TIME", "1e400"), ("SLURM_LOCALID", ""), ("SLURM_JOB_ID", "x"),
]  # fmt: skip


def command_lines(text: str) -> list[str]:
    """Return the command lines of a text, with what is short for several words written out."""
    lines = text.strip().splitlines()
    return [" ".join(SHORT.get(word, word) for word in line.split()) for line in lines]


def spoken(word: str) -> str:
    """Return a word of a command line with what stands in braces for something long."""
    for short, long in SPOKEN.items():
        word = word.replace(short, long)
    return word

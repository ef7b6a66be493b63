"""A launch line of Megatron-LM: each flag is read, has no effect, or is refused, and better flags are named."""

from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.config.clusters.cluster import Cluster
from hpctrain.config.errors import JobError
from hpctrain.software.advice import better_flags, own_engine
from hpctrain.software.megatron_flags import FLAGS, NO_EFFECT, READ, REFUSED, MegatronRun, read_flags, run_of
from hpctrain.software.run import DescribedRun

ARGUMENTS = {
    name.replace("_", "-"): (kind, choices[0].split(",") if choices else [])
    for line in (Path(__file__).parent / "megatron_arguments.txt").read_text().splitlines()[1:]
    for name, kind, *choices in [line.split(" ")]
}
"""The type and the choices of each flag, as Megatron-LM's own parser has them."""
MODEL = (
    "--num-layers 16 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --micro-batch-size 1 --bf16"
    " --global-batch-size 32 --vocab-size 50257"
)
SCRIPT = """#!/bin/bash
LAYERS=16; TP=2  # of tensors
MODEL="--num-layers $LAYERS --hidden-size ${WIDTH:-2048} --num-attention-heads 16"
TRAIN=(
    --micro-batch-size 1
    --global-batch-size 32 --seq-length=2048 --bf16
)
torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py $MODEL ${TRAIN[@]} \\
    --tensor-model-parallel-size $TP --vocab-size 50257 --lr 3.0e-4 --save $OUT 2>&1 | tee log
"""
YAML = """ENV_VARS:
  SKIP_PYTEST: 0
MODEL_ARGS:
# the model
  --num-layers: 16  # blocks
  --hidden-size: 2048
  --num-attention-heads: 16

  --seq-length: 2048
  --micro-batch-size: 1
  --global-batch-size: 32
  --bf16: true
  --swiglu: false
  --vocab-size: "50257"
  --tensor-model-parallel-size: 2
TEST_TYPE: regular
"""


def machine(devices: int = 8) -> Cluster:
    return DescribedRun(1024, 4, 16, 1024, devices, 1, 1, 1, 1, "H100").cluster


def own(more: str = "", devices: int = 8) -> MegatronRun:
    return run_of(read_flags(f"{MODEL} {more}"), machine(devices))


def run(more: str = "", devices: int = 8) -> DescribedRun:
    return own(more, devices).run


def test_every_flag_of_megatron_is_read_or_has_no_effect_or_is_refused_with_a_reason():
    for name in ARGUMENTS:
        refused = [why for why, pattern in REFUSED.items() if pattern.fullmatch(name)]
        assert len(refused) + (name in READ) <= 1, name
        assert refused or name in READ or NO_EFFECT.fullmatch(name), name


def test_what_is_read_has_the_types_and_choices_of_megatrons_own_parser():
    assert all(ARGUMENTS[name][0] in ("int", "-") for name in FLAGS["numbers"] if name != "recompute-num-layers")
    assert {name for name in FLAGS["switches"] if ARGUMENTS[name][0] != "-"} == set()
    for name, words in FLAGS["choices"].items():
        choices = ARGUMENTS[name][1]
        assert not choices or set(words) <= set(choices), name
    assert set(FLAGS["harmless"]) <= set(ARGUMENTS)


def test_flags_and_a_script_and_a_functional_test_are_the_same_run(tmp_path):
    expected = run("--tensor-model-parallel-size 2")
    assert (expected.tensor, expected.data, expected.dtype, expected.stack) == (2, 4, "bf16", "megatron-core")
    assert expected.vocabulary == 50432, "a multiple of 2 x 128"
    for name, text in (("run.sh", SCRIPT), ("model_config.yaml", YAML)):
        (tmp_path / name).write_text(text)
        assert run_of(read_flags(str(tmp_path / name)), machine()).run == replace(expected, machine=machine())


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        ("--swiglu", "ffn", 5440),
        ("--swiglu", "architecture", "llama"),
        ("--group-query-attention --num-query-groups 4", "kv_heads", 4),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4", "interleave", 2),
        ("--recompute-activations", "recompute", "selective"),
        ("--use-distributed-optimizer", "zero", 1),
        ("--use-torch-fsdp2", "zero", 3),
        ("--attention-backend unfused", "stack", "megatron-lm"),
        ("--kv-channels 64", "head_size", 64),
        ("--fp8-format hybrid", "linear_dtype", "fp8"),
        ("--sequence-parallel", "sequence_parallel", False),
        ("--untie-embeddings-and-output-weights", "tie_head", False),
        ("--num-distributed-optimizer-instances 1 --num_workers 2", "data", 8),
        ("--overlap-grad-reduce", "gradient_dtype", "fp32"),
    ],
)
def test_a_flag_says_a_field_of_the_run(flags, field, value):
    assert getattr(run(flags), field) == value


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-experts 8", "the flags: --num-experts 8: a mixture of experts cannot be predicted"),
        (
            "--tensor-model-paralel-size 2",
            "(2026-08-22); did you mean 'tensor-model-parallel-size'",
        ),
        ("--tensor-model-parallel-size two", "--tensor-model-parallel-size two; set it to a whole number above 0"),
        ("--tensor-model-parallel-size 3", "are 3 devices a replica, which do not divide the 8 of the cluster"),
        ("--optimizer sgd", "--optimizer sgd cannot be predicted; of its values adam can"),
        ("--lr '3", "cannot be read as a shell does: No closing quotation"),
        ("--step-batch-size-schedule 0:x", "--step-batch-size-schedule x; set it to a whole number above 0"),
        ("--num-attention-heads 4 --tensor-model-parallel-size 8", "heads 4 is not divisible by 8, as this layout"),
        ("--context-parallel-size 8 --seq-length 1032", "--seq-length 1032 is not divisible by 16, as this layout"),
        ("--group-query-attention --num-query-groups 3", "num_heads 16 is not divisible by num_kv_heads 3"),
    ],
)
def test_what_cannot_be_predicted_is_refused_in_one_line(flags, message):
    with pytest.raises(JobError) as error:
        run(flags)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_test_of_inference_and_a_missing_file_are_refused(tmp_path):
    (tmp_path / "model_config.yaml").write_text(YAML + "MODE: inference\n")
    with pytest.raises(JobError, match="MODE: inference is no pre-training"):
        read_flags(str(tmp_path / "model_config.yaml"))
    with pytest.raises(JobError, match="cannot be read .*give flags, a script or a model_config.yaml"):
        read_flags(str(tmp_path / "nothing.sh"))


def test_the_flags_of_a_layout_are_read_back_and_are_flags_of_megatron():
    original = own(
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
        " --sequence-parallel --recompute-granularity full --overlap-grad-reduce --use-distributed-optimizer"
    )
    flags = original.words()
    for name, value in flags.items():
        kind, choices = ARGUMENTS[name]
        assert (kind == "-") == (value == ""), name
        assert not choices or value in choices, name
    layout = " ".join(f"--{name} {value}" for name, value in flags.items())
    assert run_of(read_flags(f"{MODEL} {layout}"), machine()) == original


def test_better_flags_are_faster_and_fit_and_are_read_back():
    given = own("--tensor-model-parallel-size 8 --recompute-granularity full")
    slow = given.run.predict(given.software)
    better = better_flags(given, slow)
    assert better and better.prediction.fits and better.prediction.step_seconds < 0.9 * slow.step_seconds
    assert "(without --recompute-granularity)" in better.flags
    named = better.flags.split(" (without")[0]
    found = run_of(read_flags(f"{MODEL} {named}"), machine())
    assert found.run.predict(found.software).step_seconds == better.prediction.step_seconds
    assert better_flags(found, better.prediction) is None
    assert own_engine(given.run, 5.0).prediction.fits

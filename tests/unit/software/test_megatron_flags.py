"""A launch line of Megatron-LM: each flag is read, has no effect, or is refused, and better flags are named."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.config.clusters.cluster import Cluster
from hpctrain.config.errors import JobError
from hpctrain.software.advice import better_flags, own_engine
from hpctrain.software.megatron_flags import (
    FLAGS,
    NO_EFFECT,
    NOT_PRICED,
    READ,
    REFUSED,
    MegatronRun,
    read_flags,
    run_of,
)
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
SPARSE = "--swiglu --num-experts 8 --moe-grouped-gemm --moe-ffn-hidden-size 704"
SHARED = "--tensor-model-parallel-size 2 --sequence-parallel"
SENT = f"{SPARSE} --expert-model-parallel-size 4 --moe-token-dispatcher-type"
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
        others = [bool(NO_EFFECT.fullmatch(name)), bool(NOT_PRICED.fullmatch(name))]
        assert refused or name in READ or name in FLAGS["renamed"] or sum(others) == 1, name
    for name in ("no-masked-softmax-fusion", "attention-dropout", "squared-relu", "cross-entropy-loss-fusion"):
        assert NOT_PRICED.fullmatch(name) and not NO_EFFECT.fullmatch(name), "it takes or saves time"


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
        (SPARSE, "num_experts", 8),
        (SPARSE, "experts_per_token", 2),
        (f"{SPARSE} --moe-router-topk 1", "experts_per_token", 1),
        (SPARSE, "ffn", 704),
        (f"{SPARSE} {SHARED}", "expert_tensor", 2),
        (f"{SENT} alltoall {SHARED} --expert-tensor-parallel-size 1", "expert_tensor", 1),
        (f"{SENT} alltoall", "expert_parallel", 4),
        (f"{SENT} alltoall", "dispatches_once", False),
        (f"{SENT} flex", "dispatches_once", True),
        (f"{SENT} flex --overlap-moe-expert-parallel-comm", "overlaps_experts", True),
    ],
)
def test_a_flag_says_a_field_of_the_run(flags, field, value):
    assert getattr(run(flags), field) == value


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-experts 8", "the flags: --num-experts without --swiglu: experts without gates cannot be predicted"),
        ("--num-experts 8 --swiglu", "without --moe-grouped-gemm: one product after the other cannot be predicted"),
        (f"{SPARSE} --expert-model-parallel-size 4", "alltoall: gathering all tokens cannot be predicted"),
        (f"{SENT} allgather", "alltoall: gathering all tokens cannot be predicted"),
        (f"{SENT} alltoall --num-experts 6", "--num-experts 6 is not divisible by 4 ranks with experts"),
        (f"{SPARSE} --moe-router-topk 9", "experts_per_token = 9 must be 1 to num_experts = 8"),
        (f"{SPARSE} --moe-layer-freq 2", "--moe-layer-freq 2: a layer without experts among others cannot be"),
        (f"{SPARSE} --moe-shared-expert-intermediate-size 64", "64: a shared expert cannot be predicted"),
        (f"{SPARSE} --moe-train-capacity-factor 1.5", "factor 1.5: an expert that drops tokens cannot be predicted"),
        (f"{SPARSE} --deepspeed", "--deepspeed with --num-experts: DeepSpeed's own experts cannot be predicted"),
        (
            f"{SPARSE} --tensor-model-parallel-size 2",
            "--tensor-model-parallel-size 2 and without --sequence-parallel: Megatron-LM refuses to train it",
        ),
        (
            "--tensor-model-paralel-size 2",
            "(2026-08-22); did you mean 'tensor-model-parallel-size'",
        ),
        ("--tensor-model-parallel-size two", "--tensor-model-parallel-size two; set it to a whole number above 0"),
        ("--tensor-model-parallel-size 3", "are 3 devices a replica, which do not divide the 8 of the cluster"),
        (
            "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 3",
            "leave 16 blocks uneven in 3 stages",
        ),
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


def test_better_flags_keep_experts_on_as_many_ranks():
    given = own(f"{SENT} alltoall --use-distributed-optimizer --overlap-grad-reduce")
    assert given.assumed == ("the load of experts: even",)
    assert own(f"{SPARSE} --moe-router-force-load-balancing").assumed == ()
    prediction = given.run.predict()
    faster = run(f"{SENT} flex --use-distributed-optimizer --overlap-grad-reduce").predict()
    assert faster.step_seconds < prediction.step_seconds, "a token goes once to a rank with two of its experts"
    advice = better_flags(given, prediction)
    assert advice and advice.prediction.step_seconds < prediction.step_seconds


EVEN = "--use-distributed-optimizer --overlap-grad-reduce"


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        # the size of tensor groups changes, and with it what Megatron-LM takes for experts by default
        (f"{SENT} alltoall {SHARED} {EVEN}", "--expert-tensor-parallel-size 2"),
        (f"{SENT} alltoall {SHARED} --expert-tensor-parallel-size 1 {EVEN}", "(without --expert-tensor-parallel-size)"),
        # a layout in other words than those of advice
        (
            "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1",
            "(without --num-layers-per-virtual-pipeline-stage)",
        ),
        (
            f"--pipeline-model-parallel-size 4 --decoder-last-pipeline-num-layers 1 {EVEN}",
            "(without --decoder-last-pipeline-num-layers)",
        ),
        (f"--tensor-model-parallel-size 4 --recompute-activations {EVEN}", "(without --recompute-activations)"),
        (
            "--tensor-model-parallel-size 4 --use-torch-fsdp2 --data-parallel-sharding-strategy optim_grads_params",
            "(without --data-parallel-sharding-strategy) (without --use-torch-fsdp2)",
        ),
    ],
)
def test_better_flags_are_read_back_as_the_run_that_was_predicted(line, changed):
    given = own(line)
    advice = better_flags(given, given.run.predict(given.software))
    assert advice and changed in advice.flags
    added, *gone = advice.flags.split("(without --")
    for name in gone:
        line = re.sub(rf"--{name.strip(') ')}( [^-\s]\S*)?", "", line)
    found = own(f"{line} {added}")
    assert found.run.expert_tensor == given.run.expert_tensor
    assert found.run.predict(found.software).step_seconds == advice.prediction.step_seconds


def test_better_flags_give_no_layout_whose_ranks_have_other_tokens_of_the_same_experts():
    given = own(f"{SPARSE} --recompute-granularity full")
    advice = better_flags(given, given.run.predict(given.software))
    assert advice and "tensor-model" not in advice.flags


# What scripts of repositories on GitHub say, by their own means: arrays, variables that are added to, branches,
# products, `bash -c`, DeepSpeed's flags, old names.
BLOOM = """
TP_SIZE=4; PP_SIZE=12
GPT_ARGS=" --num-layers 70 --hidden-size 14336 --num-attention-heads 112 --seq-length 2048 --bf16 --embed-layernorm \\
    --micro-batch-size 2 --global-batch-size 2048 --position-embedding-type alibi --checkpoint-activations \\
    --pp-partition-method 'type:transformer|embedding' --pad-vocab-size-to 250880 "
DEEPSPEED_ARGS=" --deepspeed --deepspeed_config ${config_json} --zero-stage ${ZERO_STAGE:-1} "
export CMD=" `pwd`/pretrain_gpt.py --tensor-model-parallel-size $TP_SIZE --pipeline-model-parallel-size $PP_SIZE \\
    $GPT_ARGS $DEEPSPEED_ARGS "
echo $CMD
srun --jobid $SLURM_JOBID bash -c '$LAUNCHER --node_rank $SLURM_PROCID $CMD' 2>&1 | tee --append out
"""
GPT3 = """
DISTRIBUTED_ARGS=( --nproc_per_node 8 --nnodes $NUM_NODES )
MODEL=(
    --num-layers 96
    --hidden-size 12288 --num-attention-heads 96
    --seq-length 2048 --attention-backend auto
)
TRAIN=( --micro-batch-size 1 --global-batch-size $((8 * 192)) --rampup-batch-size 16 16 5859375 --fp16 )
TRAIN+=( --lr 6.0e-5 )
if [ -n "$BIG" ]; then PARALLEL="--tensor-model-parallel-size 8"; else PARALLEL=""; fi
PARALLEL+=" --pipeline-model-parallel-size 16"
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${MODEL[@]} ${TRAIN[@]} $PARALLEL
"""
PAPER = """
OPTIONS="--model-parallel-size 2 --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --batch-size 4
    --seq-length 1024 --fp16 --DDP-impl torch --vocab-size 50257"
"""


@pytest.mark.parametrize(
    ("script", "devices", "expected"),
    [
        (
            BLOOM,
            384,
            {"tensor": 4, "pipeline": 12, "data": 8, "zero": 1, "recompute": "full", "vocabulary": 250880}
            | {"stack": "megatron-deepspeed", "stages": (6,) * 12},
        ),
        (GPT3, 1024, {"tensor": 8, "pipeline": 16, "data": 8, "global_batch": 1536, "layers": 96, "dtype": "fp16"}),
        (PAPER, 8, {"tensor": 2, "microbatch": 4, "data": 4, "positions": 1024, "global_batch": 16}),
    ],
)
def test_a_published_script_is_read(tmp_path, script, devices, expected):
    (tmp_path / "run.sh").write_text(script)
    run = run_of(read_flags(str(tmp_path / "run.sh")), machine(devices)).run
    assert {name: getattr(run, name) for name in expected} == expected


# Flags of published runs, facts alone: BigScience's 104B and 1B3, DeepSpeed's GPT-3 6.7B, NVIDIA's Qwen 3 of
# 4B, AxoNN's GPT of 350M; the devices of each.
PUBLISHED = (
    ("--num-layers 64 --hidden-size 11600 --num-attention-heads 80 --seq-length 2048 --fp16 --micro-batch-size 1"
     " --global-batch-size 2048 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 32 --deepspeed"
     " --zero-stage 1 --checkpoint-activations --vocab-size 50257", 256),
    ("--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --fp16 --micro-batch-size 8"
     " --global-batch-size 512 --pipeline-model-parallel-size 2 --glu-activation geglu", 64),
    ("--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --fp16 --micro-batch-size 1"
     " --global-batch-size 1024 --tensor-model-parallel-size 8 --no-pipeline-parallel --deepspeed --zero-stage 1", 64),
    ("--num-layers 36 --hidden-size 2560 --num-attention-heads 32 --ffn-hidden-size 9728 --kv-channels 128 --swiglu"
     " --group-query-attention --num-query-groups 8 --qk-layernorm --normalization RMSNorm --seq-length 4096 --bf16"
     " --micro-batch-size 1 --position-embedding-type rope --rotary-base 1000000", 8),
    ("--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --micro-batch-size 4 --bf16"
     " --row-tensor-model-parallel-size 2 --column-tensor-model-parallel-size 2", 8),
)  # fmt: skip


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (0, ""),
        (1, "--glu-activation is no flag of Megatron-LM"),
        (2, ""),
        (3, ""),
        (4, "--row-tensor-model-parallel-size is no flag of Megatron-LM"),
    ],
)
def test_a_published_line_is_predicted_or_refused_with_the_reason(number, says):
    line, devices = PUBLISHED[number]
    if says:
        with pytest.raises(JobError, match=says):
            read_flags(line)
        return
    own = run_of(read_flags(line), machine(devices))
    assert own.run.predict(own.software).step_seconds > 0
    assert ("--qk-layernorm changes nothing" in own.assumed) == (number == 3)


@pytest.mark.parametrize(
    ("flags", "stages"),
    [
        ("--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 5", (4, 4, 4, 6)),
        ("--decoder-last-pipeline-num-layers 1", (6, 5, 5, 2)),
        ("--account-for-loss-in-pipeline-split --account-for-embedding-in-pipeline-split", (5, 5, 4, 4)),
        ("", ()),
    ],
)
def test_stages_of_different_numbers_of_layers_are_read(flags, stages):
    assert run(f"--pipeline-model-parallel-size 4 {flags}").stages == stages


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
    ours = own_engine(replace(given.run, linear_dtype="fp8"), 5.0)
    assert ours.prediction.fits and ours.flags.endswith("products in bf16, as it has no fp8")


def test_our_own_engine_leaves_the_memory_that_a_device_reserves():
    known = DescribedRun(1024, 4, 16, 1024, 2, 1, 1, 1, 4, "H100")
    family = known.own_cluster.families["H100"]
    assert {stage.available_bytes for stage in own_engine(known, 2.0).prediction.memory} == {family.usable_bytes}
    assert family.usable_bytes < known.cluster.families["H100"].usable_bytes == family.memory_bytes

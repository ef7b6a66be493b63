"""`hpctrain predict --from megatron`: a launch line of another trainer, as a user has it."""

import json

FLAGS = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --micro-batch-size 1 --bf16"
    " --global-batch-size 16 --tensor-model-parallel-size 8 --recompute-granularity full --vocab-size 32000 --lr 3e-4"
)


def test_a_launch_line_is_predicted_beside_better_flags_and_our_engine(hpctrain, tmp_path):
    line = ("predict", "--from", "megatron", FLAGS, "--cluster", "a100-80-40")
    done = hpctrain(*line, cwd=tmp_path)
    assert done.code == 0, done.err
    for part in (
        "memory    fits: ",
        "bound by  ",
        "better flags",
        "our engine",
        "--use-distributed-optimizer",
        "assumed",
    ):
        assert part in done.out, done.out
    (tmp_path / "run.sh").write_text(f"torchrun --nproc_per_node=8 pretrain_gpt.py \\\n  {FLAGS}\n")
    result = json.loads(hpctrain(*line[:3], "run.sh", *line[4:], "--json", cwd=tmp_path).out)
    seconds = [result[name]["step_seconds"] for name in ("megatron-core", "better flags", "our engine")]
    assert seconds[0] > seconds[1] > 0 < seconds[2] < seconds[0]
    assert f"{seconds[0]:.4g}" in done.out


def test_what_cannot_be_predicted_is_said_in_one_line(hpctrain, tmp_path):
    for flags, more, code, message in (
        (f"{FLAGS} --window-size 8", (), 81, "--window-size 8: attention in a window cannot be predicted"),
        (FLAGS, ("--plan", "plan.toml"), 2, "--from is in place of JOB, --plan and --set"),
    ):
        done = hpctrain("predict", "--from", "megatron", flags, "--cluster", "a100-80-40", *more, cwd=tmp_path)
        assert done.code == code and message in done.err and "Traceback" not in done.err, done.err
    done = hpctrain("predict", "--cluster", "a100-80-40", cwd=tmp_path)
    assert done.code == 2 and "give JOB and --plan, or --from SOFTWARE LINE" in done.err

"""What `make test` leaves out and `make test-thorough` runs: cases whose parts other cases have, and measurements."""

FUSED = "losses_are_those_of_one_rank_without_them", "an_interrupted_run_has_the_same_bits"
PARTS = "losses_are_those_of_one_rank", "interrupted_and_resumed_is_uninterrupted_and_exposed_bit_for_bit"
GPU_SECTION = "a_section_runs_to_its_end_without_a_gpu"

LEFT_OUT = {
    # One section of the benchmark for each kind of work; all of them run with `python -m benchmarks.gpu`. What parity
    # and shared devices show of ranks is shown in tests/ranks.
    "commands/test_gpu_benchmark": {
        GPU_SECTION: (
            *("routes", "rows", "llama_8b", "fused", "prediction", "families", "checkpoints"),
            *("parity", "shared", "ranks"),
        ),
    },
    # Two ranks a host have what one has: a copy instead of two, and tensor groups inside a host.
    "hosts/test_messages": {"one_copy_crosses_the_slow_link_however_few_rows_a_microbatch_has": ("four",)},
    "hosts/test_network": {"training_on_four_hosts_gives_the_losses_of_one": ("tensor in a cluster",)},
    # Each value of one with a value of the other; layer norms are in tests/ranks/test_all_at_once.py.
    "unit/model/test_fused": {
        "the_fused_loss_is_that_of_single_operations": ("plain-fp32", "capped-bf16"),
        "what_is_computed_again_has_the_same_bits_and_those_of_single_operations_are_near": ("gpt2",),
    },
    # Halves have the parts: logits in parts of another family, capped scores in half precision.
    "unit/planner/test_activations": {
        "so_it_is_with_documents_half_precision_and_logits_in_parts": ("logits in parts, half precision",),
    },
    "commands/test_mixed": {"mixed_is_nearly_the_sum_of_its_families_with_the_same_losses": ()},
    # tests/ranks/test_all_at_once.py resumes fused kernels bit for bit, and has layer norms.
    "ranks/test_fused": {FUSED[0]: ("grid", "grid of layer norms"), FUSED[1]: ()},
    # AdamW has these layouts; the others cut or share shards.
    "ranks/test_parity": {
        "losses_by_an_optimizer_of_one_moment_are_those_of_one_rank": ("y", "x and y", "x, pipeline", "pipeline"),
    },
    # tests/unit/planner/test_activations.py counts these to the byte.
    "ranks/test_memory": {
        "no_rank_needs_more_than_predicted_nor_much_less": ("c, norms of heads", "c, learned positions"),
        "sums_by_messages_take_no_more_than_predicted": ("exchange by domains, ZeRO 0",),
    },
    # Each recompute with one of both.
    "ranks/test_traffic": {"weights_move_as_often_as_the_formula_says": ("none-off", "full-on")},
    "ranks/test_parts": {
        PARTS[0]: (
            *("llama-x and y", "llama-positions of a row at a time, x and y", "llama-replicas of different grids"),
            *("gpt2-and recomputed", "llama-x, y and z"),
        ),
        PARTS[1]: (
            *("llama-x and y", "llama-positions of a row at a time, x and y", "llama-replicas of different grids"),
            "llama-x, y and z",
        ),
        "a_rehearsed_step_is_as_much_shorter_as_predicted": ("TP2-by rows", "TP2-by positions of a row"),
    },
    "ranks/test_precision": {"one_family_in_half_precision_and_one_in_fp32": ("bf16-side by side",)},
    "ranks/test_peers": {
        "a_pipeline_has_the_bits_of_one_that_sends_by_mpi": ("plan0-aabb", "plan1-aaaa", "plan2-aabb"),
    },
    "ranks/test_mixture": {"packed_documents_give_the_losses_of_one_rank": ("llama",)},
    "ranks/test_recompute": {
        "losses_and_weights_are_the_bits_of_tiles_that_keep_all": ("llama-x and y, sequence parallel",),
    },
    "ranks/test_sequence_parallel": {
        "losses_are_those_of_one_rank": (
            *("gpt2-more y than key/value heads", "gpt2-from cut to whole", "llama-from whole to cut"),
            *("gpt2-replicas of different grids", "gpt2-virtual stages", "gpt2-x, y and z"),
        ),
    },
}
"""By file and test (without `test_`): the cases, or all of them where none is named."""

ON_TWO_RANKS_ALONE = {
    "ranks/test_precision": {
        "fp16_skips_the_same_steps_on_all_layouts_and_follows_one_rank": (),
    },
}
"""What has nothing more to show on more ranks."""

RESUMED = {"interrupted_and_resumed_is_uninterrupted_bit_for_bit": ()}
ON_FOUR_RANKS_AT_MOST = {
    "ranks/test_checkpoint": RESUMED,
    "ranks/test_interleaved": {"interrupted_and_resumed_is_uninterrupted_bit_for_bit_and_any_plan_continues": ()},
    "ranks/test_parts": {"interrupted_and_resumed_is_uninterrupted_and_exposed_bit_for_bit": ()},
    "ranks/test_sequence_parallel": RESUMED,
    "ranks/test_split_backward": {"random_tilings_are_bit_equal": ()},
    "ranks/test_recompute": {"losses_and_weights_are_the_bits_of_tiles_that_keep_all": ()},
    "ranks/test_offload": {"losses_and_weights_are_the_bits_of_tiles_without_offload": ()},
    "ranks/test_any_layout": {"moved_state_is_that_of_a_checkpoint_and_each_element_is_sent_once": ()},
}
"""What eight ranks show elsewhere: tests/ranks/test_all_at_once.py and test_traffic.py resume bit for bit, the former
with recompute and offload, and test_tilings.py draws tilings."""


def is_left_out(node: str, table: dict = LEFT_OUT) -> bool:
    """Say whether a test is in a table, by the name that pytest has for it."""
    file, _, test = node.removeprefix("tests/").partition(".py::")
    function, _, case = test.removesuffix("]").partition("[")
    cases = table.get(file, {}).get(function.removeprefix("test_"))
    return cases is not None and (not cases or case in cases)

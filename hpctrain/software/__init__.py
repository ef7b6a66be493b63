"""Floor 2+, above the planner: what trainers of others do differently from our engine. It needs neither MPI nor torch.

Read it in this order; a file imports only from its own line and those above it.

    nccl         what a collective of NCCL takes
    software     the record of what a trainer does differently, and a setup that follows it
    megatron     Megatron-LM and Megatron-Core, by version
    deepspeed    Megatron-DeepSpeed, and layers of torch with DeepSpeed's pipelines
    torch_fsdp   torch's FSDP as torchtitan and Composer use it
    predictor    predicts a plan as such software runs it
    run          a run of it, in the words of its paper
    launched     what advice and exports need of each software
    megatron_flags   a launch line of Megatron-LM, read as a run
    torchtitan   a configuration of torchtitan, read as a run
    advice       which flags would be better, and what our own engine would do
    megatron_export  the launch line of a plan
    torchtitan_export  the configuration of a plan
"""

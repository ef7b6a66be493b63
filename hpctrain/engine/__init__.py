"""Floor 3: executes a plan.

Read it in this order; a file imports only from its own line and those above it.

    decode     text from a trained model
    requests   what a user, a signal or a rank asks of a run
    saves      when a checkpoint is due
    step/      one step: the pipeline's instructions, the loss scale, the optimizer and its shards
    routes     the groups of a plan, and the route that each takes
    start/     before the first step: what is open becomes a value and a reason
    trainer    a plan's parts, and the steps that they take
    alignment  operators of unlike devices, compared
    run        a run, and its legs
"""

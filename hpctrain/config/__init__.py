"""Floor 0: the files that people write, and what is wrong in them.

Read it in this order; a file imports only from its own line and those above it.

    bounds       the numbers that files may hold
    errors       every error that a user meets
    terminal     text for people, without control characters
    paths        paths that people type, and files that others made
    tables       what all TOML files have in common
    parallelism  the section `[plan]` of a job
    precision    number formats
    training/    how weights are updated
    watch        faults that a run looks for in its numbers
    other_names  keys of other trainers, and what to set instead
    saved        jobs and plans of older schemas
    clusters/    the cluster file
    prices       the price file of `hpctrain what-if`
    kernels      which kernels compute
    job          the job file
"""

"""Floor 0: the files that people write, and what is wrong in them.

Read it in this order; a file imports only from its own line and those above it.

    bounds       the numbers that files may hold
    errors       every error that a user meets
    terminal     lines that fit a terminal
    paths        questions about paths, and files of others
    tables       what all TOML files have in common
    parallelism  the section `[plan]` of a job
    precision    number formats
    training/    how weights are updated
    watch        faults that a run looks for in its numbers
    other_names  what other trainers call them
    saved        jobs and plans of older schemas
    clusters/    the cluster file
    kernels      which kernels compute
    job          the job file
"""

"""Floor 3: what a run reports.

Read it in this order; a file imports only from its own line and those above it.

    folder/           the run folder: the schema of its files, its lock, its spans
    overrun           how late a rehearsal was
    metrics           a line for each step
    sample            one step for the report: its instructions and traffic
    text_tables       tables for people
    machines          the machines of `what-if` as a table
    trace             spans as a trace of Chrome's format
    torch_profile     torch.profiler for some steps of some ranks
    exports           metrics for other programs
    prediction_check  measured parts beside the predicted ones
    anomalies         stragglers and jumps
    console           what a person reads while it runs
    live              all of these in one step
    report/           a page about a run
"""

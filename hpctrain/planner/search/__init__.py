"""The search for a plan. `search` says how it goes.

Read it in this order; a file imports only from its own line and those above it.

    pools           devices that are equal
    space           the shapes that a search selects from
    holders         ranks with the same weights: on which nodes they lie, and what they exchange
    stage_variants  what a stage is, and the variants of computing it
    stages          seconds and bytes of a stage
    cut             the blocks and rows of a shape
    extra_warmup    more microbatches in flight, where messages delay stages
    item_cuts       cuts between any two items
    pipeline_run    when the stages of a pipeline are done
    score           about how long a step of a shape takes
    shortlist       the choices for a pool that are worth scoring
    mixed_tiles     long rows on devices of several families or nodes
    changes         simulates plans, and changes of them
    search          the queue of candidates
"""

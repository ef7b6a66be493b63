"""Floor 2: prices and searches plans, from plain data. It needs neither MPI nor torch nor a GPU.

Read it in this order; a file imports only from its own line and those above it.

    prices/      how long a pass takes and what it exchanges, by data sheet, measured products or profile
    prediction/  the step of a plan: its simulation, its memory, its parts
    search/      shapes, their ranking, and changes of the best plans
    explain      the choice and the runner-up, in words
    choose       the plan of a run
    what_if      what other machines would bring to a job
    yardstick    what the families would do alone, and an even plan: what a mixed run is compared with
"""

"""Floor 0: the tiling, as data.

Read it in this order; a file imports only from its own line and those above it.

    tiling        tiles and plans
    draw          a plan as text
    file          a plan's file
    holdings      what a rank has of the weights, and with whom
    transfers     what goes from tile to tile
    schedule      the instructions of each rank
    equal_tiles   tiles that differ in their ranks alone
    role          what one rank needs to know of a plan
    checks        what a plan must fulfil
    schedule_run  a schedule, run without ranks
    launch_order  the order of operations on devices
    uniform       even plans, by keys
    keepers       who keeps second copies of the state
"""

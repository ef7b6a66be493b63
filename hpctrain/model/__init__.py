"""Floor 2: decoder-only transformers on a tensor grid. Communicators are an interface; MPI is never imported.

Read it in this order; a file imports only from its own line and those above it.

    recompute         what a layer keeps for its backward pass, and what it computes again
    parallel/         axes of the grid, and positions that y or c cuts
    initialise        first weights, by seed and name
    storage/          weights as they are kept: shards, regions of unlike grids, gathers and sums
    operators/        a file an operator: forward, backward, float64 reference
    transformer       embedding, block and head
    stage             the consecutive layers of a tile
"""

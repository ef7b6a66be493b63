"""Floor 1: ranks start, wait for each other and exchange bytes. This room knows bytes and tensors, and no model.

Read it in this order; a file imports only from its own line and those above it.

    start/             a rank before MPI is there: its launcher, its process, what dead ranks left behind
    operations         those of a group, and what follows from their names
    topology           which rank is where
    mpi_communicators  those of MPI: one for each family, the bridge, alarms
    waiting            how a rank waits without using a core, and operations as steps
    watchdog/          the flight record, and who watches the ranks
    progress/          an operation, what records it, and what moves it while a rank computes
    accelerators/      what a rank computes on, and the order in which it does what a maker's library is asked for
    transports/        bytes between two ranks
    collectives/       collectives over any transport, and by makers' libraries
    groups/            groups and channels, and the route that each takes
    world              all ranks of this start
    bind               the devices of all ranks, and what each can do
    probe/             measures devices and links
"""

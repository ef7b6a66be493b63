"""Ranks start, wait for each other and exchange bytes. This room knows bytes and tensors, and no model.

In the order in which to read it:

    launcher, pmi, litter, process    a rank before MPI is there, and as a process
    waiting, steps                    how a rank waits, and communication as steps
    watchdog/                         the flight record, and who watches the ranks
    instruments                       what follows each operation: flight record, trace, pretended pace
    lanes, launches                   what goes on while a rank computes, on its host and on its device
    accelerators/                     what a rank computes on
    topology, network, settings       where ranks are, what messages take, what groups are made by
    routes/, window, collectives/     bytes between two ranks, and collectives over them
    communicator, channel             groups of ranks, and neighbours in a pipeline
    world, solo                       all ranks of this start, or one of them alone
    probe/, doctor/                   what is measured of them, and what is checked
"""

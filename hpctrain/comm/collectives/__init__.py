"""Collectives over any transport, as steps.

Read it in this order; a file imports only from its own line and those above it.

    protocol              what every route offers, and which class is whose
    flat, shared          between hosts, by messages; inside one host, through its memory
    hierarchical          inside domains by the one, across them by the other
    streamed              on tensors of devices: around one of them, on a stream of its own
"""

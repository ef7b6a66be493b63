"""Collectives as steps, each over its own medium. All offer the same; `groups/maker.py` chooses one for a group:

| class                     | for                                                                 |
|---------------------------|---------------------------------------------------------------------|
| `SharedCollectives`       | ranks of one host, through its memory                               |
| `FlatCollectives`         | ranks that are all equally far from each other, by messages         |
| `HierarchicalCollectives` | several domains: one of the others inside each, and messages across |
| `NativeCollectives`       | devices of one family, by their maker's library; messages for host memory |
| `StreamedCollectives`     | around any of them where ranks have devices: on a stream of its own |
| `SilentCollectives`       | a rank alone                                                        |

Read it in this order; a file imports only from its own line and those above it.

    flat, shared          between hosts, by messages; inside one host, through its memory
    hierarchical          inside domains by the one, across them by the other
    native                by makers' libraries, which torch's process groups call
    streamed              on tensors of devices: around one of them, on a stream of its own
"""

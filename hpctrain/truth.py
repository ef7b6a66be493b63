"""What a rehearsal's pretend devices really do: the table `[truth]` of a cluster file, that only they read.

Whoever plans knows what was measured, as with real devices: so this is no part of a `Cluster`.
"""

from hpctrain.cluster import Positive
from hpctrain.tables import Table


class Truth(Table):
    """How the rehearsal is scaled: with all three kept, the real work and the pretended one have like proportions."""

    time_scale: Positive = 1.0
    """Seconds of the rehearsal for one of the cluster."""
    memory_scale: Positive = 1.0
    """Bytes of the rehearsal for one of the cluster."""
    bandwidth_to_compute_scale: Positive = 1.0
    """Bytes per FLOP of the rehearsal for one of the cluster."""

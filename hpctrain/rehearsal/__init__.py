"""Turn a cluster and a job of real size into a miniature that local CPU ranks rehearse."""

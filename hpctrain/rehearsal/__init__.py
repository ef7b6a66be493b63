"""How a cluster and a job of real size become a miniature that local CPU ranks rehearse."""

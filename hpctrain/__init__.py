"""hpctrain: train one large language model on all the accelerators a site owns, as if they were one machine."""

__version__ = "0.1.0"

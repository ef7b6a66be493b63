"""The evidence for the predictor: what others measured with their own software, and what is predicted of it.

Runs are described by `hpctrain.software.run.DescribedRun`. `predictor` scores all published sets, `fit_runs` a table of
your own.
"""

"""The operators of a transformer, one file each: forward, backward, and a float64 reference in another form.

Read `running.py` first: what computes an operator, operation by operation or as fused kernels.
"""

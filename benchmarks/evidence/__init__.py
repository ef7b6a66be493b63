"""The evidence for the predictor: what others measured with their own software, and what is predicted of it.

`described.predict_run` takes a run in the words of its paper and returns seconds and bytes. `predictor` scores all
published sets, `fit_runs` a table of your own.
"""

"""The update of weights: the optimizers' rules, the rate of each step, and the section `[train]` that names them."""

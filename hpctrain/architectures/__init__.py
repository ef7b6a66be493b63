"""Floor 0: what a model is made of, as data. One module a family; `registry` finds them."""

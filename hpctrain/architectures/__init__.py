"""Floor 0: the parts of a model, as data. One module a family; `registry` looks them up."""

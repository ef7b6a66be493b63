"""Routes for tensors in the memory of devices."""

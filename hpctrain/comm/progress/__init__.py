"""Lanes and the order of launches move operations, and instruments record each of them."""

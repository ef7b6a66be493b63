"""The kinds of devices that a rank can compute on, behind one interface."""

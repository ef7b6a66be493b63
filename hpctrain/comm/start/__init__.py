"""Everything before MPI starts: launchers, their variables, and leftovers of dead ranks."""

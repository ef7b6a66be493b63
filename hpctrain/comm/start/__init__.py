"""Before MPI starts: launchers, their variables, what dead ranks left behind."""

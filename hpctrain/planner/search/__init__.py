"""The search: shapes, their ranking, changes of a plan, the choice."""

"""Watches the ranks: what each did last, who waits for whom in vain, and who was killed."""

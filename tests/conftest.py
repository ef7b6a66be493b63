"""Settings for all tests: hypothesis does not judge times, since machines are shared and noisy."""

from hypothesis import settings

settings.register_profile("shared-machine", deadline=None, max_examples=40)
settings.load_profile("shared-machine")

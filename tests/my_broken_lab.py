"""A user's module that fails when it is imported."""

raise RuntimeError("no licence server")

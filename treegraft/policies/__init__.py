"""Built-in drafters, builders, grafts, schedulers and verifiers."""

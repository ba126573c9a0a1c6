"""The errors treegraft raises: one root, a few leaves, each saying whose move it is.

Messages are one line: what was expected, what was found, what to change.
"""


class TreegraftError(Exception):
    """Root of every error that treegraft raises on purpose."""


class ConfigError(TreegraftError, ValueError):
    """An option, a config key or a combination of them is wrong; change the config."""


class PromptError(TreegraftError, ValueError):
    """A prompt cannot be decoded: empty, an id out of range, or past the context limit."""


class UnsupportedModelError(TreegraftError):
    """A model cannot be verified on a tree, or a drafter does not fit its target."""


class CapacityError(TreegraftError):
    """A KV cache or a tree was asked to hold more than it was opened for."""


class TreeError(TreegraftError):
    """A draft tree or a proposal breaks one of the laws in core/tree.py."""


class PolicyError(TreegraftError):
    """A graft policy, builder, scheduler or verifier raised; names its class and method."""


class DrafterError(TreegraftError):
    """A drafter raised, or returned something that is no valid proposal; names the drafter."""


class ProcessorError(TreegraftError):
    """A logits processor raised, returned no row of logits, or left no token; names its class."""


class DatastoreError(TreegraftError):
    """A corpus cannot be read, or a datastore written, opened or used; names the file."""


class ScheduleError(TreegraftError):
    """A trace, a cost file or a scheduler's artefact cannot be read, written or used here."""

"""What runs in the processes that `treegraft bench peers` starts, one module per family of peers.

A peer's interpreter need not have treegraft, nor its pins: apart from ``treegraft.py``, modules
here import the standard library, torch, transformers and their own peer, and each other.
"""

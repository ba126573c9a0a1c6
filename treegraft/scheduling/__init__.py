"""The offline value system: traces of schedules, their value, and the scheduler distilled from it.

``traces`` are collected (``collect``), solved (``value``), distilled (``fit``) and held against
real decoding (``evaluate``); docs/scheduling.md describes all four.
"""

"""One drafter per file."""

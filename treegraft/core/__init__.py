"""The tree, the roles, sampling, statistics and errors; needs torch and numpy only."""

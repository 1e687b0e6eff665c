"""Plans: what was chosen for which key and why, in memory, on disk and in lockfiles."""

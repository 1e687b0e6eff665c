"""Whole models: traced, rewritten by rules, checked, timed, captured; never slower than what was given."""

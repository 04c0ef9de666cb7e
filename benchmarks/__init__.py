"""Measurements: `readings` takes them, `report` makes the tables of docs/results.md from its records."""

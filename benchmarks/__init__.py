"""Measurements: what a step communicates, counted exactly, and what an agreement costs in time."""

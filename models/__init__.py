"""Checkpoint -> torch module: targets, drafters, and the step that composes them."""

"""Prompts -> completions by the target -> trained drafter, with held-out acceptance."""

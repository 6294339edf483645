"""forerun against other engines: the same target, prompts and greedy setting on one machine.

    python -m benchmarks.peers --install        once: the other engines, in build/peers
    python -m benchmarks.peers BUNDLE --prompts FILE.jsonl [--limit N] [--rounds 3] [--json OUT]

Run from the repository root; docs/comparisons.md says what each engine is run with. Who takes part
stands in `registry.py`; the modules `with_*.py`, which load an engine and answer with it, run in
worker processes of the other engines' environment, as do `worker.py`, `exchange.py` and
`registry.py`: none of these imports more than the standard library and its one engine.
"""

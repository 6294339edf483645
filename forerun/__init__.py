"""forerun: a language model and its drafter compiled into one speculative-decoding step."""

__version__ = "0.1.0"

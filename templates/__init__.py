"""Jinja2 templates: deployment files, CI and Makefile fragments, the HTML report."""

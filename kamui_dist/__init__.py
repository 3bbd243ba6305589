"""kamui_dist: a distributed trainer for language models with one explicit, readable loop."""

__version__ = "0.1.0"

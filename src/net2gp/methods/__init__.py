"""One method per file; each returns a posterior."""

from net2gp.methods.adapt import adapt, adapt_tasks

__all__ = ["adapt", "adapt_tasks"]

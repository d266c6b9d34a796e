"""Saved posteriors: which classes a file may hold, and how both formats are read."""

"""The version, in one place: packaging, the saved-file header and the docs read it from here."""

__version__ = "0.1.0"

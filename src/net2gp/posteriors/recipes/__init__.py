"""How posteriors were found, and how they take in more data."""

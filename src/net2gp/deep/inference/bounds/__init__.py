"""Other bounds on the evidence: closed forms, and importance weights; for checks and for comparisons."""

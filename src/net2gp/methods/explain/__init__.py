"""What the dual view shows: which training points support a prediction, and what each of them changes."""

"""What the dual view shows: which points a prediction rests on, and what each point changes."""

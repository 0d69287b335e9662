"""What does a model answer? Tasks with exact answers and plain text, with intervals, in every execution mode."""

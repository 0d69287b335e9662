"""Where drafts come from without weights, how many are worth verifying, and how many were accepted."""

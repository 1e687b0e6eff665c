"""`tensorlogic try`: an unmodified program in child processes, with and without us in turn, and whether it gains."""

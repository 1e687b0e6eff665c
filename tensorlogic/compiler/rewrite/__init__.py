"""Rules and passes that replace parts of a graph."""

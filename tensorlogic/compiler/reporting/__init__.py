"""What optimize did, and what is left to gain."""
